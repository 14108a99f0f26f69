"""An example proves, before prompts are shared, that the model computes the same: what is found, what forgiven."""

from __future__ import annotations

import pytest
import torch

from rhymerl.models import proof
from rhymerl.models.proof import prove_sharing
from rhymerl.models.shared_prefixes import RunBucket, place_runs
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings


def misplaced(*given):
    """A layout whose answers stand one position too late."""
    placed = place_runs(*given)
    placed.layout.position_ids[:, placed.layout.sizes[0] :] += 1
    return placed


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_wrong_mask_or_position_is_found_out(dtype, monkeypatch):
    body = tiny_policy(dtype=dtype).model.get_decoder()
    assert prove_sharing(body, 64) is None
    right = RunBucket.mask

    def opened(self, *given):
        mask = right(self, *given).clone()
        mask[..., -2, -1] = 0  # the last but one sees the last
        return mask

    def closed(self, *given):
        mask = right(self, *given).clone()
        mask[:, :, -1, 0] = float("-inf")
        return mask

    for wrong in (opened, closed):
        monkeypatch.setattr(RunBucket, "mask", wrong)
        assert prove_sharing(body, 64) == "its states behind a shared prompt are others"
    monkeypatch.setattr(RunBucket, "mask", right)
    monkeypatch.setattr(proof, "place_runs", misplaced)
    assert prove_sharing(body, 64) == "its states behind a shared prompt are others"


def test_rounding_is_told_from_structure(monkeypatch):
    """A sharp model of 30 layers was refused for 1.2e-4 of its largest state."""
    body = tiny_policy(dtype="float32").model.get_decoder()
    monkeypatch.setitem(proof._TOLERANCE, torch.float32, 0.0)
    assert prove_sharing(body, 64) is None
    monkeypatch.setattr(proof, "place_runs", misplaced)
    assert prove_sharing(body, 64) == "its states behind a shared prompt are others"


@pytest.mark.parametrize(
    ("made", "settings", "reason"),
    [
        ({"attention_dropout": 0.1}, {}, "dropout"),
        ({}, {"share_prefixes": False}, None),
    ],
)
def test_a_model_that_cannot_computes_row_by_row_and_says_why(made, settings, reason, caplog):
    model = tiny_policy(**made).model
    with caplog.at_level("WARNING"):
        assert not UpdateSettings(**settings).prove(model, 64)
    assert (reason is None and not caplog.text) or reason in caplog.text
    assert UpdateSettings().prove(tiny_policy().model.train(), 64)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_a_dropout_of_another_head_is_none(model_type):
    """GPT-2 has one of a summary, GPT-NeoX one of a classifier."""
    config = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if model_type == "gpt2" else {}
    model = tiny_policy(model_type, **config).model
    assert any("drop" in name and value for name, value in model.config.to_dict().items())
    assert UpdateSettings().prove(model, 64)
