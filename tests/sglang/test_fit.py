"""`rhymerl fit backend=sglang` trains as the embedded backend does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rhymerl.cli import main
from rhymerl.history.traces import read_trace
from rhymerl.testing import tiny_policy
from tests.sglang.conftest import CpuEngine

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

STEPS = 3
DRAFTER = '''
import numpy as np
from rhymerl import Draft, Drafter


class FirstAnswer(Drafter):
    """Guesses that a prompt is answered as the last best sample was: it learns from scored samples."""

    def __init__(self, *, least: int = 1) -> None:
        self.least = least
        self._known = {}

    def learn(self, samples):
        for sample in sorted(samples, key=lambda sample: sample.reward):
            self._known[sample.prompt.key] = sample.completion.token_ids

    def propose(self, request, context, budget):
        done = len(context) - len(request.prompt.token_ids)
        guess = self._known.get(request.prompt.key, context[:0])[done : done + budget]
        return Draft(token_ids=guess, parents=np.arange(-1, len(guess) - 1, dtype=np.int32))
'''


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(tmp_path: Path, model: Path, name: str, *words: str) -> tuple[dict[str, torch.Tensor], list, dict]:
    """Weights, the recorded answers, and the logged metrics of the last step."""
    run_dir = tmp_path / name
    code = main(
        [
            "fit",
            "--config=quickstart",
            f"model.path={model}",
            f"run_dir={run_dir}",
            "task.difficulty=3",
            "task.train_size=4",
            "task.validation_size=2",
            "data.prompts_per_step=4",
            "rollout.group_size=8",
            "rollout.max_tokens=24",
            "update.learning_rate=1e-3",
            "rewards={digits: tests.integration.rewards.digits}",
            "record_rollouts=true",
            "checkpoint.every_n_steps=3",
            f"trainer.max_steps={STEPS}",
            *words,
        ]
    )
    assert code == 0
    exported = tmp_path / f"{name}-export"
    assert main(["export", str(run_dir), str(exported)]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    return load_file(exported / "model.safetensors"), list(read_trace(run_dir / "rollouts.jsonl.gz")), summary


def on_sglang() -> list[str]:
    """Overrides for an engine on the CPU."""
    engine = CpuEngine()
    arguments = ",".join(f"{name}:{json.dumps(value)}" for name, value in engine.arguments.items())
    environment = ",".join(f"{name}:'{value}'" for name, value in engine.environment.items())
    return [
        "backend=sglang",
        "backend.nodes=7",
        f"backend.arguments={{{arguments}}}",
        f"backend.environment={{{environment}}}",
    ]


def test_three_steps_are_those_of_the_embedded_backend(tmp_path, one_thread, monkeypatch):
    model = tmp_path / "model"
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(model)
    (tmp_path / "first_answer.py").write_text(DRAFTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    ours, our_answers, _ = trained(tmp_path, model, "embedded", "backend.max_running=8")
    start = load_file(model / "model.safetensors")
    drafts = ["budget=fixed", "budget.nodes=7"]  # whether or not they pay in so short a run
    for name, words in (("history", []), ("users", ["drafter=first_answer.FirstAnswer"])):
        theirs, their_answers, summary = trained(tmp_path, model, name, *on_sglang(), *drafts, *words)
        assert len(our_answers) == len(their_answers) == STEPS * 4 * 8
        same = [
            np.array_equal(one.response_tokens, two.response_tokens)
            for one, two in zip(our_answers, their_answers, strict=True)
        ]
        assert np.mean(same) == 1.0
        assert max(float((ours[each] - theirs[each]).abs().max()) for each in ours) < 1e-4
        assert any(not torch.equal(start[each], theirs[each]) for each in theirs)
        print(name, {key: value for key, value in summary.items() if "spec" in key})
        assert summary["spec_accept_length"] > 1.0


def test_adapters_reach_the_engine_in_the_weights(tmp_path, one_thread):
    model = tmp_path / "model"
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(model)
    words = ["adapter=lora", "adapter.rank=4", "update.learning_rate=1e-2"]
    ours, our_answers, _ = trained(tmp_path, model, "embedded", "backend.max_running=8", *words)
    theirs, their_answers, _ = trained(tmp_path, model, "sglang", *on_sglang(), *words)
    pairs = zip(our_answers, their_answers, strict=True)
    assert np.mean([np.array_equal(one.response_tokens, two.response_tokens) for one, two in pairs]) >= 0.98
    assert max(float((ours[each] - theirs[each]).abs().max()) for each in ours) < 1e-4
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(start[each], theirs[each]) for each in theirs)


def test_rollouts_without_training(tmp_path, one_thread):
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    tiny_policy(dtype="float32", context=128, peaked=2.0).save(model)
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=?"}) + "\n" for i in range(8)))
    answers = {}
    for name, words in (("embedded", []), ("sglang", on_sglang())):
        out = tmp_path / f"{name}.jsonl"
        settings = [f"model.path={model}", f"data.prompts={prompts}", "passes=2", "rollout.max_tokens=24", f"out={out}"]
        assert main(["rollout", *settings, *words]) == 0
        answers[name] = list(read_trace(out))
    pairs = zip(answers["embedded"], answers["sglang"], strict=True)
    assert np.mean([np.array_equal(one.response_tokens, two.response_tokens) for one, two in pairs]) >= 0.98
