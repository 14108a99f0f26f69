"""Time that the plugin takes to draft for a pass of SGLang: 16 nodes a request, from recorded answers, in the last of their epochs.

`draft_ms` is what a pass waits for, and `catch_up_ms` what is done when it is launched: medians over the passes in which all requests
run. `draft_cpu_ms` is the processor time of the first, of all threads: a busy machine takes longer.

    python benchmarks/draft_pass.py [TRACE]
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import record

from rhymerl.backends.remote.wire import to_custom_params
from rhymerl.backends.sglang.plugin.arrays import TreeArrays
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.runs.replay import Replay
from rhymerl.types import Prompt, RolloutRequest, SamplingParams

TRACE = Path(__file__).parent / "traces" / "running_sum.jsonl.gz"
LEAST_TOKENS = 40
MEASURES = ("draft_ms", "draft_cpu_ms", "catch_up_ms")


@dataclass
class Running:
    """SGLang's request, as far as the plugin reads it."""

    rid: str
    origin_input_ids: list[int]
    answer: list[int]
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        return len(self.output_ids) >= len(self.answer)

    def commit(self, trees: TreeArrays, line: int) -> None:
        """Append what the tree has right, and one token more."""
        parents, tokens = trees.parents[line].tolist(), trees.token_ids[line].tolist()
        node, rest = 0, self.answer[len(self.output_ids) :]
        for token in rest[:-1]:
            found = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token]
            if not found:
                break
            node = found[0]
            self.output_ids.append(token)
        self.output_ids.append(self.answer[len(self.output_ids)])


def request_of(each: TraceRecord, sample: int) -> Running:
    prompt = Prompt(id=each.prompt_id, key=each.prompt_id, token_ids=each.prompt_tokens, text="")
    length = len(each.response_tokens)
    sampling = SamplingParams(max_tokens=length)
    request = RolloutRequest(id=f"{prompt.id}/{sample}", prompt=prompt, sample=sample, seed=0, sampling=sampling)
    params = SimpleNamespace(
        custom_params=to_custom_params(request, feed=0),
        max_new_tokens=length - 1,
        temperature=1.0,
        top_k=2**30,
        top_p=1.0,
        min_p=0.0,
        stop_token_ids=set(),
        ignore_eos=False,
    )
    answer = each.response_tokens.tolist()
    return Running(request.id, each.prompt_tokens.tolist(), answer, params, answer[:1])


def batch_of(records: Sequence[TraceRecord], running: int) -> list[Running]:
    """The first `running` requests, group by group."""
    groups: dict[str, list[TraceRecord]] = defaultdict(list)
    for each in records:
        if len(each.response_tokens) >= LEAST_TOKENS:
            groups[each.prompt_id].append(each)
    requests = [request_of(each, sample) for group in groups.values() for sample, each in enumerate(group)]
    if len(requests) < running:
        raise SystemExit(f"--running {running}: expected at most {len(requests)}, the trace's answers of an epoch")
    return requests[:running]


def pass_ms(records: Sequence[TraceRecord], *, running: int, nodes: int) -> dict[str, float]:
    """Median milliseconds of the passes until the first request ends."""
    last = max(each.epoch for each in records)
    drafter = HistoryTreeDrafter(deterministic=True)
    replay = Replay(drafter, FixedBudget(nodes - 1), from_epoch=last)
    replay.run([each for each in records if each.epoch < last])  # only learned from
    drafter.close()  # when all indexes are built: a thread beside it would be counted
    drafting = EngineDrafting(drafter, FixedBudget(nodes - 1), vocabulary=2**31 - 1)
    requests = batch_of([each for each in records if each.epoch == last], running)
    taken: list[tuple[float, float, float]] = []
    while not any(each.finished() for each in requests):
        started, started_cpu = time.perf_counter(), time.process_time()
        trees = drafting.propose(requests, lambda: [()] * running)
        assert trees is not None
        trees.mask()
        drafted, drafted_cpu = time.perf_counter(), time.process_time()
        drafting.catch_up()
        caught_up = time.perf_counter()
        taken.append((drafted - started, drafted_cpu - started_cpu, caught_up - drafted))
        for line, each in enumerate(requests):
            each.commit(trees, line)
    drafter.close()
    later = zip(*taken[1:], strict=True)  # the first one indexes the prompts
    return {name: 1e3 * statistics.median(times) for name, times in zip(MEASURES, later, strict=True)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=7)
    parser.add_argument("trace", type=Path, nargs="?", default=TRACE)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument(
        "--nodes", type=int, default=16, help="tokens of each request in a pass, its last one among them"
    )
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    records = list(read_trace(arguments.trace))
    measures = {
        str(running): partial(pass_ms, records, running=running, nodes=arguments.nodes) for running in arguments.running
    }
    values = record.interleaved(measures, repeats=arguments.repeats)
    rows = [
        {"running": int(name), **{each: record.spread(times[each] for times in found) for each in MEASURES}}
        for name, found in values.items()
    ]
    arguments.trace = arguments.trace.name
    return record.finish("draft_pass", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
