"""The draw inside SGLang against the embedded engine's own, from what SGLang keeps of a batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.backends.remote.wire import to_custom_params, without_logprobs
from rhymerl.backends.sglang.plugin import keyed
from rhymerl.engine.noise import noise_keys, noise_keys_on_device
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.engine.sampler import HostSampler
from rhymerl.testing import make_prompt
from rhymerl.types import RolloutRequest, SamplingParams

V = 53
_ALL = 2**30  # SGLang's top-k that is off

seeds = st.one_of(st.integers(0, 2**64 - 1), st.integers(2**63 - 2, 2**63 + 2), st.just(2**64 - 1))


def rollout_request(seed: int, *, prompt: int = 5, generated: int = 0, **sampling) -> RolloutRequest:
    return RolloutRequest(
        id=f"{seed}/{prompt}",
        prompt=make_prompt(range(prompt)),
        sample=0,
        seed=seed,
        sampling=SamplingParams(**{"max_tokens": 99, **sampling}),
        output=without_logprobs(np.arange(generated, dtype=np.int32)) if generated else None,
    )


def engine_request(request: RolloutRequest, *, num_tokens: int = 0) -> SimpleNamespace:
    """Return what SGLang has of the request."""
    count = len(request.prompt.token_ids) + (len(request.output) if request.output else 0)
    params = SimpleNamespace(custom_params=to_custom_params(request, feed=0, num_tokens=num_tokens))
    return SimpleNamespace(rid="x", origin_input_ids=[0] * count, sampling_params=params)


def sampling_info(requests: list[RolloutRequest]) -> SimpleNamespace:
    """Return the record as SGLang writes it: greedy is top-k 1 at temperature 1."""
    params = [request.sampling for request in requests]
    top_k = [1 if each.temperature == 0 else each.top_k or _ALL for each in params]
    return SimpleNamespace(
        temperatures=torch.tensor([[each.temperature or 1.0] for each in params]),
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor([each.top_p for each in params]),
        min_ps=torch.tensor([each.min_p for each in params]),
        need_top_k_sampling=any(each != _ALL for each in top_k),
        need_top_p_sampling=any(each.top_p != 1 for each in params),
        need_min_p_sampling=any(each.min_p > 0 for each in params),
        is_all_greedy=all(each <= 1 for each in top_k),
        vocab_size=V,
        sampling_seed=torch.tensor([keyed.first_counter(engine_request(each)) for each in requests]),
        grammars=None,
        has_custom_logit_processor=False,
    )


def our_draw(logits: torch.Tensor, requests: list[RolloutRequest], positions: np.ndarray, each: int) -> list[int]:
    """The embedded engine's, at response positions [n]."""
    rows = Rows(len(requests), 64, SlotPool(64))
    owners = np.repeat([rows.enter(request, None) for request in requests], each)
    return HostSampler(logits, rows).draw(np.arange(len(logits)), owners, positions).tolist()


@given(st.lists(st.tuples(seeds, st.integers(0, 2**40)), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 9))
def test_counters_and_places_in_the_sequence_give_the_noise_of_places_in_the_answer(pairs, prompt, generated):
    numbers, positions = zip(*pairs, strict=True)
    counters = [
        keyed.first_counter(engine_request(rollout_request(seed, prompt=prompt, generated=generated)))
        for seed in numbers
    ]
    sampled_at = torch.tensor(positions) + prompt - 1  # the place of the token before
    keys = noise_keys_on_device(torch.tensor(counters) + sampled_at)
    assert keys.tolist() == noise_keys(np.array(numbers, np.uint64), np.array(positions)).tolist()


def test_a_seed_is_taken_as_64_bits_as_the_embedded_engine_takes_it():
    one, other = (keyed.first_counter(engine_request(rollout_request(seed))) for seed in (-1, 2**64 - 1))
    assert one == other


