"""Whether an engine draws by seed is told from its answers, however its passes are rounded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymerl.backends.remote.proof import draws_by_seed
from rhymerl.backends.remote.wire import from_custom_params
from rhymerl.engine.noise import log_race_times, noise_keys
from rhymerl.testing import tiny_policy

VOCABULARY_BEYOND = 10**6


class Engine:
    """Rounds its logits by about `rounding`, each time in another way; `rule` says whose noise it draws with."""

    url = "nowhere"

    def __init__(self, policy, *, rounding: float, rule: str = "ours") -> None:
        self.policy, self.rounding, self.rule = policy, rounding, rule
        self.random = torch.Generator().manual_seed(0)
        self.answers: list[list[int]] = []

    def post(self, path, content, *, timeout_s):
        params, tokens = content["sampling_params"], list(content["input_ids"])
        asked = from_custom_params(params["custom_params"], content["rid"], tokens, SimpleNamespace())
        seed = {"ours": asked.seed, "one": 1, "own": len(self.answers)}[self.rule]
        for position in range(params["max_new_tokens"]):
            with torch.no_grad():
                logits = self.policy.model(torch.tensor([tokens])).logits[0, -1].double()
            logits += self.rounding * torch.randn(len(logits), generator=self.random)
            keys = noise_keys(np.array([seed], np.uint64), np.array([position]))
            times = log_race_times(torch.from_numpy(keys.astype(np.int64)), len(logits))[0]
            tokens.append(int((logits / params["temperature"] - times).argmax()))
        self.answers.append(tokens[1:])
        return {"output_ids": self.answers[-1]}


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(dtype="float32")


def test_answers_that_part_where_two_tokens_were_nearly_as_good_follow_from_their_seed(policy):
    engine = Engine(policy, rounding=0.05)
    assert draws_by_seed(engine, policy, "bfloat16")
    assert engine.answers[0] != engine.answers[1], "this test shows nothing"
    assert not draws_by_seed(engine, policy, "float32")  # in which passes are not rounded like that


@pytest.mark.parametrize("rounding", [0.0, 0.05])
@pytest.mark.parametrize("rule", ["one", "own"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rule_of_the_engine_s_own_is_seen(policy, dtype, rule, rounding):
    """One answer to all seeds, or as many as there are requests."""
    engine = Engine(policy, rounding=rounding if rule == "own" else 0.0, rule=rule)
    engine.answers.append([])  # so that its first answer is not that of seed 0
    engine.answers.append([])
    assert not draws_by_seed(engine, policy, dtype)


@pytest.mark.parametrize("answer", [[], [5], [VOCABULARY_BEYOND] * 32, [-1] * 32])
def test_answers_that_nobody_can_have_drawn(policy, answer):
    answers = iter([answer, [2] * 32, [3] * 32])
    engine = SimpleNamespace(url="nowhere", post=lambda path, content, *, timeout_s: {"output_ids": next(answers)})
    assert not draws_by_seed(engine, policy, "float32")
