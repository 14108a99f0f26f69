"""The tournament of schedulers: rules of other systems do what they say, and no figure is better than it can be."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scheduling import tournament
from rhymerl.schedulers import Progress, Scheduler
from rhymerl.simulation import SyntheticLengths
from rhymerl.simulation.base import StepWork

PEERS = sorted(path for path in (Path(tournament.__file__).parent / "peers").glob("*.py") if path.name != "__init__.py")


def small(**more: Any) -> Any:
    source = partial(SyntheticLengths, mean=300.0, cap=1000, steps_per_epoch=2)
    sizes: dict[str, Any] = {"num_workers": 4, "prompts": 8, "group_size": 4, "warm_up": 2}
    return tournament.Workload(source=source, **(sizes | more))


def works_of(rows: list[list[int]], prompts_per_step: int) -> list[StepWork]:
    """Steps of given lengths: a row a prompt, a number an answer."""
    source = SyntheticLengths(prompts_per_step=prompts_per_step, group_size=len(rows[0]), cap=100, steps_per_epoch=100)
    steps = len(rows) // prompts_per_step
    lengths = np.array(rows).reshape(steps, -1)
    return [
        StepWork(requests=work.requests, lengths=each, is_cut=np.zeros(len(each), np.bool_))
        for work, each in zip(source.steps(steps, 0), lengths, strict=True)
    ]


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.name)
def test_a_rule_of_another_system_is_short_and_says_where_it_is_from(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    assert path.name == "base.py" or "arXiv" in text or "doi" in text


@pytest.mark.parametrize("max_running", [None, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_rule_keeps_what_it_says(max_running: int | None, seed: int) -> None:
    workload = small(max_running=max_running)
    found = tournament.figures_of_all(workload, workload.steps(12, seed))
    assert set(found) == set(tournament.ROWS)
    for (name, steps), figures in found.items():
        assert figures.tokens_per_time <= figures.bound, name
        assert -1e-9 < figures.idle < 1, name
        assert (figures.stale > 0) == (figures.oldest > 0), name
        if steps == tournament.ON_POLICY:
            assert figures.stale == 0, name
        if steps == tournament.ONE_OFF:
            assert figures.oldest == 1, name


def progress_of(workers: list[int], tokens: list[int], num_workers: int) -> Progress:
    requests = works_of([[1]] * len(workers), len(workers))[0].requests
    planned = np.bincount(workers, minlength=num_workers)
    return Progress(step=0, planned=planned, requests=requests, workers=np.array(workers), num_tokens=np.array(tokens))


def moves_of(scheduler: Scheduler, progress: Progress) -> dict[int, int]:
    """Where the i-th request goes."""
    number = {request.id: i for i, request in enumerate(progress.requests)}
    return {number[move.request_id]: move.worker for move in scheduler.rebalance(progress)}


def test_laminar_packs_workers_that_ramp_down_onto_the_fullest_that_fits() -> None:
    scheduler = tournament.LaminarScheduler(max_requests=3)
    workers = [0, 1, 1, 2, 2, 3]
    assert moves_of(scheduler, progress_of([0, 0, 1, 1, 1, 2, 2, 2, 3], [9] * 9, 4)) == {}, "nothing ramps down yet"
    # Tokens fall on workers 0 to 2 and rise on worker 3. Worker 0 fits both others, of which worker 2 has more.
    assert moves_of(scheduler, progress_of(workers, [5, 6, 6, 8, 8, 12], 4)) == {0: 2}


def test_seer_asks_a_group_first_what_is_unknown_and_then_goes_by_the_longest() -> None:
    requests = works_of([[1, 1, 1]] * 3, 3)[0].requests
    scheduler = tournament.SeerScheduler()
    plan = scheduler.plan(requests, 2, 0)
    firsts = [request.id for queue in plan for request in queue if request.sample == 0]
    assert [queue[0].sample for queue in plan] == [0, 0]
    assert len(firsts) == 3
    # The first two have ended, with 40 and 60 tokens; then their siblings wait behind the third one's.
    left = [request for queue in plan for request in queue]
    at = [worker for worker, queue in enumerate(plan) for _ in queue]

    def look(gone: set[str], tokens: dict[str, int]) -> dict[str, int]:
        pairs = [(request, worker) for request, worker in zip(left, at, strict=True) if request.id not in gone]
        progress = Progress(
            step=0,
            planned=np.array([len(queue) for queue in plan]),
            requests=[request for request, _ in pairs],
            workers=np.array([worker for _, worker in pairs]),
            num_tokens=np.array([tokens.get(request.id, 0) for request, _ in pairs]),
        )
        return {move.request_id: number for number, move in enumerate(scheduler.rebalance(progress))}

    zero, one, two = (requests[3 * prompt].id for prompt in range(3))
    look(set(), {zero: 40, one: 60, two: 1})
    order = look({zero, one}, {two: 2})
    mean = {prompt: np.mean([order[requests[3 * prompt + sample].id] for sample in (1, 2)]) for prompt in range(3)}
    assert mean[2] < mean[1] < mean[0]
