"""Verifies what pays: the nodes that maximise the pass's tokens per second over all requests (docs/drafting.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rhymerl.budgets.acceptance import Acceptance, largest_part, rank_in_drafts
from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.budgets.expectation import PassTotals
from rhymerl.budgets.learned_cost import NUM_COLD, LearnedCost
from rhymerl.budgets.outlook import Choice, Outlook
from rhymerl.budgets.probe_budget import PROBE_NODES, PROBED, TRUST, Kind, ProbeBudget, ProbeCourse
from rhymerl.budgets.token_weights import TokenWeights
from rhymerl.costs import CostCurve, PassCost, Points, points_of
from rhymerl.drafts import DraftBatch
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.history.records import HistoryDelta
from rhymerl.types import BoolArray, FloatArray, IndexArray, IntArray, Ratio, RolloutRequest

# Without measuring: a pass costs 1 + tokens / 64.
_ASSUMED = ((0, 1.0), (64, 2.0))
_GAIN = 1.02  # the best of many estimates is too good
_NEAR = 0.8  # with less than that for all requests, those whose tokens are worth most do not reach it either
_PATIENCE = 4  # passes in a row without that gain after which drafting stops
_OTHER_BATCH = 2.0  # a batch that has shrunk or grown by this factor is one of another size
_MORE, _LATELY = 1.5, 0.8
_OUTLOOK_EVERY = 2  # passes with drafts
_CHOICE_EVERY = 4  # passes, or when a request has left or entered
_REMEMBER = 0.99  # of what drafts promised and kept, a pass with drafts
_REMEMBER_PROBE = 0.8  # a probe: what it is for is that things may have changed
_BENEFIT = 20.0  # tokens of doubt in favour of the drafts
# Where costs are given, the first probe is enough; they are learned from the second one and from the last trial.
_TRIALS: list[Kind] = ["trial"] * (NUM_COLD + 1)
_ATTEMPT: tuple[Kind, ...] = ("probe", "probe", *_TRIALS)


@dataclass(eq=False)
class GoodputBudget(Budget):
    """Chooses the set S of draft nodes that maximises (B + sum of P(v) over S) / cost(B, |S|), of B running requests.

    P(v) is calibrated online (budgets/acceptance.py) and falls along a path, so the best set is a prefix of all nodes
    sorted by P. Where no request waits, P(v) is weighed by what a token of its request is worth
    (budgets/token_weights.py). The cost is learned from the passes, or given as `costs`: points [tokens, seconds], or a
    file with them. With `deterministic` it is never measured; without `costs` it is then assumed to be 1 + tokens / 64.
    None follows the Trainer. Given costs go with an `ask_cost`, in their unit: what a pass takes longer because the
    drafter is asked, and for each request that it is asked for. At most `nodes` a request. While drafts do not pay, a
    few requests are probed now and then (budgets/probe_budget.py), so that drafting never costs more than some percent.
    """

    nodes: int = at_least(0, 32)
    _: KW_ONLY
    costs: str | Path | Points | PassCost | None = None
    ask_cost: Sequence[float] = (0.0, 0.0)
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        asking, is_given = list(self.ask_cost), self.costs is not None or self.deterministic
        is_pair = len(asking) == 2 and min(asking) >= 0
        require(is_pair, "ask_cost", asking, "two costs, of a pass and of a request, each 0 or more")
        is_learned_alone = is_given or not any(asking)
        require(is_learned_alone, "ask_cost", asking, "[0, 0] without costs, because it is learned then")
        if isinstance(self.costs, PassCost):
            self._given = self.costs
        else:
            points = points_of(_ASSUMED if self.costs is None else self.costs)
            self._given = CostCurve(points, ask_cost=(asking[0], asking[1]))
        self._learned = LearnedCost()
        self._acceptance = Acceptance()
        self._probe_budget = ProbeBudget()
        self._outlook = Outlook()
        self._course = ProbeCourse(reach=float(min(PROBE_NODES, self.nodes)))
        # Tokens expected of verified nodes, and accepted ones, of late.
        self._expected_lately = self._accepted_lately = 0.0
        self._kind: Kind = "draft"  # of the pass under way
        self._rows = 0  # of the pass under way
        self._asked = 0  # of these, those that the drafter was asked for
        self._expected = 0.0  # tokens, of its verified nodes
        self._worth = TokenWeights()
        self._weights: dict[str, float] | None = None  # by id of a running request; None: all tokens are worth the same
        self._report = PassTotals()

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def _cost(self) -> PassCost:
        return self._learned if self.costs is None and not self.deterministic else self._given

    def uniform(self, widths: Sequence[int]) -> Budget:
        given = {name: getattr(self, name) for name in ("costs", "ask_cost", "deterministic")}
        return UniformGoodputBudget(widths, **given)

    def admit(self, request: RolloutRequest) -> None:
        self._report.enter(request)
        self._worth.enter(request)
        if request.prefetched is not None:
            self._probe_budget.grant_probe()

    def finish(self, request: RolloutRequest) -> None:
        self._report.leave(request)
        self._worth.leave(request)

    def follow(self, delta: HistoryDelta) -> None:
        self._worth.follow(delta)

    # -- before a pass -------------------------------------------------------------------------------------------

    def count_passes(self, num_passes: int) -> None:
        self._probe_budget.earn(num_passes)
        self._course.passes += num_passes
        self._report.num_passes += num_passes
        self._report.begun += num_passes

    def skips(self, num_requests: int) -> int:
        self._report.begin(self._rows, num_requests)
        self._rows, self._asked = num_requests, 0
        self._look(num_requests)
        self._kind = self._next_kind()
        if self._kind != "plain":
            return 0
        self._cost.note_pause()
        return self._probe_budget.passes_until_probe

    def note_running(self, requests: Sequence[RolloutRequest], num_generated: IndexArray, *, num_waiting: int) -> None:
        """While others wait, an end lets one in, whoever ends: so all tokens are worth the same."""
        weights = None if num_waiting else self._worth.weights(requests, num_generated, self._cost)
        names = (request.id for request in requests)
        self._weights = None if weights is None else dict(zip(names, weights.tolist(), strict=True))

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        limits = np.zeros(len(requests), np.int32)
        if self._kind == "draft":
            limits[self._asked_for(requests)] = min(round(self._course.reach), self.nodes)
        elif self._kind == "probe":
            limits[self._probed(requests)] = min(PROBE_NODES, self.nodes)
        return limits

    def _asked_for(self, requests: Sequence[RolloutRequest]) -> slice | IndexArray:
        """Return the requests whose drafts should speed up a pass: those with the largest token weights, or none.

        Where later steps run ahead there is work for all slots, whoever ends: then all are asked for, or none.
        """
        course = self._course
        if not self._outlook.is_known:
            return slice(None)
        weights = None if self._worth.runs_ahead else self._weights_of(requests)
        batch = (len(requests), weights is None)
        if course.batch != batch or course.passes % _CHOICE_EVERY == 0:
            choice = self._outlook_for(len(requests), weights)
            course.batch, course.gain, course.num_asked = batch, choice.gain, choice.num_asked
        course.misses = 0 if course.gain > _GAIN else course.misses + 1
        if course.misses >= _PATIENCE:
            course.drafts = False
        if course.gain <= _GAIN:
            return slice(0)
        if weights is None:
            return slice(None)
        most_first: IndexArray = np.argsort(-weights, kind="stable")
        return most_first[: course.num_asked]

    def _weights_of(self, requests: Sequence[RolloutRequest]) -> FloatArray | None:
        return None if self._weights is None else np.array([self._weights[request.id] for request in requests])

    def _outlook_for(self, rows: int, weights: FloatArray | None = None) -> Choice:
        return self._outlook.best(rows, self._cost, weights=weights, computed=partial(self._num_computed, rows))

    def _num_computed(self, rows: int, drafted: FloatArray, nodes: FloatArray) -> FloatArray:
        """Return the nodes that a pass over `rows` requests computes, with so many drafts of so many nodes each."""
        return drafted * nodes

    def _look(self, rows: int) -> None:
        """Use what is known of batches of this size: drafts may pay in large ones and not in small ones."""
        course = self._course
        if course.rows / _OTHER_BATCH < rows < course.rows * _OTHER_BATCH:
            return
        is_new, course.rows, course.misses = course.rows == 0, rows, 0
        if not is_new:
            affords = self._outlook.is_known and not self._probe_budget.is_spent
            course.drafts = affords and self._outlook_for(rows).gain > _NEAR

    def _next_kind(self) -> Kind:
        course = self._course
        if course.drafts:
            course.attempt.clear()
            return "trial" if self._cost.wants_plain(self._rows) else "draft"
        if not course.attempt and self._probe_budget.affords_probe:
            course.attempt.extend(_ATTEMPT if self._cost.learns else _ATTEMPT[:1])
        return course.attempt.pop(0) if course.attempt else "plain"

    def _probed(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """Return the requests to probe: neighbours, which often have their prompt in common, others each time.

        Those with prefetched tokens come first.
        """
        rows, course = len(requests), self._course
        prefetched = [index for index, request in enumerate(requests) if request.prefetched is not None]
        course.probes += 1
        neighbours = [(course.probes * PROBED + i) % rows for i in range(PROBED)]
        return list(dict.fromkeys([*prefetched[:PROBED], *neighbours]))[:PROBED]

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        asked = self._asked = len(requests)
        probability = self._calibration * self._acceptance.probabilities(drafts)
        if self._kind == "probe" or self._course.passes % _OUTLOOK_EVERY == 0:
            probed = min(PROBE_NODES, self.nodes) if self._kind == "probe" else None
            self._outlook.learn(self._rows, _sums(-np.sort(-probability)), asked, probed=probed)
        if self._kind == "probe" and self._cost.is_known and not self._probe_budget.is_spent:
            self._course.drafts = self._outlook_for(self._rows).gain > _GAIN
        weights = self._weights_of(requests)
        worth = probability if weights is None else probability * weights[drafts.requests]
        mask = self._chosen(drafts, worth, asked)
        self._course.trusted = max(self._course.trusted, TRUST * self._num_verified(drafts, mask))
        self._expected = float(probability[mask].sum()) / self._calibration
        self._learn_reach(drafts, mask)
        return mask

    def _chosen(self, drafts: DraftBatch, worth: FloatArray, asked: int) -> BoolArray:
        """Return the nodes to verify, [N]; `worth` [N] are the tokens that each is expected to add, weighed."""
        best_first = np.argsort(-worth, kind="stable")  # parents stay in front of their children
        expected = _sums(worth[best_first])
        sizes = np.arange(len(expected))
        size = min(self._best(sizes, expected, asked), self._course.trusted)
        if self._kind == "probe":
            size = max(size, min(asked, len(worth)))  # only what is verified teaches anything
        mask = np.zeros(len(worth), np.bool_)
        mask[best_first[:size]] = True
        return mask

    def _num_verified(self, drafts: DraftBatch, mask: BoolArray) -> int:
        """Return how many nodes a pass computes in which those of `mask` are verified."""
        return int(mask.sum())

    def _best(self, sizes: IndexArray, expected: FloatArray, asked: int) -> int:
        """Return the index of the choice that makes the most tokens a second, of so many nodes each.

        `expected` are the tokens that each adds, weighed by their worth; the first choice is a pass without nodes.
        After a probe it counts as if all requests had been asked for, and the others had drafts like these.
        """
        rows = max(self._rows, asked)
        share = asked / rows if self._kind == "probe" else 1.0
        _, seconds = self._seconds(rows, sizes / share, rows if self._kind == "probe" else asked)
        goodput = (rows + expected / share) / seconds
        return int(goodput.argmax())

    def _learn_reach(self, drafts: DraftBatch, mask: BoolArray) -> None:
        """Ask for a little more than the largest of the drafts that were worth it lately."""
        course, largest = self._course, int(largest_part(mask, drafts.starts))
        wanted = min(_MORE * largest + 2.0, float(self.nodes))
        course.reach = max(wanted, _LATELY * course.reach + (1 - _LATELY) * wanted)

    # -- after a pass --------------------------------------------------------------------------------------------

    def learn(self, outcome: PassOutcome) -> None:
        nodes, rows, prompts = outcome.num_verified, len(outcome.requests), outcome.num_prompt_tokens
        self._report.asked.append((rows, nodes, self._asked, prompts, outcome.num_seen))
        if nodes:
            self._report.saved.append((outcome.requests, outcome.num_accepted))
            self._learn_acceptance(outcome)
        sizes = {"prompt_tokens": prompts, "seen": outcome.num_seen}
        seconds = self._cost.observe(rows, nodes, self._asked, outcome.seconds, **sizes)
        if self._asked:
            weights = self._weights_of(outcome.requests) if self._kind == "draft" else None
            accepted = outcome.num_accepted if weights is None else weights * outcome.num_accepted
            made = 1 + float(accepted.sum()) / rows
            plain, known = self._seconds(rows, np.array([nodes]), self._asked)
            taken = float(known[0])
            # Where a prompt was computed, too, what was measured cannot be compared with a plain pass.
            measured = seconds if outcome.is_decoding else taken
            self._settle(made, taken / plain, measured / plain)
            self._report.count(rows, made=made, taken=taken / plain)

    def _settle(self, made: float, taken: float, measured: float) -> None:
        """Settle a pass: `made` tokens a request; `taken` and `measured` plain passes, by costs and by the clock."""
        if self._kind == "probe":
            self._probe_budget.pay_probe(measured - made)
        else:
            # By all that is known of such passes: what this one took is as much the machine's other work.
            self._probe_budget.settle(made - taken)
        self._course.drafts &= not self._probe_budget.is_spent

    def _learn_acceptance(self, outcome: PassOutcome) -> None:
        remember = _REMEMBER
        if self._kind == "probe":
            remember = _REMEMBER_PROBE
            self._acceptance.fade(remember)
        self._acceptance.learn(outcome.drafts, outcome.reached, outcome.accepted)
        self._expected_lately = remember * self._expected_lately + self._expected
        self._accepted_lately = remember * self._accepted_lately + float(outcome.num_accepted.sum())

    @property
    def _calibration(self) -> float:
        """Return recently accepted over expected nodes, at most 1: the chosen nodes' estimates are biased upwards."""
        return min((self._accepted_lately + _BENEFIT) / (self._expected_lately + _BENEFIT), 1.0)

    def _seconds(self, rows: int, nodes: FloatArray | IndexArray, asked: int) -> tuple[float, FloatArray]:
        """Return the time of a pass without drafts, and with each number of `nodes` for `asked` requests."""
        askers = np.full(len(nodes) + 1, asked)
        askers[0] = 0
        seconds = self._cost.seconds(rows, np.append(0.0, nodes), askers)
        return float(seconds[0]), seconds[1:]

    # -- state and metrics ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all but the cost of passes, which belongs to the machine."""
        return {
            "acceptance": self._acceptance.state_dict(),
            "probe_budget": asdict(self._probe_budget),
            "outlook": self._outlook.state_dict(),
            "worth": self._worth.state_dict(),
            "course": asdict(self._course),
            "expected": self._expected_lately,
            "accepted": self._accepted_lately,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._acceptance.load_state_dict(state["acceptance"])
        self._probe_budget = ProbeBudget(**state["probe_budget"])
        self._outlook.load_state_dict(state["outlook"])
        self._worth.load_state_dict(state["worth"])
        self._course = ProbeCourse(**state["course"])
        self._expected_lately, self._accepted_lately = state["expected"], state["accepted"]

    def metrics(self) -> Mapping[str, float]:
        report, self._report = self._report, self._report.next()
        plain, one_more = self._cost.seconds(1, np.array([0, 1]), 0)
        few, many = self._cost.seconds(1, np.zeros(2), np.array([1, 2]))
        return {
            "budget/nodes_per_pass": Ratio(report.num_nodes, report.num_passes),
            "budget/paused_frac": Ratio(report.num_passes - len(report.asked), report.num_passes),
            "budget/regret": report.regret(self._cost, lambda rows: self._outlook_for(rows).gain),
            "budget/expected_speedup": report.speedup(self._cost) if report.asked else 1.0,
            "budget/node_cost_frac": float((one_more - plain) / plain),
            "budget/ask_cost_frac": float((few - plain) / plain),
            "budget/ask_more_cost_frac": float((many - few) / plain),
        }


@dataclass(eq=False)
class UniformGoodputBudget(GoodputBudget):
    """GoodputBudget's choice among `widths`, which rise: so many nodes per request, even if drafts are shorter.

    With w nodes a request a pass over B requests costs what B w nodes cost, and adds the w best nodes of each draft.
    Further arguments are GoodputBudget's. Raises ValueError for widths that do not begin with 0 or do not rise.
    """

    nodes: int = field(init=False)
    widths: Sequence[int] = field()

    def __post_init__(self) -> None:
        given = list(self.widths)
        rises = given[:1] == [0] and sorted(set(given)) == given
        require(rises, "widths", given, "rising numbers of nodes, the first of them 0")
        self.nodes = given[-1]
        self._sizes = np.array(given, np.int64)
        super().__post_init__()

    def width_of(self, largest: int) -> int:
        """Return the smallest width that holds a draft of so many nodes."""
        return int(self._sizes[np.searchsorted(self._sizes, largest)])

    def _chosen(self, drafts: DraftBatch, worth: FloatArray, asked: int) -> BoolArray:
        rank = np.empty(len(worth), np.int64)
        rank_in_drafts(worth, drafts.starts, rank)
        rows = asked if self._kind == "probe" else max(self._rows, asked)
        sizes = self._sizes[: max(int(np.searchsorted(self._sizes * rows, self._course.trusted, side="right")), 2)]
        added = np.bincount(rank, weights=worth, minlength=self.nodes)
        expected = np.concatenate([[0.0], np.cumsum(added)])[sizes]
        best = self._best(sizes * rows, expected, asked)
        if self._kind == "probe":
            best = max(best, min(1, len(sizes) - 1))  # only what is verified teaches anything
        chosen: BoolArray = rank < sizes[best]
        return chosen

    def _num_computed(self, rows: int, drafted: FloatArray, nodes: FloatArray) -> FloatArray:
        widths: FloatArray = self._sizes[np.searchsorted(self._sizes, np.minimum(nodes, self.widths[-1]))].astype(float)
        return rows * widths

    def _num_verified(self, drafts: DraftBatch, mask: BoolArray) -> int:
        return max(self._rows, len(drafts)) * self.width_of(int(largest_part(mask, drafts.starts)))


def _sums(values: FloatArray) -> FloatArray:
    """Return 0 and the sums of the first ones, [n + 1]."""
    return np.concatenate([[0.0], np.cumsum(values)])
