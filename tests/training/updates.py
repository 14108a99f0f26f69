"""Updates of a tiny policy, from samples with random rewards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rhymerl.algos import GRPO
from rhymerl.algos.base import Algorithm, Batch, PolicyOutput, Totals
from rhymerl.distributed import Alone, Ranks
from rhymerl.models.critic import CriticSettings
from rhymerl.models.policy import Policy
from rhymerl.models.sharding import replicate, shard
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from tests.models.test_logprobs import answered, make_samples


def scored(count: int, *, alike: bool = False) -> list[Sample]:
    """Groups of four samples with random rewards and behaviour log-probs, of answers that begin `alike` or not."""
    source = np.random.default_rng(3)
    samples = make_samples(count)
    if alike:
        samples = [like(samples[i - i % 4], sample, way=(i + i // 4) % 5) for i, sample in enumerate(samples)]
    result = []
    for i, sample in enumerate(samples):
        prompt = samples[i - i % 4].prompt
        request = RolloutRequest(
            id=str(i), prompt=prompt, sample=i % 4, seed=i, sampling=sample.completion.request.sampling
        )
        generated = Output(
            token_ids=sample.completion.token_ids,
            logprobs=-source.random(len(sample)) * 5,
            policy_versions=np.zeros(len(sample), np.int32),
        )
        completion = Completion(request=request, output=replace(generated, finish_reason="stop"))
        reward = float(source.integers(2))
        result.append(Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=sample.loss_mask))
    return result


def like(first: Sample, sample: Sample, *, way: int) -> Sample:
    """Return an answer by `way`: the first, its half with others, these with more, the first again, or its half."""
    tokens = first.completion.token_ids
    half, other = tokens[: (len(tokens) + 1) // 2], tokens[::-1]
    ways = tokens, np.append(half, other), np.concatenate((half, other, tokens)), tokens, half
    return answered(sample.completion.request, ways[way])


def norm_in_double(norm: Qwen2RMSNorm, states: Tensor) -> Tensor:
    """Compute a norm in its input's dtype: transformers computes it in float32, and the difference would show."""
    return norm.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


class ActorCritic(Algorithm):
    """Reads all that there is: every pass, values with a gradient, an entropy that is trained, what a step adapts."""

    needs = frozenset({"proximal", "reference", "values", "entropy_gradient"})

    def __init__(self, *, value_coef: float = 0.5) -> None:
        self.value_coef = value_coef
        self.num_steps = 0
        self.prepared: list[Batch] = []

    def advantages(self, batch: Batch) -> Tensor:
        return (batch.rewards[:, None] - batch.values).masked_fill(~batch.mask, 0)

    def prepare(self, batch: Batch) -> Batch:
        self.prepared.append(replace(super().prepare(batch), returns=batch.rewards[:, None].expand_as(batch.values)))
        return self.prepared[-1]

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        ratio = (output.logprobs - batch.proximal_logprobs).exp()
        pull = (output.logprobs - batch.reference_logprobs) ** 2
        wrong = (output.values - batch.returns) ** 2
        each = -ratio * batch.advantages + 0.1 * pull - 0.1 * output.entropy + self.value_coef * wrong
        # Of the first token and of each sample, so that both totals are needed.
        loss = (
            each.masked_fill(~batch.mask, 0).sum() / totals.num_tokens + output.values[:, 0].sum() / totals.num_samples
        )
        kept = {"ratio": ratio, "wrong": wrong, "values": output.values}
        return loss, {name: (it.detach() * batch.mask).sum() / totals.num_tokens for name, it in kept.items()}

    def metrics(self, batch: Batch) -> dict[str, float]:
        self.num_steps += 1
        return {"num_steps": float(self.num_steps)}


def forgiving_grpo(**settings: Any) -> GRPO:
    """Whose ratios are hardly ever clipped."""
    return GRPO(clip_low=5, clip_high=50, **settings)


@functools.cache
def first_policy(attention_dropout: float = 0.0) -> Policy:
    """Return the policy of which every run starts from a copy."""
    policy = tiny_policy(attention_dropout=attention_dropout)
    policy.model.train()
    return policy


def run_update(
    samples: list[Sample],
    *,
    algorithm: Callable[[], Algorithm] = forgiving_grpo,
    critic: CriticSettings | None = None,
    steps: int = 1,
    dropout: float = 0.0,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ranks: Ranks | None = None,
    draws_exactly: bool = False,
    shares_prefixes: bool = False,
    mesh: DeviceMesh | None = None,
    teacher: PreTrainedModel | None = None,
    **settings: float,
) -> tuple[nn.ModuleDict, dict[str, float]]:
    """Train on the same samples as `steps` rollout steps in a row, from the same model.

    The last step's metrics come without times. Returns what was trained: `model` and, if there is one, `critic`;
    sharded over a `mesh`, as the reference is.
    """
    made = algorithm()
    model = copy.deepcopy(first_policy(dropout).model)
    update = UpdateSettings(**{"learning_rate": 1e-3, **settings})
    trained = nn.ModuleDict({"model": model})
    if critic is not None:
        trained["critic"] = critic.build(first_policy(dropout), seed=2)
    reference = (teacher or first_policy(dropout).model) if made.reads_reference else None
    if mesh is not None:
        reference = copy.deepcopy(reference)
        for each in (model, reference, trained["critic"].body if critic is not None else None):
            if each is not None:
                shard(each, mesh)
        if critic is not None:
            replicate(trained["critic"].head, mesh)
    optimizer = update.optimizer(list(model.parameters()), critic=trained["critic"] if critic is not None else None)
    schedule = update.schedule(optimizer, 10)
    updater = Updater(
        model,
        made,
        update,
        temperature=0.9,
        seed=1,
        backward=backward,
        autocast=nullcontext,
        draws_exactly=draws_exactly,
        shares_prefixes=shares_prefixes,
        reference=reference,
        critic=trained["critic"] if critic is not None else None,
        ranks=ranks if ranks is not None else Alone(),
    )
    metrics = [dict(updater.run(samples, step, optimizer=optimizer, schedule=schedule)) for step in range(steps)]
    return trained, {name: value for name, value in metrics[-1].items() if not name.startswith("timing_s/")}
