"""The central invariant: batch mates, slots, memory, pass size and drafts change only the speed of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.drafters import Drafter
from rhymerl.drafts import Draft
from rhymerl.engine.engine import Engine
from rhymerl.errors import BackendError, ConfigError
from rhymerl.testing import OracleDrafter, RandomTreeDrafter, make_prompt, make_requests, tiny_policy
from rhymerl.types import Completion, RolloutRequest
from tests.products import values_first

MODELS = ("qwen2", "qwen3", "llama")
SAMPLING = {
    "T=1": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.8},
    "top-k, min-p": {"temperature": 1.3, "top_k": 7, "min_p": 0.05},
}


def answers(
    policy, requests: Sequence[RolloutRequest], *, drafter: Drafter | None = None, **settings
) -> dict[str, Completion]:
    """All completions by id; the KV store is checked after every batch of completions and must end up all free."""
    engine = Engine(policy.model, drafter=drafter, **{"kv_tokens": 4096, "check_drafts": True, **settings})
    engine.submit(requests)
    done = {}
    while engine.has_work:
        done.update({completion.request.id: completion for completion in engine.run()})
        engine.check_integrity()
    engine.new_weights(1)
    assert engine.kv.pool.num_free == engine.kv.num_slots
    return done


def assert_same(left: dict[str, Completion], right: dict[str, Completion], *, atol: float = 1e-9) -> None:
    assert left.keys() == right.keys()
    for name, completion in left.items():
        np.testing.assert_array_equal(completion.token_ids, right[name].token_ids, err_msg=name)
        np.testing.assert_allclose(completion.logprobs, right[name].logprobs, atol=atol, rtol=0)
        assert completion.finish_reason == right[name].finish_reason


@pytest.mark.parametrize(("model_type", "sampling"), values_first(MODELS, SAMPLING))
def test_drafts_change_no_token(model_type, sampling):
    policy = tiny_policy(model_type)
    requests = make_requests(8, group_size=3, **sampling)
    plain = answers(policy, requests, max_running=32)
    assert len({c.token_ids.tobytes() for c in plain.values()}) > 3, "the case is too easy: all answers are alike"
    assert_same(plain, answers(policy, requests, drafter=RandomTreeDrafter(), max_running=5))
    oracle = OracleDrafter({name: c.token_ids for name, c in plain.items()})
    drafted = answers(policy, requests, drafter=oracle, max_running=7)
    assert_same(plain, drafted)
    assert all(c.num_passes <= -(-len(c.token_ids) // 17) + 1 for c in drafted.values()), "the oracle's drafts were cut"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 1},
        {"max_running": 3},
        {"max_running": 1, "kv_tokens": 60},
        {"max_running": 16, "kv_tokens": 70},
        {"max_running": 16, "kv_tokens": 70, "drafter": RandomTreeDrafter(seed=3)},
        {"max_running": 16, "max_pass_tokens": 17},
        {"max_running": 16, "max_pass_tokens": 17, "drafter": RandomTreeDrafter(seed=4)},
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items() if name != "drafter"),
)
def test_slots_memory_and_pass_size_change_no_token(settings):
    policy = tiny_policy(tied=True)
    requests = make_requests(10, group_size=4)
    assert_same(answers(policy, requests, max_running=40), answers(policy, requests, **settings))


@pytest.mark.parametrize("prompt_tokens", [(100, 150), (1, 150)])
def test_drafts_below_long_prompts_change_no_token(prompt_tokens):
    """Rows of many tokens and keys go through torch's attention, short ones beside them through the compiled loop."""
    policy = tiny_policy()
    requests = make_requests(8, group_size=2, prompt_tokens=prompt_tokens)
    plain = answers(policy, requests)
    assert_same(plain, answers(policy, requests, drafter=RandomTreeDrafter()))
    assert_same(plain, answers(policy, requests, drafter=OracleDrafter({n: c.token_ids for n, c in plain.items()})))


def test_alone_and_among_31_others():
    policy = tiny_policy("llama")
    requests = make_requests(32, seed=5)
    together = answers(policy, requests, max_running=32)
    for request in requests[::6]:
        assert_same(answers(policy, [request]), {request.id: together[request.id]})


def test_the_noise_is_what_decides():
    """The same prompts under other seeds get other tokens: the comparison above can fail."""
    policy = tiny_policy()
    first, second = make_requests(6), make_requests(6)
    second = [replace(request, seed=request.seed + 1) for request in second]
    left, right = answers(policy, first), answers(policy, second)
    assert any(left[name].token_ids.tolist() != right[name].token_ids.tolist() for name in left)


def test_withdrawn_and_resubmitted_goes_on_as_if_nothing_had_happened():
    policy = tiny_policy()
    requests = make_requests(6, group_size=2)
    whole = answers(policy, requests)
    engine = Engine(policy.model, kv_tokens=4096, max_running=8)
    engine.submit(requests)
    done = {c.request.id: c for c in engine.run()}
    partial = engine.withdraw()
    assert {c.request.id for c in partial} | done.keys() == whole.keys()
    assert any(0 < len(c.token_ids) < len(whole[c.request.id].token_ids) for c in partial)
    done.update(answers(policy, [c.resume() for c in partial], max_running=3))
    assert_same(whole, done)


