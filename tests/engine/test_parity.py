"""Engine against transformers: greedy tokens of `generate`, log-probs of the model's own forward and of the update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.types import Sample
from tests.engine.test_lossless import answers
from tests.products import pairs_first, values_first

MODELS = ("qwen2", "qwen3", "llama")


@pytest.mark.parametrize(("model_type", "tied"), values_first(MODELS, [False, True]))
def test_greedy_tokens_are_those_of_generate(model_type, tied):
    policy = tiny_policy(model_type, tied=tied)
    requests = make_requests(6, temperature=0.0, max_tokens=20)
    done = answers(policy, requests)
    for request in requests:
        prompt = torch.from_numpy(request.prompt.token_ids).long()[None]
        expected = policy.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=1,
            pad_token_id=0,
        )
        assert done[request.id].token_ids.tolist() == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("model_type", "sampling", "dtype"),
    pairs_first(MODELS, [{"temperature": 0.6}, {"temperature": 1.4, "top_p": 0.7}], ["float64", "float32"]),
)
def test_logprobs_are_the_models_and_the_updates(model_type, sampling, dtype):
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    policy = tiny_policy(model_type, dtype=dtype)
    done = list(answers(policy, make_requests(6, group_size=2, **sampling)).values())
    samples = [
        Sample(completion=c, text="", reward=0.0, rewards={}, loss_mask=np.ones(len(c.token_ids), np.bool_))
        for c in done
    ]
    with torch.no_grad():
        batch = token_batch(samples, "cpu")
        update = policy_output(policy.model, batch, temperature=sampling["temperature"], chunk_tokens=7).logprobs
        for completion, line in zip(done, update, strict=True):
            tokens = torch.from_numpy(
                np.concatenate([completion.request.prompt.token_ids, completion.token_ids])
            ).long()
            start = len(completion.request.prompt.token_ids)
            everything = (policy.model(tokens[None]).logits[0] / sampling["temperature"]).log_softmax(-1)
            own = everything[start - 1 : -1].gather(-1, tokens[start:, None])[:, 0].numpy()
            np.testing.assert_allclose(completion.logprobs, own, atol=tolerance, rtol=0)
            np.testing.assert_allclose(line[: len(own)].numpy(), own, atol=tolerance, rtol=0)


def test_bfloat16_and_autocast_generate():
    policy = tiny_policy(dtype="bfloat16", peaked=1.0)
    done = answers(policy, make_requests(3))
    assert all(np.isfinite(c.logprobs).all() and (c.logprobs <= 0).all() for c in done.values())
    done = answers(
        tiny_policy(dtype="float32"), make_requests(3), autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    assert all(np.isfinite(c.logprobs).all() for c in done.values())


def test_training_mode_and_attention_are_restored_and_no_weight_is_copied():
    policy = tiny_policy()
    model = policy.model.train()
    model.model.layers[0].eval()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    modes = [module.training for module in model.modules()]
    pointers = [p.data_ptr() for p in model.parameters()]
    implementation = model.config._attn_implementation
    answers(policy, make_requests(2))
    assert [module.training for module in model.modules()] == modes
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.config._attn_implementation == implementation
