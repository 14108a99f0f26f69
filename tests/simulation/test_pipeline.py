"""Steps one after another: by hand, against the simulator of single passes, and what every mode promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.costs import CostCurve
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    Move,
    PacedScheduler,
    PackedScheduler,
    Scheduler,
    SortedScheduler,
)
from rhymerl.simulation import Decoding, Simulation, StepWork, SyntheticLengths
from rhymerl.simulation.pipeline import samples_of
from rhymerl.simulation.summary import Window, step_time, summary
from rhymerl.testing import make_requests
from tests.products import values_first
from tests.simulation.twin import pipelined

SCHEDULERS = [FIFOScheduler, SortedScheduler, PackedScheduler, HistoPipeScheduler, PacedScheduler]


def work(lengths) -> StepWork:
    requests = make_requests(len(lengths), max_tokens=1000)
    return StepWork(requests=requests, lengths=np.array(lengths, np.int64), is_cut=np.zeros(len(lengths), np.bool_))


def small(num_steps: int = 12, **settings) -> list[StepWork]:
    defaults = {"prompts_per_step": 12, "group_size": 4, "mean": 200.0, "cap": 800, "steps_per_epoch": 2}
    return SyntheticLengths(**{**defaults, **settings}).steps(num_steps, 0)


PASS = 1 + 1 / 128  # of one request


def test_keep_by_hand():
    # Worker 0 has 6 then 2 then 1 tokens, worker 1 has 2 then 6 then 1. Nobody waits until step 2, which needs step 0.
    works = [work([6, 2]), work([2, 6]), work([1, 1])]
    it = Simulation(FIFOScheduler(), num_workers=2, run_ahead="keep").run(works)
    assert it.starts.tolist() == pytest.approx(np.array([[0, 0], [6, 2], [8, 8]]) * PASS)
    assert it.done.tolist() == pytest.approx([6 * PASS, 8 * PASS, 9 * PASS])
    # Of step 1, worker 1 has sampled 4 tokens when step 0 is done; in step 2 nobody ran ahead of step 1.
    assert it.stale_tokens.tolist() == pytest.approx([0, 4, 0])
    assert it.staleness.tolist() == [0, 1, 0]


def test_off_by_hand():
    it = Simulation(FIFOScheduler(), num_workers=2, run_ahead="off").run([work([6, 2]), work([2, 6])])
    assert it.done.tolist() == pytest.approx([6 * PASS, 12 * PASS])
    figures = summary(it, Window(first=0, last=2), train_time=0.0)
    assert figures["bubble_frac"] == pytest.approx(8 / 24)
    assert figures["step_time"] == pytest.approx(6 * PASS)
    assert figures["staleness_max"] == figures["stale_token_frac"] == 0


def test_draft_by_hand():
    # Worker 1 is idle for 4 passes of step 0 and draws 4 of its 6 tokens of step 1, which are then verified 4 at a
    # time.
    decoding = Decoding(redo_acceptance=1.0, redo_nodes=3)
    it = Simulation(FIFOScheduler(), num_workers=2, run_ahead="draft", decoding=decoding).run(
        [work([6, 2]), work([2, 6])]
    )
    assert it.ahead[0].tolist() == pytest.approx([0, 4 * PASS])
    assert it.done[1] - it.done[0] == pytest.approx((1 + 4 / 128) + 2 * PASS)
    assert it.stale_tokens.tolist() == [0, 0]
    figures = summary(it, Window(first=0, last=1), train_time=0.0)
    assert (figures["bubble_frac"], figures["run_ahead_frac"]) == (pytest.approx(0), pytest.approx(4 / 12))


# An engine's, in ms: dear above a few hundred tokens.
COSTS = CostCurve([(1, 6.2), (64, 7.5), (256, 14), (512, 22), (1024, 38), (4096, 140)])


@pytest.mark.parametrize(("scheduler", "acceptance"), values_first(SCHEDULERS, [0.5, 0.95, 0.998]))
def test_prefetched_tokens_cost_no_time_where_all_draft(scheduler, acceptance):
    """Whatever share of them is right: no more are verified than pay, and none behind the first that is wrong."""
    decoding = Decoding(costs=COSTS, tokens_per_pass=3.5, verified=4, redo_acceptance=acceptance, redo_nodes=128)
    works = small(12, prompts_per_step=64, group_size=8, mean=1000.0, cap=4000)
    ends = {
        mode: Simulation(scheduler(), num_workers=4, run_ahead=mode, decoding=decoding).run(works).done[-1]
        for mode in ("off", "draft")
    }
    assert ends["draft"] < 1.02 * ends["off"]


# Answers with a long tail in which schedulers, drafts and prefetched tokens were found to lose.
LOSING = [
    Decoding(costs=COSTS, tokens_per_pass=3.5, verified=4),
    Decoding(costs=COSTS, tokens_per_pass=3.5, verified=4, redo_acceptance=0.998, redo_nodes=128),
    Decoding(costs=COSTS, tokens_per_pass=3.5, verified=4, redo_acceptance=0.95, redo_nodes=128),
    Decoding(costs=COSTS, tokens_per_pass=3.5, verified=4, redo_acceptance=0.5, redo_nodes=128),
    Decoding(costs=COSTS, redo_acceptance=0.95, max_running=24),
    Decoding(redo_acceptance=0.95),
]


@pytest.mark.parametrize(
    ("decoding", "pipeline"),
    values_first({str(n): each for n, each in enumerate(LOSING)}, ["colocated", "disaggregated"]),
)
def test_auto_is_as_fast_as_off_and_as_fifo(decoding, pipeline):
    works = SyntheticLengths(prompts_per_step=32).steps(12, 0)

    def seconds(scheduler, mode):
        simulation = Simulation(
            scheduler(),
            num_workers=8,
            run_ahead=mode,
            pipeline=pipeline,
            train_time=10_000.0 if pipeline == "disaggregated" else 0.0,
            rebalance_every=3_000.0,
            decoding=decoding,
        )
        return step_time(simulation.run(works), Window(first=5, last=10), simulation.pause)

    fifo = seconds(FIFOScheduler, "off")
    for scheduler in SCHEDULERS:
        auto = seconds(scheduler, "auto")
        assert auto <= seconds(scheduler, "off") / 0.99, scheduler
        assert auto <= 1.01 * fifo, scheduler


def test_auto_is_strictly_on_policy():
    simulation = Simulation(PackedScheduler(), num_workers=4, run_ahead="auto", max_staleness=0)
    it = simulation.run(small())
    assert it.staleness.max() == 0
    assert it.ahead.sum() > 0


def test_run_ahead_tokens_are_right_up_to_the_first_miss_by_hand():
    # Each with probability 1/2: of three tokens 1 + 1/2 + 1/4 are sampled up to the miss, it among them; of many, 2.
    decoding = Decoding(redo_acceptance=0.5)
    assert decoding.redone(np.array([0.0, 1.0, 3.0, 100.0])).tolist() == pytest.approx([0, 1, 1.75, 2])
    assert Decoding(redo_acceptance=1.0).redone(np.array([3.0])).tolist() == [3]


def test_nodes_that_pay_by_hand():
    # A pass costs 1 up to 4 tokens and 1 more for each beyond. Two requests that are always right: 4 tokens for 1, or 6
    # for 3, 8 for 5.
    costs = CostCurve([(0, 1.0), (4, 1.0), (104, 101.0)])
    certain = Decoding(costs=costs, redo_acceptance=1.0, redo_nodes=3)
    assert certain.nodes_that_pay(2, 0) == 1
    # Alone: 1, 2, 3, 4 tokens for 1. Beside two others of a token each: 3, 4 tokens for 1, then 5 for 2.
    assert certain.nodes_that_pay(1, 0) == 3
    assert certain.nodes_that_pay(1, 2) == 1
    # Right by half and beside nobody, where every token costs the same: a second one brings half as much as the first.
    assert Decoding(costs=CostCurve([(0, 1e-9), (1, 1.0)]), redo_acceptance=0.5).nodes_that_pay(1, 0) == 0


def test_training_stops_colocated_workers_and_not_others():
    works = [work([6, 2]), work([2, 6]), work([1, 1])]
    runs = {
        pipeline: Simulation(FIFOScheduler(), num_workers=2, pipeline=pipeline, train_time=5.0).run(works)
        for pipeline in ("colocated", "disaggregated")
    }
    assert runs["colocated"].done.tolist() == pytest.approx([6 * PASS, 8 * PASS, 9 * PASS])  # work time, without pauses
    window = Window(first=0, last=3)
    assert summary(runs["colocated"], window, train_time=5.0)["step_time"] == pytest.approx(3 * PASS + 5)
    # Step 0 is trained at 6 + 5: step 2 begins then, 3 passes late.
    assert runs["disaggregated"].starts[2].tolist() == pytest.approx([6 * PASS + 5] * 2)


queues = st.lists(st.lists(st.integers(1, 12), max_size=4), min_size=3, max_size=3)


@given(st.lists(queues, min_size=1, max_size=5), st.sampled_from(["off", "keep"]), st.sampled_from([0.0, 3.0]))
def test_as_a_simulator_of_single_passes(plans, run_ahead, train_time):
    class Given(Scheduler):
        """Plans the queues that it is told."""

        def plan(self, requests, num_workers, step):
            ordered = iter(requests)
            return [[next(ordered) for _ in queue] for queue in plans[step]]

    works = [work([length for queue in plan for length in queue]) for plan in plans]
    simulation = Simulation(
        Given(), num_workers=3, run_ahead=run_ahead, pipeline="disaggregated", train_time=train_time
    )
    it, twin = simulation.run(works), pipelined(plans, run_ahead=run_ahead, train_time=train_time)
    assert it.done.tolist() == pytest.approx(twin.done)
    assert it.starts.tolist() == [pytest.approx(each) for each in twin.starts]
    assert it.ends.tolist() == [pytest.approx(each) for each in twin.ends]


@pytest.mark.parametrize(("scheduler", "mode"), values_first(SCHEDULERS, ["keep", "off", "draft"]))
def test_every_request_is_answered_once_and_never_by_a_policy_older_than_one_step(scheduler, mode):
    works = small()
    decoding = Decoding(redo_nodes=8)
    it = Simulation(scheduler(), num_workers=3, run_ahead=mode, rebalance_every=16.0, decoding=decoding).run(works)
    for each, waits, latencies in zip(works, it.waits, it.latencies, strict=True):
        assert len(latencies) == len(each.lengths)
        assert np.isfinite(latencies).all()
        # with its tokens redone as drafts an answer takes fewer passes than tokens
        assert (latencies - waits >= each.lengths * (0.1 if mode == "draft" else 1.0)).all()
        assert (waits >= 0).all()
    assert it.staleness.max() == (1 if mode == "keep" else 0)
    late = np.concatenate([[0.0, 0.0], it.trained[:-2]])  # the update before the last, when a step begins
    assert (it.starts >= late[:, None]).all()
    assert 0 <= summary(it, Window(first=2, last=10), train_time=0.0)["bubble_frac"] < 1


def test_the_same_seed_gives_the_same_figures():
    runs = [Simulation(HistoPipeScheduler(), num_workers=4, rebalance_every=16.0).run(small()) for _ in range(2)]
    assert runs[0].ends.tolist() == runs[1].ends.tolist()
    assert (
        small()[0].lengths.tolist()
        != SyntheticLengths(prompts_per_step=12, group_size=4).steps(1, 1)[0].lengths.tolist()
    )


class Watching(Scheduler):
    """Plans queues of so many requests, and notes what it sees of the steps under way."""

    def __init__(self, *sizes: list[int]) -> None:
        self.sizes = sizes
        self.seen, self.unfinished = [], []

    def plan(self, requests, num_workers, step):
        ordered = iter(requests)
        return [[next(ordered) for _ in range(size)] for size in self.sizes[step]]

    def rebalance(self, progress):
        self.seen.append(progress)
        return []

    def observe(self, progress):
        self.unfinished.append(progress)


def test_the_next_step_is_planned_when_a_worker_has_a_tenth_of_its_requests_left():
    scheduler = Watching([10, 1], [1, 1])
    works = [work([*range(1, 11), 20]), work([1, 1])]
    Simulation(scheduler, num_workers=2, run_ahead="keep").run(works)
    (progress,) = scheduler.unfinished
    assert progress.workers.tolist() == [0, 1]
    assert progress.num_tokens.tolist() == [9, 9]


def test_a_step_is_followed_from_when_its_own_policy_is_there():
    """Worker 1 begins step 1 at 2; step 0's last answer, and so the policy, comes at 6; the first look a pass later."""
    scheduler = Watching([1, 1], [1, 1])
    works = [work([6, 2]), work([2, 6])]
    Simulation(scheduler, num_workers=2, run_ahead="keep", rebalance_every=1.001 * PASS).run(works)
    first = next(progress for progress in scheduler.seen if progress.step == 1)
    assert first.num_tokens.tolist() == [1, 5]


