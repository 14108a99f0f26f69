"""A replay answers recorded requests once more with a drafter's drafts, without a model.

Verification emits the target's own tokens whatever is drafted (docs/correctness.md), so what a drafter would have saved
follows from the recorded tokens alone: a pass emits the drafted tokens that agree with them, and one more.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby

import numpy as np

from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.costs import CostCurve, PassCost
from rhymerl.drafters.base import Drafter
from rhymerl.drafts import DraftBatch, no_drafts
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.engine.walk import walk
from rhymerl.errors import at_least, check_ranges
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.history.traces import TraceRecord
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.types import Completion, IntArray, Output, Prompt, RolloutRequest, Sample, SamplingParams

_UNUSED = SamplingParams(max_tokens=1)
_MOST_TOKENS = 2**20  # that an answer might have gone on for
ASSUMED = CostCurve([(0, 1.0), (64, 2.0)])


@dataclass(slots=True)
class ReplayTotals:
    """Sums over passes. A request pass is one request in one pass: it verifies a root and its draft."""

    tokens: int = 0
    request_passes: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0  # request passes with at least one node
    propose_s: float = 0.0
    cost: float = 0.0  # by the cost curve

    def count(self, outcome: PassOutcome) -> None:
        """Add a pass, but for the tokens it emitted."""
        self.passes += 1
        self.request_passes += len(outcome.requests)
        self.drafted += len(outcome.drafts.token_ids)
        self.accepted += int(outcome.num_accepted.sum())
        self.hits += int((outcome.drafts.counts > 0).sum())
        assert outcome.seconds is not None, "a replay gives every pass its cost"
        self.cost += outcome.seconds

    def result(self) -> dict[str, float]:
        """Ratios by the names of docs/metrics.md where they are the same thing."""
        passes = max(self.request_passes, 1)
        return {
            "tokens": self.tokens,
            "request_passes": self.request_passes,
            "tokens_per_pass": self.tokens / passes,
            "verified_per_token": (self.drafted + self.request_passes) / max(self.tokens, 1),
            "accept_rate": self.accepted / max(self.drafted, 1),
            "draft_hit_rate": self.hits / passes,
            "nodes_per_draft": self.drafted / max(self.hits, 1),
            "propose_us": 1e6 * self.propose_s / passes,
        }

    def __add__(self, other: ReplayTotals) -> ReplayTotals:
        return ReplayTotals(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(slots=True, kw_only=True)
class ReplayedEpoch:
    """The answers of an epoch, and the indices of those that are replayed; the others are only learned from."""

    number: int
    records: Sequence[TraceRecord]
    replayed: Sequence[int] = ()

    def choose(self, most: int) -> None:
        """Choose the answers to replay: whole prompts, at most so many answers, but at least one prompt's."""
        groups: dict[str, list[int]] = {}
        for index, record in enumerate(self.records):
            groups.setdefault(record.prompt_id, []).append(index)
        chosen = np.random.default_rng(self.number).permutation(np.array([*groups], object))
        ends = np.cumsum([len(groups[prompt]) for prompt in chosen])
        num_groups = max(int(np.searchsorted(ends, most, side="right")), 1)
        self.replayed = sorted(index for prompt in chosen[:num_groups] for index in groups[prompt])


