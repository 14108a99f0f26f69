"""Tokens per second inside SGLang: without drafts, with its own n-grams, with ours and with history.

Each mode is a server with the same policy, and answers the same prompts after two epochs of answers to them:

- none: rhymerl's backend without drafts;
- ngram: SGLang's own NGRAM speculation with as many draft tokens, on its stock server, which sees nothing of rhymerl;
- ours_ngram: NGramDrafter inside SGLang, which drafts from the request's own text;
- history_tree: HistoryTreeDrafter inside SGLang, which knows those epochs;
- embedded, where asked for: the embedded engine without drafts, in this process;
- stock, where asked for: SGLang's own server without drafts, beside which none shows what our keyed draws cost.

Without SGLang, `--baseline embedded --modes embedded` has the embedded engine alone. All servers run side by side and
take turns, round by round; where memory is short, --in-turns starts one after another. In a round `running` requests
are kept with the server until all have been sent. The first round of each size is not counted. A row has the mode's
tokens a second over those of none in the same round, the tokens that a pass emits (accept length) and the share of
verified draft tokens that it accepts (accept rate), the share of the time in which our drafter worked, and the share of
answers that are none's, token for token: in float32 there is no result below 0.97. `ngram` draws by SGLang's own rule,
so its answers are others; it goes on learning in the measured rounds, while history_tree's history stays as it was:
`epochs` is what a mode may have seen.

No round begins after `--minutes`; a round has at least `--answers-per-slot` answers for each running request, from at
most `--num-prompts` prompts. `--memory` is the servers' mem_fraction_static on a GPU; `--server` and `--environment`
are their further arguments (KEY=VALUE) and variables (NAME=VALUE).

    python -m benchmarks.gpu.sglang_throughput --size 0.5B --dtype bfloat16 --running 1 8 32 128 --minutes 8
    python -m benchmarks.gpu.sglang_throughput --model DIRECTORY --prompts FILE.jsonl --max-tokens 512

The policy is the quickstart's, which has learned running sums, unless another is named. --size is a Qwen2 of that size
with random weights, whose distributions are peaked, so that epochs repeat; it shows the arithmetic of a size and
nothing of what a trained model repeats. On a CPU the server runs on the tests' stand-ins for SGLang's kernels (make
test-sglang), and times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.bare import sample, share_equal
from benchmarks.gpu.peaked_policy import SIZES
from benchmarks.gpu.sglang_servers import EMBEDDED, HISTORY, MODES, NONE, STOCK, STOCK_NGRAM, StockServer, start
from benchmarks.gpu.sglang_work import Work, make_policy, make_prompts
from rhymerl.backends.base import RolloutBackend
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings
from rhymerl.rollout.metrics import AcceptanceTotals
from rhymerl.types import Completion, RolloutRequest

EQUAL = 0.97  # of the answers in float32, where passes of other shapes round in other ways
CPU_NOTE = (
    "on a CPU SGLang runs on the tests' stand-ins for its kernels, so times mean nothing; its own n-gram mode is greedy there, "
    "so its accept length means nothing either"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The results of the requests of one round in one mode."""

    seconds: float
    answers: Sequence[Completion]  # in the order of the requests
    draft_time_frac: float | None  # of our drafters
    epochs: float  # of answers that the mode may have drafted from

    @property
    def tokens_per_s(self) -> float:
        return speculation_of([self]).tokens / self.seconds


def speculation_of(rounds: Sequence[Round]) -> AcceptanceTotals:
    total = AcceptanceTotals()
    for each in rounds:
        total.count(each.answers)
    return total


Rounds = dict[tuple[int, int], Round]  # by number, and by running requests


