"""The settings that have changed since a checkpoint was written."""

from __future__ import annotations

from omegaconf import OmegaConf

from rhymerl.config.output import changes

NOW = OmegaConf.create({"model": {"_target_": "rhymerl.models.policy.PolicySource", "path": "here"}, "seed": 0})


def test_another_class_is_a_change() -> None:
    before = {"model": {"_target_": "my_models.Source", "path": "here"}, "seed": 0}
    (change,) = changes(before, NOW)
    assert (change.key, change.before) == ("model._target_", "my_models.Source")
