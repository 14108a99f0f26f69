"""Requests on their way through JSON and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.backends.remote.wire import feed_of, from_custom_params, noise_of, to_custom_params
from rhymerl.testing import make_prompt
from rhymerl.types import Output, RolloutRequest, SamplingParams

SAMPLING = SamplingParams(max_tokens=9, stop_token_ids=(1,))


def travelled(request: RolloutRequest, *, feed: int = 0):
    """Its custom_params as they arrive: through JSON, and with what SGLang puts beside them."""
    return {**json.loads(json.dumps(to_custom_params(request, feed=feed))), "__req__": object()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WHOLE = {
    "id": "a",
    "sample": 0,
    "seed": "7",
    "split": "train",
    "prompt_id": "p",
    "prompt_key": "k",
    "offset": 1,
    "feed": 0,
}


@given(
    own=json_values
    | st.builds(lambda name, value: {**WHOLE, name: value}, st.sampled_from([*WHOLE, "prefetched"]), json_values)
)
def test_whatever_comes_as_our_parameters_is_a_request(own):
    """An exception in SGLang's scheduler would end the engine, and all other requests with it."""
    params = {"rhymerl": own}
    seed, offset = noise_of(params, "rid")
    request = from_custom_params(params, "rid", [4, 5, 6], SAMPLING)
    assert request.seed == seed
    assert 0 <= offset <= 2**31
    assert len(request.prompt.token_ids) + len(request.output or ()) == 3
    assert feed_of(params) >= 0
    hash(request.id), hash(request.prompt.key)


@given(params=st.one_of(st.integers(), st.text(), st.lists(st.integers())))
def test_and_so_is_what_comes_in_their_place(params):
    assert noise_of(params, "a") == noise_of(None, "a")
    assert (
        from_custom_params(params, "a", [1], SAMPLING).prompt.key
        == from_custom_params(None, "a", [1], SAMPLING).prompt.key
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "x"), ("seed", "9" * 5000), ("seed", 1.5), ("offset", -1), ("offset", "1"), ("split", "test"), ("id", ["a"]),
     ("prompt_key", {}), ("feed", -1), ("feed", None), ("sample", True), ("prefetched", "?"), ("prefetched", "AAA="), ("prefetched", 3)],
)  # fmt: skip
def test_what_is_malformed_is_taken_for_a_request_of_others(name, value, caplog):
    params = {"rhymerl": {**WHOLE, name: value}}
    request = from_custom_params(params, "rid", [4, 5], SAMPLING)
    assert (request.id, request.seed) == ("rid", noise_of(None, "rid")[0])
    assert noise_of(params, "rid") == noise_of(None, "rid")
    assert "rid" in caplog.text


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    answer=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    prefetched=st.one_of(st.none(), st.lists(st.integers(0, 2**31 - 1), max_size=6)),
    seed=st.one_of(st.integers(0, 2**64 - 1), st.integers(2**63 - 1, 2**63 + 1)),
    sample=st.integers(0, 99),
    split=st.sampled_from(["train", "validation"]),
)
def test_a_request_arrives_as_it_left(prompt, answer, prefetched, seed, sample, split):
    count = len(answer)
    generated = Output(
        token_ids=np.array(answer, np.int32), logprobs=np.zeros(count), policy_versions=np.zeros(count, np.int32)
    )
    sent = RolloutRequest(
        id="3/7/0",
        prompt=make_prompt(prompt, id="7"),
        sample=sample,
        seed=seed,
        sampling=SAMPLING,
        split=split,
        output=generated,
        prefetched=None if prefetched is None else np.array(prefetched, np.int32),
    )
    params = travelled(sent, feed=4)
    back = from_custom_params(params, "rid", [*prompt, *answer], SAMPLING)
    for name in ("id", "sample", "seed", "split", "sampling"):
        assert getattr(back, name) == getattr(sent, name), name
    assert (back.prompt.id, back.prompt.key) == (sent.prompt.id, sent.prompt.key)
    assert back.prompt.token_ids.tolist() == prompt
    assert (back.output.token_ids.tolist() if back.output else []) == answer
    assert (back.output is None) == (count == 0)
    assert back.prompt.token_ids.dtype == np.int32
    assert (back.prefetched if back.prefetched is None else back.prefetched.tolist()) == prefetched
    assert back.prefetched is None or back.prefetched.dtype == np.int32
    assert ("prefetched" in params["rhymerl"]) == (prefetched is not None)
    assert noise_of(params, "rid") == (seed, count)
    assert feed_of(params) == 4


def test_what_only_the_trainer_knows_of_earlier_tokens_is_marked():
    request = RolloutRequest(id="1", prompt=make_prompt([4]), sample=0, seed=2, sampling=SAMPLING)
    params = to_custom_params(request, feed=0)
    params["rhymerl"]["offset"] = 2
    generated = from_custom_params(params, "rid", [4, 5, 6], SAMPLING).output
    assert np.isnan(generated.logprobs).all()
    assert generated.policy_versions.tolist() == [-1, -1]


@pytest.mark.parametrize("params", [None, {}, {"theirs": 1}])
def test_requests_of_others_are_known_by_their_tokens_and_names(params):
    first, again, other = (
        from_custom_params(params, rid, tokens, SAMPLING)
        for rid, tokens in (("a", [1, 2]), ("b", [1, 2]), ("a", [1, 3]))
    )
    assert first.prompt.key == again.prompt.key != other.prompt.key
    assert first.seed == other.seed != again.seed
    assert first.id == "a"
    assert first.output is None
    assert noise_of(params, "a") == (first.seed, 0)
    assert feed_of(params) == 0
