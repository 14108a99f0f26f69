"""A language model beside a tower: text alone is trained, drafts change nothing, and exports are whole again."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rhymerl.drafters import NoDrafter
from rhymerl.models.exported import restore
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import RandomTreeDrafter
from tests.integration.training import Run
from tests.models.windowed import InDouble
from tests.models.wrapped import WRAPPED, save_wrapped


def loaded(folder) -> Policy:
    return PolicySource(str(folder), dtype="float64").load()


@pytest.mark.parametrize("name", WRAPPED)
def test_text_alone_is_trained_and_drafts_change_nothing(name, tmp_path):
    save_wrapped(name, tmp_path)
    policy, twin = loaded(tmp_path), loaded(tmp_path)
    before = {key: each.clone() for key, each in policy.model.state_dict().items()}
    frozen = {key for key, each in policy.model.named_parameters() if not each.requires_grad}
    assert any("vision" in key or "visual" in key for key in frozen)
    run = Run(num_steps=2, prompts_per_step=3)
    with InDouble():
        weights, samples = run.train(policy=policy, drafter=NoDrafter())
        with_drafts, same = run.train(policy=twin, drafter=RandomTreeDrafter())
    after = policy.model.state_dict()
    changed = {key for key, each in after.items() if not torch.equal(each, before[key])}
    assert changed
    assert not changed & frozen
    for ours, theirs in zip(samples, same, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.completion.token_ids.tolist() == other.completion.token_ids.tolist()
    for key, each in weights.items():
        torch.testing.assert_close(with_drafts[key], each, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", WRAPPED)
def test_an_export_is_whole_again(name, tmp_path):
    policy = loaded(save_wrapped(name, tmp_path / "first"))
    head = policy.model.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(1.0)
    state = policy.model.state_dict()
    policy.save(tmp_path / "saved")
    restore(policy.files(), state, tmp_path / "restored", read=lambda names: {each: state[each] for each in names})
    for folder in ("saved", "restored"):
        model, found = AutoModelForImageTextToText.from_pretrained(
            tmp_path / folder, dtype=torch.float64, output_loading_info=True
        )
        assert type(model).__name__ == WRAPPED[name][0]
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        assert all(torch.equal(each, state[key]) for key, each in model.state_dict().items())
        assert (tmp_path / folder / "preprocessor_config.json").read_text() == '{"do_resize": true}'


@pytest.mark.parametrize("targets", [None, ["q_proj"]])
def test_adapters_are_on_layers_of_text(targets, tmp_path):
    save_wrapped("gemma3", tmp_path)
    policy = PolicySource(str(tmp_path), adapter=LoRA(rank=2, targets=targets)).load()
    trained = [name for name, each in policy.model.named_parameters() if each.requires_grad]
    assert trained
    assert all("language_model" in name for name in trained)


def test_a_plan_knows_what_is_trained(tmp_path):
    save_wrapped("gemma3", tmp_path)
    source = PolicySource(str(tmp_path))
    planned, read = source.outline(), source.load().model
    for (name, one), (same, other) in zip(planned.named_parameters(), read.named_parameters(), strict=True):
        assert (name, one.requires_grad) == (same, other.requires_grad)
