"""Sampling replay: what truncation left to sample from goes from engine to update, which normalises over the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import GRPO, Batch, PolicyOutput, Totals
from rhymerl.distributed.wire import Wire
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.engine import inputs
from rhymerl.engine.engine import Engine
from rhymerl.engine.truncation import truncate
from rhymerl.models.head import KeptTokens, chosen_logprobs, head_logprobs
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.policy import Policy
from rhymerl.models.shared_prefixes import sharing
from rhymerl.replayed import KeptSets
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.types import Completion, Sample
from rhymerl.workers import RECORDS
from rhymerl.workers.coordinator import SharedPlan
from rhymerl.workers.run_ahead_state import RunAheadState
from tests.engine.test_grid import sample
from tests.engine.test_lossless import answers, assert_same
from tests.products import pairs_first
from tests.training.updates import norm_in_double, run_update

TRUNCATIONS = {"top-p": {"top_p": 0.8}, "top-k": {"top_k": 20}, "min-p": {"min_p": 0.1}}
DRAFTERS: Mapping[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "history_tree": HistoryTreeDrafter,
    "hostile": RandomTreeDrafter,
}


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' norms go through float32, where engine and update round differently."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


def wide_policy(**settings) -> Policy:
    """A policy of more tokens than top-k keeps, some of which are hardly likely."""
    policy = tiny_policy(vocab_size=64, peaked=8.0, **settings)
    vars(policy.model)["num_tokens"] = 64  # its tokenizer has fewer
    return policy


def sampled(policy: Policy, drafter: Drafter | None = None, *, count: int = 6, **sampling) -> dict[str, Completion]:
    requests = make_requests(-(-count // 3), group_size=3, **{"replay": True, **sampling})
    return answers(policy, requests, drafter=drafter, max_running=4)


def logprobs_of(policy: Policy, samples: list[Sample], temperature: float, *, shares: bool = False) -> np.ndarray:
    """The update's log-probs of all tokens."""
    with torch.no_grad(), sharing([policy.model]) if shares else nullcontext():
        tokens = token_batch(samples, "cpu", shares=shares)
        output = policy_output(policy.model, tokens, temperature=temperature, chunk_tokens=7)
    return output.logprobs[tokens.response].numpy()


@pytest.mark.parametrize(
    ("truncation", "temperature", "drafter"), pairs_first(TRUNCATIONS, [0.6, 1.0], DRAFTERS.keys())
)
def test_the_first_updates_ratio_is_1(in_double, truncation, temperature, drafter):
    policy = wide_policy()
    found = sampled(policy, DRAFTERS[drafter](), temperature=temperature, **truncation)
    samples = [sample(completion) for completion in found.values()]
    behaviour = np.concatenate([each.completion.logprobs for each in samples])
    for shares in (False, True):
        ratio = np.exp(logprobs_of(policy, samples, temperature, shares=shares) - behaviour)
        assert np.abs(ratio - 1).max() < 1e-12
    for completion in found.values():
        sets = completion.output.kept_sets
        assert len(sets) == len(completion.output)
        assert all(token in left for token, left in zip(completion.token_ids, sets, strict=True))
        assert all(0 < len(left) <= truncation.get("top_k", policy.model.config.vocab_size) for left in sets)
    whole = sampled(policy, temperature=temperature, replay=False, **truncation)
    for name, completion in whole.items():
        assert np.array_equal(completion.token_ids, found[name].token_ids)
        assert completion.output.kept is None
    difference = behaviour - np.concatenate([whole[name].logprobs for name in found])
    noted = np.concatenate([each.output.log_masses for each in found.values()])
    np.testing.assert_allclose(-noted, difference, atol=1e-12, rtol=0)
    assert difference.min() >= -1e-12
    assert difference.mean() > 0.01, "the case is too easy: nothing was cut off"


def test_in_float32_it_is_1_in_the_mean():
    policy = wide_policy(dtype="float32")
    samples = [sample(each) for each in sampled(policy, RandomTreeDrafter(), count=12, top_p=0.8).values()]
    behaviour = np.concatenate([each.completion.logprobs for each in samples])
    ratio = np.exp(logprobs_of(policy, samples, 1.0, shares=True) - behaviour)
    assert 0.999 <= ratio.mean() <= 1.001
    assert len(ratio) > 100


def test_equal_answers_whose_sets_differ_are_not_computed_as_one(in_double):
    """As by a newer policy, or by rounding; one of them has been sampled before replay was switched on."""
    policy = tiny_policy()
    given = sample(next(iter(sampled(policy, count=3, top_p=0.8).values())))
    completion = given.completion
    other = replace(given, completion=replace(completion, output=replace(completion.output, kept=None)))
    apart, shared = (logprobs_of(policy, [given, other, given], 1.0, shares=shares) for shares in (False, True))
    np.testing.assert_allclose(apart, shared, atol=1e-12, rtol=0)
    first, second, third = shared.reshape(3, -1)
    assert np.array_equal(first, third)
    assert (first - second).mean() > 0.01


