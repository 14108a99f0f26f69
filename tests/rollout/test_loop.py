"""The rollout loop: every request answered once, canonical order, seeds that never repeat, no state of its own."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings, request_seed
from rhymerl.schedulers import FIFOScheduler, PacedScheduler, PackedScheduler, Scheduler
from rhymerl.testing import ScriptedBackend, make_prompt


class Shuffled(ScriptedBackend):
    """Finishes requests in another order than they came in."""

    def collect(self, timeout_s=None, *, max_passes=None):
        return super().collect(timeout_s, max_passes=max_passes)[::-1]


def loop(*, backend=None, scheduler=None, rewards=(), **settings) -> RolloutLoop:
    backend = backend or Shuffled(lambda request: [2 + request.sample] * (1 + request.sample), batch=5)
    return RolloutLoop(
        backend,
        scheduler or FIFOScheduler(),
        scorer=RewardScorer(list(rewards)),
        decode=lambda ids: " ".join(map(str, ids)),
        **settings,
    )


def test_a_scheduler_is_told_how_many_requests_run_side_by_side():
    backend = ScriptedBackend(lambda request: [2])
    backend.max_running = 5
    assert loop(backend=backend, scheduler=PackedScheduler()).scheduler.max_running == 5
    assert loop(backend=backend, scheduler=PacedScheduler(max_running=3)).scheduler.max_running == 3, "it has its own"
    assert loop(scheduler=PackedScheduler()).scheduler.max_running is None, "nobody knows"
    scheduler = loop(backend=backend, scheduler=PackedScheduler()).scheduler
    backend.max_running = 7
    assert loop(backend=backend, scheduler=scheduler).scheduler.max_running == 7, (
        "what another run's backend said is over"
    )


PROMPTS = [make_prompt([3, number], id=str(number), answer=str(number)) for number in range(6)]
LENGTH = Reward(lambda completion: float(len(completion.split())), name="length", where="main")
LAST = Reward(lambda completion, *, answer: float(answer), name="answer", where="main", weight=10.0)


def test_samples_come_in_canonical_order_with_their_rewards():
    result = loop(rewards=[LENGTH, LAST]).run(PROMPTS, 4, RolloutSettings(group_size=3))
    indices = [(s.prompt.id, s.completion.request.sample) for s in result.samples]
    assert indices == [(str(number), sample) for number in range(6) for sample in range(3)]
    for sample in result.samples:
        number, index = int(sample.prompt.id), sample.completion.request.sample
        assert sample.rewards == {"length": 1 + index, "answer": number}
        assert sample.reward == 1 + index + 10 * number
        assert sample.text == " ".join([str(2 + index)] * (1 + index))
        assert sample.loss_mask.all()
        assert len(sample.loss_mask) == len(sample)


def test_functions_that_do_not_apply_are_left_out_of_the_sum():
    short = Reward(lambda completion: 5.0 if len(completion.split()) < 2 else None, name="short", where="main")
    long = Reward(lambda completion: 7.0 if len(completion.split()) > 2 else None, name="long", where="main", weight=10)
    result = loop(rewards=[short, long]).run(PROMPTS[:1], 0, RolloutSettings(group_size=3))
    assert [sample.rewards for sample in result.samples] == [{"short": 5.0}, {}, {"long": 7.0}]
    assert [sample.has_reward for sample in result.samples] == [True, False, True]
    assert [sample.reward for sample in result.samples if sample.has_reward] == [5.0, 70.0]
    assert (result.failures.num_failed, result.failures.num_absent) == ({}, {"short": 2, "long": 2})
    assert loop().run(PROMPTS[:1], 0, RolloutSettings()).samples[0].reward == 0.0, "nobody asks for rewards"


def test_all_answers_of_an_epoch_enter_history_also_of_a_prompt_that_was_in_the_place_of_another():
    mine = loop(rewards=[LENGTH])
    settings = RolloutSettings(group_size=2)
    for step in (0, 1):
        mine.run(PROMPTS[:2], step, settings, epoch=0)
    mine.run(PROMPTS[:2], 2, settings, epoch=1)
    answers = mine.history.answers(PROMPTS[0])
    assert [(answer.epoch, answer.sample) for answer in answers] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


class Following(ScriptedBackend):
    """Counts the tokens of the history that its drafter would draft from."""

    def __init__(self) -> None:
        super().__init__(lambda request: [2, 3])
        self.num_tokens = 0

    def follow(self, history: HistoryStore) -> None:
        self.num_tokens = history.num_tokens


def test_workers_hear_of_a_history_that_is_loaded_after_them():
    """As under fsdp2, where a checkpoint is read once the model is sharded, and the workers exist by then."""
    before = loop(backend=Following())
    before.run(PROMPTS, 0, RolloutSettings(group_size=2))
    backend, history = Following(), HistoryStore()
    resumed = loop(backend=backend, history=history)
    history.load_state_dict(before.history.state_dict())
    resumed.load_state_dict(before.state_dict())
    assert backend.num_tokens == before.history.num_tokens == 2 * 2 * len(PROMPTS)


def test_a_group_of_one_cannot_be_replaced():
    with pytest.raises(ValueError, match="^dynamic_sampling=2: the rewards of a group of one"):
        RolloutSettings(group_size=1, dynamic_sampling=2)


def test_metrics_by_hand():
    result = loop(rewards=[LENGTH]).run(PROMPTS[:2], 0, RolloutSettings(group_size=3))
    expected = {
        "reward": 2.0,
        "reward_std": np.std([1, 2, 3]),
        "frac_reward_zero_std": 0.0,
        "completions/mean_length": 2.0,
        "completions/min_length": 1.0,
        "completions/max_length": 3.0,
        "completions/clipped_ratio": 0.0,
        "completions/mean_terminated_length": 2.0,
        "rewards/length/mean": 2.0,
    }
    for name, value in expected.items():
        assert result.metrics[name] == pytest.approx(value), name


def test_seeds_never_repeat_and_never_change():
    seeds = {
        request_seed(run, step, prompt, sample, number)
        for run in range(2)
        for step in (0, 1, "evaluation")
        for prompt in PROMPTS
        for sample in range(3)
        for number in range(2)
    }
    assert len(seeds) == 2 * 3 * 6 * 3 * 2
    # A resumed run of any later version must draw the same tokens.
    assert request_seed(0, 0, make_prompt([1], id="a"), 0) == 9265599739096293162


class Broken(Scheduler):
    """Plans whatever it is told to do to the list of requests."""

    def __init__(self, change) -> None:
        self.change = change

    def plan(self, requests, num_workers, step):
        return self.change(list(requests))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: [r[1:]], "drops the request '0/0/0'"),
        (lambda r: [r + r[:1]], "doubles the request '0/0/0'"),
        (lambda r: [r, []], "2 queues for 1 workers"),
    ],
)
def test_a_plan_that_is_no_partition_is_refused_before_anything_runs(change, message):
    backend = Shuffled(lambda request: [2])
    with pytest.raises(ValueError, match=f"Broken.plan.*{message}"):
        loop(backend=backend, scheduler=Broken(change)).run(PROMPTS, 0, RolloutSettings())
    assert backend.withdraw() == []


def test_a_backend_that_loses_requests_is_an_error():
    class Forgetful(ScriptedBackend):
        def submit(self, requests):
            super().submit(requests[1:])

    with pytest.raises(BackendError, match="Forgetful lost 1 requests"):
        loop(backend=Forgetful(lambda request: [2])).run(PROMPTS, 0, RolloutSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "^group_size=0"),
        ({"max_tokens": 0}, "^max_tokens=0: expected at least 1"),
        ({"top_p": 1.5}, r"^top_p=1.5: expected in \(0, 1\]"),
        ({"temperature": -1.0}, "^temperature=-1.0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RolloutSettings(**settings)