@dataclass(eq=False)
class Replay:
    """Answers the requests of a trace from the trace, `max_running` side by side, as an engine would with these drafts.

    History is learned after each epoch. Epochs before `from_epoch` are only learned from, and so are most answers where
    there are more than `answers` to replay (`epochs_of`). Raises ValueError for an argument out of range.
    """

    drafter: Drafter
    budget: Budget
    _: KW_ONLY
    history: HistoryStore = field(default_factory=HistoryStore)
    costs: PassCost = ASSUMED
    max_running: int = at_least(1, 128)
    from_epoch: int = at_least(0, 0)
    answers: int = at_least(0, 0)  # about so many are replayed; 0 = all
    complaints: set[type[Drafter]] = field(default_factory=set)  # the drafters of which malformed drafts were told
    progress: ProgressBar = SILENT  # hears of each answer

    def __post_init__(self) -> None:
        check_ranges(self)
        # Which token ids there are, the records do not say.
        self.protocol = DraftingProtocol(self.drafter, self.budget, vocabulary=2**31 - 1, complaints=self.complaints)

    def run(self, records: Sequence[TraceRecord]) -> dict[int, ReplayTotals]:
        """Return the totals by epoch, from `from_epoch` on. Raises HookError where most drafts are malformed."""
        totals: dict[int, ReplayTotals] = {}
        delta = self.history.snapshot()
        self.protocol.follow(delta)
        for epoch in self.epochs_of(records):
            if epoch.number >= self.from_epoch:
                totals[epoch.number] = self._replay([_Running(epoch.records[each], each) for each in epoch.replayed])
            samples = [_Running(record, number).sample() for number, record in enumerate(epoch.records)]
            self.protocol.learn(samples)
            for prompt, answers in answers_of(samples, epoch.number):
                self.history.add(prompt, answers)
            delta = self.history.deltas(delta.version)
            self.protocol.follow(delta)
        self.protocol.check_drafts()
        return totals

    def epochs_of(self, records: Sequence[TraceRecord]) -> list[ReplayedEpoch]:
        """Return the epochs in order.

        The prompts whose answers are replayed are chosen from a fixed seed, in each epoch anew. All answers to a prompt
        are replayed together, since they draft for one another.
        """
        by_epoch = groupby(sorted(records, key=lambda record: record.epoch), lambda record: record.epoch)
        epochs = [ReplayedEpoch(number=number, records=list(group)) for number, group in by_epoch]
        judged = [epoch for epoch in epochs if epoch.number >= self.from_epoch]
        num_left = self.answers or len(records)
        for index, epoch in enumerate(judged):
            epoch.choose(num_left // (len(judged) - index) if self.answers else num_left)
            num_left -= len(epoch.replayed)
        return epochs

    def _replay(self, answers: Iterable[_Running]) -> ReplayTotals:
        totals = ReplayTotals()
        waiting = deque(answers)
        running: list[_Running] = []
        while waiting or running:
            while waiting and len(running) < self.max_running:
                running.append(waiting.popleft())
                self.protocol.start(running[-1].request)
            self._step(running, totals, num_waiting=len(waiting))
            for each in [each for each in running if each.has_left]:
                self.protocol.finish(each.completion())
                if each.goes_on():
                    self.protocol.start(each.request)
                    continue
                running.remove(each)
                self.progress.advance()
        return totals

    def _step(self, running: Sequence[_Running], totals: ReplayTotals, *, num_waiting: int) -> None:
        requests = [each.request for each in running]
        started = time.perf_counter()
        is_skipped = self.protocol.is_skipped(len(requests))
        drafts = no_drafts(len(running)) if is_skipped else self._drafts(running, requests, num_waiting)
        totals.propose_s += time.perf_counter() - started
        walked = walk(drafts, [each.remaining for each in running])
        num_tokens = len(running) + len(drafts.token_ids)
        outcome = PassOutcome(
            requests=requests,
            drafts=drafts,
            **walked._asdict(),
            num_tokens=num_tokens,
            num_rows=len(running),
            seconds=float(self.costs.seconds(len(running), np.array([len(drafts.token_ids)]), 0)[0]),
            is_decoding=True,
        )
        if not is_skipped:
            self.protocol.learn_outcome(outcome)
        for each, count in zip(running, walked.num_accepted.tolist(), strict=True):
            tokens = each.advance(count + 1)
            totals.tokens += len(tokens)
            if self.protocol.hears_tokens:
                self.protocol.accept(each.request, tokens, count)
        totals.count(outcome)

    def _drafts(self, running: Sequence[_Running], requests: Sequence[RolloutRequest], num_waiting: int) -> DraftBatch:
        """Ask as an engine does: requests that have one token left are not asked for."""
        room, generated = np.array([(each.room, each.num_generated) for each in running], np.int32).T
        granted = self.protocol.limits(requests, generated, num_waiting=num_waiting)
        limits = np.minimum(granted, self.protocol.max_nodes)
        limits[room <= 1] = 0
        askers = np.flatnonzero(limits)
        if len(askers) == 0:
            return no_drafts(len(running))
        asking = [requests[r] for r in askers.tolist()]
        contexts = [running[r].context for r in askers.tolist()]
        return self.protocol.propose(asking, contexts, limits[askers], room[askers]).scatter(askers, len(running))


class _Running:
    """An answer that is being replayed."""

    def __init__(self, record: TraceRecord, number: int) -> None:
        self.record = record
        self.request = RolloutRequest(
            id=f"{record.epoch}/{number}",  # a joined trace may name a sample twice
            prompt=_prompt(record),
            sample=record.sample,
            seed=0,
            sampling=_UNUSED,
        )
        self.ends_by_length = record.finish_reason != "stop"
        self._tokens = np.concatenate([record.prompt_tokens, record.response_tokens], dtype=np.int32)
        self._turns = _turns_of(record)
        self._part = 0  # where what the policy reads begins
        self._done, self._end = next(self._turns, (len(self._tokens), len(self._tokens)))

    @property
    def context(self) -> IntArray:
        return self._tokens[self._part : self._done]

    @property
    def num_generated(self) -> int:
        return len(self.context) - len(self.request.prompt.token_ids)

    @property
    def room(self) -> int:
        """Tokens that may still come; a turn that ended by itself could have gone on."""
        is_cut = self.ends_by_length and self._end == len(self._tokens)
        return len(self.remaining) if is_cut else len(self._tokens) + _MOST_TOKENS

    @property
    def remaining(self) -> IntArray:
        return self._tokens[self._done : self._end]

    @property
    def has_left(self) -> bool:
        """Return whether the engine has no more to sample, of this turn at least."""
        return self._done == self._end

    def advance(self, count: int) -> IntArray:
        """Emit `count` tokens, fewer at the end of a turn."""
        before = self._done
        self._done = min(self._done + count, self._end)
        return self._tokens[before : self._done]

    def goes_on(self) -> bool:
        """Return whether there is another turn, and begin it after the reply to the last one."""
        ended = self._done
        self._done, self._end = next(self._turns, (ended, ended))
        if self._done > ended and self._begins_part(ended):
            self._part = ended
            prompt = replace(self.request.prompt, token_ids=self.context)
            self.request = replace(self.request, prompt=prompt, segment=self.request.segment + 1)
        self.request = replace(self.request, output=Output.of(self._response))
        return not self.has_left

    def _begins_part(self, place: int) -> bool:
        return self.record.parts is not None and place - len(self.record.prompt_tokens) in self.record.parts

    def sample(self) -> Sample:
        record = self.record
        output = Output.of(record.response_tokens, policy_version=record.epoch, finish_reason=record.finish_reason)
        completion = Completion(request=self.request, output=output)
        mask = record.sampled if record.sampled is not None else output.sampled
        return Sample(completion=completion, text="", reward=record.reward, rewards={}, loss_mask=mask)

    def completion(self) -> Completion:
        """Return the answer so far at the end of its turn."""
        reason = self.record.finish_reason if self._done == len(self._tokens) else "stop"
        return Completion(request=self.request, output=Output.of(self._response, finish_reason=reason))

    @property
    def _response(self) -> IntArray:
        return self.context[len(self.request.prompt.token_ids) :]


def _turns_of(record: TraceRecord) -> Iterator[tuple[int, int]]:
    """Yield where each turn of the policy begins and ends in prompt and answer; an answer without replies is one."""
    start, count = len(record.prompt_tokens), len(record.response_tokens)
    if record.sampled is None:
        yield start, start + count
        return
    edges = np.flatnonzero(np.diff(record.sampled.astype(np.int8), prepend=0, append=0)) + start
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _prompt(record: TraceRecord) -> Prompt:
    key = hashlib.blake2b(record.prompt_tokens.tobytes(), digest_size=16).hexdigest()
    return Prompt(id=record.prompt_id, key=key, token_ids=record.prompt_tokens, text="")
