"""Log-probs for the update: chunks and micro-batches change nothing, and logits never exist for all tokens at once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rhymerl.models.head import head_logprobs
from rhymerl.models.logprobs import default_chunk_tokens, policy_output, token_batch
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.training.batches import micro_batches, total_tokens
from rhymerl.types import Completion, Output, RolloutRequest, Sample


def make_samples(count: int, *, max_tokens: int = 12, vocabulary: int = 19) -> list[Sample]:
    """Random answers to random prompts."""
    source = np.random.default_rng(1)
    return [
        answered(
            request,
            source.integers(2, vocabulary, source.integers(1, max_tokens, endpoint=True)).astype(np.int32),
        )
        for request in make_requests(count)
    ]


def answered(request: RolloutRequest, tokens: np.ndarray) -> Sample:
    completion = Completion(request=request, output=Output.of(tokens, finish_reason="stop"))
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=np.ones(len(tokens), np.bool_))


def answer(length: int) -> Sample:
    """So many tokens to a short prompt."""
    return answered(make_requests(1, prompt_tokens=(4, 4))[0], np.full(length, 2, np.int32))


def gradients(model, samples, parts, *, chunk_tokens):
    """Log-probs of all samples and the gradient of their sum of squares, computed part by part."""
    model.zero_grad()
    logprobs = {}
    for part in parts:
        batch = token_batch([samples[i] for i in part], "cpu")
        output = policy_output(model, batch, temperature=0.8, chunk_tokens=chunk_tokens)
        (output.logprobs**2).sum().backward()
        for i, line in zip(part, output.logprobs.detach(), strict=True):
            logprobs[i] = line[: len(samples[i])]
    return logprobs, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_chunks_and_micro_batches_change_nothing(chunk_tokens, max_tokens):
    model, samples = tiny_policy().model, make_samples(9)
    expected, expected_gradient = gradients(model, samples, [list(range(9))], chunk_tokens=None)
    parts = list(micro_batches(samples, range(9), max_tokens))
    assert sorted(i for part in parts for i in part) == list(range(9))
    logprobs, gradient = gradients(model, samples, parts, chunk_tokens=chunk_tokens)
    for i in expected:
        torch.testing.assert_close(logprobs[i], expected[i], atol=1e-12, rtol=0)
    for left, right in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=1e-10)


def test_micro_batches_keep_their_budget():
    samples = make_samples(20)
    for part in micro_batches(samples, range(20), 90):
        width = max(len(samples[i].prompt.token_ids) + len(samples[i]) for i in part)
        assert len(part) == 1 or len(part) * width <= 90


def test_micro_batches_hold_samples_of_like_length():
    """Log-normal lengths: under a budget that all of them fit into, padding used to be most of the work."""
    lengths = np.exp(np.random.default_rng(0).normal(4.6, 1.0, 128)).astype(int).clip(2, 1000)
    samples = [answer(length) for length in lengths]
    widths = [[total_tokens(samples[i]) for i in part] for part in micro_batches(samples, range(128), 10**6)]
    assert sorted(sum(widths, [])) == sorted(map(total_tokens, samples))
    assert sum(len(part) * max(part) for part in widths) < 1.25 * sum(map(sum, widths))


@pytest.mark.parametrize("max_tokens", [300, 3_000, 10**6])
def test_no_other_split_of_the_sorted_samples_is_cheaper(max_tokens):
    """A micro-batch costs its padded tokens and 512 more."""
    source = np.random.default_rng(max_tokens)
    for _ in range(20):
        samples = [answer(int(length)) for length in np.exp(source.normal(4.6, 1.0, 9)).clip(2, 1000)]
        parts = [[total_tokens(samples[i]) for i in part] for part in micro_batches(samples, range(9), max_tokens)]
        widths = sorted(map(total_tokens, samples), reverse=True)
        assert sum(parts, []) == widths
        splits = ([0, *cuts, 9] for size in range(9) for cuts in itertools.combinations(range(1, 9), size))
        costs = [
            sum((end - start) * widths[start] + 512 for start, end in itertools.pairwise(split))
            for split in splits
            if all(
                end - start == 1 or (end - start) * widths[start] <= max_tokens
                for start, end in itertools.pairwise(split)
            )
        ]
        assert sum(len(part) * part[0] + 512 for part in parts) == min(costs)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("chunk_tokens", [50, None])
def test_logits_exist_for_one_chunk_at_a_time(chunk_tokens):
    policy = tiny_policy(vocab_size=1021)  # the head's own gradient has 32 rows, its hidden size
    samples = make_samples(40)
    total = sum(map(len, samples))
    with Largest(1021) as largest:
        output = policy_output(policy.model, token_batch(samples, "cpu"), temperature=1.0, chunk_tokens=chunk_tokens)
        output.logprobs.sum().backward()
    assert largest.rows == (chunk_tokens or total)


class Subnormal(TorchDispatchMode):
    """How many numbers were too small for a float32's exponent, with which a CPU takes ten times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            size = result.abs()
            self.found += int(((size > 0) & (size < torch.finfo(torch.float32).tiny)).sum())
        return result


def test_the_entropy_of_peaked_distributions_costs_no_more_and_is_right():
    """A sum of V terms is off by some sqrt(V) of its roundings (Higham and Mary, doi 10.1137/18M1226312).

    So is the norm of the log-probs, by which the entropy H is then off 1 + H times as much.
    """
    head, size = torch.nn.Identity(), 100_000
    hidden = torch.randn(4, size, generator=torch.Generator().manual_seed(1))
    peaked = hidden.clone()
    peaked[:, 0] = 95.0
    targets = torch.zeros(4, dtype=torch.long)
    for logits in (hidden, peaked):
        logits.requires_grad_()
        with Subnormal() as subnormal:
            logprobs, entropy = head_logprobs(logits, head, targets, temperature=1.0, chunk_tokens=4)
            (logprobs + entropy).sum().backward()
        assert subnormal.found == 0
        expected = torch.distributions.Categorical(logits=logits.detach().double()).entropy()
        within = (1 + expected) * size**0.5 * torch.finfo(torch.float32).eps
        assert ((entropy.double() - expected).abs() <= within).all()


@pytest.mark.parametrize(("gib", "tokens"), [(80, 2**30 // (4 * 151_936)), (16, 2**28 // (4 * 151_936))])
def test_chunks_of_logits_fit_the_device(gib, tokens, monkeypatch):
    """Each chunk reads the head's weight again: 110 tokens at a time would be slow on a GPU."""
    head = torch.nn.Linear(1, 151_936, bias=False)
    assert default_chunk_tokens(head) == 2**26 // (4 * 151_936)
    memory = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert default_chunk_tokens(SimpleNamespace(weight=OnGPU(head.weight))) == tokens


class OnGPU(torch.Tensor):
    """Says so, and is not."""

    device = torch.device("cuda")