# -- moves -----------------------------------------------------------------------------------------------------------


class Handing(Scheduler):
    """Worker 0 gets everything; at the first look `moved` requests go to worker 1."""

    def __init__(self, *moved: str, worker: int = 1) -> None:
        self.moved = moved
        self.worker = worker
        self.seen = []

    def plan(self, requests, num_workers, step):
        return [list(requests), *([] for _ in range(num_workers - 1))]

    def rebalance(self, progress):
        self.seen.append(progress)
        return [Move(request_id=name, worker=self.worker) for name in self.moved] if len(self.seen) == 1 else []


@pytest.mark.parametrize("recomputed", [1.0, 0.5, 0.0])
def test_a_move_by_hand(recomputed):
    # Two requests of 10 and 20 tokens on worker 0. After 4 passes of two the longer one moves: its 4 tokens are
    # recomputed at 4/128 (or half of them, or none), and 16 passes are left; worker 0 has 6 passes of one to go.
    scheduler = Handing("1/0")
    two = 1 + 2 / 128
    decoding = Decoding(recomputed=recomputed)
    simulation = Simulation(scheduler, num_workers=2, run_ahead="off", rebalance_every=4 * two, decoding=decoding)
    it = simulation.run([work([10, 20])])
    assert scheduler.seen[0].num_tokens.tolist() == [4, 4]
    assert scheduler.seen[0].planned.tolist() == [2, 0]
    assert it.ends[0].tolist() == pytest.approx([4 * two + 6 * PASS, 4 * two + recomputed * 4 / 128 + 16 * PASS])
    assert it.moves.tolist() == [1]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (Handing("nobody"), "Handing.rebalance moves the request 'nobody', which is not under way"),
        (Handing("1/0", "1/0"), "Handing.rebalance moves the request '1/0' twice"),
        (Handing("1/0", worker=2), "Handing.rebalance moves the request '1/0' to worker 2: expected 0 to 1"),
    ],
)
def test_a_wrong_move_is_refused_by_name(scheduler, message):
    with pytest.raises(ValueError, match=message):
        Simulation(scheduler, num_workers=2, run_ahead="off", rebalance_every=4).run([work([10, 20])])


