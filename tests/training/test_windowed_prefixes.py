"""Prompts computed once by layers that are not those of Llama: the gradients are those of separate rows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymerl.models import attention, shared_prefixes
from rhymerl.models.attention import last_seen
from rhymerl.models.proof import prove_sharing
from rhymerl.models.shared_prefixes import SharedLayout
from rhymerl.testing import make_prompt
from rhymerl.training.settings import UpdateSettings
from tests.models.test_logprobs import answered
from tests.models.windowed import CHUNKED, FAMILIES, LATENTS, WINDOWED, InDouble, windowed_model
from tests.products import pairs_first, values_first
from tests.training.test_shared_prefixes import assert_equal, gradients
from tests.training.updates import forgiving_grpo, scored


def samples_of(seed: int, *, longest_prompt: int):
    """Groups of four, of a random prompt each, whose answers begin alike."""
    source, samples = np.random.default_rng(seed), scored(12, alike=True)
    prompts = [make_prompt(source.integers(2, 15, source.integers(1, longest_prompt + 1))) for _ in range(3)]
    found = []
    for number, sample in enumerate(samples):
        request = dataclasses.replace(sample.completion.request, prompt=prompts[number // 4])
        found.append(dataclasses.replace(answered(request, sample.completion.token_ids), reward=sample.reward))
    return found


def both(family: str, samples, **settings):
    """Return gradients and metrics with prompts shared, and of separate rows."""
    policy = SimpleNamespace(model=windowed_model(family, **settings).train())
    with InDouble():
        return [gradients(samples, shares=shares, algorithm=forgiving_grpo, policy=policy) for shares in (True, False)]


@pytest.mark.parametrize(("family", "window", "longest_prompt"), pairs_first(WINDOWED.keys(), [1, 3, 8, 24], [3, 40]))
def test_the_gradients_are_those_of_separate_rows(family, window, longest_prompt):
    found, expected = both(family, samples_of(window, longest_prompt=longest_prompt), sliding_window=window)
    assert all(any(each.any() for each in step) for step in expected[0])
    assert_equal(found, expected)


@pytest.mark.parametrize(("family", "longest_prompt"), values_first(LATENTS.keys(), [3, 40]))
def test_the_gradients_of_latents_are_those_of_separate_rows(family, longest_prompt):
    assert_equal(*both(family, samples_of(5, longest_prompt=longest_prompt)))


@pytest.mark.parametrize(("family", "chunk", "block"), pairs_first(CHUNKED.keys(), [1, 4, 24], [3, 256]))
def test_the_gradients_of_chunks_are_those_of_separate_rows(family, chunk, block, monkeypatch):
    """A block begins anywhere in a chunk."""
    monkeypatch.setattr(shared_prefixes, "_BLOCK", block)
    assert_equal(*both(family, samples_of(chunk, longest_prompt=30), attention_chunk_size=chunk))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_long_runs_attend_in_blocks(family, monkeypatch):
    """A block of 3 makes prompts and answers long; the last one of a run is shorter."""
    monkeypatch.setattr(shared_prefixes, "_BLOCK", 3)
    for window in (2, 5, 11):
        assert_equal(*both(family, samples_of(window, longest_prompt=20), sliding_window=window))


def test_activations_that_are_computed_again():
    samples, settings = samples_of(1, longest_prompt=20), {"shares": True, "algorithm": forgiving_grpo}
    for family in ("gemma2", "gpt_oss", "deepseek_v3", "llama4_text"):
        settings["policy"] = SimpleNamespace(model=windowed_model(family).train())
        assert_equal(gradients(samples, activation_checkpointing=True, **settings), gradients(samples, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_share_their_prompts(family):
    assert UpdateSettings().prove(windowed_model(family, dtype=torch.float32), 64)


@pytest.mark.parametrize(("family", "by"), values_first(WINDOWED.keys(), [-1, 1, 1000]))
def test_a_window_that_is_none_of_the_models_is_found_out(family, by, monkeypatch):
    body = windowed_model(family, dtype=torch.float32, sliding_window=16).get_decoder()
    assert prove_sharing(body, 64) is None
    monkeypatch.setattr(shared_prefixes, "last_seen", lambda visible, window: last_seen(visible, window + by))
    assert prove_sharing(body, 64) == "its states behind a shared prompt are others"
    assert prove_sharing(body, 16) is None


WRONG = {
    "last_seen": lambda visible, window: last_seen(visible, window - 1),
    "at_positions": lambda layer, query, positions: query,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("family", CHUNKED)
def test_chunks_that_are_none_of_the_models_are_found_out(family, name, monkeypatch):
    """They are long, and so are the steps by which queries grow."""
    body = windowed_model(family, dtype=torch.float32, attention_chunk_size=16, floor_scale=16).model
    assert prove_sharing(body, 64) is None
    monkeypatch.setattr(shared_prefixes, name, WRONG[name])
    assert prove_sharing(body, 64) == "its states behind a shared prompt are others"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_that_are_left_as_they_are_are_found_out(family, monkeypatch):
    body = windowed_model(family, dtype=torch.float32).get_decoder()
    attend = SharedLayout.attend

    def plain(self, query, key, value, scale, layer):
        return attend(self, query, key, value, scale, dataclasses.replace(layer, softcap=None, sinks=None))

    monkeypatch.setattr(SharedLayout, "attend", plain)
    assert prove_sharing(body, 64) == "its states behind a shared prompt are others"


def test_a_model_whose_layers_do_not_say_their_window_computes_row_by_row_and_says_why(caplog, monkeypatch):
    monkeypatch.setattr(attention, "unsaid_window", lambda layer: None)
    model = windowed_model("phimoe", dtype=torch.float32, sliding_window=16)
    with caplog.at_level("WARNING"):
        assert not UpdateSettings().prove(model, 64)
    assert "its states behind a shared prompt are others" in caplog.text
    assert UpdateSettings().prove(model, 16)
