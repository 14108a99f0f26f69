"""Two ranks train as one process does, whatever scheduler and run-ahead; and no rank outlives another."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rhymerl import RhymeModule
from rhymerl.rollout import RolloutSettings
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    PacedScheduler,
    PackedScheduler,
    Scheduler,
    SortedScheduler,
)
from rhymerl.testing import tiny_policy
from rhymerl.types import Sample
from tests.integration.ranked import run_ranks, said, start_ranks
from tests.integration.training import Run, Trained
from tests.products import values_first
from tests.rollout.ranked import Restless

STEPS = 10
ONE = Run(num_steps=STEPS, prompts_per_step=3, stop_token_ids=(3, 5))  # two steps are an epoch
TWO = Run(num_steps=STEPS, prompts_per_step=3, stop_token_ids=(3, 5), devices=2)
SCHEDULERS: dict[str, type[Scheduler]] = {
    each.__name__: each
    for each in (FIFOScheduler, SortedScheduler, PackedScheduler, HistoPipeScheduler, PacedScheduler, Restless)
}
# Each scheduler without run-ahead; with it those that move requests, or plan for workers that do not wait.
CASES = [*((name, "off") for name in SCHEDULERS), ("HistoPipeScheduler", "draft"), ("Restless", "draft")]


class Weights(L.Callback):
    """The policies that drew the answers of each step, and what its metrics were."""

    def __init__(self) -> None:
        self.before: list[dict[str, torch.Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        self.before.append({name: weight.detach().clone() for name, weight in pl_module.state_dict().items()})

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train_all(folder: str) -> None:
    """The samples and weights of each case to a file."""
    rank = os.environ["LOCAL_RANK"]
    for name, mode in CASES:
        torch.save(TWO.train(scheduler=SCHEDULERS[name](), run_ahead=mode), f"{folder}/{name}.{mode}.{rank}")
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a fit that is over has kept the signal"
    assert not any(type(each) is RhymeModule for each in gc.get_objects()), "and with it its module"
    weights = Weights()
    kept = TWO.train(scheduler=Restless(), run_ahead="keep", callbacks=[weights])
    torch.save((kept, weights.before, weights.metrics), f"{folder}/kept.{rank}")
    still = Run(num_steps=STEPS, prompts_per_step=3, stop_token_ids=(3, 5), devices=2, learning_rate=0.0)
    torch.save(still.train(scheduler=Restless(), run_ahead="keep"), f"{folder}/still.{rank}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, train_all, str(folder), output=folder / "output")
    return folder


@pytest.fixture(scope="module")
def alone() -> Trained:
    torch.set_num_threads(1)
    return ONE.train(scheduler=FIFOScheduler())


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def answers(samples: list[Sample]) -> list[tuple[str, list[int]]]:
    return [(sample.completion.request.id, sample.completion.token_ids.tolist()) for sample in samples]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_ten_steps_on_two_ranks_are_those_of_one_process(name, mode, trained, alone):
    weights, steps = alone
    assert len({len(sample) for samples in steps for sample in samples}) > 3
    for rank in range(2):
        other_weights, other_steps = load(trained / f"{name}.{mode}.{rank}")
        assert list(map(answers, other_steps)) == list(map(answers, steps))
        for key, weight in weights.items():
            torch.testing.assert_close(other_weights[key], weight, rtol=0, atol=1e-9)


def test_both_ranks_have_the_same_weights_to_the_last_bit(trained):
    for name in (*(f"{name}.{mode}" for name, mode in CASES), "still"):
        (one, _), (two, _) = (load(trained / f"{name}.{rank}") for rank in range(2))
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_kept_log_probs_are_those_of_the_policy_that_drew_the_token(trained):
    """And their difference from those that the update sees is the part of the weights' age."""
    (_, steps), weights, metrics = load(trained / "kept.0")
    model = tiny_policy(dtype="float64", context=64, peaked=2.0).model
    ages: list[int] = []
    for step, samples in enumerate(steps):
        gaps: list[float] = []
        assert len(samples) == len({sample.completion.request.id for sample in samples}) == 12
        logits = {}
        for sample in samples:
            generated = sample.completion.output
            ids = torch.tensor([*sample.prompt.token_ids.tolist(), *generated.token_ids.tolist()])[None]
            logits = {}
            for version in {step, *generated.policy_versions.tolist()}:
                model.load_state_dict({k.removeprefix("model."): w for k, w in weights[version].items()})
                with torch.no_grad():
                    logits[version] = model(ids).logits[0].log_softmax(-1)
            first = len(sample.prompt.token_ids)
            for index, (token, version) in enumerate(zip(generated.token_ids, generated.policy_versions, strict=True)):
                expected = logits[int(version)][first + index - 1, int(token)]
                assert abs(float(expected) - generated.logprobs[index]) < 1e-6
                ages.append(step - int(version))
                gaps.append(abs(float(logits[step][first + index - 1, int(token)]) - generated.logprobs[index]))
        of_age, precision, mean = (
            metrics[step][f"sampling/sampling_logp_difference/{n}"] for n in ("age", "precision", "mean")
        )
        stale = ages[-len(gaps) :]
        expected = sum(gap for gap, age in zip(gaps, stale, strict=True) if age) / len(gaps)
        assert of_age == pytest.approx(expected, abs=1e-6)
        assert (of_age > 1e-4) == any(stale)
        assert precision < 1e-6
        assert of_age + precision == pytest.approx(mean, rel=1e-6)
    assert set(ages) == {0, 1}


