"""The loss that balances experts: transformers' own, over all trained tokens of a mini-batch, however it is split."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.algos import GRPO
from rhymerl.distributed import Alone, Ranks
from rhymerl.errors import ConfigError, RunError
from rhymerl.models.logprobs import token_batch
from rhymerl.models.routing import routed, routers_of
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import ScriptedBackend, tiny_policy
from rhymerl.training.checks import check_algorithm
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Sample
from tests.distributed.threads import run_ranks
from tests.engine.test_grid import sample
from tests.models.small import small_model
from tests.models.windowed import InDouble
from tests.training.test_router_replay import answers, asked, experts_model

_COEFFICIENT = 0.5


def sampled(model: PreTrainedModel) -> list[Sample]:
    """Answers of a model, of which the first of each group is not trained on at all, and the others in part."""
    source, samples = np.random.default_rng(0), [sample(each) for each in answers(model, asked()).values()]
    return [
        replace(each, reward=1.0, loss_mask=(source.random(len(each)) < 0.8) & (i % 3 > 0))
        for i, each in enumerate(samples)
    ]


def gradients(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    shares: bool = True,
    ranks: Ranks | None = None,
    within: Callable[[], AbstractContextManager[Any]] = InDouble,
    **settings: Any,
) -> tuple[list[Tensor], Mapping[str, float]]:
    """Of an update in which all rewards are equal, so that the balance loss is all there is."""
    model.train()
    update = UpdateSettings(learning_rate=0, max_grad_norm=0, **{"router_aux_loss_coef": _COEFFICIENT, **settings})
    optimizer = update.optimizer(list(model.parameters()))
    parts: Any = {"temperature": 1.0, "seed": 1, "backward": Tensor.backward, "autocast": nullcontext}
    updater = Updater(
        model, GRPO(), update, draws_exactly=True, shares_prefixes=shares, ranks=ranks or Alone(), **parts
    )
    with within():
        metrics = updater.run(samples, 0, optimizer=optimizer, schedule=update.schedule(optimizer, 10))
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()], metrics


def expected(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[list[Tensor], float]:
    """What transformers has of the positions in front of trained tokens, in one pass over all samples."""
    model.train().zero_grad()
    tokens = token_batch(samples, "cpu")
    trained = np.concatenate([each.loss_mask for each in samples])
    counted = torch.zeros(tokens.input_ids.numel())
    counted[tokens.indices[torch.from_numpy(trained)]] = 1
    found = model(input_ids=tokens.input_ids, output_router_logits=True, use_cache=False)
    of_family = sys.modules[type(model).__module__].load_balancing_loss_func
    loss = of_family(found.router_logits, 16, 4, counted.view(tokens.input_ids.shape))
    (_COEFFICIENT * loss).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()], loss.item()


def assert_equal(found: Sequence[Tensor], others: Sequence[Tensor], atol: float) -> None:
    for mine, other in zip(found, others, strict=True):
        torch.testing.assert_close(mine, other, atol=atol, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_it_is_the_loss_of_transformers(family):
    model = experts_model(family)
    samples = sampled(model)
    grads, loss = expected(model, samples)
    found, metrics = gradients(model, samples)
    assert metrics["router_aux_loss"] == pytest.approx(loss, rel=1e-5)
    assert loss > 4.1, "the case is too easy: all experts are loaded alike"
    assert max(each.abs().max() for each in grads) > 0.01
    assert_equal(found, grads, 1e-6)  # transformers' is in float32


def test_no_split_changes_it():
    model = experts_model()
    samples = sampled(model)
    whole, metrics = gradients(model, samples)
    name = "router_aux_loss"
    splits: list[dict[str, Any]] = [
        {"micro_batch_tokens": 40},
        {"shares": False},
        {"shares": False, "micro_batch_tokens": 40},
        {"chunk_tokens": 3},
    ]
    for split in splits:
        found, of_split = gradients(model, samples, **split)
        assert_equal(found, whole, 1e-12)
        assert of_split[name] == pytest.approx(metrics[name], rel=1e-12), split
    once, again = (
        gradients(model, samples, within=nullcontext, activation_checkpointing=each) for each in (False, True)
    )
    assert_equal(once[0], again[0], 1e-12)
    models = [copy.deepcopy(model), model]
    for found, of_rank in run_ranks(2, lambda ranks: gradients(models[ranks.rank], samples, ranks=ranks)):
        assert_equal(found, whole, 1e-12)
        assert of_rank[name] == pytest.approx(metrics[name], rel=1e-12)


def test_loads_are_those_of_the_experts_that_compute_the_tokens():
    """All tokens by four experts: then only these are pressed, where their routers would take others."""
    model = experts_model()
    samples = sampled(model)
    crowded = []
    for each in samples:
        output = each.completion.output
        routes = np.broadcast_to(np.arange(1, 5, dtype=np.uint8), output.routes.shape)
        crowded.append(replace(each, completion=replace(each.completion, output=replace(output, routes=routes))))
    _, metrics = gradients(model, crowded)
    tokens = token_batch(crowded, "cpu")
    with torch.no_grad(), InDouble(), routed(routers_of(model), tokens.routes):
        logits = model(input_ids=tokens.input_ids, output_router_logits=True, use_cache=False).router_logits
    trained = tokens.indices[torch.from_numpy(np.concatenate([each.loss_mask for each in samples]))]
    of_four = torch.stack([each[trained].softmax(-1)[:, :4].sum(-1) for each in logits]).mean()
    assert metrics["router_aux_loss"] == pytest.approx(16 * of_four.item(), rel=1e-9)


def test_off_it_adds_nothing():
    model = experts_model()
    found, metrics = gradients(model, sampled(model), router_aux_loss_coef=0)
    assert "router_aux_loss" not in metrics
    assert max(each.abs().max() for each in found) == 0


def test_steps_on_it_even_out_the_loads():
    model = experts_model()
    samples = sampled(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        grads, metrics = gradients(model, samples)
        losses.append(metrics["router_aux_loss"])
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


def test_where_it_cannot_be_computed_it_is_refused():
    update, name = UpdateSettings(router_aux_loss_coef=0.001), r"^update\.router_aux_loss_coef=0\.001: "
    with pytest.raises(ConfigError, match=name + "Qwen2ForCausalLM has no loss that balances experts; expected 0"):
        update.check(tiny_policy().model, 16)
    balanced_otherwise = small_model("glm4_moe", n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=0)
    with pytest.raises(ConfigError, match=name + "Glm4MoeForCausalLM has no loss that balances experts"):
        update.check(balanced_otherwise, 16)
    update.check(experts_model(), 16)
    with pytest.raises(ValueError, match=name + "ScriptedBackend cannot say which experts"):
        check_algorithm(GRPO(), rollout=RolloutSettings(), update=update, backend=ScriptedBackend(lambda request: [0]))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=-1"):
        UpdateSettings(router_aux_loss_coef=-1)
    model = experts_model()
    unknown = [
        replace(each, completion=replace(each.completion, output=replace(each.completion.output, routes=None)))
        for each in sampled(model)
    ]
    with pytest.raises(RunError, match=r"^update\.router_aux_loss_coef: nothing says which experts"):
        gradients(model, unknown)
