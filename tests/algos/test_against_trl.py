"""TRL's own code on the same random tensors: losses, and advantages of a whole scoring step. float64, CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rhymerl.algos import GRPO, Batch
from rhymerl.testing import tiny_policy
from tests.algos.batches import make_batch, output_of, totals_of

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's, and those of what it brings
pytest.importorskip("trl", minversion="1.16", reason="compares with TRL 1.16, which is not installed")

EXACT = {"rtol": 1e-6, "atol": 1e-9}


class OneProcess:
    """The part of accelerate that a loss asks for."""

    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def trainer(logprobs: Tensor, entropy: Tensor, **settings: Any) -> SimpleNamespace:
    """Return as much of a GRPOTrainer as its loss reads; the model's part is given."""
    given = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "use_vllm": False,
        "max_completion_length": 7,
        **settings,
    }
    arguments = SimpleNamespace(
        delta=given.pop("delta", None),
        use_bias_correction_kl=given.pop("use_bias_correction_kl", True),
        steps_per_generation=1,
    )
    return SimpleNamespace(
        **given,
        args=arguments,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=given["entropy_coef"] > 0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )


def their_loss(
    batch: Batch, logprobs: Tensor, weight: Tensor | None, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """The loss and what it logs."""
    from trl import GRPOTrainer

    fake = trainer(logprobs, output_of(logprobs).entropy, use_vllm=weight is not None, **settings)
    blank = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": blank[:, :1],
        "prompt_mask": blank[:, :1] + 1,
        "completion_ids": blank,
        "completion_mask": batch.mask.double(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.proximal_logprobs,
        "ref_per_token_logps": batch.reference_logprobs,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": weight,
    }
    loss = GRPOTrainer._compute_loss(fake, None, inputs)
    return loss, {name: values[-1] for name, values in fake._metrics["train"].items()}


GSPO = {"ratio_level": "sequence", "loss_mean": "sequence"}
THEIR_GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
PAIRS = {
    "dapo": ({}, {}),
    "grpo": ({"loss_mean": "sequence"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"loss_mean": "constant"}, {"loss_type": "dr_grpo"}),
    "clip_higher": ({"clip_high": 0.28}, {"epsilon_high": 0.28}),
    "dual_clip": ({"dual_clip": 1.4}, {"delta": 1.4}),
    "gspo": ({**GSPO, "clip_low": 0.01, "clip_high": 0.02}, {**THEIR_GSPO, "epsilon_low": 0.01, "epsilon_high": 0.02}),
    "cispo": (
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "kl": ({"kl_coef": 0.3}, {"beta": 0.3}),
    "kl_biased": ({"kl_coef": 0.3, "kl_unbiased": False}, {"beta": 0.3, "use_bias_correction_kl": False}),
    "kl_by_answer": ({"kl_coef": 0.3, "loss_mean": "sequence"}, {"beta": 0.3, "loss_type": "grpo"}),
    "entropy": ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
    "entropy_constant": (
        {"entropy_coef": 0.1, "loss_mean": "constant"},
        {"entropy_coef": 0.1, "loss_type": "dr_grpo"},
    ),
}
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())


def assert_same(
    ours: dict[str, Any],
    theirs: dict[str, Any],
    batch: Batch,
    logprobs: Tensor,
    weight: Tensor | None = None,
    *,
    gradients: bool = True,
) -> None:
    """Loss, gradient and shared metrics."""
    batch = replace(batch, limits=torch.full((len(batch),), 7))
    algorithm = GRPO(**ours)
    batch = algorithm.prepare(batch)
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = algorithm.loss(batch, output_of(logprobs), totals_of(batch))
    expected, logged = their_loss(batch, logprobs, weight, **theirs)
    torch.testing.assert_close(loss, expected, **EXACT)
    if gradients:
        (gradient,), (their_gradient,) = (torch.autograd.grad(it, logprobs) for it in (loss, expected))
        torch.testing.assert_close(gradient, their_gradient, **EXACT)
    assert logged["entropy"] == pytest.approx(float(metrics["entropy"]))
    if "clip_ratio/low_mean" in logged and not theirs.get("importance_sampling_level"):
        for name in ("low", "high"):
            assert logged[f"clip_ratio/{name}_mean"] == pytest.approx(float(metrics[f"clip_ratio/{name}_mean"]))
    if "kl" in logged and not theirs.get("use_bias_correction_kl", True):
        assert logged["kl"] == pytest.approx(float(metrics["kl"]))


@each_pair
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient(seed, ours, theirs):
    assert_same({**ours, "correction": "none"}, theirs, *make_batch(seed))


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "cispo", "kl_biased"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_loss_with_a_corrected_behaviour_policy(floor, kind, level, name):
    """The weight follows TRL's formula.

    Where tokens of an answer have different weights, the ratio of the answer has another gradient than its token form,
    which is ours; in GSPO there are no such weights.
    """
    batch, logprobs = make_batch()
    ours, theirs = PAIRS[name]
    correction = {"correction": kind, "correction_level": level, "correction_floor": floor, "correction_cap": 1.5}
    difference = (batch.proximal_logprobs - batch.behaviour_logprobs) * batch.mask
    weight = (difference.sum(-1, keepdim=True) if level == "sequence" else difference).exp()
    outside = (weight > 1.5) | (weight < (floor or 0))
    weight = weight.masked_fill(outside, 0) if kind == "masked" else weight.clamp(floor, 1.5)
    assert outside.any()
    assert_same({**ours, **correction}, theirs, batch, logprobs, weight, gradients=(name, level) != ("gspo", "token"))


# -- advantages ------------------------------------------------------------------------------------------------------


class Scored:
    """One scoring step of a real trainer: what it drew, and the tensors that its advantages were made of."""

    def __init__(self, kind: str, folder: Path, **settings: Any) -> None:
        import trl
        from datasets import Dataset

        policy = tiny_policy(dtype="float32")
        policy.model.save_pretrained(folder)
        policy.tokenizer.padding_side = "left"
        arguments = getattr(trl, f"{kind}Config")(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            **settings,
        )
        trainer = getattr(trl, f"{kind}Trainer")(
            model=type(policy.model).from_pretrained(folder, dtype=torch.float32),
            reward_funcs=self._reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1+2"}] * 8),
            processing_class=policy.tokenizer,
        )
        with torch.no_grad():  # so that it differs from its reference
            for parameter in trainer.model.parameters():
                parameter.mul_(0.8)
        self.logprobs: list[Tensor] = []
        self._compute = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = self._noted
        self.output = trainer._generate_and_score_completions([{"prompt": "1+2"}] * 4 + [{"prompt": "3+4"}] * 4)

    def _reward(self, completions: Sequence[str], **columns: Any) -> list[float]:
        self.rewards = [1.0, 0.0, 0.25, 3.0, 2.0, 2.0, 2.5, -1.0]
        return self.rewards

    def _noted(self, *arguments: Any, **more: Any) -> Any:
        found = self._compute(*arguments, **more)
        self.logprobs.append(found[0])
        return found

    @property
    def batch(self) -> Batch:
        """Ours of the same."""
        mask = self.output["completion_mask"].bool()
        blank = torch.zeros(mask.shape, dtype=torch.float64)
        own, reference = (it.double() for it in self.logprobs) if len(self.logprobs) == 2 else (blank, blank)
        return Batch(
            rewards=torch.tensor(self.rewards, dtype=torch.float64),
            groups=torch.arange(8) // 4,
            mask=mask,
            behaviour_logprobs=own,
            reference_logprobs=reference,
            limits=torch.full((8,), 6),
            is_truncated=torch.zeros(8, dtype=torch.bool),
        )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_grpo(tmp_path: Path, scale):
    scored = Scored("GRPO", tmp_path, scale_rewards=scale)
    found = GRPO(scale=scale).advantages(scored.batch)[:, 0]
    torch.testing.assert_close(found.float(), scored.output["advantages"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_advantages_of_rloo(tmp_path: Path, kl_coef):
    scored = Scored("RLOO", tmp_path, beta=kl_coef, normalize_advantages=False)
    settings = {"kl_coef": kl_coef, "kl_in": "reward", "kl_estimator": "k1"}
    algorithm = GRPO(baseline="leave_one_out", scale="none", **settings)
    batch = scored.batch
    assert kl_coef == 0 or algorithm.kl_penalties(batch).abs().max() > 0.01
    found = algorithm.advantages(batch)[:, 0]
    torch.testing.assert_close(found.float(), scored.output["advantages"], rtol=1e-6, atol=1e-6)
