"""Episodes of several turns under training: drafter and scheduler change nothing of them."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

from benchmarks.emulation.threads import ThreadBackend
from rhymerl import Reward
from rhymerl.algos import PPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import FixedBudget
from rhymerl.callbacks import EarlyWarnings
from rhymerl.drafters import HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.errors import EpisodeError
from rhymerl.schedulers import HistoPipeScheduler, SortedScheduler
from rhymerl.testing import RandomTreeDrafter
from rhymerl.types import Sample, TurnEnd
from tests.environments.worlds import Counts, Raises, Shows
from tests.integration.conftest import rows
from tests.integration.training import REWARD, Run, Trained, assert_same_training

STOPS = (2, 3)
SHORT = Run(num_steps=4, prompts_per_step=3, stop_token_ids=STOPS)
BRIEF = Run(num_steps=2, prompts_per_step=3, stop_token_ids=STOPS)


class Asked(Counts):
    """Does not say that it is a pure function, so that nothing is remembered."""

    is_pure = False


@pytest.fixture(scope="module")
def plain() -> Trained:
    return SHORT.train(environment=Counts(), drafter=NoDrafter())


def test_replies_are_in_answers_and_not_trained(plain):
    samples = [sample for step in plain[1] for sample in step]
    assert {sample.completion.finish_reason for sample in samples} >= {"stop", "length"}
    assert max(len(sample.completion.output.turns) for sample in samples) == 3
    for sample in samples:
        output = sample.completion.output
        assert sample.loss_mask.tolist() == output.sampled.tolist()
        assert output.num_sampled <= 16
        for turn in output.turns:
            is_last = turn is output.turns[-1]
            assert output.token_ids[turn.start - 1] in (1, *STOPS) or (is_last and output.finish_reason == "length")
            assert (output.logprobs[turn.start : turn.stop] == 0).all()


@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": HistoryTreeDrafter()},
        {"drafter": NGramDrafter()},
        {"drafter": RandomTreeDrafter(vocabulary=16), "budget": FixedBudget(8)},
        {"drafter": HistoryTreeDrafter(), "scheduler": HistoPipeScheduler(), "budget": FixedBudget(8)},
        {"drafter": NoDrafter(), "scheduler": SortedScheduler()},
        {"drafter": NoDrafter(), "environment": Asked()},
        {"drafter": HistoryTreeDrafter(), "backend": ThreadBackend(lambda number: EmbeddedBackend()), "workers": 1},
        {
            "drafter": HistoryTreeDrafter(),
            "backend": ThreadBackend(lambda number: EmbeddedBackend()),
            "workers": 2,
            "run_ahead": "draft",
        },
    ],
    ids=lambda parts: "-".join(
        str(part) if isinstance(part, str | int) else type(part).__name__ for part in parts.values()
    ),
)
def test_drafters_and_schedulers_change_no_token_and_no_weight(plain, parts):
    trained = SHORT.train(**{"environment": Counts(), **parts})
    is_asked = isinstance(parts.get("environment"), Asked)
    assert is_asked != any(turn.saved_s is not None for turn in turns_of(trained[1])), "equal transcripts share a call"
    assert_same_training(trained, plain)


class SeenPPO(PPO):
    """Keeps the batch of each step."""

    def __post_init__(self):
        super().__post_init__()
        self.seen = []

    def prepare(self, batch):
        self.seen.append(super().prepare(batch))
        return self.seen[-1]


@pytest.mark.parametrize(
    ("rewards", "names", "weight"),
    [
        (None, {"turn_rewards"}, 1.0),
        ({"own": REWARD, "turns": Reward("rhymerl.rewards.turn_rewards", weight=2.0)}, {"own", "turns"}, 2.0),
    ],
)
def test_ppo_gets_what_turns_earn_where_they_end(rewards, names, weight):
    algo = SeenPPO(gamma=0.9)
    _, steps = BRIEF.train(environment=Counts(), drafter=NoDrafter(), algo=algo, rewards=rewards)
    assert max(len(sample.completion.output.turns) for step in steps for sample in step) == 3
    for samples, batch in zip(steps, algo.seen, strict=True):
        for i, sample in enumerate(samples):
            turns = sample.completion.output.turns
            assert set(sample.rewards) == names
            assert sample.reward == pytest.approx(
                weight * sum(turn.reward or 0.0 for turn in turns) + sample.rewards.get("own", 0.0)
            )
            earned = {turn.start - 1: weight * (turn.reward or 0.0) for turn in turns}
            assert batch.turn_rewards[i].tolist() == [earned.get(t, 0.0) for t in range(batch.turn_rewards.shape[1])]
            assert all(batch.mask[i, t] for t in earned)


def test_a_run_whose_environment_gives_no_reward_says_so(caplog):
    BRIEF.train(environment=Shows(), drafter=NoDrafter(), rewards=None, callbacks=[EarlyWarnings()])
    assert "step 1: the environment gave no reward in any of the 12 episodes, so nothing is learned" in caplog.text


def test_evaluations_have_episodes(rhymerl, model_dir, tmp_path):
    size = ["task.difficulty=3", "task.validation_size=4", "rollout.max_tokens=16", "evaluation.samples=4"]
    episodes = [
        "environment=tests.environments.worlds.Counts",
        "rollout.stop_token_ids=[2,3]",
        "rewards=rhymerl.rewards.turn_rewards",
    ]
    done = rhymerl(
        "evaluate", "--config=quickstart", f"model.path={model_dir}", f"run_dir={tmp_path}", *size, *episodes
    )
    assert done.code == 0, done.err
    answers = rows(tmp_path / "evaluations" / "step=0.jsonl")
    assert len(answers) == 16
    told = [answer for answer in answers if "turns" in answer]
    assert len(told) > 4
    for answer in told:
        assert answer["reward"] == sum(turn["reward"] or 0.0 for turn in answer["turns"])


def turns_of(steps: list[list[Sample]]) -> list[TurnEnd]:
    return [turn for step in steps for sample in step for turn in sample.completion.output.turns]


def test_an_environment_that_always_fails_ends_the_run(caplog):
    with pytest.raises(EpisodeError, match="step 0: the environment failed in all 12 episodes"):
        Run(num_steps=1, prompts_per_step=3, stop_token_ids=tuple(range(1, 17))).train(environment=Raises())
    assert "KeyError: 'nobody' (worlds.py:" in caplog.text


def test_a_run_that_is_resumed_in_the_middle_of_episodes_ends_with_the_same_weights(plain, tmp_path):
    """Requests of the step to come are under way when it stops: some of them wait for their environment."""
    parts = {"environment": Counts(), "drafter": NoDrafter(), "workers": 2, "run_ahead": "draft"}
    saver = Saver(tmp_path / "half.ckpt", after=2)
    weights, _ = SHORT.train(backend=ThreadBackend(lambda number: EmbeddedBackend()), callbacks=[saver], **parts)
    resumed = Run(num_steps=4, prompts_per_step=3, stop_token_ids=STOPS, ckpt_path=str(saver.path))
    again, _ = resumed.train(backend=ThreadBackend(lambda number: EmbeddedBackend()), **parts)
    for name, weight in plain[0].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)
        torch.testing.assert_close(again[name], weight, rtol=0, atol=1e-9)


class Saver(L.Callback):
    """Saves a checkpoint after so many steps."""

    def __init__(self, path: Path, *, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer, pl_module, *rest):
        if pl_module.num_rollouts == self.after:
            trainer.save_checkpoint(self.path, weights_only=False)