def test_sets_travel_between_ranks():
    outputs = [each.output for each in sampled(tiny_policy(), top_p=0.8).values()]
    assert all(output.kept is not None for output in outputs)
    wire = Wire(RECORDS, key=b"k")
    for left, right in zip(outputs, wire.unpack(wire.pack(outputs, address="a"), address="a"), strict=True):
        assert _plain(left.kept) == _plain(right.kept)


def test_without_truncation_there_is_nothing_to_replay():
    policy = tiny_policy()
    left, right = sampled(policy), sampled(policy, replay=False)
    assert_same(left, right, atol=0.0)
    assert all(completion.output.kept is None for completion in left.values())
    assert token_batch([sample(each) for each in left.values()], "cpu").kept is None


def test_an_update_sees_a_ratio_of_1_and_another_one_where_nothing_is_replayed(in_double):
    for replay, settings in ((True, {}), (True, {"kl_coef": 0.1}), (False, {})):
        found = sampled(tiny_policy(), count=12, temperature=0.9, top_p=0.8, replay=replay)
        samples = [sample(each) for each in found.values()]
        if not replay:  # as if the engine had told the truth about its tokens, and the update trained the whole policy
            told = sampled(tiny_policy(), count=12, temperature=0.9, top_p=0.8)
            samples = [_with_logprobs(each, told) for each in samples]
        _, metrics = run_update(samples, algorithm=lambda settings=settings: GRPO(**settings))
        gap = abs(metrics["sampling/importance_sampling_ratio/min"] - 1)
        assert gap < 1e-12 if replay else gap > 0.01
        assert metrics.get("kl", 0.0) == pytest.approx(0.0, abs=1e-12), "the reference is normalised over the same set"


def _with_logprobs(given: Sample, told: Mapping[str, Completion]) -> Sample:
    output = given.completion.output
    logprobs = told[given.completion.request.id].logprobs
    return replace(given, completion=replace(given.completion, output=replace(output, logprobs=logprobs)))


def test_sets_follow_a_request_that_is_interrupted_preempted_and_saved(in_double):
    policy = tiny_policy()
    requests = make_requests(4, group_size=2, top_p=0.8, replay=True)
    whole = answers(policy, requests)
    tight = answers(policy, requests, drafter=RandomTreeDrafter(), max_running=6, kv_tokens=70)
    engine = Engine(policy.model, drafter=RandomTreeDrafter(), max_running=3, kv_tokens=4096)
    engine.submit(requests)
    done = engine.run(max_passes=5)
    halves = {each.request.id: each.output for each in engine.withdraw()}
    assert any(len(output) for output in halves.values())
    plan = SharedPlan(queues=[[0]], digest="d")
    state = RunAheadState(step=0, asked="x", plan=plan, outputs=halves).state_dict()
    saved = RunAheadState.of_state(state).outputs
    engine.submit([replace(request, output=saved[request.id]) for request in requests if request.id in saved])
    while engine.has_work:
        done += engine.run()
    interrupted = {each.request.id: each for each in done}
    for found in (tight, interrupted):
        assert_same(whole, found, atol=1e-12)
        for name, completion in found.items():
            assert _plain(completion.output.kept) == _plain(whole[name].output.kept)


