"""A wrong argument is a ValueError that names it in Python, and one line that names the setting on the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rhymerl import RhymeModule
from rhymerl.config import instantiate
from rhymerl.config.targets import import_target
from rhymerl.errors import ConfigError
from rhymerl.rollout import RolloutSettings
from tests.integration.conftest import Run

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"


@pytest.mark.parametrize(
    ("key", "target", "given", "message"),
    [
        ("drafter", "drafters.HistoryTreeDrafter", {"window": -1}, "window=-1: expected at least 0"),
        ("drafter", "drafters.HistoryTreeDrafter", {"recency": 0.0}, "recency=0.0: expected above 0, at most 1"),
        ("drafter", "drafters.NGramDrafter", {"max_match": 1}, "max_match=1: expected from min_match=2 to 32"),
        ("budget", "budgets.FixedBudget", {"min_probability": 2.0}, "min_probability=2.0: expected a number from 0 to 1"),
        ("budget", "budgets.AIMDBudget", {"start": 0}, "start=0: expected at least 1"),
        ("budget", "budgets.GoodputBudget", {"nodes": -1}, "nodes=-1: expected at least 0"),
        ("budget", "budgets.GoodputBudget", {"costs": "no.json"}, "costs='no.json': expected a JSON file"),
        ("budget", "budgets.GoodputBudget", {"costs": [[1.0, 2.0]]}, "costs=[[1.0, 2.0]]: expected at least two [tokens, seconds]"),
        ("scheduler", "schedulers.PackedScheduler", {"costs": "no.json"}, "costs='no.json': expected a JSON file"),
        ("scheduler", "schedulers.HistoPipeScheduler", {"alpha": 2.0}, "alpha=2.0: expected 0 to 1"),
        ("history", "history.HistoryStore", {"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ("history", "history.HistoryStore", {"spill": __file__}, f"spill={__file__!r}: File exists; give a directory"),
        ("task", "tasks.RunningSum", {"difficulty": 99}, "difficulty=99: expected 1 to 15 additions"),
        ("algo", "GRPO", {"kl_coef": -1.0}, "kl_coef=-1.0: expected at least 0"),
        ("algo", "PPO", {"gamma": 2.0}, "gamma=2.0: expected 0 to 1"),
        ("rollout", "rollout.RolloutSettings", {"group_size": 0}, "group_size=0: expected at least 1"),
        ("rollout", "rollout.RolloutSettings", {"top_p": 2.0}, "top_p=2.0: expected in (0, 1]"),
        ("update", "training.settings.UpdateSettings", {"learning_rate": -1.0}, "learning_rate=-1.0: expected at least 0"),
        ("update", "training.settings.UpdateSettings", {"betas": [0.9]}, "betas=[0.9]: expected two numbers in [0, 1)"),
        ("evaluation", "training.evaluation.EvaluationSettings", {"samples": 0}, "samples=0: expected at least 1"),
        ("evaluation", "training.evaluation.EvaluationSettings", {"sets": {"a": {"samples": 0}}},
         "sets.a.samples=0: expected at least 1"),
        ("evaluation", "training.evaluation.EvaluationSettings", {"extract": "no_module.f"},
         "extract='no_module.f': no module named 'no_module'"),
        ("adapter", "models.lora.LoRA", {"rank": 0}, "rank=0: expected at least 1"),
        ("adapter", "models.lora.LoRA", {"targets": []}, "targets=[]: expected some of the model's linear layers"),
        ("critic", "models.critic.CriticSettings", {"head_std": -1.0}, "head_std=-1.0: expected at least 0"),
        ("model", "models.policy.PolicySource", {"path": None}, "path=None and init=None: set exactly one"),
        ("data", "data.PromptDataModule", {"prompts_per_step": 0}, "prompts_per_step=0: expected at least 1"),
        ("data", "data.PromptDataModule", {"validation": {}}, "validation={}: expected at least one data set, or null"),
        ("data", "data.PromptDataModule", {"validation": {"a/b": "x"}}, "validation: 'a/b': expected a name of letters"),
        ("data", "data.PromptSource", {"samples": 0}, "samples=0: expected at least 1"),
        ("backend", "backends.embedded.EmbeddedBackend", {"max_running": 0}, "max_running=0: expected at least 1"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"restarts": -1}, "restarts=-1: expected at least 0"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"costs": "no.json"}, "costs='no.json': expected a JSON file"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"arguments": {"tp": 2}},
         "arguments.tp=2, which SGLang may read as tp_size: is set by backend.tensor_parallel"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"url": "ftp://x"}, "url='ftp://x': expected http://HOST:PORT"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"url": "http://x:1", "restarts": 1},
         "restarts=1: is for a server that the run starts; url='http://x:1' runs already"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"url": "http://x:1", "start_timeout_s": 9.0},
         "start_timeout_s=9.0: is for a server that the run starts"),
        ("backend", "backends.sglang.backend.SGLangBackend", {"url": "http://x:1", "costs": "no.json"},
         "costs='no.json': is for a server that the run starts"),
        ("data", "data.PromptDataModule", {"chat_template_kwargs": {"tokenize": True}},
         "chat_template_kwargs.tokenize: this argument is fixed; remove it"),
        ("data", "data.PromptSource", {"chat_template_kwargs": {"return_dict": True}},
         "chat_template_kwargs.return_dict: this argument is fixed; remove it"),
        ("model", "models.policy.PolicySource", {"init": {}, "characters": "0120"},
         "characters='0120': expected ASCII characters, each once"),
        ("rewards.mine", "rewards.Reward", {"function": "rhymerl.rewards.exact_match", "weight": float("nan")},
         "weight=nan: expected a finite number"),
        ("rewards.mine", "rewards.Reward", {"function": "rhymerl.rewards.exact_mach"},
         "function='rhymerl.rewards.exact_mach': rhymerl.rewards has no 'exact_mach'; did you mean exact_match?"),
        ("rewards.mine", "rewards.Reward", {"function": "rhymerl.rewards.exact_match", "arguments": {"answr": "1"}},
         "arguments.answr: the function has no such parameter; did you mean answer?"),
        ("module", "RhymeModule", {"model": "nowhere", "reward_workers": 0}, "reward_workers=0: expected at least 1"),
        ("module", "RhymeModule", {"model": "nowhere", "run_ahead": "keep", "max_staleness": 0},
         "max_staleness=0: run_ahead=keep trains on tokens of the policy before"),
        ("module", "RhymeModule", {"model": "nowhere", "rollout": RolloutSettings(temperature=0.0)},
         "rollout.temperature=0: greedy answers of a group are all the same"),
        ("lengths", "simulation.SyntheticLengths", {"mean": -1.0}, "mean=-1.0: expected at least 1"),
        ("measure", "bench.passes.MeasureSettings", {"rounds": 0}, "rounds=0: expected at least 1"),
    ],
)  # fmt: skip
def test_python_gets_the_argument_and_yaml_the_setting(
    key: str, target: str, given: dict[str, Any], message: str
) -> None:
    path = f"rhymerl.{target}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        import_target(path, setting="")(**given)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}.{message}')}"):
        instantiate({"_target_": path, **given}, key=key)


def test_nodes_that_a_module_is_given_are_named_by_its_arguments() -> None:
    for key, target, given, message in (
        ("drafter", "drafters.NGramDrafter", {"min_match": 0}, "drafter.min_match=0: expected at least 1"),
        ("history", "history.HistoryStore", {"window": 0}, "history.window=0: expected at least 1"),
        ("model", "models.policy.PolicySource", {"dtype": "half"}, "model.dtype='half': expected one of"),
    ):
        parts: dict[str, Any] = {"model": "nowhere", key: {"_target_": f"rhymerl.{target}", **given}}
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            RhymeModule(**parts)


FIT = ["fit", "--config=quickstart", "run_dir=run"]
REPLAY = ["replay", str(TRACE)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*FIT, "drafter.window=-1"], "drafter.window=-1: expected at least 0"),
        ([*FIT, "budget.nodes=-1"], "budget.nodes=-1: expected at least 0"),
        ([*FIT, "budget=fixed", "budget.min_probability=2"], "budget.min_probability=2.0: expected a number from 0 to 1"),
        ([*FIT, "history.max_tokens=0"], "history.max_tokens=0: expected at least 1"),
        ([*FIT, "algo.kl_coef=-1"], "algo.kl_coef=-1.0: expected at least 0"),
        ([*FIT, "data.prompts_per_step=0"], "data.prompts_per_step=0: expected at least 1"),
        ([*FIT, "checkpoint.every_n_steps=0"], "checkpoint.every_n_steps=0: expected at least 1"),
        ([*FIT, "backend.max_running=0"], "backend.max_running=0: expected at least 1"),
        ([*FIT, "update.learning_rate=-1"], "update.learning_rate=-1.0: expected at least 0"),
        ([*FIT, "adapter=lora", "adapter.rank=0"], "adapter.rank=0: expected at least 1"),
        ([*FIT, "adapter=lora", "adapter.targets=[]"], "adapter.targets=[]: expected some of the model's linear layers"),
        ([*FIT, "task.difficulty=99"], "task.difficulty=99: expected 1 to 15 additions"),
        ([*FIT, "algo=ppo", "critic.path=/nowhere/at/all"], "critic.path='/nowhere/at/all': no such directory"),
        ([*FIT, "evaluation.sets={x: {samples: 0}}"], "evaluation.sets.x.samples=0: expected at least 1"),
        ([*FIT, "module.reward_workers=0"], "module.reward_workers=0: expected at least 1"),
        ([*FIT, "max_staleness=-1"], "max_staleness=-1: expected at least 0"),
        ([*FIT, "run_ahead=keep", "max_staleness=0"], "max_staleness=0: run_ahead=keep trains on tokens"),
        ([*FIT, "rollout.temperature=0"], "rollout.temperature=0: greedy answers"),
        ([*FIT, "rollout.group_size=1"], "rollout.group_size=1: GRPO compares the answers of a group"),
        ([*FIT, "algo.max_kl=0.1"], "algo.max_kl=0.1 with update.epochs=1"),
        ([*FIT, "model.characters=0120"], "model.characters='0120': expected ASCII characters, each once"),
        ([*FIT, "data.chat_template_kwargs={tokenize: true}"], "data.chat_template_kwargs.tokenize: this argument is fixed"),
        ([*FIT, "rewards={mine: {function: rhymerl.rewards.exact_match, weight: x}}"],
         "rewards.mine.weight='x': expected a finite number"),
        ([*FIT, "rewards={mine: {_target_: rhymerl.rewards.Reward, function: rhymerl.rewards.exact_match, timeout_s: 0}}"],
         "rewards.mine.timeout_s=0.0: expected a number of seconds above 0"),
        ([*FIT, "rewards={mine: rhymerl.rewards.exact_mach}"], "rewards.mine.function='rhymerl.rewards.exact_mach': rhymerl"),
        (["simulate", "max_staleness=-1"], "max_staleness=-1: expected at least 0"),
        (["simulate", "pipeline=tall"], "pipeline='tall': expected one of colocated, disaggregated"),
        (["simulate", "lengths.mean=-1"], "lengths.mean=-1.0: expected at least 1"),
        (["simulate", "lengths.prompts_per_step=0", f"trace={TRACE}"], "lengths.prompts_per_step=0: expected at least 1"),
        (["simulate", "workers=0"], "workers=0: expected at least 1"),
        (["simulate", "costs=no.json"], "costs='no.json': expected a JSON file"),
        (["simulate", "scheduler=packed", "scheduler.costs=no.json"], "scheduler.costs='no.json': expected a JSON file"),
        ([*REPLAY, "max_running=0"], "max_running=0: expected at least 1"),
        ([*REPLAY, "costs=no.json"], "costs='no.json': expected a JSON file"),
        ([*REPLAY, "history.window=0"], "history.window=0: expected at least 1"),
        (["bench", "drafter", "batch=0"], "batch=0: expected at least 1"),
        (["bench", "rollout", "pairs=0"], "pairs=0: expected at least 1"),
        (["bench", "costs", "measure.rounds=0"], "measure.rounds=0: expected at least 1"),
        (["rollout", "model.path=x", "data.samples=0", "out=x.jsonl"], "data.samples=0: expected at least 1"),
        (["warmstart", "out=out", "warmstart.batch_size=0"], "warmstart.batch_size=0: expected at least 1"),
    ],
)  # fmt: skip
def test_commands_name_the_setting(
    words: list[str], message: str, rhymerl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rhymerl(*words)
    assert done.code == 2, done.err
    assert done.err.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.err