def test_migration_moves_outliers_and_helps_or_does_little_harm():
    works = small(20, prompts_per_step=32, group_size=8)
    runs = [
        Simulation(HistoPipeScheduler(migrate=migrate), num_workers=8, rebalance_every=8.0).run(works)
        for migrate in (False, True)
    ]
    assert runs[0].moves.sum() == 0
    assert runs[1].moves.sum() > 0
    assert runs[1].done[-1] < 1.05 * runs[0].done[-1]


# -- bad input -------------------------------------------------------------------------------------------------------


class Dropping(Scheduler):
    def plan(self, requests, num_workers, step):
        return [list(requests[1:]), *([] for _ in range(num_workers - 1))]


@pytest.mark.parametrize(("num_workers", "slots"), values_first([4, 16], [None, 24]))
def test_tier_2_is_no_slower_than_tier_1_with_few_workers(num_workers, slots):
    """It used to take 1.05 to 1.3 times as long: the shortest group alone asks for eight workers."""
    lengths = SyntheticLengths(prompts_per_step=4 * num_workers, group_size=8, steps_per_epoch=4)
    works, took = lengths.steps(26, 0), []
    for tier in (1, 2):
        simulation = Simulation(
            HistoPipeScheduler(tier=tier), num_workers=num_workers, decoding=Decoding(max_running=slots)
        )
        took.append(step_time(simulation.run(works), Window(first=4, last=24), 0.0))
    assert took[1] < 1.02 * took[0]


