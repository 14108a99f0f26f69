"""The quickstart's promises, on a smaller model: repeatable, honest on held-out problems, complete in its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rhymerl.config import compose, instantiate
from tests.integration import programs
from tests.integration.conftest import Run, assert_same, checkpoint, rows

SUMMARY = [
    "eval_reward_before",
    "eval_reward_after",
    "reward_first",
    "reward_last",
    "reward_failure_rate",
    "steps",
    "wall_s",
    "rollout_s",
    "update_s",
    "rollout_tokens_per_s",
    "num_tokens",
    "spec_accept_rate",
    "spec_accept_length",
    "rollout_speedup",
    "rollout_speedup_low",
    "rollout_speedup_high",
]
# The names of TRL, for a run without a reference.
LEARNING = [
    "reward",
    "reward_std",
    "rewards/digits/mean",
    "rewards/digits/std",
    "frac_reward_zero_std",
    "entropy",
    "loss",
    "grad_norm",
    "learning_rate",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "num_tokens",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
]
ROLLOUT = [
    "rollout/spec_accept_rate",
    "rollout/spec_accept_length",
    "rollout/tail_frac",
    "spec/draft_time_frac",
    "rollout/tokens_per_s",
    "timing_s/rollout",
    "timing_s/reward",
    "timing_s/update",
    "timing_s/step",
    "perf/tokens_per_s",
    "perf/time_per_step",
    "perf/peak_memory_gb",
    "eval/reward",
    "eval/validation/mean@1",
    "eval/validation/pass@1",
    "eval/mean_length",
]
SLOW = "rewards={digits: tests.integration.rewards.digits_at_any_time}"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quick") / "run"


@pytest.fixture
def whole(run_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """A finished run; made once."""
    if not run_dir.exists():
        done = rhymerl(*settings, f"run_dir={run_dir}")
        assert (done.code, done.err) == (0, "")
        run_dir.with_name("words").write_text(done.out)
    return run_dir


def test_summary(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert list(summary) == SUMMARY
    assert ("Too short" in whole.with_name("words").read_text()) == (summary["rollout_speedup"] is None)
    assert 0 < summary["spec_accept_rate"] <= 1 < summary["spec_accept_length"]


def test_summary_without_drafts(settings, tmp_path, rhymerl: Run):
    done = rhymerl(*settings, "drafter=none", "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}", "--json")
    summary = json.loads(done.out)
    assert summary["rollout_speedup"] is None
    assert (summary["spec_accept_rate"], summary["spec_accept_length"]) == (0, 1)
    assert "times as fast" not in done.err


def test_metrics_on_tensorboard(whole):
    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    assert set(LEARNING + ROLLOUT) - set(events.Tags()["scalars"]) == set()
    steps = [event.step for event in events.Scalars("reward")]
    assert steps == sorted(set(steps))
    assert len(steps) == 6
    assert "samples/text_summary" in events.Tags()["tensors"]


def test_what_a_run_leaves(whole):
    files = {path.name for path in whole.iterdir()}
    texts = {"config.yaml", "summary.json", "samples.jsonl", "steps.jsonl.gz", "report.html"}
    assert files == texts | {"history.rhyme", "checkpoints", "tensorboard"}
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"step=5.ckpt", "step=6.ckpt", "last.ckpt"}
    again = compose(whole / "config.yaml", [])
    assert again.data.prompts_per_step == 4
    assert checkpoint(whole)["callbacks"]["_RunConfig"]["config"]["data"]["prompts_per_step"] == 4
    assert rows(whole / "samples.jsonl")[0].keys() == {
        "step",
        "prompt",
        "response",
        "reward",
        "length",
        "finish_reason",
        "prompt_id",
        "sample",
        "rewards",
        "columns",
        "advantage",
    }


def test_words_for_people(whole):
    words = whole.with_name("words").read_text()
    assert words.splitlines()[-1].startswith(f"Everything is in {whole}")
    assert "eval_reward_after" in words
    assert "Nothing was learned" not in words
    assert all(len(line) <= 80 for line in words.splitlines()[:-1])


@pytest.mark.parametrize(
    ("more", "equal"),
    [
        pytest.param([], True, marks=pytest.mark.slow),
        ([SLOW, "module.reward_workers=2"], True),  # the order in which rewards arrive is another one every time
        pytest.param(["seed=1", "data.seed=0", "task.seed=0"], False, marks=pytest.mark.slow),
    ],
)
def test_repeats_bit_for_bit_in_another_process(more, equal, settings, whole, tmp_path):
    process = programs.start([*settings, f"run_dir={tmp_path / 'run'}", *more], tmp_path / "output")
    process.join(600)
    assert process.exitcode == 0, (tmp_path / "output").read_text()
    one, two = checkpoint(whole), checkpoint(tmp_path / "run")
    if equal:
        assert_same(one["state_dict"], two["state_dict"])
        assert rows(whole / "samples.jsonl") == rows(tmp_path / "run" / "samples.jsonl")
    else:
        assert one["rhymerl"]["num_tokens"] != two["rhymerl"]["num_tokens"]


def test_held_out_problems_are_in_neither_training_nor_the_warm_start():
    task = instantiate(compose("quickstart").task)
    warm = instantiate(compose("warmstart_running_sum").task)
    held_out = {row["prompt"] for row in task.rows("validation")}
    assert len(held_out) >= 512
    assert held_out.isdisjoint(row["prompt"] for row in task.rows("train"))
    demonstrated = warm.stream("warmstart", seed=0)
    assert held_out.isdisjoint(next(demonstrated)["prompt"] for _ in range(20_000))


def test_quickstart_evaluates_all_that_it_holds_out():
    config = compose("quickstart")
    assert config.data.validation_prompts is None
    assert config.evaluation.temperature == 1.0
    assert config.deterministic is True