def test_requests_of_others_are_sampled_by_their_names():
    params = SimpleNamespace(custom_params=None)
    names = ("a", "b", "a")
    first, second, again = (
        keyed.first_counter(SimpleNamespace(rid=name, origin_input_ids=[1, 2], sampling_params=params))
        for name in names
    )
    assert first == again != second


MIXED = [{}, {"temperature": 0.0}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.6}, {"min_p": 0.2}]
BATCHES = {
    "plain": [{}],
    "cooler": [{"temperature": 0.7}],
    "greedy": [{"temperature": 0.0}],
    "top_k": [{"top_k": 4}, {"top_k": 1, "temperature": 0.7}, {"top_k": V}],
    "top_p": [{"top_p": 0.5}, {"top_p": 0.9, "temperature": 0.7}],
    "min_p": [{"min_p": 0.1}],
    "all rules": [{"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7}],
    "mixed": MIXED,
}


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_the_tokens_are_those_of_the_embedded_engine(batch, each):
    source = np.random.default_rng(1)
    for round_number in range(20):
        requests = [
            rollout_request(int(source.integers(2**63)) * 2 + 1, prompt=3 + i, generated=i % 3, **batch[i % len(batch)])
            for i in range(7)
        ]
        logits = torch.from_numpy(source.normal(size=(7 * each, V)) * 3).float()
        clean = logits.clone()
        indices = np.repeat(np.arange(7) + round_number, each) + np.tile(np.arange(each), 7)
        in_sequence = torch.from_numpy(indices + np.repeat(np.arange(7) + 3, each) - 1)
        sampled, logprobs = keyed.draw(logits, sampling_info(requests), in_sequence, each=each)
        assert sampled.tolist() == our_draw(logits, requests, indices, each)
        assert sampled.dtype == torch.int64
        temperatures = sampling_info(requests).temperatures.repeat_interleave(each, 0)
        expected = (logits.double() / temperatures).log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
        assert torch.equal(logits, clean), "noise or truncation touched the clean logits"


@pytest.mark.parametrize("rules", [{}, {"top_k": V - 1}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_tokens_that_the_trainers_tokenizer_lacks_are_never_drawn(rules, monkeypatch):
    monkeypatch.setattr(keyed, "VOCABULARY", keyed.Vocabulary())
    requests = [rollout_request(seed, **rules) for seed in range(50)]
    info, at = sampling_info(requests), torch.full((50,), 4)
    logits = torch.randn(50, V)
    keyed.VOCABULARY.follow([engine_request(requests[0])])
    assert int(keyed.draw(logits, info, at, each=1)[0].max()) >= 9, "all, as long as no request says anything else"
    keyed.VOCABULARY.follow([engine_request(requests[0], num_tokens=9), engine_request(requests[0])])
    sampled, logprobs = keyed.draw(logits, info, at, each=1)
    assert sampled.tolist() == our_draw(logits[:, :9].contiguous(), requests, np.zeros(50, np.int64), 1)
    expected = (logits[:, :9].double() / info.temperatures).log_softmax(-1).gather(-1, sampled[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_logits_of_half_precision_are_sampled_from_as_they_are():
    requests = [rollout_request(seed) for seed in range(50)]
    logits = torch.randn(50, V).bfloat16()
    sampled, _ = keyed.draw(logits, sampling_info(requests), torch.full((50,), 4), each=1)
    assert sampled.tolist() == our_draw(logits.float(), requests, np.zeros(50, np.int64), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": torch.zeros(V)},
        {"acc_additive_penalties": torch.zeros(V)},
        {"acc_scaling_penalties": torch.ones(V)},
        {"grammars": [None, object()]},
        {"has_custom_logit_processor": True},
        {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
        {"sampling_seed": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_else_shapes_the_draw_is_left_to_sglang(change):
    info = sampling_info([rollout_request(1)])
    assert keyed.is_plain(info)
    info.grammars, info.penalizer_orchestrator = [None], SimpleNamespace(is_required=False)
    assert keyed.is_plain(info)
    vars(info).update(change)
    assert not keyed.is_plain(info)
