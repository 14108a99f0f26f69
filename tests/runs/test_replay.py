"""Replay: what a drafter would have saved follows from recorded tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.budgets import Budget, FixedBudget
from rhymerl.config import compose
from rhymerl.costs import CostCurve
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine.walk import walk
from rhymerl.history import HistoryStore
from rhymerl.history.traces import TraceRecord, TraceWriter, read_trace
from rhymerl.runs.judging import replay_trace
from rhymerl.runs.replay import Replay, ReplayTotals
from rhymerl.testing import OracleDrafter, RandomTreeDrafter
from rhymerl.types import RolloutRequest, Sample

SAMPLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"


def record(
    tokens: Sequence[int], *, epoch: int = 0, prompt: Sequence[int] = (1, 2), sample: int = 0, **changed: Any
) -> TraceRecord:
    fields = {"reward": 0.5, "finish_reason": "stop", **changed}
    return TraceRecord(
        epoch=epoch,
        prompt_id="-".join(map(str, prompt)),
        sample=sample,
        prompt_tokens=np.array(prompt, np.int32),
        response_tokens=np.array(tokens, np.int32),
        **fields,
    )


def replayed(
    records: Sequence[TraceRecord], drafter: Drafter, budget: Budget | None = None, **settings: Any
) -> dict[int, ReplayTotals]:
    try:
        return Replay(drafter, budget or FixedBudget(8), **settings).run(records)
    finally:
        drafter.close()


def random_trace(num_epochs: int = 3, *, prompts: int = 3, group: int = 2, seed: int = 0) -> list[TraceRecord]:
    """Answers that are near copies of those of the epoch before."""
    rng = np.random.default_rng(seed)
    answers = {(p, s): rng.integers(2, 9, int(rng.integers(5, 60))) for p in range(prompts) for s in range(group)}
    records = []
    for epoch in range(num_epochs):
        for (p, s), tokens in answers.items():
            tokens[rng.integers(0, len(tokens))] = rng.integers(2, 9)
            reason = "length" if s else "stop"
            records.append(record(tokens, epoch=epoch, prompt=[2, p], sample=s, reward=float(s), finish_reason=reason))
    return records


# -- by hand -----------------------------------------------------------------------------------------------------


def test_an_oracle_by_hand():
    """Answers of 8 and 3 tokens, 3 nodes a pass: 3 + 1 tokens twice, and 3 accepted ones with the end as last."""
    records = [record([5, 6, 7, 8, 5, 6, 7, 9]), record([4, 5, 6], sample=1)]
    oracle = OracleDrafter({"0/0": [5, 6, 7, 8, 5, 6, 7, 9], "0/1": [4, 5, 6]})
    (totals,) = replayed(records, oracle, FixedBudget(3), costs=CostCurve([(0, 1.0), (10, 2.0)])).values()
    assert (totals.tokens, totals.request_passes, totals.passes) == (11, 3, 2)
    assert (totals.drafted, totals.accepted, totals.hits) == (9, 9, 3)
    assert totals.cost == pytest.approx(1.8 + 1.4)  # 2 roots and 6 nodes, then 1 and 3
    result = totals.result()
    assert result["tokens_per_pass"] == pytest.approx(11 / 3)
    assert result["verified_per_token"] == pytest.approx(12 / 11)
    assert result["accept_rate"] == result["draft_hit_rate"] == 1.0
    assert result["nodes_per_draft"] == 3.0


def test_a_history_by_hand():
    """Epoch 0 says 5 6 7 8 9, epoch 1 says 5 6 4 8 9, and the budget is of 3 nodes.

    First pass: 5 6 7 are drafted, 5 6 accepted, 4 sampled. Then nothing is known after 4, and 8 is sampled. Then 9 is.
    """
    records = [record([5, 6, 7, 8, 9]), record([5, 6, 4, 8, 9], epoch=1)]
    drafter = HistoryTreeDrafter(deterministic=True, own=False, siblings=False)
    by_epoch = replayed(records, drafter, FixedBudget(3))
    assert by_epoch[0].result()["tokens_per_pass"] == 1.0
    totals = by_epoch[1]
    assert (totals.tokens, totals.request_passes) == (5, 3)
    assert (totals.drafted, totals.accepted, totals.hits) == (4, 3, 2)  # after 8 the 9 is drafted, and ends it


def test_who_ends_at_the_limit_is_not_asked_for_the_last_token():
    """Its last token is sampled, not drafted: there is no place for a node behind it."""
    for reason, asked in [("stop", 3), ("length", 2)]:
        listener = Listener()
        replayed([record([5, 6, 7], finish_reason=reason)], listener)
        assert len(listener.contexts) == asked


class Listener(Drafter):
    """Drafts nothing and remembers what it is told."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []
        self.told: list[str] = []
        self.emitted: list[tuple[str, list[int], int]] = []

    def propose(self, request: RolloutRequest, context: np.ndarray, budget: int) -> Draft:
        self.contexts.append(context.tolist())
        return Draft(token_ids=[], parents=[])

    def start(self, request: RolloutRequest) -> None:
        self.told.append(f"start {request.id}")

    def finish(self, completion: Any) -> None:
        self.told.append(f"finish {completion.request.id}")

    def accept(self, request: RolloutRequest, token_ids: np.ndarray, num_accepted: int) -> None:
        self.emitted.append((request.id, token_ids.tolist(), num_accepted))

    def learn(self, samples: Sequence[Sample]) -> None:
        self.told.append(f"learn {[(sample.completion.token_ids.tolist(), sample.reward) for sample in samples]}")

    def follow(self, delta: Any) -> None:
        self.told.append(f"follow {len(delta.changes)} {delta.is_snapshot}")


