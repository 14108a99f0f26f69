"""TRL's side of a comparison, started by `compare.py` with TRL's interpreter: GRPOTrainer; prints one JSON line.

It starts from the same weights and tokenizer as our side and needs none of our code. Whatever is not set here is TRL's
default, and our side's settings are made to match: AdamW without weight decay, gradient norm 1, clip range 0.2, no KL.
"""

from __future__ import annotations

import importlib.metadata
import json
import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import sides


def rewards_by(reward: Callable[..., float], names: Sequence[str]) -> Callable[..., list[float]]:
    """Return a reward function as TRL calls it: completions, texts or messages, and the columns of their rows."""

    def rewards(completions: list[Any], **columns: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        given = zip(*(columns[name] for name in names), strict=True)
        return [
            reward(text, **dict(zip(names, values, strict=True))) for text, values in zip(texts, given, strict=True)
        ]

    return rewards


class Clock(TrainerCallback):
    """Times from the end of a step, its logging included, to the end of the next."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.rollout_s: list[float] = []
        self.update_s: list[float] = []
        self.prepared = self._last = 0.0

    def on_train_begin(self, *ignored: Any, **more: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *ignored: Any, **more: Any) -> None:
        self.update_s.append(time.perf_counter() - self.prepared)

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "reward" in (logs or {}):
            now = time.perf_counter()
            self.step_s.append(now - self._last)
            self._last = now


class TimedTrainer(GRPOTrainer):
    """Notes how long generation takes, and when the batch is ready for the update."""

    clock: Clock
    has_generated = False

    def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
        started, self.has_generated = time.perf_counter(), True
        result = super()._generate_single_turn(*arguments, **more)
        self.clock.rollout_s.append(time.perf_counter() - started)
        return result

    def _prepare_inputs(self, *arguments: Any, **more: Any) -> Any:
        result = super()._prepare_inputs(*arguments, **more)
        if self.has_generated:  # and not for the later backwards of a step
            self.clock.prepared, self.has_generated = time.perf_counter(), False
        return result


def configuration(arguments: Any) -> GRPOConfig:
    """One rollout and one optimizer step a step; logged every step, as on our side."""
    rows = arguments.prompts * arguments.group_size
    at_once = arguments.rows_per_backward or rows
    return GRPOConfig(
        output_dir=str(arguments.folder),
        seed=arguments.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        num_generations=arguments.group_size,
        max_completion_length=arguments.max_tokens,
        temperature=1.0,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=["tensorboard"],
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    arguments = sides.settings()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    set_seed(arguments.seed)
    clock, rows = Clock(), sides.rows_of(arguments)
    names = [name for name in rows[0] if name != "prompt"]
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.policy),
        reward_funcs=rewards_by(pkgutil.resolve_name(arguments.reward), names),
        args=configuration(arguments),
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.clock = clock
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "step_s": clock.step_s,
        "rollout_s": clock.rollout_s,
        "update_s": clock.update_s,
        "reward": [entry["reward"] for entry in history],
        "length": [entry["completions/mean_length"] for entry in history],
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
