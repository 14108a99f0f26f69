"""Time that the plugin takes to draft for a pass of SGLang: 16 nodes a request, from recorded answers, in the last of their epochs.

`draft_ms` is the median over the passes in which all requests run.

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


def pass_ms(records: Sequence[TraceRecord], *, running: int, nodes: int) -> list[float]:
    """Milliseconds of each pass, until the first request ends."""
    last = max(each.epoch for each in records)
    drafter = HistoryTreeDrafter(deterministic=True)
    replay = Replay(drafter, FixedBudget(nodes - 1), from_epoch=last)
    replay.run([each for each in records if each.epoch < last])  # only learned from
    drafting = EngineDrafting(drafter, nodes, vocabulary=2**31 - 1)
    requests = batch_of([each for each in records if each.epoch == last], running)
    taken: list[float] = []
    while not any(each.finished() for each in requests):
        started = time.perf_counter()
        trees = drafting.propose(requests, [()] * running)
        trees.mask()
        taken.append(1e3 * (time.perf_counter() - started))
        for line, each in enumerate(requests):
            each.commit(trees, line)
    drafter.close()
    return taken[1:]  # the first one indexes the prompts


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
        str(running): partial(lambda n: statistics.median(pass_ms(records, running=n, nodes=arguments.nodes)), running)
        for running in arguments.running
    }
    values = record.interleaved(measures, repeats=arguments.repeats)
    rows = [{"running": int(name), "draft_ms": record.spread(found)} for name, found in values.items()]
    arguments.trace = arguments.trace.name
    return record.finish("draft_pass", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