@dataclass(slots=True, kw_only=True)
class Side:
    """One mode's server."""

    mode: str
    backend: StockServer | RolloutBackend
    epochs: float = 0.0  # of answers that it may draft from

    def answer(self, requests: Sequence[RolloutRequest], *, running: int) -> list[Completion]:
        """All answers in the order of the requests, of which `running` are with the server at a time."""
        waiting = iter(requests)
        done: dict[str, Completion] = {}
        self.backend.submit(list(itertools.islice(waiting, running)))
        while len(done) < len(requests):
            completed = self.backend.collect()
            done.update((each.request.id, each) for each in completed)
            self.backend.submit(list(itertools.islice(waiting, len(completed))))
        return [done[request.id] for request in requests]

    def measured(self, requests: Sequence[RolloutRequest], *, running: int) -> Round:
        self.backend.metrics()  # those of a round begin with it
        started = time.perf_counter()
        answers = self.answer(requests, running=running)
        seconds = time.perf_counter() - started
        share = self.backend.metrics().get("spec/draft_time_frac")
        return Round(seconds=seconds, answers=answers, draft_time_frac=share, epochs=self.epochs)


def measure(policy: Policy, work: Work, arguments: argparse.Namespace) -> dict[str, Rounds]:
    """The rounds of every mode, as many as --minutes allow: servers in turn share what is left when one is up."""
    modes = list(dict.fromkeys([arguments.baseline, *arguments.modes]))
    groups = [[mode] for mode in modes] if arguments.in_turns else [modes]
    history = HistoryStore(window=max(arguments.epochs, 1))
    found: dict[str, Rounds] = {mode: {} for mode in modes}
    over = time.monotonic() + 60 * arguments.minutes
    for number, group in enumerate(groups):
        if number and time.monotonic() > over:
            say(f"--minutes are over before {group[0]}")
            break
        with started(group, policy, arguments) as sides:
            up = time.monotonic()
            learn(sides, work, history, arguments)
            run_rounds(sides, work, history, found, up + (over - up) / (len(groups) - number), arguments)
    return found


@contextmanager
def started(modes: Sequence[str], policy: Policy, arguments: argparse.Namespace) -> Iterator[list[Side]]:
    """One after another: each takes its share of the memory that the ones before have left."""
    with ExitStack() as stack:
        sides = []
        for mode in modes:
            took = -time.monotonic()
            backend = start(mode, policy, arguments)
            stack.callback(backend.close)
            say(f"{mode} is up after {took + time.monotonic():.0f} s")
            sides.append(Side(mode=mode, backend=backend))
        yield sides


def learn(sides: Sequence[Side], work: Work, history: HistoryStore, arguments: argparse.Namespace) -> None:
    """Let all sides answer the epochs, which warms them up; the baseline's answers are the drafters' history."""
    for side in sides:
        for epoch in range(arguments.epochs):
            answers = side.answer(work.epoch(epoch), running=max(arguments.running))
            if side.mode == arguments.baseline:
                for prompt, group in answers_of([sample(each) for each in answers], epoch):
                    history.add(prompt, group)
        if side.mode in (STOCK_NGRAM, HISTORY):
            side.epochs = arguments.epochs
    for side in sides:
        side.backend.follow(history)


