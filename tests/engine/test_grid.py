"""The central invariant over a grid of drafters, architectures, kinds of sampling, slot counts and new weights.

A drafter is added by one line in DRAFTERS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import pytest
import torch

from rhymerl.budgets import AIMDBudget, Budget, FixedBudget, GoodputBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter
from rhymerl.engine.engine import Engine
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.models.policy import Policy
from rhymerl.testing import OracleDrafter, RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.types import Completion, RolloutRequest, Sample
from tests.engine.test_lossless import MODELS, assert_same

Answers = Mapping[str, Sequence[int]]  # by request id: those of plain decoding, in all epochs

DRAFTERS: dict[str, Callable[[Answers], Drafter]] = {
    "random trees": lambda plain: RandomTreeDrafter(),
    "oracle": OracleDrafter,
    "ngram": lambda plain: NGramDrafter(min_match=1),
    "history_tree": lambda plain: HistoryTreeDrafter(),
    "paper": lambda plain: HistoryTreeDrafter(
        window=1,
        own=False,
        siblings=False,
        min_match=1,
        max_branches=1,
        priority="reward",
        length_weight=float("inf"),
        deterministic=True,  # it drafts from finished indexes alone, and a short run may end before they are there
    ),
}
BUDGETS: dict[str, Callable[[], Budget]] = {
    "paper": AIMDBudget,
    "history_tree": lambda: GoodputBudget(costs=[(0, 1.0), (1000, 1.1)]),  # nodes are cheap: they are verified
}
TEMPERATURES = (0.0, 0.7, 1.0)
TRUNCATIONS = {
    "all tokens": {},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 5},
}
SLOTS = (1, 7, 64)
NUM_EPOCHS = 3
ROUNDING = 1e-6  # nats: transformers' norms go through float32, where one in thousands rounds the other way


def epochs_of_requests(count: int, **sampling) -> list[list[RolloutRequest]]:
    """Return epochs of the same prompts, four samples each, under other noise."""
    requests = make_requests(-(-count // (4 * NUM_EPOCHS)), group_size=4, **sampling)
    return [
        [dataclasses.replace(r, id=f"{epoch}/{r.id}", seed=r.seed + epoch + 1) for r in requests]
        for epoch in range(NUM_EPOCHS)
    ]


def move(policy: Policy, epoch: int) -> None:
    """Do what an update might do: the same small step whoever asks."""
    torch.manual_seed(epoch)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def generate(
    policy: Policy,
    epochs: Sequence[Sequence[RolloutRequest]],
    drafter: Drafter | None,
    *,
    slots: int,
    budget: Budget | None = None,
) -> dict[str, Completion]:
    """One engine through all epochs; the drafter learns what each came to, and the weights move on."""
    engine = Engine(policy.model, drafter=drafter, budget=budget, max_running=slots, kv_tokens=8192, check_drafts=True)
    done: dict[str, Completion] = {}
    history = HistoryStore()
    for epoch, requests in enumerate(epochs):
        engine.new_weights(epoch)
        engine.submit(requests)
        while engine.has_work:
            done.update({completion.request.id: completion for completion in engine.run()})
        engine.check_integrity()
        if drafter is not None:
            learn(drafter, history, [sample(done[request.id]) for request in requests], epoch)
        move(policy, epoch)
    if drafter is not None:
        drafter.close()
    return done


def learn(drafter: Drafter, history: HistoryStore, samples: Sequence[Sample], epoch: int) -> None:
    before = history.version
    for prompt, answers in answers_of(samples, epoch):
        history.add(prompt, answers)
    drafter.learn(samples)
    drafter.follow(history.deltas(before))


def sample(completion: Completion) -> Sample:
    reward = float(completion.token_ids.sum() % 2)
    mask = np.ones(len(completion.token_ids), np.bool_)
    return Sample(completion=completion, text="", reward=reward, rewards={}, loss_mask=mask)


def assert_lossless(model_type: str, sampling: Mapping[str, float], *, count: int, slots: Sequence[int]) -> None:
    epochs = epochs_of_requests(count, **sampling)
    plain = generate(tiny_policy(model_type), epochs, None, slots=64)
    assert len(plain) >= count
    assert len({completion.token_ids.tobytes() for completion in plain.values()}) > count / 20, "too easy"
    for (name, make), most in product(DRAFTERS.items(), slots):
        drafter = make({name: completion.token_ids for name, completion in plain.items()})
        budget = BUDGETS.get(name, FixedBudget)()
        drafted = generate(tiny_policy(model_type), epochs, drafter, slots=most, budget=budget)
        assert_same(plain, drafted, atol=ROUNDING)
        assert sum(completion.num_accepted for completion in drafted.values()) > 0, f"{name}: nothing was tested"


SAMPLINGS = {
    f"T={temperature}, {name}": {"temperature": temperature, **truncation}
    for temperature, (name, truncation) in product(TEMPERATURES, TRUNCATIONS.items())
}


@pytest.mark.parametrize("number", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_a_slice(number):
    """Each kind of sampling once, with one architecture and one slot count or another."""
    sampling = list(SAMPLINGS.values())[number]
    assert_lossless(MODELS[number % len(MODELS)], sampling, count=36, slots=[(3, 16, 5, 32)[number % 4]])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("model_type", MODELS)
def test_the_whole_grid(model_type, sampling):
    assert_lossless(model_type, sampling, count=500, slots=SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_float32_all_but_one_in_a_thousand_are_the_same(drafter):
    """Only where two candidates are as close as the rounding of another order of additions."""
    epochs = epochs_of_requests(5000)
    plain = generate(tiny_policy(dtype="float32"), epochs, None, slots=64)
    made = DRAFTERS[drafter]({name: completion.token_ids for name, completion in plain.items()})
    drafted = generate(tiny_policy(dtype="float32"), epochs, made, slots=48)
    same = [drafted[name].token_ids.tolist() == c.token_ids.tolist() for name, c in plain.items()]
    assert len(same) >= 5000
    assert np.mean(same) >= 0.999
