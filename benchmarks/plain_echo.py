"""The echo task (trl_echo.py) trained by a loop of torch alone: the referee where two trainers end with different rewards.

It shares the first weights, the rows and the reward with them, and nothing else: tokens come from `torch.multinomial` over a cache of transformers, the gradient from
autograd on whole rows, the step from `torch.optim.AdamW`.

    python benchmarks/plain_echo.py [--steps 100] [--seeds 16]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import echo_task
import record
import torch

from rhymerl.models.policy import PolicySource

PROMPTS, GROUP, TOKENS, END = 8, 8, 32, 1


def rewards(seed: int, steps: int) -> Iterator[float]:
    """Train from the weights of a seed; yields the mean reward of each step."""
    policy = PolicySource(init=echo_task.MODEL, characters=echo_task.CHARACTERS, seed=seed).load()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, weight_decay=0.0)
    source, rows, order = torch.Generator().manual_seed(seed), echo_task.rows(), list[int]()
    for _ in range(steps):
        order = order or torch.randperm(len(rows), generator=source).tolist()
        chosen, order = [rows[i] for i in order[:PROMPTS] for _ in range(GROUP)], order[PROMPTS:]
        prompts = torch.tensor([policy.tokenizer(row["prompt"])["input_ids"] for row in chosen])
        answers = sample(policy.model, prompts, source)
        ended = (answers == END).cumsum(1)
        counts = ended - (answers == END).long() == 0  # the tokens up to the first end
        texts = [policy.decode(line[kept].tolist()) for line, kept in zip(answers, counts, strict=True)]
        found = torch.tensor(
            [echo_task.echo(text, target=row["target"]) for text, row in zip(texts, chosen, strict=True)]
        )
        yield found.mean().item()
        groups = found.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        logits = policy.model(input_ids=torch.cat([prompts, answers], 1)).logits[:, prompts.shape[1] - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        loss = -(logprobs * advantages.view(-1, 1) * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Return so many tokens for each prompt, [rows, TOKENS]; what comes behind an end counts nowhere."""
    cache, new, found = None, prompts, []
    for _ in range(TOKENS):
        out = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=source)
        found.append(new)
    return torch.cat(found, 1)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=16)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads or 1)
    start, rows = record.environment(), []
    for seed in range(arguments.seeds):
        found = list(rewards(seed, arguments.steps))
        rows.append({"seed": seed, "reward_mean": statistics.mean(found), "reward_last5": statistics.mean(found[-5:])})
        print(record.cell(rows[-1]), file=sys.stderr, flush=True)
    means = [row["reward_mean"] for row in rows]
    rows.append(
        {
            "seed": "all",
            **{name: statistics.mean(row[name] for row in rows) for name in ("reward_mean", "reward_last5")},
        }
    )
    print(
        f"standard error {statistics.stdev(means) / len(means) ** 0.5:.4f}" if len(means) > 1 else "", file=sys.stderr
    )
    return record.finish("plain_echo", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
