"""Families whose layers are not those of Llama: two GRPO steps draw the same tokens with any drafter."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from rhymerl.drafters import Drafter, HistoryTreeDrafter, NoDrafter
from rhymerl.models.policy import Policy
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.testing import RandomTreeDrafter
from tests.integration.training import Run, Trained
from tests.models.windowed import CHUNKED, LATENTS, InDouble, windowed_model
from tests.products import values_first


def trained(family: str, drafter: Drafter) -> Trained:
    policy = Policy(model=windowed_model(family), tokenizer=character_tokenizer("0123456789+=;#? \n"))
    with InDouble():
        return Run(num_steps=2, prompts_per_step=3).train(policy=policy, drafter=drafter)


@cache
def plain(family: str) -> Trained:
    return trained(family, NoDrafter())


@pytest.mark.parametrize(
    ("family", "drafter"), values_first([*LATENTS, *CHUNKED], [RandomTreeDrafter, HistoryTreeDrafter])
)
def test_drafters_draw_the_same_tokens(family: str, drafter: type[Drafter]) -> None:
    (weights, steps), (expected, drawn) = trained(family, drafter()), plain(family)
    assert len(steps) == len(drawn) == 2
    before = windowed_model(family).state_dict()
    assert any(not torch.equal(weights[f"model.{name}"], each) for name, each in before.items())
    for found, wanted in zip(steps, drawn, strict=True):
        assert [each.completion.token_ids.tolist() for each in found] == [
            each.completion.token_ids.tolist() for each in wanted
        ]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-9, rtol=0)
