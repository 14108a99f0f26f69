"""The CPU engine itself, before anything of ours runs in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rhymerl.testing import tiny_policy
from tests.sglang.conftest import CpuEngine

pytestmark = pytest.mark.sglang


def test_its_greedy_tokens_and_log_probs_are_those_of_transformers(cpu_engine: CpuEngine, tmp_path: Path) -> None:
    policy = tiny_policy(dtype="float32", hidden_size=64, context=512, peaked=12.0)
    policy.model.save_pretrained(tmp_path / "model")
    source = np.random.default_rng(0)
    prompts = [source.integers(2, 19, source.integers(1, 24)).tolist() for _ in range(12)]
    with cpu_engine.launch(tmp_path / "model", tmp_path / "log") as server:
        sampling = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
        answers = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True})
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, log_probs = greedy(policy.model, prompt, 32)
        assert answer["output_ids"] == tokens
        assert [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
            log_probs, abs=1e-4
        )


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    tokens, log_probs = [*prompt], []
    for _ in range(num_tokens):
        scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return tokens[len(prompt) :], log_probs