def test_a_drafter_is_told_what_an_engine_tells_it():
    """Also of an answer that the trace has twice, as a trace of two runs may."""
    records = [record([5, 6], epoch=1), record([7], reward=1.0), record([8, 9]), record([7], reward=1.0)]
    listener = Listener()
    replayed(records, listener, max_running=2)
    assert listener.told == [
        "follow 0 True",
        *("start 0/0", "start 0/1", "finish 0/0", "start 0/2", "finish 0/1", "finish 0/2"),
        *("learn [([7], 1.0), ([8, 9], 0.5), ([7], 1.0)]", "follow 1 False"),
        *("start 1/0", "finish 1/0", "learn [([5, 6], 0.5)]", "follow 1 False"),
    ]
    assert listener.contexts == [[1, 2], [1, 2], [1, 2, 8], [1, 2], [1, 2], [1, 2, 5]]
    assert listener.emitted == [
        *(("0/0", [7], 0), ("0/1", [8], 0), ("0/1", [9], 0), ("0/2", [7], 0), ("1/0", [5], 0), ("1/0", [6], 0))
    ]


def test_a_history_that_is_there_is_drafted_from():
    history = HistoryStore()
    replayed([record([5, 6, 7, 8])], NoDrafter(), history=history)
    drafter = HistoryTreeDrafter(deterministic=True)
    (totals,) = replayed([record([5, 6, 7, 8], epoch=1)], drafter, history=history).values()
    assert totals.request_passes == 1


# -- in general --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter",
    [NoDrafter(), NGramDrafter(), RandomTreeDrafter(vocabulary=9), HistoryTreeDrafter(deterministic=True)],
    ids=lambda drafter: type(drafter).__name__,
)
@pytest.mark.parametrize("max_running", [1, 4, 128])
def test_tokens_are_conserved(drafter, max_running):
    records = random_trace()
    by_epoch = replayed(records, drafter, max_running=max_running)
    for epoch, totals in by_epoch.items():
        listed = [each for each in records if each.epoch == epoch]
        assert totals.tokens == sum(len(each.response_tokens) for each in listed)
        assert totals.tokens <= totals.accepted + totals.request_passes  # a last pass may draw no token
        assert totals.tokens >= totals.accepted + totals.request_passes - len(listed)
        assert totals.passes <= totals.request_passes <= totals.passes * max_running


def test_every_epoch_counts_from_the_chosen_one_on():
    records = random_trace(4)
    whole = replayed(records, HistoryTreeDrafter(deterministic=True))
    late = replayed(records[::-1], HistoryTreeDrafter(deterministic=True), from_epoch=2)
    assert (list(whole), list(late)) == ([0, 1, 2, 3], [2, 3])
    for epoch in late:
        assert late[epoch].tokens == whole[epoch].tokens
        assert late[epoch].tokens > 1.5 * late[epoch].request_passes


