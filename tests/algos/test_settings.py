"""Settings of the algorithms: bad ones are named, good ones are kept."""

from __future__ import annotations

import re

import pytest

from rhymerl.algos import GRPO, PPO
from rhymerl.config import describe, instantiate
from rhymerl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip_low": -0.1}, "at least 0"),
        ({"kl_coef": -1.0}, "at least 0"),
        ({"entropy_coef": -1.0}, "at least 0"),
        ({"loss_mean": "mean"}, "one of token, sequence, constant"),
        ({"ratio_level": "answer"}, "one of token, sequence"),
        ({"correction": "clipped"}, "one of none, truncated, masked"),
        ({"dual_clip": 1.0}, "more than 1"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "null with surrogate=cispo"),
        ({"kl_target": 6.0}, "null, unless kl_in=reward and kl_coef is above 0"),
        ({"kl_target": 0.0, "kl_in": "reward", "kl_coef": 0.1}, "more than 0"),
        ({"correction_cap": -1.0}, "at least 0, or null"),
        ({"correction_floor": 3.0}, "less than correction_cap=2.0"),
        ({"overlong_fraction": 1.5}, "0 to 1"),
        ({"max_kl": 0.0}, "more than 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", [GRPO, PPO])
def test_bad_settings_are_named(family, settings, expected):
    name, value = next(iter(settings.items()))
    message = f"{name}={value!r}: expected {expected}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        family(**settings)


@pytest.mark.parametrize("algorithm", [GRPO(clip_high=0.3), PPO(kl_coef=0.1, kl_target=6.0)])
def test_a_config_says_how_it_was_made(algorithm):
    assert describe(instantiate(describe(algorithm))) == describe(algorithm)
    assert not any(name.startswith("_kl") for name in describe(algorithm))


def test_a_wrong_type_in_a_config_is_named():
    with pytest.raises(ConfigError, match=r"algo.loss_mean='mean': expected one of token, sequence, constant"):
        instantiate({"_target_": "rhymerl.algos.ppo.PPO", "loss_mean": "mean"}, key="algo")