def test_a_plan_that_is_no_partition_is_refused_by_name():
    with pytest.raises(ValueError, match="Dropping.plan drops the request '0/0'"):
        Simulation(Dropping(), num_workers=2).run([work([1, 2])])


class Noting(FIFOScheduler):
    """Notes how many requests a worker decodes side by side, each time that it plans."""

    def __init__(self, max_running: int | None = None) -> None:
        self.max_running, self.noted = max_running, []

    def plan(self, requests, num_workers, step):
        self.noted.append(self.max_running)
        return super().plan(requests, num_workers, step)


@pytest.mark.parametrize(("own", "noted"), [(None, [2, 2, 5, 5, None, None]), (3, [3] * 6)])
def test_a_scheduler_plans_for_the_slots_of_the_simulation_that_asks(own, noted):
    """One object in several simulations: what another one said of its workers is over, and its own setting stays."""
    scheduler = Noting(own)
    simulations = [Simulation(scheduler, num_workers=2, decoding=Decoding(max_running=slots)) for slots in (2, 5, None)]
    for simulation in simulations:
        simulation.run([work([4, 3, 2, 1]), work([1, 2, 3, 4])])
    assert scheduler.noted == noted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"run_ahead": "keep", "max_staleness": 0},
            "max_staleness=0: run_ahead=keep trains on tokens of the policy before",
        ),
        ({"max_staleness": -1}, "max_staleness=-1: expected at least 0"),
        ({"run_ahead": "on"}, "run_ahead='on': expected one of off, draft, keep"),
        ({"pipeline": "both"}, "pipeline='both': expected one of colocated, disaggregated"),
    ],
)
def test_modes_that_do_not_go(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Simulation(FIFOScheduler(), **settings)


def test_samples_have_the_lengths_and_passes_of_the_work():
    given_work = work([4, 10])
    samples = samples_of(given_work, Decoding(tokens_per_pass=2.0, verified=3.0))
    assert [len(sample) for sample in samples] == [4, 10]
    assert [sample.completion.num_passes for sample in samples] == [2, 5]
    assert [sample.completion.num_drafted for sample in samples] == [4, 10]
