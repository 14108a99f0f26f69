"""Verifies what pays: the draft nodes of all requests that make the most tokens a second of the pass (docs/drafting.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.budgets.acceptance import Acceptance
from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.budgets.costs import CostCurve, LearnedCost, PassCost
from rhymerl.errors import require_at_least
from rhymerl.types import DraftBatch, Ratio, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IntArray

# Without measuring: a pass costs 1 + tokens / 64.
_ASSUMED = ((0, 1.0), (64, 2.0))
_PATIENCE = 4  # passes in a row without a gain after which the drafter is left alone ...
_PAUSE = 4, 64  # ... for so many passes at first, and at most; each failure doubles it
_FIRST_REACH = (
    4.0  # nodes of a request, at first and after a pause: a try is cheap, and what pays grows within a few passes
)
_MORE, _LATELY = 1.5, 0.8
_PLAIN_EVERY = 16  # how many passes without drafts are taken for one: their cost is soon known, and learning takes time
_GAIN = 1.1  # the best of many estimates is too good: 5 % expected was a loss when measured
_REMEMBER = 0.99  # of what drafts promised and kept, a pass with drafts
_BENEFIT = 20.0  # tokens of doubt in favour of the drafts
_OTHER_BATCH = 1.3  # a batch that has shrunk by this factor is worth another look


class GoodputBudget(Budget):
    """Chooses the set S of draft nodes that maximises (B + sum of P(v) over S) / cost(B, |S|), of B running requests.

    P(v) is calibrated online (budgets/acceptance.py) and falls along a path, so the best set is a prefix of all nodes sorted
    by P. The cost is learned from the passes, or given as `costs`: points [tokens, seconds], or a file with them. With
    `deterministic` it is never measured; without `costs` it is then assumed to be 1 + tokens / 64.
    At most `nodes` a request. When nothing has paid for some passes the drafter itself is paused.
    """

    def __init__(
        self,
        nodes: int = 32,
        *,
        costs: str | Path | Sequence[Sequence[float]] | PassCost | None = None,
        deterministic: bool = False,
    ) -> None:
        require_at_least("budget", {"nodes": (nodes, 0)})
        self.nodes = nodes
        self.costs = costs
        self.deterministic = deterministic
        self._cost = _cost(costs, deterministic=deterministic)
        self._acceptance = Acceptance()
        self._pause = _Pause()
        self._promised = self._kept = 0.0  # tokens expected of verified nodes, and accepted ones, of late
        self._expected = 0.0  # of the pass under way
        self._asked = 0  # requests of the pass under way that the drafter was asked for
        self._is_trial = False  # the pass under way is without drafts, to see what it costs
        self._was_paused = False
        # How many nodes of a request are worth asking for: those that are then cut away cost time too.
        self._reach = min(_FIRST_REACH, float(nodes))
        self._report = _Report()

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        self._asked, self._is_trial = 0, False
        self._report.passes += 1
        if self._pause.holds(len(requests)):
            self._report.paused += 1
            self._was_paused = True
            return np.zeros(len(requests), np.int32)
        if self._was_paused:
            self._look_again()
        self._is_trial = self._cost.wants_plain
        if self._is_trial:
            return np.zeros(len(requests), np.int32)
        return np.full(len(requests), min(round(self._reach), self.nodes), np.int32)

    def _look_again(self) -> None:
        """After a pause history may have come: the drafter shows all it has, and broken promises count half."""
        self._was_paused = False
        self._reach = float(self.nodes)
        self._promised, self._kept = self._promised / 2, self._kept / 2

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        rows = self._asked = len(requests)
        probability = self._honesty * self._acceptance.probabilities(drafts)
        best_first = np.argsort(-probability, kind="stable")  # parents stay in front of their children
        tokens = rows + np.concatenate([[0.0], np.cumsum(probability[best_first])])
        goodput = tokens / self._cost.seconds(rows, np.arange(len(tokens)), rows)
        size = int(goodput.argmax())
        plain = rows / float(self._cost.seconds(rows, np.zeros(1, np.int64), 0)[0])
        gain = float(goodput[size]) / plain
        self._pause.learn(gain, rows)
        self._report.gain += gain
        self._report.asks += 1
        mask = np.zeros(len(probability), np.bool_)
        mask[best_first[:size]] = True
        self._expected = float(probability[mask].sum()) / self._honesty
        self._learn_reach(drafts, mask)
        return mask

    def _learn_reach(self, drafts: DraftBatch, mask: BoolArray) -> None:
        """Ask for a little more than the largest of the drafts that were worth it lately."""
        largest = int(np.bincount(drafts.requests[mask], minlength=1).max())
        wanted = min(_MORE * largest + 2.0, float(self.nodes))
        self._reach = max(wanted, _LATELY * self._reach + (1 - _LATELY) * wanted)

    def learn(self, outcome: PassOutcome) -> None:
        nodes = len(outcome.drafts.token_ids)
        if self._asked == 0 and not self._is_trial and self._report.passes % _PLAIN_EVERY:
            return
        self._acceptance.learn(outcome.drafts, outcome.reached, outcome.accepted)
        if nodes:
            self._promised = _REMEMBER * self._promised + self._expected
            self._kept = _REMEMBER * self._kept + float(outcome.num_accepted.sum())
        if outcome.is_decoding:
            self._cost.observe(len(outcome.requests), nodes, self._asked, outcome.seconds)
        self._report.nodes += nodes

    @property
    def _honesty(self) -> float:
        """Accepted over expected of what was verified lately, at most 1: the nodes chosen are those whose estimate is too good."""
        return min((self._kept + _BENEFIT) / (self._promised + _BENEFIT), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """All but the cost of passes, which belongs to the machine."""
        return {
            "acceptance": self._acceptance.state_dict(),
            "pause": asdict(self._pause),
            "reach": self._reach,
            "promised": self._promised,
            "kept": self._kept,
            "was_paused": self._was_paused,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._acceptance.load_state_dict(state["acceptance"])
        self._pause = _Pause(**state["pause"])
        self._reach = state["reach"]
        self._promised, self._kept, self._was_paused = state["promised"], state["kept"], state["was_paused"]

    def metrics(self) -> Mapping[str, float]:
        report, self._report = self._report, _Report()
        plain, one_more = self._cost.seconds(1, np.array([0, 1]), 0)
        return {
            "budget/nodes_per_pass": Ratio(report.nodes, report.passes),
            "budget/paused_frac": Ratio(report.paused, report.passes),
            "budget/expected_speedup": Ratio(report.gain, report.asks) if report.asks else 1.0,
            "budget/node_cost_frac": float((one_more - plain) / plain),
        }


@dataclass(slots=True)
class _Pause:
    """Whether the drafter is left alone: after misses in a row, for twice as long each time, until the batch has shrunk."""

    misses: int = 0
    length: int = _PAUSE[0]
    left: int = 0
    rows: int = 0  # of the batch in which drafting did not pay

    def holds(self, rows: int) -> bool:
        """Called once a pass."""
        if rows * _OTHER_BATCH < self.rows:
            self.left, self.rows, self.length = 0, 0, _PAUSE[0]
        self.left = max(self.left - 1, 0)
        return self.left > 0

    def learn(self, gain: float, rows: int) -> None:
        """A pass with drafts was expected to be `gain` times as fast as one without."""
        if gain > _GAIN:
            self.misses, self.length = 0, _PAUSE[0]
            return
        self.misses += 1
        if self.misses >= _PATIENCE or self.length > _PAUSE[0]:
            self.left, self.rows = self.length + 1, rows
            self.length = min(2 * self.length, _PAUSE[1])
            self.misses = 0


@dataclass(slots=True)
class _Report:
    """Since the last metrics."""

    passes: int = 0
    paused: int = 0
    nodes: int = 0
    asks: int = 0
    gain: float = 0.0


def _cost(costs: str | Path | Sequence[Sequence[float]] | PassCost | None, *, deterministic: bool) -> PassCost:
    if isinstance(costs, PassCost):
        return costs
    if isinstance(costs, str | Path):
        return CostCurve.read(costs)
    if costs is not None:
        return CostCurve(costs)
    return CostCurve(_ASSUMED) if deterministic else LearnedCost()