def test_new_weights_in_flight_mark_the_tokens_with_their_version():
    policy = tiny_policy()
    engine = Engine(policy.model, kv_tokens=4096)
    engine.submit(make_requests(3, max_tokens=24, stop_token_ids=()))
    for _ in range(5):
        with engine.forward.ready():
            engine.step()
    engine.new_weights(7)
    done = []
    while engine.has_work:
        done += engine.run()
    for completion in done:
        assert completion.output.policy_versions.tolist() == [0] * 5 + [7] * 19


def test_more_prompts_than_rows():
    """Idle prefixes fill all rows; a sample whose own prefix is still there must find a row all the same."""
    policy = tiny_policy(num_layers=1)
    requests = make_requests(60, group_size=4, max_tokens=6)
    assert_same(answers(policy, requests, max_running=64), answers(policy, requests, max_running=4))


def test_a_prompt_of_one_token_among_more_prompts_than_rows():
    """It has no prefix of its own, and needs a row all the same."""
    policy = tiny_policy(num_layers=1)
    requests = [*make_requests(30, max_tokens=2, prompt_tokens=(9, 9)), *make_requests(1, prompt_tokens=(1, 1))]
    requests[-1] = replace(requests[-1], id="short")
    assert_same(answers(policy, requests, max_running=64), answers(policy, requests, max_running=2))


class Wide(Drafter):
    """A drafter of as many siblings as the budget allows, in plain lists, as the docstring of Draft shows."""

    def propose(self, request, context, budget):
        return Draft(token_ids=list(range(2, 2 + budget)), parents=[-1] * budget)


def test_a_wide_draft_at_the_very_end_of_the_context():
    policy = tiny_policy(context=29)
    requests = make_requests(4, group_size=2, prompt_tokens=(9, 9), max_tokens=20, stop_token_ids=())
    drafted = answers(policy, requests, drafter=Wide())
    assert_same(answers(policy, requests), drafted)
    assert sum(c.num_accepted for c in drafted.values()) > 0


def test_what_has_ended_cannot_go_on():
    policy = tiny_policy()
    engine = Engine(policy.model)
    for completion in answers(policy, make_requests(6)).values():
        with pytest.raises(ConfigError, match="has ended already"):
            engine.submit([completion.resume()])


class Malformed(Drafter):
    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, request, context, budget):
        return self.draft


@pytest.mark.parametrize(
    ("token_ids", "parents", "problem"),
    [
        ([5, 6], [-1], "one length"),
        ([5, 5], [-1, -1], "two siblings with the same token"),
        ([5, 6], [-1, 1], "does not come before its child"),
        ([5, 6], [-1, -2], "does not come before its child"),
        ([99], [-1], "outside the vocabulary"),
        ([-1], [-1], "outside the vocabulary"),
        ([2] * 17, list(range(-1, 16)), "the budget is 16"),
        ([5.5], [-1], "must be integers"),
    ],
)
def test_a_malformed_draft_is_named_or_ignored_and_counted(token_ids, parents, problem):
    policy = tiny_policy(num_layers=1)
    requests = make_requests(2, max_tokens=5)
    drafter = Malformed(Draft(token_ids=token_ids, parents=parents))
    with pytest.raises(ValueError, match=f"Malformed proposed a bad draft.*{problem}"):
        answers(policy, requests, drafter=drafter)
    engine = Engine(policy.model, drafter=drafter, kv_tokens=4096)
    engine.submit(requests)
    done = {}
    while engine.has_work:
        done.update({completion.request.id: completion for completion in engine.run()})
    assert_same(answers(policy, requests), done)
    assert engine.totals.bad_drafts > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("where", ["norm", "layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"])
def test_a_policy_that_has_diverged_is_an_error(where, dtype):
    policy = tiny_policy(dtype=dtype)
    policy.model.model.get_submodule(where).weight.data.fill_(float("nan"))
    engine = Engine(policy.model)
    engine.submit(make_requests(1))
    with pytest.raises(BackendError, match=r"not finite.*update\.learning_rate"):
        engine.run()


def test_prompts_given_as_wider_integers_share_only_prefixes_that_are_theirs():
    """The token 5 as int64 has the bytes of the tokens 5 0 as int32."""
    policy = tiny_policy()
    (template,) = make_requests(1, max_tokens=12, stop_token_ids=())
    prompts = [make_prompt([5, 7]), make_prompt([5, 0, 7])]
    requests = [replace(template, id=str(number), prompt=prompt) for number, prompt in enumerate(prompts)]
    wide = replace(prompts[0], token_ids=np.array([5, 7], np.int64))
    assert_same(answers(policy, requests), answers(policy, [replace(requests[0], prompt=wide), requests[1]]))


@pytest.mark.parametrize("given", [[5, 7], (5, 7), np.array([5, 7], np.int64), np.array([5, 7], np.uint8)], ids=type)
def test_token_ids_of_a_prompt_are_of_one_width(given):
    prompt = replace(make_prompt([1]), token_ids=given)
    assert (prompt.token_ids.dtype, prompt.token_ids.tolist()) == (np.int32, [5, 7])
    assert replace(prompt, token_ids=[]).token_ids.dtype == np.int32
    with pytest.raises(TypeError):
        replace(prompt, token_ids=[0.5])
