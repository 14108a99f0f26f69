"""Workers apart from the ranks, in lockstep: their passes follow neither the clock nor evaluations."""

from __future__ import annotations

import pytest
import torch

from benchmarks.emulation.threads import ThreadBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings
from rhymerl.schedulers import FIFOScheduler
from rhymerl.testing import make_prompt, tiny_policy
from tests.products import values_first
from tests.rollout.ranked import REWARD, SETTINGS, Restless, length, prompts, run_step
from tests.workers.fleet import fleet
from tests.workers.late import LateBackend, NotingBackend, Pass

SCHEDULERS = [FIFOScheduler, Restless]


def passes_of(scheduler, run_ahead, *, seed=0, late_s=0.0, evaluates=False) -> list[list[Pass]]:
    """The passes of each of three workers in five steps; an evaluation may come before each but the first."""
    engines: list[NotingBackend] = []

    def make(number: int) -> NotingBackend:
        engines.append(NotingBackend(length))
        return engines[-1]

    backend = LateBackend(make, seed=seed, late_s=late_s)
    with fleet(scheduler, backend=backend, run_ahead=run_ahead, lockstep=True) as (loop, _):
        for step in range(5):
            if evaluates and step:
                loop.sync_weights([], step)
                loop.run(prompts(0), f"validation {step}", SETTINGS, split="validation")
            run_step(loop, step)
    return [engine.passes for engine in engines]


@pytest.mark.parametrize(("scheduler", "run_ahead"), values_first(SCHEDULERS, ["draft", "keep"]))
def test_passes_are_the_same_however_late_messages_are(scheduler, run_ahead):
    """Also where a worker begins an exchange only after another one has told of it, and requests move between them."""
    punctual = passes_of(scheduler, run_ahead)
    for seed in range(8):
        assert passes_of(scheduler, run_ahead, seed=seed, late_s=0.005) == punctual


@pytest.mark.parametrize(("scheduler", "run_ahead"), values_first(SCHEDULERS, ["off", "draft", "keep"]))
def test_an_evaluation_leaves_the_passes_of_training_as_they_are(scheduler, run_ahead):
    evaluated = passes_of(scheduler, run_ahead, evaluates=True)
    for passes in evaluated:
        kinds = [{name.startswith("validation") for name, _ in running} for _, running in passes]
        assert {True} in kinds
        assert {True, False} not in kinds
    of_training = [[each for each in passes if not each[1][0][0].startswith("validation")] for passes in evaluated]
    assert of_training == passes_of(scheduler, run_ahead)


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_an_evaluation_leaves_the_log_probs_of_training_as_they_are(run_ahead):
    """To the last bit, which follows the shape of a pass."""
    assert logprobs(run_ahead, evaluates=True) == logprobs(run_ahead, evaluates=False)


def logprobs(run_ahead: str, *, evaluates: bool) -> list[list[float]]:
    """The log-probs of two embedded engines' answers in three steps, with another policy in each."""
    policy = tiny_policy("starcoder2", context=64, peaked=2.0)
    parameters = list(policy.model.parameters())
    starts = [parameter.detach().clone() for parameter in parameters]
    asked = [make_prompt([3, 4 + number, 7], id=str(number)) for number in range(8)]
    others = [make_prompt([6, 4 + number, 8, 9], id=f"of validation {number}") for number in range(4)]
    settings = RolloutSettings(group_size=4, max_tokens=32, stop_token_ids=(3, 5))
    found = []
    with ThreadBackend(lambda number: EmbeddedBackend()) as backend, RewardScorer([REWARD]) as scorer:
        backend.start(policy, NoDrafter())
        parts = {"scorer": scorer, "decode": lambda ids: " ".join(map(str, ids)), "num_workers": 2}
        loop = RolloutLoop(backend, FIFOScheduler(), run_ahead=run_ahead, lockstep=True, **parts)
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter, start in zip(parameters, starts, strict=True):
                    parameter.copy_(start + 0.02 * step * torch.randn(start.shape, generator=draw))
            loop.sync_weights(policy.named_weights(), step)
            if evaluates:
                loop.run(others, f"validation {step}", settings, split="validation")
            half, next_half = asked[step % 2 :: 2], asked[(step + 1) % 2 :: 2]
            rollout = loop.run(half, step, settings, epoch=step // 2, following=next_half)
            found += [sample.completion.output.logprobs.tolist() for sample in rollout.samples]
        loop.close()
    return found