def run_rounds(
    sides: Sequence[Side],
    work: Work,
    history: HistoryStore,
    found: Mapping[str, Rounds],
    ends: float,
    arguments: argparse.Namespace,
) -> None:
    """Round 0 is the one that does not count."""
    for turn, (number, running) in enumerate(itertools.product(range(1 + arguments.repeats), arguments.running)):
        requests = work.round(number, running)
        first = turn % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            if time.monotonic() > ends:
                say(f"--minutes are over in round {number} with {running} running")
                return
            one = found[side.mode][number, running] = side.measured(requests, running=running)
            length = round(speculation_of([one]).accept_length, 3)
            known = {"round": number, "running": running, "mode": side.mode, "accept_length": length}
            record.note_row({**known, "tokens_per_s": round(one.tokens_per_s, 1)})
            side.backend.follow(history)  # nothing new: the drafter forgets these answers
            if side.mode == STOCK_NGRAM:
                side.epochs += len(requests) / work.answers_an_epoch


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(found: Mapping[str, Rounds], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each mode, from the rounds that the baseline has too."""
    rows = []
    for running in arguments.running:
        for mode, rounds in found.items():
            keys = [(number, running) for number in range(1, 1 + arguments.repeats)]
            keys = [key for key in keys if key in rounds and key in found[arguments.baseline]]
            if keys:
                parts = [rounds[key] for key in keys], [found[arguments.baseline][key] for key in keys]
                rows.append({"running": running, "mode": mode, **row(*parts, mode)})
    return rows


def row(rounds: Sequence[Round], plain: Sequence[Round], mode: str) -> dict[str, Any]:
    pairs = list(zip(rounds, plain, strict=True))
    total = speculation_of(rounds)
    fractions = [each.draft_time_frac for each in rounds if each.draft_time_frac is not None]
    return {
        "times as fast": record.spread(one.tokens_per_s / base.tokens_per_s for one, base in pairs),
        "tokens_per_s": record.spread(each.tokens_per_s for each in rounds),
        "wall_s": record.spread(each.seconds for each in rounds),
        "accept_length": round(total.accept_length, 3),
        "accept_rate": round(total.accept_rate, 3),
        "draft_time_frac": record.spread(fractions) if fractions else "",
        "answer_tokens": round(total.tokens / sum(len(each.answers) for each in rounds), 1),
        "equal_answers": ""
        if mode in (STOCK, STOCK_NGRAM)
        else round(statistics.fmean(share_equal(one.answers, base.answers) for one, base in pairs), 4),
        "epochs": round(rounds[-1].epochs, 1),
    }


def check(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Refuse figures of modes that did not do the same work."""
    if not rows:
        raise SystemExit("not one round was over in time: raise --minutes, or lower --repeats or --answers-per-slot")
    others = [each for each in rows if each["equal_answers"] != "" and each["equal_answers"] < EQUAL]
    if others and arguments.dtype == "float32":
        raise SystemExit(
            f"{record.table(rows)}\nnot the same answers as {arguments.baseline}'s, of which {EQUAL:.0%} are expected in float32"
        )


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(parser_of(), words)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        say(f"Mind: {CPU_NOTE}")
    policy = make_policy(arguments)
    work = Work(
        prompts=make_prompts(policy, arguments),
        rollout=RolloutSettings(
            group_size=arguments.group_size, max_tokens=arguments.max_tokens, temperature=arguments.temperature
        ),
        stop_token_ids=policy.stop_token_ids,
        seed=arguments.seed,
        answers_per_slot=arguments.answers_per_slot,
    )
    rows = table(measure(policy, work, arguments), arguments)
    check(rows, arguments)
    return record.finish(
        "sglang_throughput",
        __doc__,
        arguments,
        rows=rows,
        **record.versions(["sglang"]),
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        note="" if has_gpu else CPU_NOTE,
    )


def parser_of() -> argparse.ArgumentParser:
    modes = [*MODES, STOCK, EMBEDDED]
    parser = record.options(
        __doc__,
        repeats=3,
        running=[1, 8, 32],
        nodes=7,
        epochs=2,
        num_prompts=64,
        group_size=8,
        max_tokens=128,
        temperature=1.0,
        answers_per_slot=4,
        minutes=30.0,
        in_turns=False,
        memory=0.15,
        server=[],
        environment=[],
        start_timeout_s=600.0,
    )
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--model", help="directory of a checkpoint (default: the quickstart's policy)")
    policy.add_argument("--size", choices=list(SIZES), help="random peaked weights of that size instead")
    parser.add_argument("--prompts", help=".jsonl with a prompt a line (default: running sums)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(MODES))
    parser.add_argument("--baseline", choices=modes, default=NONE, help=f"the mode that others are over ({NONE})")
    return parser


if __name__ == "__main__":
    main()
