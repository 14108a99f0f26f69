"""A shared prompt computed once: gradients and metrics equal those row by row, to the last digits of float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import GRPO, PPO
from rhymerl.distributed import Alone
from rhymerl.models import shared_prefixes
from rhymerl.models.critic import CriticSettings
from rhymerl.models.logprobs import token_batch
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import Policy
from rhymerl.models.shared_prefixes import SharedLayout, place_runs, sharing, side_by_side
from rhymerl.testing import make_prompt, tiny_policy
from rhymerl.training.batches import micro_batches, units
from rhymerl.training.passes import balance_samples
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from tests.distributed.threads import run_ranks
from tests.models.test_logprobs import answered
from tests.products import pairs_first
from tests.training.updates import ActorCritic, forgiving_grpo, norm_in_double, scored

ALONE = Alone()


@pytest.fixture(autouse=True)
def norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)


@functools.cache
def policy_of(model_type: str = "qwen2") -> Policy:
    policy = tiny_policy(model_type)  # type: ignore[arg-type]
    policy.model.train()
    return policy


class Recording(Updater):
    """Keeps the gradients of each optimizer step, and moves nothing."""

    def _step(self, work):
        self.gradients = getattr(self, "gradients", [])
        self.gradients.append([p.grad.clone() for each in self._trained(work).values() for p in each])
        return {}


def gradients(samples, *, shares, algorithm, critic=None, ranks=ALONE, policy=None, **settings):
    """Return the gradients of each optimizer step of a rollout step, and its metrics."""
    policy, made = policy or policy_of(), algorithm()
    model = copy.deepcopy(policy.model)
    values = critic.build(policy, seed=2) if critic is not None else None
    update = UpdateSettings(learning_rate=1e-3, **settings)
    optimizer = update.optimizer(list(model.parameters()), critic=values)
    updater = Recording(
        model,
        made,
        update,
        temperature=0.9,
        seed=1,
        backward=torch.Tensor.backward,
        autocast=nullcontext,
        shares_prefixes=shares,
        reference=copy.deepcopy(policy.model) if "reference" in made.needs else None,
        critic=values,
        ranks=ranks,
    )
    metrics = updater.run(samples, 0, optimizer=optimizer, schedule=update.schedule(optimizer, 10))
    return updater.gradients, {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}


def assert_equal(found, expected):
    assert found[1] == pytest.approx(expected[1], rel=1e-6)  # some are means in float32
    for mine, others in zip(found[0], expected[0], strict=True):
        largest = max(float(other.abs().max()) for other in others)
        for left, right in zip(mine, others, strict=True):
            torch.testing.assert_close(left, right, atol=1e-12 * max(largest, 1.0), rtol=0)


OWN, SHARED = CriticSettings(head_std=0.3), CriticSettings(head_std=0.3, shared=True)
IN_REWARD = {"kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"}
ALGORITHMS = {
    "grpo": (forgiving_grpo, None),
    "grpo with kl and entropy": (functools.partial(GRPO, kl_coef=0.3, entropy_coef=0.1), None),
    "grpo, each answer counts alike": (functools.partial(GRPO, loss_mean="sequence"), None),
    "dr. grpo": (functools.partial(forgiving_grpo, scale="none", loss_mean="constant"), None),
    "dapo": (functools.partial(forgiving_grpo, overlong_fraction=0.5), None),
    "gspo": (functools.partial(forgiving_grpo, ratio_level="sequence", loss_mean="sequence"), None),
    "cispo": (functools.partial(forgiving_grpo, surrogate="cispo"), None),
    "rloo": (functools.partial(forgiving_grpo, baseline="leave_one_out", scale="none", **IN_REWARD), None),
    "reinforce++": (
        functools.partial(forgiving_grpo, baseline="none", scale="none", whiten=True, **IN_REWARD),
        None,
    ),
    "ppo": (PPO, OWN),
    "ppo, one backbone": (PPO, SHARED),
    "actor critic": (ActorCritic, OWN),
}


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens", "alike"), pairs_first(ALGORITHMS.keys(), [1, 50, 10**6], [False, True])
)
def test_the_gradients_are_those_of_separate_rows(name, micro_batch_tokens, alike):
    algorithm, critic = ALGORITHMS[name]
    samples, settings = scored(16, alike=alike), {"algorithm": algorithm, "critic": critic, "mini_batches": 2}
    expected = gradients(samples, shares=False, **settings)
    assert all(any(each.any() for each in step) for step in expected[0])
    assert_equal(gradients(samples, shares=True, micro_batch_tokens=micro_batch_tokens, **settings), expected)


@pytest.mark.parametrize("bucket_tokens", [0, 64])
def test_runs_read_those_of_other_buckets(bucket_tokens, monkeypatch):
    """With 0 there is a bucket for each length."""
    monkeypatch.setattr(shared_prefixes, "_BUCKET_TOKENS", bucket_tokens)
    layout = token_batch(scored(16, alike=True), "cpu", shares=True).shared
    assert layout is not None
    assert (len(layout.buckets) > 2) == (bucket_tokens == 0)
    expected = gradients(scored(16, alike=True), shares=False, algorithm=forgiving_grpo)
    assert_equal(gradients(scored(16, alike=True), shares=True, algorithm=forgiving_grpo), expected)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("groups", [("cuda",), ("cpu",)])
def test_long_runs_attend_in_blocks(groups, alike, monkeypatch):
    """A block of 3 makes them long; the last one of a run is shorter."""
    expected = gradients(scored(16, alike=alike), shares=False, algorithm=forgiving_grpo)
    monkeypatch.setattr(shared_prefixes, "_BLOCK", 3)
    monkeypatch.setattr(shared_prefixes, "_WITHOUT_GROUPS", groups)
    layout = token_batch(scored(16, alike=alike), "cpu", shares=True).shared
    assert layout is not None
    assert {each.visible.shape[2] for each in layout.buckets if each.width > 3} == {3}
    assert any(each.width % 3 for each in layout.buckets if each.width > 3)
    assert_equal(gradients(scored(16, alike=alike), shares=True, algorithm=forgiving_grpo), expected)


def test_a_long_answer_does_not_pay_for_a_dense_mask():
    prompt, answers = np.arange(45), [np.arange(2000) + 1, np.append(np.arange(500) + 1, np.arange(1500) + 3)]
    layout = place_runs([prompt] * 2, answers, "cpu").layout
    assert [each.width for each in layout.buckets] == [2000, 1500]
    assert sum(each.visible.numel() for each in layout.buckets) < 256 * (45 + 500 + 2000 + 1500 + 2 * 256)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox"])
def test_other_families(model_type, monkeypatch):
    for name in ("llama.modeling_llama.LlamaRMSNorm", "qwen3.modeling_qwen3.Qwen3RMSNorm"):
        monkeypatch.setattr(f"transformers.models.{name}.forward", Qwen2RMSNorm.forward)
    samples, settings = scored(8, alike=True), {"algorithm": forgiving_grpo, "policy": policy_of(model_type)}
    assert_equal(gradients(samples, shares=True, **settings), gradients(samples, shares=False, **settings))


FACTORS = {"factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},  # changes beyond the context
    "yarn": FACTORS,
    "llama3": {**FACTORS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**FACTORS, "short_factor": [1.0] * 4, "long_factor": [6.0] * 4},  # changes beyond 64 positions
}


@pytest.mark.parametrize("rope", [*ROPES, "learned"])
def test_answers_end_with_the_context(rope, monkeypatch):
    """A short run behind a long common beginning is padded to the width of one that ends with the context."""
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", Qwen2RMSNorm.forward)
    if rope == "learned":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        policy = tiny_policy("gpt2", context=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropouts)
    else:
        parameters = {"rope_type": rope, "rope_theta": 10_000.0, **ROPES[rope]}
        policy = tiny_policy("llama", context=64, rope_parameters=parameters)
    request = dataclasses.replace(scored(1)[0].completion.request, prompt=make_prompt(np.full(8, 4)))
    source = np.random.default_rng(0)
    longest = source.integers(2, 15, 56)
    near = np.append(longest[:45], [16, 3, 4])
    samples = [answered(request, each.astype(np.int32)) for each in (longest, near)]
    samples = [dataclasses.replace(each, reward=float(n)) for n, each in enumerate(samples)]
    layout = token_batch(samples, "cpu", shares=True).shared
    assert [len(each.read) for each in layout.buckets] == [2]
    settings = {"algorithm": forgiving_grpo, "policy": policy}
    assert_equal(gradients(samples, shares=True, **settings), gradients(samples, shares=False, **settings))


def test_a_device_without_a_kernel_for_groups_gets_a_key_for_each_head(monkeypatch):
    """The CPU stands for a GPU here."""
    assert policy_of().model.config.num_key_value_heads < policy_of().model.config.num_attention_heads
    expected = gradients(scored(8), shares=True, algorithm=forgiving_grpo)
    monkeypatch.setattr(shared_prefixes, "_WITHOUT_GROUPS", ("cpu",))
    attend, grouped = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*given, attn_mask=None, enable_gqa=False, **settings):
        grouped.append(attn_mask is not None and enable_gqa)
        return attend(*given, attn_mask=attn_mask, enable_gqa=enable_gqa, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    assert_equal(gradients(scored(8), shares=True, algorithm=forgiving_grpo), expected)
    assert grouped
    assert not any(grouped)


def test_adapters_and_activations_that_are_computed_again():
    policy = copy.deepcopy(policy_of())
    LoRA(4).put_on(policy.model, seed=0)
    with_kl = functools.partial(GRPO, kl_coef=0.3)
    for settings in ({"policy": policy}, {"policy": policy, "algorithm": with_kl}, {"activation_checkpointing": True}):
        settings = {"algorithm": forgiving_grpo, **settings}
        samples = scored(8, alike=True)
        assert_equal(gradients(samples, shares=True, **settings), gradients(samples, shares=False, **settings))


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks(size):
    settings = {"algorithm": functools.partial(GRPO, kl_coef=0.3), "mini_batches": 2}
    samples = scored(16, alike=True)
    expected = gradients(samples, shares=False, **settings)
    threads = torch.get_num_threads()
    found = run_ranks(size, lambda ranks: gradients(samples, shares=True, ranks=ranks, **settings))
    torch.set_num_threads(threads)
    for each in found:
        assert_equal(each, expected)


# -- layout --------------------------------------------------------------------------------------------------------


def test_a_prompt_is_there_once_and_an_answers_last_token_not_at_all():
    samples = scored(8)
    one, two = samples[0], samples[4]
    batch = token_batch(samples, "cpu", shares=True)
    layout = batch.shared
    assert layout is not None
    assert len(layout.paths.lengths) == 2
    assert layout.sizes[0] == 2 * max(len(one.prompt.token_ids), len(two.prompt.token_ids))
    assert sum(layout.sizes) == layout.input_ids.numel() == layout.position_ids.numel()
    rows = token_batch(samples, "cpu")
    assert batch.places is not None
    assert torch.equal(batch.targets[batch.places], rows.targets)
    assert torch.equal(batch.response, rows.response)
    assert torch.equal(layout.input_ids[0, batch.indices[batch.places]], rows.input_ids.flatten()[rows.indices])
    assert sum(layout.sizes[1:]) <= sum(len(sample) for sample in samples) + 8 * 8


def test_what_answers_begin_with_is_there_once():
    prompt = scored(1)[0].completion.request
    words = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 7, 8, 9], [5, 6], [2, 6, 7], [5, 6, 7, 8, 9, 4]]
    batch = token_batch([answered(prompt, np.array(each, np.int32)) for each in words], "cpu", shares=True)
    layout = batch.shared
    assert layout is not None
    # 5 6 7 8 9, of which the last token is read for that which goes on with 4, and 2 6; nothing is read behind 3 and 7.
    read = [
        token
        for each in layout.buckets
        for token in layout.input_ids[0, each.read[:, -each.width :]].flatten().tolist()
    ]
    assert sorted(token for token in read if token) == [2, 5, 6, 6, 7, 8, 9]
    # After the prompt 5 or 2, after 5 only 6 and so on, after 5 6 7 either 8 or 3: as many as there are different
    # beginnings.
    assert len(batch.targets) == len({tuple(each[:end]) for each in words for end in range(1, len(each) + 1)})
    assert batch.scatter(batch.targets).tolist() == [[*each, *[0] * (6 - len(each))] for each in words]


def test_an_empty_answer_has_no_tokens_and_a_value_behind_it():
    request = scored(1)[0].completion.request
    samples = [answered(request, np.array(each, np.int32)) for each in ([], [5, 6], [])]
    for behind, shape in ((False, (3, 2)), (True, (3, 3))):
        batch = token_batch(samples, "cpu", shares=True, behind=behind)
        assert batch.response.shape == shape
        assert batch.response.sum(1).tolist() == [behind, 2 + behind, behind]
        assert batch.scatter(batch.targets)[1].tolist() == [5, 6, *[0] * behind]


def test_a_few_tokens_in_common_are_not_worth_a_run():
    """What each row reads has to be told of each, then."""
    one = np.arange(100)
    other, near = one.copy(), one.copy()
    other[3:] += 1
    near[90:] += 1
    assert dict(side_by_side([one, other])) == {0: 0, 1: 0}
    assert dict(side_by_side([near, one, other])) == {1: 0, 0: 90, 2: 0}
    alone = place_runs([one] * 2, [one, other], "cpu").layout.buckets
    assert [len(each.visible) for each in alone] == [1]


@pytest.mark.parametrize("max_tokens", [1, 30, 100, 10**6])
def test_micro_batches_keep_a_prompts_answers_together_while_they_fit(max_tokens):
    samples = scored(16)
    parts = micro_batches(samples, range(16), max_tokens, shares=True)
    assert sorted(i for part in parts for i in part) == list(range(16))
    for part in parts:
        prompts = {samples[i].prompt.id: len(samples[i].prompt.token_ids) for i in part}
        tokens = max(prompts.values()) * len(prompts) + sum(len(samples[i]) for i in part)
        assert tokens <= max_tokens or len(part) == 1
    if max_tokens == 10**6:
        assert len(parts) == 1


def test_micro_batches_count_what_answers_begin_with_once_but_for_copies_of_its_keys():
    request = dataclasses.replace(scored(1)[0].completion.request, prompt=make_prompt(np.full(80, 4)))
    samples = [answered(request, np.append(np.full(160, 5), [i, i]).astype(np.int32)) for i in range(6, 14)]
    assert [unit.extra for unit in units(samples, range(8), max_tokens=None, shares=True)] == [162 + 5 + 7 * (2 + 15)]
    parts = units(samples, range(8), max_tokens=80 + 162 + 5 + 3 * (2 + 15), shares=True)
    assert [len(unit.samples) for unit in parts] == [4, 4]


def test_groups_are_dealt_whole_unless_a_rank_would_wait():
    samples = scored(16)
    for size in (1, 2, 4):
        dealt = balance_samples(samples, range(16), size, shares=True)
        assert sorted(i for part in dealt for i in part) == list(range(16))
        assert all(len({part_of(i, dealt) for i in range(start, start + 4)}) == 1 for start in range(0, 16, 4))
    dealt = balance_samples(samples[:4], range(4), 4, shares=True)
    assert sorted(map(len, dealt)) == [1, 1, 1, 1], "one group for four ranks: each computes the prompt"


def part_of(index: int, dealt: list[list[int]]) -> int:
    return next(rank for rank, part in enumerate(dealt) if index in part)


def test_outside_of_the_context_no_model_reads_a_shared_layout():
    body = policy_of().model.get_decoder()
    layout = token_batch(scored(4), "cpu", shares=True).shared
    assert isinstance(layout, SharedLayout)
    before = body.config._attn_implementation
    with sharing([body, body]):
        assert body.config._attn_implementation != before
    assert body.config._attn_implementation == before
