"""TRL's side of `update_speed.py`, which starts it with an interpreter that has TRL: GRPOTrainer's loss; prints one JSON line.

It reads the same tensors as our side, padded as GRPOTrainer pads them (prompts on the left, answers on the right, to the longest
of the step), and takes an optimizer step from GRPOTrainer's loss, on as many samples at a time as its memory for padded tokens allows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def trainer_of(policy: str, folder: Path, *, batch: int) -> GRPOTrainer:
    """Return a trainer with the loss of our side: a mean over all tokens, clip range 0.2, no divergence."""
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(policy),
        reward_funcs=lambda completions, **ignored: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=batch,
            num_generations=2,
            generation_batch_size=2 * batch,
            loss_type="dapo",
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 4),
    )


def padded(data: dict[str, Any], pad: int) -> dict[str, torch.Tensor]:
    """All samples of the step, to the longest prompt and the longest answer."""
    prompts, answers = data["prompts"], data["answers"]
    width, length = max(map(len, prompts)), max(map(len, answers))
    return {
        "prompt_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids + [pad] * (length - len(ids)) for ids in answers]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in answers]),
        "advantages": torch.tensor(data["advantages"]),
    }


def step(
    trainer: GRPOTrainer, whole: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, *, batch: int
) -> dict[str, float]:
    """One optimizer step over all samples; seconds, and the gradient's norm."""
    count, num_tokens = len(whole["advantages"]), whole["completion_mask"].sum()
    started = time.perf_counter()
    optimizer.zero_grad()
    for first in range(0, count, batch):
        part = {name: tensor[first : first + batch] for name, tensor in whole.items()}
        trainer._compute_loss(trainer.model, {**part, "num_items_in_batch": num_tokens}).backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    optimizer.step()
    return {"step_s": time.perf_counter() - started, "grad_norm": float(norm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # TRL and its callbacks print
    trainer = trainer_of(arguments.policy, arguments.folder / "trl", batch=arguments.batch)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation  # a step is the whole
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0)  # the weights stay as they are
    whole = padded(json.loads((arguments.folder / "step.json").read_text()), trainer.processing_class.pad_token_id)
    print(
        json.dumps({name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}),
        file=answers,
        flush=True,
    )
    for _ in sys.stdin:  # a line asks for a step
        print(json.dumps(step(trainer, whole, optimizer, batch=arguments.batch)), file=answers, flush=True)


if __name__ == "__main__":
    main()