def test_kept_tokens_at_learning_rate_0_are_those_of_one_process(trained):
    still = Run(num_steps=STEPS, prompts_per_step=3, stop_token_ids=(3, 5), learning_rate=0.0)
    torch.set_num_threads(1)
    _, steps = still.train(scheduler=FIFOScheduler())
    _, other_steps = load(trained / "still.0")
    assert list(map(answers, other_steps)) == list(map(answers, steps))


class Die(L.Callback):
    """Ends its rank in step 2: between steps, or in the middle of a rollout."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank != self.rank or pl_module.num_rollouts != 2:
            return
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "told to end":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.how == "raises":
            raise ValueError("this rank has had enough")
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # SIGALRM, which kills, in the middle of what follows


def train_until_death(rank: int, how: str, run_ahead: str) -> None:
    run = Run(num_steps=500, prompts_per_step=3, devices=2)
    run.train(scheduler=Restless(), run_ahead=run_ahead, callbacks=[Die(rank, how)])


@pytest.mark.parametrize(
    ("rank", "how", "run_ahead"),
    values_first([0, 1], ["killed", "raises", "killed soon", "told to end"], ["off", "keep"]),
)
def test_when_a_rank_ends_the_other_ends_with_its_error(rank, how, run_ahead, tmp_path):
    processes = start_ranks(2, train_until_death, rank, how, run_ahead, output=tmp_path / "output")
    processes[rank].join(600)
    assert processes[rank].exitcode not in (None, 0)
    other = processes[1 - rank]
    other.join(600)
    other.kill()
    assert other.exitcode == 1, said(tmp_path / "output", 1 - rank)
    words = said(tmp_path / "output", 1 - rank)
    assert f"rank {rank} " in words
    assert ("this rank has had enough" in words) == (how == "raises")
    assert ("it was told to end (SIGTERM)" in words) == (how == "told to end")


def split_by_rank() -> None:
    """A loader that gives each rank its own part of a step."""

    from rhymerl import PromptDataModule, RhymeModule
    from rhymerl.data import PromptBatch
    from tests.integration.training import PROMPTS, REWARD

    class SplitData(PromptDataModule):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            whole = loader.batch
            rank = int(os.environ["LOCAL_RANK"])
            loader.batch = lambda step: PromptBatch(whole(step).prompts[rank::2])  # type: ignore[method-assign]
            return loader

    module = RhymeModule(
        tiny_policy(dtype="float64", context=64),
        rollout=RolloutSettings(group_size=4, max_tokens=16),
        rewards=REWARD,
    )
    trainer = L.Trainer(
        max_steps=2,
        devices=2,
        accelerator="cpu",
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, SplitData(PROMPTS, prompts_per_step=4))


def test_prompts_that_are_split_by_rank_are_refused(tmp_path):
    processes = start_ranks(2, split_by_rank, output=tmp_path / "output")
    for process in processes:
        process.join(600)
        process.kill()
    assert all("rank 1 has other prompts than rank 0" in said(tmp_path / "output", rank) for rank in range(2))
