"""A short training run in float64, and all that it drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.types import Sample

PROMPTS = [{"prompt": f"{i}+{i}=?\n", "answer": str(2 * i)} for i in range(6)]
REWARD = "tests.integration.rewards.digits"

Trained = tuple[dict[str, torch.Tensor], list[list[Sample]]]  # weights, and the samples of every step


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length of a run, and how many of the six prompts a step takes, four answers each."""

    num_steps: int
    prompts_per_step: int
    stop_token_ids: Sequence[int] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    devices: int = 1
    learning_rate: float = 3e-3
    ckpt_path: str | None = None
    chat_template: str | None = None  # prompts are messages of the user then, and conversations are rendered anew

    @property
    def prompts(self) -> list[dict[str, Any]]:
        if self.chat_template is None:
            return list(PROMPTS)
        return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS]

    def train(self, *, callbacks: Sequence[L.Callback] = (), policy: Policy | None = None, **parts: Any) -> Trained:
        """Train with a drafter, a scheduler or the like."""
        policy = policy or tiny_policy(dtype="float64", context=64, peaked=2.0)
        if self.chat_template is not None:
            policy.tokenizer.chat_template = self.chat_template
        history: Any = "keep" if self.chat_template is None else "rerender"
        sizes: Any = {"group_size": 4, "max_tokens": 16, **self.sampling}
        module = RhymeModule(
            policy,
            rollout=RolloutSettings(stop_token_ids=self.stop_token_ids, history=history, **sizes),
            **{"rewards": REWARD, "update": UpdateSettings(learning_rate=self.learning_rate), **parts},
        )
        recorder = Recorder()
        trainer = L.Trainer(
            max_steps=self.num_steps,
            callbacks=[recorder, *callbacks],
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=self.devices,
            strategy="auto" if self.devices == 1 else "ddp",
        )
        data = PromptDataModule(self.prompts, prompts_per_step=self.prompts_per_step)
        trainer.fit(module, data, ckpt_path=self.ckpt_path)
        return {name: weight.detach().clone() for name, weight in module.state_dict().items()}, recorder.steps


class Recorder(L.Callback):
    """The samples of every step."""

    def __init__(self) -> None:
        self.steps: list[list[Sample]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: RhymeModule, *rest: Any) -> None:  # type: ignore[override]
        assert pl_module.last_rollout is not None
        self.steps.append(pl_module.last_rollout.samples)


def kept_of(sample: Sample) -> list[list[int]]:
    """What truncation has left at each token, in canonical order; nothing where there is none."""
    return [sorted(each.tolist()) for each in sample.completion.output.kept_sets]


def assert_same_training(found: Trained, expected: Trained) -> None:
    """The same tokens, masks, kept sets, rewards and ends; log-probs and weights within 1e-9."""
    for step, others in zip(found[1], expected[1], strict=True):
        for one, other in zip(step, others, strict=True):
            assert one.completion.token_ids.tolist() == other.completion.token_ids.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
            assert kept_of(one) == kept_of(other)
            assert one.reward == other.reward
            assert one.completion.finish_reason == other.completion.finish_reason
            np.testing.assert_allclose(one.completion.logprobs, other.completion.logprobs, atol=1e-9)
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=0, atol=1e-9)