def _plain(kept: KeptSets | None) -> list[tuple[list[int], float]]:
    assert kept is not None
    return [(ids.tolist(), round(mass, 9)) for ids, mass in zip(kept.sets, kept.log_masses.tolist(), strict=True)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_device_keeps_what_a_cpu_keeps(in_double, monkeypatch: pytest.MonkeyPatch, mixed):
    """`mixed`: beside answers that are not replayed, or not truncated at all."""
    policy = tiny_policy()
    requests = make_requests(4, group_size=2, top_p=0.8, top_k=20, replay=True)
    if mixed:
        requests[::3] = [replace(each, sampling=replace(each.sampling, replay=False)) for each in requests[::3]]
        requests[1::3] = [replace(each, sampling=replace(each.sampling, top_p=1.0, top_k=0)) for each in requests[1::3]]
    on_cpu = answers(policy, requests)
    monkeypatch.setattr(inputs, "on_host", lambda device: False)
    found = answers(policy, requests, drafter=RandomTreeDrafter())
    assert_same(on_cpu, found, atol=1e-12)
    for name, completion in found.items():
        expected = on_cpu[name].output
        assert (expected.kept is None) == (completion.output.kept is None)
        assert list(map(list, completion.output.kept_sets)) == list(map(list, expected.kept_sets))
        np.testing.assert_allclose(completion.output.log_masses, expected.log_masses, atol=1e-12, rtol=0)


def test_outputs_are_cut_and_joined_with_their_sets():
    sets = [np.array(each, np.int32) for each in ([1, 2], [3], [], [4, 5, 6])]
    completion = next(iter(sampled(tiny_policy(), count=3, top_k=5).values()))
    output = replace(completion.output[:4], kept=KeptSets.of(sets, [-0.5, -1.0, 0.0, -2.0]))
    whole = [([1, 2], -0.5), ([3], -1.0), ([], 0.0), ([4, 5, 6], -2.0)]
    assert output.kept is not None
    assert output.kept.counts.tolist() == [2, 1, 0, 3]
    assert (output.kept.token_ids.nbytes, output.kept.counts.nbytes + output.kept.log_masses.nbytes) == (4 * 6, 12 * 4)
    for cut in range(5):
        assert _plain((output[:cut] + output[cut:]).kept) == whole
    reply = replace(output[:2], kept=None)  # nobody sampled it
    assert _plain((output[:1] + reply + output[3:]).kept) == [whole[0], ([], 0.0), ([], 0.0), whole[3]]
    assert (reply + reply).kept is None


@pytest.mark.parametrize("linear", [True, False])
def test_log_probs_entropy_and_gradients_are_those_of_the_kept_tokens(linear):
    torch.manual_seed(1)
    head = nn.Linear(4, 9, dtype=torch.float64)
    if not linear:
        head = nn.Sequential(head)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sets = [[0, 3, 8], [2], [], [1, 2, 3, 4], [7, 0]]
    targets = torch.tensor([3, 2, 5, 4, 0])
    kept = KeptTokens.of([np.array(each, np.int32) for each in sets], "cpu")
    settings = {"temperature": 0.7, "chunk_tokens": 2, "kept": kept}
    logprobs, entropy = head_logprobs(hidden, head, targets, **settings)
    lines = [(head(hidden)[i] / 0.7)[each or slice(None)].log_softmax(0) for i, each in enumerate(sets)]
    places = [each.index(t) if each else t for each, t in zip(sets, targets.tolist(), strict=True)]
    expected = torch.stack([line[place] for line, place in zip(lines, places, strict=True)])
    expected_entropy = torch.stack([-(line.exp() * line).sum() for line in lines])
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    torch.testing.assert_close(chosen_logprobs(hidden, head, targets, **settings), expected, atol=1e-12, rtol=0)
    weights = torch.randn(2, 5, dtype=torch.float64)
    inputs_of = [hidden, *head.parameters()]
    found = torch.autograd.grad((weights * torch.stack([logprobs, entropy])).sum(), inputs_of)
    wanted = torch.autograd.grad((weights * torch.stack([expected, expected_entropy])).sum(), inputs_of)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)


@pytest.mark.parametrize("replays", [True, False])
def test_the_gradient_of_a_truncated_policy_is_biased_unless_its_sampling_is_replayed(replays):
    """Two tokens of a vocabulary of 12, over all answers that top-p can sample, weighted with their probability.

    The first token decides what the second is worth, and no baseline of whole answers knows that.
    """
    torch.manual_seed(3)
    size = 12
    table = nn.Linear(1 + size, size, bias=False, dtype=torch.float64)  # logits at the start and behind each token
    nn.init.normal_(table.weight)
    rewards = torch.randn(size, size, dtype=torch.float64)
    contexts = torch.eye(1 + size, dtype=torch.float64)
    ones, off = torch.ones(1 + size), torch.zeros(1 + size)
    left = truncate(table(contexts).detach(), ones, off.long(), 0.8 * ones, off) > -torch.inf
    assert 2 < left.sum(-1).double().mean() < size - 2
    pairs = [(a, b) for a in left[0].nonzero()[:, 0].tolist() for b in left[1 + a].nonzero()[:, 0].tolist()]
    first, second = torch.tensor(pairs).T

    truncated = table(contexts).masked_fill(~left, -torch.inf).softmax(-1)
    chance = truncated[0, first] * truncated[1 + first, second]
    expected_reward = (chance * rewards[first, second]).sum()
    (true,) = torch.autograd.grad(expected_reward, table.weight)

    places = torch.stack([torch.zeros_like(first), 1 + first], 1).flatten()
    kept = KeptTokens.of([left[place].nonzero()[:, 0].numpy().astype(np.int32) for place in places], "cpu")
    logprobs, entropy = head_logprobs(
        contexts[places],
        table,
        torch.tensor(pairs).flatten(),
        temperature=1.0,
        chunk_tokens=5,
        kept=kept if replays else None,
    )
    shape, number = (len(pairs), 2), len(pairs)
    gains = (chance * (rewards[first, second] - expected_reward)).detach()
    batch = Batch(
        rewards=rewards[first, second],
        groups=torch.zeros(number).long(),
        mask=torch.ones(shape, dtype=torch.bool),
        behaviour_logprobs=logprobs.detach().view(shape),
        limits=torch.full((number,), 2),
        is_truncated=torch.zeros(number, dtype=torch.bool),
        advantages=gains[:, None].expand(shape),
    )
    output = PolicyOutput(logprobs=logprobs.view(shape), entropy=entropy.view(shape))
    loss, _ = GRPO().loss(batch, output, Totals(num_tokens=1, num_samples=number))
    (estimated,) = torch.autograd.grad(-loss, table.weight)
    error = float((estimated - true).norm() / true.norm())
    assert error < 1e-12 if replays else error > 0.05
