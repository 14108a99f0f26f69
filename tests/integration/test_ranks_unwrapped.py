"""Ranks without DDP's wrapper: the same weights as with it, from the same equal start, and none of its buckets."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from rhymerl.drafters import NoDrafter
from rhymerl.schedulers import FIFOScheduler
from rhymerl.training.trainer import equal_weights
from tests.integration.ranked import run_ranks
from tests.integration.training import Run

STEPS = Run(num_steps=4, prompts_per_step=3, devices=2)


class InLockstep(L.Callback):
    """So that a run repeats bit for bit."""

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        torch.use_deterministic_algorithms(True)

    def teardown(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        torch.use_deterministic_algorithms(False)


class Wrapped(InLockstep):
    """Lightning's own wrapper, within `no_sync`: that is what it sets."""

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        del vars(trainer.strategy)["configure_ddp"]

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        wrapped = trainer.strategy.model
        assert isinstance(wrapped, DistributedDataParallel)
        sizes = wrapped._get_ddp_logging_data()["bucket_sizes"].split(",")
        assert sum(map(int, sizes)) == sum(each.nbytes for each in pl_module.parameters())
        wrapped.require_backward_grad_sync = False


class Unwrapped(InLockstep):
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """A bucket is the reducer's, and that is the wrapper's."""
        assert isinstance(trainer.strategy, DDPStrategy)
        assert trainer.strategy.model is pl_module
        gc.collect()
        assert not any(type(each) is DistributedDataParallel for each in gc.get_objects())


class OwnWeights(InLockstep):
    """Lets rank 1 come with other weights than rank 0."""

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(trainer.global_rank)


CALLBACKS = {"unwrapped": Unwrapped, "own": OwnWeights, "wrapped": Wrapped}


def train_all(folder: str) -> None:
    rank = os.environ["LOCAL_RANK"]
    for name, callback in CALLBACKS.items():
        torch.save(
            STEPS.train(callbacks=[callback()], drafter=NoDrafter(), scheduler=FIFOScheduler())[0],
            f"{folder}/{name}.{rank}",
        )
    other = torch.nn.Linear(100, 200 + int(rank))
    with pytest.raises(RuntimeError, match="sizes" if rank == "1" else ""):  # rank 0 sees that the other has left
        equal_weights(other)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unwrapped")
    run_ranks(2, train_all, str(folder), output=folder / "output")
    return folder


@pytest.mark.parametrize("name", ["unwrapped", "own"])
def test_weights_are_those_of_ddp_to_the_last_bit(name, trained):
    """Also where rank 1 comes with other weights: it gets those of rank 0."""
    expected = torch.load(trained / "wrapped.0")
    for rank in range(2):
        found = torch.load(trained / f"{name}.{rank}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
