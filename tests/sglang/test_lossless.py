"""Drafts inside SGLang change the speed and nothing else, and its tokens are the embedded backend's."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.sglang.engines import answered, embedded, equal, largest_difference, remember, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 5},
    {"temperature": 1.3},
]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(dtype="float32", context=512)


@pytest.fixture(scope="module")
def plain(policy):
    with sglang() as backend:
        yield started(backend, policy)


@pytest.fixture(scope="module")
def drafting(policy):
    with sglang() as backend:
        yield started(backend, policy, HistoryTreeDrafter())


def test_a_thousand_sampled_answers(policy, plain, drafting):
    requests = make_requests(125, group_size=8)
    ours = embedded(policy, requests)
    history = HistoryStore()
    remember(history, ours)
    first = answered(drafting, requests)
    drafting.metrics()
    drafting.follow(history)
    second = answered(drafting, requests)
    metrics = drafting.metrics()
    without = answered(plain, requests)
    shares = {"none": equal(without, ours), "first epoch": equal(first, ours), "history": equal(second, ours)}
    print(shares, metrics)
    assert min(shares.values()) >= 0.995
    assert largest_difference(second, ours) < 1e-4
    assert largest_difference(without, ours) < 1e-4
    assert metrics["rollout/spec_accept_length"] > 3
    assert metrics["spec/draft_hit_rate"] > 0.9
    assert metrics["spec/bad_drafts"] == 0


def test_the_same_request_of_another_client_again(plain, drafting):
    """The request has the same name; now its first answer is the draft."""
    sampling = {"temperature": 1.5, "max_new_tokens": 40, "ignore_eos": True}
    for backend in (plain, drafting):
        engine = backend.engine
        assert backend._delivery.draws_by_seed
        answers = [
            engine.post("/generate", {"rid": "theirs", "input_ids": [3, 4, 5], "sampling_params": sampling})[
                "output_ids"
            ]
            for _ in range(3)
        ]
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_way_of_drawing(policy, plain, drafting, sampling):
    requests = make_requests(24, group_size=4, seed=3, **sampling)
    ours = embedded(policy, requests)
    assert equal(answered(plain, requests), ours) >= 0.98
    assert equal(answered(drafting, requests), ours) >= 0.98


def test_mixed_ways_in_one_batch(policy, drafting):
    requests = [
        dataclasses.replace(request, id=f"{i}/{request.id}")
        for i, sampling in enumerate(SAMPLINGS)
        for request in make_requests(6, group_size=2, seed=5, **sampling)
    ]
    assert equal(answered(drafting, requests), embedded(policy, requests)) >= 0.98


def test_the_distribution_is_the_same(plain, drafting):
    """Two samples of 1 024 answers with different seeds, by their two tokens: chi-square of homogeneity."""
    from scipy.stats import chi2_contingency

    (request,) = make_requests(1, seed=11, max_tokens=2, temperature=1.5, stop_token_ids=())
    counts = []
    for backend, first_seed in ((plain, 0), (drafting, 10_000)):
        requests = [dataclasses.replace(request, id=f"r{i}", sample=i, seed=first_seed + i) for i in range(1024)]
        counts.append(Counter(tuple(each.token_ids.tolist()) for each in answered(backend, requests).values()))
    common = [answer for answer, count in (counts[0] + counts[1]).items() if count >= 10]
    table = [[count[answer] for answer in common] for count in counts]
    for line, count in zip(table, counts, strict=True):
        line.append(1024 - sum(line))
        assert sum(count.values()) == 1024
    assert len(common) >= 10
    p = chi2_contingency(np.array(table)).pvalue
    print(f"chi-square over {len(common) + 1} outcomes: p = {p:.3f}")
    assert p > 0.01


def test_random_trees_change_nothing(policy):
    requests = make_requests(40, group_size=2, seed=7)
    with sglang() as backend:
        answers = answered(started(backend, policy, RandomTreeDrafter(seed=1)), requests)
        assert backend.metrics()["spec/draft_hit_rate"] > 0.5
    assert equal(answers, embedded(policy, requests)) >= 0.98


def test_bfloat16_is_reported():
    policy = tiny_policy(dtype="bfloat16", context=512)
    requests = make_requests(50, group_size=4)
    answers = {}
    for name, drafter in (("none", NoDrafter()), ("history", HistoryTreeDrafter())):
        with sglang() as backend:
            answers[name] = answered(started(backend, policy, drafter), requests)
    share = equal(answers["none"], answers["history"])
    print(f"bfloat16: {share:.1%} of the answers are the same with and without drafts")
    assert share > 0.5


def test_tokens_that_the_tokenizer_lacks_are_never_sampled():
    """The model has 64 rows and its tokenizer 19 tokens, as with matrices that were padded."""
    made = tiny_policy(dtype="float32", hidden_size=64, context=512, vocab_size=64)
    policy = dataclasses.replace(made, tokenizer=tiny_policy().tokenizer)
    requests = make_requests(6, group_size=2, max_tokens=24)
    expected = embedded(policy, requests)
    with started(sglang(), policy, RandomTreeDrafter(vocabulary=64)) as backend:
        answers = answered(backend, requests)
    assert max(int(each.token_ids.max()) for each in answers.values()) < 19
    assert equal(answers, expected) == 1
    assert largest_difference(answers, expected) < 1e-3
