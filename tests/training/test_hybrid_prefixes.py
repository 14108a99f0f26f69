"""Prompts computed once by layers that go from token to token: the gradients are those of separate rows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymerl.models import recurrent
from rhymerl.models.proof import prove_sharing
from rhymerl.testing import make_prompt
from rhymerl.training.settings import UpdateSettings
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.test_logprobs import answered
from tests.models.windowed import InDouble
from tests.products import values_first
from tests.training.test_shared_prefixes import assert_equal, gradients
from tests.training.updates import forgiving_grpo, scored

_CHUNK = 64  # tokens that transformers' rules take at once


def samples_of(seed: int, *, longest_prompt: int, longest_answer: int):
    """Groups of four, of a random prompt each; answers begin alike, and one of each group has one token."""
    source, samples = np.random.default_rng(seed), []
    prompts = [make_prompt(source.integers(2, 15, source.integers(1, longest_prompt + 1))) for _ in range(3)]
    for number, sample in enumerate(scored(12)):
        first = np.random.default_rng([seed, number // 4]).integers(2, 15, longest_answer)
        length = (1, longest_answer, *source.integers(1, longest_answer + 1, 2))[number % 4]
        same = int(source.integers(0, length + 1))
        tokens = np.append(first[:same], source.integers(2, 15, length - same)).astype(np.int32)
        request = dataclasses.replace(sample.completion.request, prompt=prompts[number // 4])
        samples.append(dataclasses.replace(answered(request, tokens), reward=sample.reward))
    return samples


def both(family: str, samples, **settings):
    """Return gradients and metrics with prompts shared, and of separate rows."""
    policy = SimpleNamespace(model=hybrid_model(family).double().train())
    with InDouble():
        return [
            gradients(samples, shares=shares, algorithm=forgiving_grpo, policy=policy, **settings)
            for shares in (True, False)
        ]


SHAPES = [(2, 8), (40, 8), (3, 2 * _CHUNK + 3), (2 * _CHUNK + 2, _CHUNK + 1)]


@pytest.mark.parametrize(("family", "lengths", "micro_batch_tokens"), values_first(HYBRIDS.keys(), SHAPES, [50, 10**6]))
def test_the_gradients_are_those_of_separate_rows(family, lengths, micro_batch_tokens):
    """Prompts are shorter than the kernel of a convolution, or longer than what a rule takes at once."""
    samples = samples_of(sum(lengths), longest_prompt=lengths[0], longest_answer=lengths[1])
    found, expected = both(family, samples, micro_batch_tokens=micro_batch_tokens)
    assert all(any(each.any() for each in step) for step in expected[0])
    assert_equal(found, expected)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_activations_that_are_computed_again(family):
    samples, settings = (
        samples_of(1, longest_prompt=20, longest_answer=9),
        {"shares": True, "algorithm": forgiving_grpo},
    )
    settings["policy"] = SimpleNamespace(model=hybrid_model(family).train())
    assert_equal(gradients(samples, activation_checkpointing=True, **settings), gradients(samples, **settings))


@pytest.mark.parametrize("family", HYBRIDS)
def test_they_share_their_prompts(family):
    assert UpdateSettings().prove(hybrid_model(family, dtype=torch.float32), 64)


def last_of_others(self, kept):
    """Tokens of the prompt before, where there is a run before it."""
    return [torch.cat([each[-1:], each[:-1]]) if len(each) > 1 else each for each in LAST(self, kept)]


def without_padding(self, kept):
    """Prompts whose padding is taken for tokens."""
    prompts, *runs = LAST(self, kept)
    own = torch.from_numpy(self.own[0])
    return [torch.cat([prompts[:, : prompts.shape[1] - own.shape[1]], own], 1), *runs]


LAST = recurrent.TokenPaths.last
RULES = ["qwen3_5_text", "olmo_hybrid", "falcon_h1", "nemotron_h"]
ALL = ["lfm2", *RULES]


def without_inputs(self, kept):
    """Convolutions that begin anew behind the prompt."""
    prompts, *runs = LAST(self, kept)
    nobody = torch.full((len(prompts), kept or 0), sum(each.size for each in self.own))
    return [prompts, *(torch.cat([nobody[:1].expand(len(each), -1), each[:, kept or 0 :]], 1) for each in runs)]


def first_prompt(self):
    return [torch.zeros(len(lines), dtype=torch.int64) for lines in self.before]


WRONG = {
    "another's tokens": ("last", last_of_others, ALL),
    "the first prompt's state": ("prompts", property(first_prompt), RULES),
    "padding": ("last", without_padding, RULES),
    "no inputs of before": ("last", without_inputs, ALL),
}


@pytest.mark.parametrize(
    ("wrong", "family"), [(wrong, family) for wrong, (*_, families) in WRONG.items() for family in families]
)
def test_states_of_others_are_found_out(wrong, family, monkeypatch):
    body = hybrid_model(family, dtype=torch.float32).get_decoder()
    assert prove_sharing(body, 64) is None
    name, function, _ = WRONG[wrong]
    monkeypatch.setattr(recurrent.TokenPaths, name, function)
    assert prove_sharing(body, 64) is not None
