"""SmolLM2-135M-Instruct in bfloat16: what rounding must not end, and what drafts must not change in spite of it."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from rhymerl.config import compose
from rhymerl.engine.support import prove_engine
from rhymerl.errors import ConfigError
from rhymerl.models import proof
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.models.proof import prove_sharing
from rhymerl.testing import OracleDrafter
from tests.engine.test_lossless import answers
from tests.engine.test_support import hide_a_token, in_packed_passes, move_a_token, show_a_token
from tests.integration import programs
from tests.integration.conftest import assert_same, checkpoint
from tests.pretrained.questions import QUESTIONS, requests
from tests.training.test_sharing_proof import misplaced

pytestmark = pytest.mark.pretrained

FIT = (
    "fit",
    "--config=smollm2",
    "model.dtype=bfloat16",
    "update.learning_rate=1e-3",  # of less, nothing is left when weights are rounded
    "deterministic=true",
    "task.validation_size=2",
    "data.prompts_per_step=2",
    "rollout.max_tokens=16",
    "checkpoint.every_n_steps=1",
    "trainer.max_steps=3",
)


def load(dtype: str) -> Policy:
    return PolicySource(compose("smollm2").model.path, dtype=dtype).load()


def run(words: list[str], tmp_path: Path) -> int:
    process = programs.start(words, tmp_path / "output")
    process.join(400)
    print((tmp_path / "output").read_text()[-3000:])
    return process.exitcode


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_it_trains_is_killed_and_resumes(factor: int, tmp_path: Path) -> None:
    """However sharp it is: its last norm times `factor`."""
    policy = load("float32")
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(factor)
    policy.save(tmp_path / "model")
    words = [*FIT, f"model.path={tmp_path / 'model'}"]
    whole, killed = (f"run_dir={tmp_path / name}" for name in ("whole", "killed"))
    assert run([*words, whole], tmp_path) == 0
    dies = "algo={_target_: tests.integration.programs.DieInUpdate, call: 2}"  # within the second step
    assert run([*words, killed, dies], tmp_path) == -signal.SIGKILL
    assert run([*words, killed, "ckpt_path=last"], tmp_path) == 0
    weights = [checkpoint(tmp_path / name)["state_dict"] for name in ("whole", "killed")]
    assert_same(*weights)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights[0][f"model.{name}"], policy.model.get_parameter(name).bfloat16())


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_one_wrong_mask_entry_or_position_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's passes and in those of the update."""
    model = load(dtype).model
    prove_engine(model)
    for change in (hide_a_token, show_a_token, move_a_token):
        with in_packed_passes(model, change), pytest.raises(ConfigError, match="differ"):
            prove_engine(model)
    assert prove_sharing(model.get_decoder(), 64) is None
    monkeypatch.setattr(proof, "place_runs", misplaced)
    assert prove_sharing(model.get_decoder(), 64) == "its states behind a shared prompt are others"


def test_drafts_keep_the_distribution() -> None:
    """Two samples of 1 024 answers with different seeds, by their two tokens: chi-square of homogeneity."""
    policy = load("bfloat16")
    (one,) = requests(policy, QUESTIONS[1:], samples=1, max_tokens=3, temperature=0.6)
    samples = [
        [dataclasses.replace(one, id=f"r{i}", sample=i, seed=first + i) for i in range(1024)]
        for first in (0, 10_000, 20_000)
    ]
    known, plain = (answers(policy, each, max_running=64) for each in samples[:2])
    drafter = OracleDrafter({name: each.token_ids for name, each in known.items()})
    drafted = answers(policy, samples[2], drafter=drafter, max_running=48)
    accepted = sum(each.num_accepted for each in drafted.values())
    assert accepted > 200, "drafts that are never taken prove nothing"
    counts = [Counter(tuple(each.token_ids[:2].tolist()) for each in done.values()) for done in (plain, drafted)]
    p, outcomes = homogeneity(*counts)
    print(f"{accepted} tokens of drafts accepted; chi-square over {outcomes} outcomes: p = {p:.3f}")
    assert outcomes >= 10
    assert p > 0.01


def homogeneity(*counts: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Return p of the chi-square test of homogeneity, and the number of outcomes; those below 10 counts are one."""
    common = [outcome for outcome, count in (counts[0] + counts[1]).items() if count >= 10]
    table = torch.tensor([[count[each] for each in common] for count in counts], dtype=torch.float64)
    rest = torch.tensor([sum(count.values()) for count in counts], dtype=torch.float64) - table.sum(1)
    table = torch.cat([table, rest[:, None]], 1)
    expected = table.mean(0)
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(common), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)), len(common) + 1
