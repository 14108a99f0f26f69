"""Families with sliding windows, sinks, scaled and capped logits, and hybrids, are trained on any engine's answers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from transformers import PreTrainedModel

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.drafters import NoDrafter
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.policy import Policy
from rhymerl.models.proof import prove_update
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import ScriptedBackend
from rhymerl.training.settings import UpdateSettings
from tests.integration.training import PROMPTS, REWARD
from tests.models.hybrid import HYBRIDS
from tests.models.small import small_model
from tests.models.test_logprobs import make_samples

WINDOW = {"sliding_window": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {**WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    "mistral": ("mistral", WINDOW),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    **{name: (name, HYBRIDS[name]) for name in ("lfm2", "qwen3_5_text", "falcon_h1", "nemotron_h")},
}
IN_FLOAT32 = {"gpt_oss", "nemotron_h"}  # torch has no grouped product in float64; logits that are always float32


def build(family: str) -> PreTrainedModel:
    model_type, settings = FAMILIES[family]
    torch.manual_seed(0)
    dtype = torch.float32 if family in IN_FLOAT32 else torch.float64
    return small_model(model_type, dtype=dtype, max_position_embeddings=64, initializer_range=0.3, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(family):
    model, samples = build(family), make_samples(4)
    prove_update(model)
    output = policy_output(model, token_batch(samples, "cpu"), temperature=0.8, chunk_tokens=7)
    (output.logprobs**2).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for sample, line in zip(samples, output.logprobs.detach(), strict=True):
        prompt, answer = (
            torch.from_numpy(each).long() for each in (sample.prompt.token_ids, sample.completion.token_ids)
        )
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits.double() / 0.8).log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        torch.testing.assert_close(line[: len(answer)].double(), logprobs.detach(), atol=1e-5, rtol=0)
        total = total + (logprobs**2).sum()
    total.backward()
    for name, parameter in model.named_parameters():
        # By the whole tensor: sums of float32 products in another order leave small entries with larger errors.
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


# One with windows and caps, one with sinks and experts, and a hybrid; of each the proof above looks at the gradients.
ALWAYS = ("gemma2", "gpt_oss", "falcon_h1")


@pytest.mark.parametrize(
    "family", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_they_are_trained_on_the_answers_of_another_engine(family):
    model = build(family)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    module = RhymeModule(
        Policy(model=model, tokenizer=character_tokenizer("0123456789+=;#? \n")),
        rollout=RolloutSettings(group_size=4, max_tokens=16),
        update=UpdateSettings(learning_rate=1e-2),
        rewards=REWARD,
        drafter=NoDrafter(),
        backend=ScriptedBackend(lambda request: [*range(2, 4 + request.seed % 9), 14, 1]),
    )
    trainer = L.Trainer(
        max_steps=1,  # its answers are those of the first policy
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="32-true" if family in IN_FLOAT32 else "64-true",
    )
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=3))
    after = module.model.state_dict()
    assert all(each.isfinite().all() for each in after.values())
    assert any(not torch.equal(after[name], each) for name, each in before.items())
