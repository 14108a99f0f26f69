"""Shared prompts by torch's flash kernel; on a CPU a stand-in takes its place, which sees the same keys."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.models import flash, shared_prefixes
from rhymerl.models.shared_prefixes import packed_states, place_runs, sharing
from rhymerl.testing import tiny_policy
from tests.models.windowed import InDouble, windowed_model
from tests.training.test_shared_prefixes import assert_equal, gradients, policy_of
from tests.training.test_windowed_prefixes import samples_of
from tests.training.updates import forgiving_grpo, norm_in_double


def lower_right(
    query, keys, values, query_starts, key_starts, longest_query, longest_keys, *, scale, window_size, upper_left=False
):
    """Attend as the kernel does: the last query of a sequence sees its last key, or the first one only the first."""
    queries, ends = query_starts.tolist(), key_starts.tolist()
    assert (longest_query, longest_keys) == (max(np.diff(queries)), max(np.diff(ends)))
    assert window_size[1] == 0
    seen = longest_keys if window_size[0] < 0 else window_size[0] + 1
    group, found = query.shape[1] // keys.shape[1], []
    for first, last, start, end in zip(queries, queries[1:], ends, ends[1:], strict=False):
        for number in range(first, last):
            stop = start + 1 + number - first if upper_left else end - (last - 1 - number)
            there = slice(max(stop - seen, start), stop)
            k, v = (each[there].repeat_interleave(group, 1) for each in (keys, values))
            weights = (scale * (k * query[number]).sum(-1)).softmax(0)
            found.append((weights[..., None] * v).sum(0))
    return torch.stack(found)


@pytest.fixture
def kernel(monkeypatch):
    """Let the CPU take the way of a GPU, in float64; returns the windows of its calls."""
    calls = []

    def noted(*given, **settings):
        calls.append(settings["window_size"])
        return lower_right(*given, **settings)

    monkeypatch.setattr(flash, "_DEVICE", "cpu")
    monkeypatch.setattr(flash, "_DTYPES", (torch.float64,))
    monkeypatch.setattr(flash, "_kernel", lambda: noted)
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)
    flash._is_right.cache_clear()
    yield calls
    flash._is_right.cache_clear()


def both(policy, longest_prompt, **settings):
    samples = samples_of(3, longest_prompt=longest_prompt)
    settings = {"algorithm": forgiving_grpo, "policy": policy, **settings}
    return [gradients(samples, shares=shares, **settings) for shares in (True, False)]


@pytest.mark.parametrize("longest_prompt", [1, 3, 40])
@pytest.mark.parametrize("bucket_tokens", [0, 64])
def test_the_gradients_are_those_of_separate_rows(longest_prompt, bucket_tokens, kernel, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "_BUCKET_TOKENS", bucket_tokens)
    policy = policy_of()
    assert policy.model.config.num_key_value_heads < policy.model.config.num_attention_heads
    assert_equal(*both(policy, longest_prompt))
    assert set(kernel[2:]) == {(-1, 0)}


@pytest.mark.parametrize("window", [1, 3, 8])
def test_windows(window, kernel):
    policy = SimpleNamespace(model=windowed_model("mistral", sliding_window=window).train())
    with InDouble():
        assert_equal(*both(policy, 20))
    assert set(kernel[2:]) == {(window - 1, 0)}


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_layers_that_it_does_not_know_keep_their_masks(family, kernel):
    """Soft caps, sinks, heads of another width, chunks."""
    model = windowed_model(family).train()
    with InDouble():
        assert_equal(*both(SimpleNamespace(model=model), 20))
    assert (family == "llama4_text") == bool(kernel), "Llama 4 has layers of full attention, too"


def test_activations_that_are_computed_again(kernel):
    """The kernel is proved where it is met first, which is no part of what is computed again."""
    found, expected = both(policy_of(), 20, activation_checkpointing=True)
    assert_equal(found, expected)
    assert kernel


UPPER_LEFT = functools.partial(lower_right, upper_left=True)


def absent(*given, **settings):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def of_another_release(query, keys, values, query_starts, key_starts, longest_query, longest_keys, is_causal=False):
    raise AssertionError("it takes no window")


def forward_only(*given, **settings):
    attended = lower_right(*given, **settings)
    if attended.requires_grad:
        attended.register_hook(lambda gradient: absent())
    return attended


def wrong_gradient(query, keys, *given, **settings):
    return lower_right(query, keys.detach() + 0.9 * (keys - keys.detach()), *given, **settings)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (UPPER_LEFT, "computes something else"),
        (absent, "only supports Ampere"),
        (of_another_release, "unexpected keyword argument"),
        (forward_only, "only supports Ampere"),
        (wrong_gradient, "computes something else"),
    ],
)
def test_a_kernel_that_is_not_what_we_take_it_for_is_left_alone(wrong, reason, kernel, monkeypatch, caplog):
    monkeypatch.setattr(flash, "_kernel", lambda: wrong)
    assert_equal(*both(policy_of(), 20))
    (message,) = {each.message for each in caplog.records if "flash" in each.message}
    assert reason in message


def test_values_narrower_than_keys_keep_their_masks(kernel):
    wide, narrow = torch.zeros(3, 2, 16, dtype=torch.float64), torch.zeros(3, 2, 8, dtype=torch.float64)
    assert flash.can_attend(wide, wide, wide, flash.LayerAttention())
    assert not flash.can_attend(wide, wide, narrow, flash.LayerAttention())


def test_half_precision_of_autocast_is_what_it_computes_in(kernel, monkeypatch):
    monkeypatch.setattr(flash, "_DTYPES", (torch.bfloat16,))
    values = torch.zeros(3, 2, 8)
    assert not flash.can_attend(values, values, values, flash.LayerAttention())
    with torch.autocast("cpu", torch.bfloat16):
        assert flash.can_attend(values, values, values, flash.LayerAttention())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_is_proved_where_a_pass_has_no_gradients(around, kernel):
    values = torch.zeros(3, 2, 8, dtype=torch.float64)
    with around():
        assert flash.can_attend(values, values, values, flash.LayerAttention())
    assert not torch.is_inference_mode_enabled()


def test_nothing_of_it_on_a_cpu():
    values = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    assert not flash.can_attend(values, values, values, flash.LayerAttention())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_on_a_gpu_states_and_gradients_are_those_of_masks(window, monkeypatch):
    model = windowed_model("mistral", sliding_window=window) if window else tiny_policy().model
    body = copy.deepcopy(model).get_decoder().to("cuda", torch.bfloat16)
    numbers = np.arange(100) % body.config.vocab_size
    prompts = [numbers[:3], numbers[:40], numbers[:40]]
    placed = place_runs(prompts, [numbers[7:9], numbers[10:80], numbers[10:30]], "cuda")
    found = []
    for by_flash in (True, False):
        if not by_flash:
            monkeypatch.setattr(flash, "can_attend", lambda *given: False)
        body.zero_grad()
        with sharing([body]):
            states = packed_states(body, placed.layout)[0]
        read = states[torch.from_numpy(np.concatenate(placed.paths)).to("cuda")]
        read.float().square().sum().backward()
        found.append([read, *(each.grad for each in body.parameters() if each.grad is not None)])
        assert placed.layout._sequences is not None, "the kernel was taken first"
    for mine, others in zip(*found, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0.05 * float(others.abs().max()))
