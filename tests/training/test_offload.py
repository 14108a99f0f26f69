"""Moments in the host's memory."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from rhymerl.testing import tiny_policy
from rhymerl.training import offload as module
from rhymerl.training.offload import offload
from rhymerl.training.settings import UpdateSettings
from tests.integration.training import Run

STEPS = 3


def trained(*, offloads: bool, device: str = "cpu", steps: int = STEPS) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model after some steps, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32).to(device)
    optimizer = UpdateSettings(learning_rate=1e-2).optimizer(list(model.parameters()))
    if offloads:
        offload(optimizer)
    for step in range(steps):
        take_step(model, optimizer, step)
    return model, optimizer


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        numbers = torch.arange(parameter.numel(), dtype=torch.float64, device=parameter.device)
        parameter.grad = (numbers + step).sin().to(parameter.dtype).view(parameter.shape)
    optimizer.step()


def places(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the devices of all moments."""
    found = [
        value
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if value.shape == parameter.shape
    ]
    assert len(found) == 2 * 2
    return {each.device.type for each in found}


def test_moments_leave_after_a_step_and_come_back_before_the_next(monkeypatch):
    """On a host from which nothing comes back."""
    monkeypatch.setattr(module, "HOST", torch.device("meta"))
    model, optimizer = trained(offloads=True, steps=1)
    assert places(optimizer) == {"meta"}
    with pytest.raises(NotImplementedError, match="meta"):
        take_step(model, optimizer, 1)


def test_those_of_a_checkpoint_leave_at_once(monkeypatch):
    _, optimizer = trained(offloads=False)
    monkeypatch.setattr(module, "HOST", torch.device("meta"))
    offload(optimizer)
    assert places(optimizer) == {"meta"}


def test_the_number_of_steps_stays(monkeypatch):
    monkeypatch.setattr(module, "HOST", torch.device("meta"))
    _, optimizer = trained(offloads=True, steps=1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_a_run_that_asks_for_it(monkeypatch):
    moves: list[int] = []
    move = module._move

    def noted(place, optimizer, *rest):
        moves.append(len(optimizer.state))
        move(place, optimizer, *rest)

    monkeypatch.setattr(module, "_move", noted)
    run = Run(num_steps=2, prompts_per_step=2)
    weights, _ = run.train(update=UpdateSettings(learning_rate=run.learning_rate, offload_optimizer=True))
    parameters = len(list(tiny_policy().model.parameters()))
    assert moves == [0, 0, parameters, parameters, parameters]
    kept, _ = run.train()
    assert len(moves) == 5
    torch.testing.assert_close(weights, kept, rtol=0, atol=1e-9)  # drafts of two runs differ, and so does rounding


@pytest.mark.gpu
def test_steps_are_the_same_to_the_last_bit_and_the_gpu_is_free_between_them():
    kept, _ = trained(offloads=False, device="cuda")
    before = torch.cuda.memory_allocated()
    model, optimizer = trained(offloads=True, device="cuda")
    assert places(optimizer) == {"cpu"}
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before < 2.5 * sizes, "weights and gradients, and no moments"
    assert all(map(torch.equal, kept.parameters(), model.parameters()))
    again, resumed = trained(offloads=True, device="cuda", steps=0)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))  # it would share the number of steps
    take_step(again, resumed, STEPS)
    take_step(model, optimizer, STEPS)
    pairs: list[tuple[Tensor, Tensor]] = list(zip(again.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
