"""Run directories as a run leaves them, made in no time; and what is in a page."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.history import HistoryStore
from rhymerl.report import write_report
from rhymerl.report.steps import STEPS, StepFile
from rhymerl.testing import make_answer
from rhymerl.types import Prompt

CONFIG = """\
seed: {seed}
report: true
algo:
  _target_: rhymerl.GRPO
  clip_high: {clip}
drafter:
  _target_: rhymerl.drafters.HistoryTreeDrafter
rollout:
  group_size: 2
model:
  seed: ${{seed}}
"""


def make_run(
    folder: Path,
    *,
    num_steps: int = 6,
    prompts: int = 4,
    group: int = 2,
    words: str = "4+4=8",
    seed: int = 0,
    with_history: bool = True,
    num_workers: int = 2,
) -> Path:
    """A run of `prompts` prompts, all of them in each step, so that a step is an epoch."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(seed=seed, clip=0.2 + seed / 10))
    summary = {"steps": num_steps, "eval_reward_before": 0.25, "eval_reward_after": 0.75, "num_tokens": 1_234_567}
    (folder / "summary.json").write_text(json.dumps(summary))
    file = StepFile(folder / STEPS)
    facts = {
        "model": f"Tiny, {words}",
        "data": "rows.jsonl",
        "device": "cpu",
        "command": "rhymerl fit",
        "commit": "1234567",
    }
    file.append({"step": 0, "evaluation": {"eval/reward": 0.25, "eval/set/mean@1": 0.25}})
    for step in range(1, num_steps + 1):
        record = step_record(step, prompts=prompts, group=group, words=words, seed=seed, num_workers=num_workers)
        file.append({**record, **({"began_at": 1_000.0, "facts": facts} if step == 1 else {})})
    file.append({"step": num_steps, "evaluation": {"eval/reward": 0.75, "eval/set/mean@1": 0.75}})
    if with_history:
        history().save(folder / "history.rhyme", tokenizer="any")
    return folder


def step_record(
    step: int,
    *,
    prompts: int,
    group: int,
    words: str,
    seed: int = 0,
    num_workers: int = 2,
    num_texts: int | None = None,
) -> dict[str, Any]:
    rng = np.random.default_rng((seed, step))
    count = prompts * group
    start_s = 1_000.0 + 10 * step
    spans = [[worker, "weights", step - 1, start_s, start_s] for worker in range(num_workers)]
    spans += [[worker, "decode", step - 1, start_s, start_s + 3 + worker] for worker in range(num_workers)]
    spans.append([0, "decode", step, start_s + 3, start_s + 4])
    return {
        "step": step,
        "epoch": step - 1,
        "ended_at": start_s + 9,
        "metrics": metrics(step),
        "workers_apart": False,
        "warnings": [],
        "holding": [],
        "spans": spans,
        "answers": {
            "prompt_id": [f"p{number // group}" for number in range(count)],
            "sample": [number % group for number in range(count)],
            "reward": rng.integers(0, 2, count).tolist(),
            "tokens": rng.integers(10, 40, count).tolist(),
            "passes": [8] * count,
            "drafted": [6] * count,
            "accepted": [min(step, 5)] * count,
            "is_cut": [int(number == 0) for number in range(count)],
        },
        "texts": [
            {
                "answer": number,
                "prompt": f"{words} asks {number // group}",
                "text": f"{words} says {number}",
                "runs": [
                    *([3, NOT_DRAFTED], [2, DraftSource.OWN], [1, DraftSource.SIBLING], [2, DraftSource.RUN_AHEAD]),
                    *([2, DraftSource.HISTORY], [len(f"{words} says {number}") - 10, DraftSource.HISTORY + 2]),
                ],
                "rewards": {"right": 1.0},
                "advantage": 0.5,
            }
            for number in range(count if num_texts is None else num_texts)
        ],
    }


def metrics(step: int) -> dict[str, float]:
    return {
        "reward": 0.1 * step,
        "entropy": 1.0 / step,
        "kl": 0.001 * step,
        "grad_norm": 0.5,
        "clip_ratio/region_mean": 0.01,
        "learning_rate": 3e-4,
        "frac_reward_zero_std": 0.25,
        "completions/min_length": 10.0,
        "completions/mean_length": 20.0 + step,
        "completions/max_length": 40.0,
        "completions/clipped_ratio": 0.0,
        "rollout/spec_accept_rate": 0.5,
        "rollout/spec_accept_length": 1 + step / 10,
        "rollout/speedup": 1.5,
        "rollout/tokens_per_s": 1_000.0,
        "rollout/bubble_frac": 0.1,
        **{f"spec/accept_rate_pos_{depth}": 1 / depth for depth in range(1, 9)},
        "spec/accepted_own_frac": 0.25,
        "spec/accepted_sibling_frac": 0.25,
        "spec/accepted_history_frac": 0.5,
        "spec/accepted_run_ahead_frac": 0.0,
        "history/tokens": 100.0 * step,
        "history/bytes": 400.0 * step,
        "off_policy/staleness/mean": 0.0,
        "sampling/sampling_logp_difference/mean": 0.01 * step,
        "sampling/sampling_logp_difference/precision": 0.01 * step,
        "sampling/sampling_logp_difference/age": 0.0,
        "sampling/sampling_logp_difference/truncation": 0.2,
        "timing_s/rollout": 4.0,
        "timing_s/update": 3.0,
        "timing_s/advantage": 0.001,
        "timing_s/step": 9.0,
    }


def history() -> HistoryStore:
    """Two epochs of one prompt; of the six tokens of the second, those after the first three repeat the first."""
    store = HistoryStore()
    prompt = Prompt(id="p", key="k", token_ids=np.array([1], np.int32), text="p")
    for epoch in range(2):
        store.add(prompt, [make_answer(range(6), reward=1.0, epoch=epoch)])
    return store


def data_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    start = page.index('id="data">') + len('id="data">')
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(page[start : page.index("</script>", start)])))
    return found


def page_of(*runs: Path, out: Path) -> str:
    write_report(runs, out)
    return out.read_text()