@pytest.mark.parametrize(
    ("settings", "name"), [({"max_running": 0}, "max_running"), ({"from_epoch": -1}, "from_epoch")]
)
def test_settings_out_of_range_are_named(settings, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        Replay(NoDrafter(), FixedBudget(), **settings)


def walked(drafts: DraftBatch, answers: Sequence[Sequence[int]]) -> tuple[list[bool], list[bool], list[int]]:
    """Node by node, from the root on."""
    reached, accepted, counts = set(), set(), []
    for r, answer in enumerate(answers):
        start, draft = int(drafts.starts[r]), drafts.draft(r)
        node, count = -1, 0
        for token in answer:
            children = [n for n in range(len(draft)) if draft.parents[n] == node]
            reached |= {start + n for n in children}
            agreeing = [n for n in children if draft.token_ids[n] == token]
            if not agreeing:
                break
            (node,) = agreeing
            accepted.add(start + node)
            count += 1
        counts.append(count)
    total = range(len(drafts.token_ids))
    return [n in reached for n in total], [n in accepted for n in total], counts


@pytest.mark.parametrize("seed", range(8))
def test_a_walk_follows_the_answer(seed):
    rng, drafter = np.random.default_rng(seed), RandomTreeDrafter(vocabulary=3, seed=seed)
    answers = [rng.integers(0, 3, int(rng.integers(0, 6))).astype(np.int32) for _ in range(30)]
    drafts = DraftBatch.pack([drafter.propose(None, None, 12) for _ in answers])  # type: ignore[arg-type]
    found = walk(drafts, answers)
    assert (found.reached.tolist(), found.accepted.tolist(), found.num_accepted.tolist()) == walked(drafts, answers)
    assert max(found.num_accepted) > 1


# -- judging -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        writer.write(random_trace())
    return path


def test_judge_compares_to_no_drafting(trace, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"costs": [[0, 1], [1000, 1]]}')
    config = compose("replay", ["drafter=history_tree", "budget.nodes=8", "max_running=1"])
    config.trace, config.costs = str(trace), str(costs)
    result = replay_trace(config)
    assert result["predicted_speedup"] == pytest.approx(
        result["tokens_per_pass"]
    )  # where a pass costs what a token does
    assert list(result["epochs"]) == [0, 1, 2]
    assert sum(each["tokens"] for each in result["epochs"].values()) == result["tokens"]
    assert 0.5 < result["similarity"] < 1
    assert result["length_same_group"] == result["length_spearman"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trace=null"], r"trace=null: name a file of recorded rollouts"),
        (["from_epoch=3"], "from_epoch=3: the trace ends with epoch 2"),
        (["history.window=0"], "history.window=0: expected at least 1"),
        (["max_running=0"], "max_running=0: expected at least 1"),
        (["costs=nothing.json"], r"costs='nothing.json': expected a JSON file"),
        (["trace=nothing.jsonl"], "trace 'nothing.jsonl': no such file"),
    ],
)
def test_what_cannot_be_judged(trace, overrides, message):
    config = compose("replay", [f"trace={trace}", *overrides])
    with pytest.raises(Exception, match=message) as caught:
        replay_trace(config)
    assert "\n" not in str(caught.value)


def test_a_drafter_without_history_is_allowed(trace):
    config = compose("replay", [f"trace={trace}", "drafter.window=0"])
    assert replay_trace(config)["tokens_per_pass"] > 1


# -- the recorded run --------------------------------------------------------------------------------------------


def test_tokens_a_pass_on_the_recorded_run():
    """History is worth this much on the trace that comes along; tests/test_docs.py has more ways, to the digit."""
    drafter = HistoryTreeDrafter(deterministic=True)
    by_epoch = replayed(list(read_trace(SAMPLE)), drafter, FixedBudget(16), from_epoch=4)
    assert sum(by_epoch.values(), ReplayTotals()).result()["tokens_per_pass"] > 6.8


# -- some of the answers -------------------------------------------------------------------------------------------


def test_some_answers_are_whole_prompts_and_others_each_epoch():
    records = random_trace(6, prompts=9, group=4)
    replay = Replay(HistoryTreeDrafter(deterministic=True), FixedBudget(8), answers=2 * 6 * 4 + 3, from_epoch=1)
    first, *epochs = replay.epochs_of(records)
    assert list(first.replayed) == []
    drawn = []
    for epoch in epochs:
        chosen = [epoch.records[index].prompt_id for index in epoch.replayed]
        assert len(chosen) == 4 * len(set(chosen)), "all answers to a prompt or none"
        drawn.append(frozenset(chosen))
    assert sum(len(epoch.replayed) for epoch in epochs) == 2 * 6 * 4, "as many whole prompts as there is room for"
    assert len(set(drawn)) > 2


class CountingPasses(HistoryTreeDrafter):
    """Notes the tokens of each pass by request."""

    def __init__(self) -> None:
        super().__init__(deterministic=True, others=0)
        self.passes: dict[str, list[int]] = {}

    def accept(self, request, token_ids, num_accepted):
        super().accept(request, token_ids, num_accepted)
        self.passes.setdefault(request.id, []).append(len(token_ids))


def test_answers_that_are_replayed_have_the_passes_that_they_have_among_all():
    """The others are learned from; at a fixed budget and without a pool, drafts do not depend on them."""
    records = random_trace(4, prompts=6, group=2)
    whole, part = CountingPasses(), CountingPasses()
    for drafter, answers in ((whole, 0), (part, 12)):
        Replay(drafter, FixedBudget(8), answers=answers).run(records)
        drafter.close()
    assert len(whole.passes) == len(records)
    assert len(part.passes) == 12
    assert part.passes == {name: whole.passes[name] for name in part.passes}
    assert any(max(passes) > 1 for passes in part.passes.values())


def test_few_answers_are_one_prompt_an_epoch():
    records = random_trace(3, prompts=3, group=2)
    epochs = Replay(NoDrafter(), FixedBudget(0), answers=1).epochs_of(records)
    assert [len(epoch.replayed) for epoch in epochs] == [2, 2, 2]
