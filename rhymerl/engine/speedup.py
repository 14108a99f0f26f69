"""The speed-up of drafts: the time that answers would have taken without drafts, over the time that they took.

Drafts change no token, so the passes without them are known (budgets/timeline.py). What such a pass takes is learned
from the run's own passes, of which some are without drafts (`is_due_plain`). What the drafter and the budget take of a
pass is measured, and prompts have a term of their own. All else depends on the number of tokens in the pass, drafted or
not. So passes with drafts teach what plain passes cost, too, and a machine that becomes slower does so for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.budgets.learned_cost import NUM_COLD, LearnedCost
from rhymerl.budgets.timeline import PlainPasses
from rhymerl.engine.totals import PassRecord
from rhymerl.types import BoolArray, Completion, FloatArray, IndexArray, Ratio, RolloutRequest

_PLAIN_IN_A_ROW = NUM_COLD + 3  # passes: the costs are known after three of them that are not cold
_ONE_PLAIN_OF = 16, 64  # passes, of the first policy versions and later: where drafts save half the time, 3 % and 0.8 %
_FIRST_VERSIONS = 8
_LEAST_S = 0.5  # of passes that are compared at once, so that it takes less than a thousandth of them
_FIRST_REPORTS = 8  # are compared one by one: a short run shall have a figure, too
_MOST_PASSES = 20_000  # wait for passes of the other kind before they are forgotten
_STRIDE = 17  # passes by which they move from version to version, so that short rollouts have some, too


def is_due_plain(policy_version: int, pass_number: int) -> bool:
    """Return whether the pass goes without drafts, for comparison; `pass_number` counts from the rollout's start.

    It depends on nothing else, so a resumed run does it in the same passes. They begin with a rollout's first passes,
    which short rollouts have, too.
    """
    if policy_version == 0:  # perhaps there is no training at all
        return False
    every = _PLAIN_IN_A_ROW * _ONE_PLAIN_OF[policy_version > _FIRST_VERSIONS]
    return (pass_number - 1 + _STRIDE * (policy_version - 1)) % every < _PLAIN_IN_A_ROW


@dataclass(slots=True)
class _Answer:
    """An answer, as far as it was sampled since the last report."""

    prompt_tokens: int
    begun: int  # tokens that are not counted: those that it had before, and replies
    context: int  # tokens in front of the first new one
    sampled: int = 0


class SpeedupMeter:
    """Compares passes with the passes that the same answers would have taken without drafts.

    Times are those of the engine's clock `now`; passes of evaluations are left out.
    """

    def __init__(self, max_running: int, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._max_running = max_running
        self._now = now
        self._cost = LearnedCost(asking=False)  # of a pass but for its drafts
        self._answers: dict[str, _Answer] = {}  # in the order in which they were submitted
        self._rollouts: list[list[_Answer]] = []  # the answers of earlier reports that are not compared yet
        self._open: dict[str, _Answer] = {}
        self._passes: list[PassRecord] = []
        self._num_observed = 0  # passes from which the costs were learned
        self._first_pass = 0  # of this report
        self._is_evaluation = False
        self._taken_s = self._between_s = 0.0  # of passes, and between those of a report
        self._began_at = self._ended_at = 0.0
        self._num_reports = 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests are queued."""
        self._is_evaluation |= any(request.split == "validation" for request in requests)
        for request in requests:
            self._begin(request.id, len(request.output) if request.output else 0, len(request.prompt.token_ids))

    def _begin(self, name: str, tokens: int, prompt_tokens: int) -> None:
        """Begin an answer, or its next turn: without drafts, too, turns come one by one, so they are one answer."""
        new = _Answer(prompt_tokens=prompt_tokens, begun=tokens, context=prompt_tokens + tokens)
        self._open[name] = answer = self._answers.setdefault(name, new)
        answer.begun = tokens - answer.sampled

    def leave(self, completions: Iterable[Completion]) -> None:
        """Requests have ended, or were taken back."""
        for each in completions:
            answer = self._open.pop(each.request.id)
            answer.sampled = len(each.token_ids) - answer.begun

    def note(self, record: PassRecord) -> None:
        """A pass is over."""
        self._ended_at = self._now()
        if len(self._passes) == self._first_pass:
            self._began_at = self._ended_at - record.seconds
        self._passes.append(record)

    def report(self, progress: Mapping[str, int]) -> dict[str, float]:
        """Return the metrics since the last report; `progress` are the tokens of waiting and running requests.

        Nothing is said before passes of both kinds are known. Later, short rollouts are compared together (`_LEAST_S`).
        """
        for name, answer in self._open.items():
            answer.sampled = progress[name] - answer.begun
        self._close_rollout()
        for name, answer in self._open.items():
            self._begin(name, answer.begun + answer.sampled, answer.prompt_tokens)
        is_evaluation, self._is_evaluation = self._is_evaluation, False
        if is_evaluation:
            return {}
        self._num_reports += 1
        if not self._passes or (self._taken_s < _LEAST_S and self._num_reports > _FIRST_REPORTS):
            return {}
        result = self._compare()
        if result or len(self._passes) > _MOST_PASSES:
            self._rollouts, self._passes, self._first_pass, self._num_observed = [], [], 0, 0
            self._taken_s = self._between_s = 0.0
        return result

    def _close_rollout(self) -> None:
        if self._is_evaluation:
            del self._passes[self._first_pass :]
        taken = sum(each.seconds for each in self._passes[self._first_pass :])
        if taken:
            self._taken_s += taken
            self._between_s += max(self._ended_at - self._began_at - taken, 0.0)
            self._rollouts.append([each for each in self._answers.values() if each.sampled])
        self._answers, self._first_pass = {}, len(self._passes)

    def _compare(self) -> dict[str, float]:
        """Return nothing as long as the costs are not known."""
        columns = map(np.array, zip(*self._passes, strict=True))  # [P] each
        rows, nodes, asked, prompt_tokens, seen, draft_s, taken, *_ = columns
        tokens, seconds, new = rows + nodes, taken - draft_s, slice(self._num_observed, None)
        was_known = self._cost.is_known
        # An error is that of a forecast, where there could be one.
        forecast = self._seconds(tokens, prompt_tokens, seen)
        self._cost.observe_all(
            tokens[new],
            np.zeros_like(tokens[new]),
            asked[new],
            seconds[new],
            prompt_tokens=prompt_tokens[new],
            seen=seen[new],
        )
        is_plain = asked == 0
        self._num_observed = len(taken)
        if not self._cost.is_known:
            return {}
        expected = self._seconds(tokens, prompt_tokens, seen)
        slots = min(self._max_running, int(rows.max()))  # keys and values of long answers may leave room for fewer
        plain = sum(_plain_passes(each, slots).seconds(self._cost) for each in self._rollouts if each)
        # Prompts are computed as often without drafts.
        plain += float((expected - self._seconds(tokens, np.zeros_like(tokens), seen)).sum())
        plain *= float(seconds.sum() / expected.sum())
        if not was_known:
            forecast = expected
        return {
            "rollout/speedup": Ratio(plain + self._between_s, self._taken_s + self._between_s),
            "rollout/plain_pass_error": _ratio(seconds, forecast, is_plain),
            "rollout/drafted_pass_error": _ratio(seconds, forecast, ~is_plain),
            "rollout/drafted_pass_frac": Ratio(float(taken[~is_plain].sum()), float(taken.sum())),
        }

    def _seconds(self, tokens: IndexArray, prompt_tokens: IndexArray, seen: IndexArray) -> FloatArray:
        """Return the time of passes through the model."""
        none = np.zeros_like(tokens)
        return self._cost.seconds(tokens, none, none, prompt_tokens=prompt_tokens, seen=seen)


def _ratio(taken: FloatArray, expected: FloatArray, chosen: BoolArray) -> Ratio:
    return Ratio(float(taken[chosen].sum()), float(expected[chosen].sum()))


def _plain_passes(answers: Sequence[_Answer], slots: int) -> PlainPasses:
    """Return the passes of a rollout's answers without drafts, but for their prompts."""
    tokens, contexts = np.array([(each.sampled, each.context) for each in answers], np.int64).T
    return PlainPasses.of(tokens, contexts, slots)
