"""The metrics of a rollout, whichever backend it ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.history.answers import are_alike
from rhymerl.rollout.results import SamplingRound, by_prompt
from rhymerl.types import Completion, FinishReason, Output, Sample
from rhymerl.workers.base import over_workers

_LIMITS: tuple[FinishReason, ...] = ("max_turns", "length", "context", "environment")


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return rewards and lengths of samples by their names in docs/metrics.md; `reward` only if a sample has one."""
    rewarded = [sample for sample in samples if sample.has_reward]
    lengths = np.array([sample.num_sampled for sample in samples])
    ended = np.array([sample.completion.finish_reason == "stop" for sample in samples])
    groups = [[sample.reward for sample in group] for group in by_prompt(rewarded).values()]
    # Equal rewards deviate by 0, where rounding may leave something of it.
    spread = np.array([0.0 if are_alike(rewards) else np.std(rewards) for rewards in groups] or [0.0])
    metrics = {
        **({"reward": np.mean([sample.reward for sample in rewarded])} if rewarded else {}),
        "reward_std": spread.mean(),
        "frac_reward_zero_std": (spread == 0).mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.mean(),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = lengths[ended].mean()
        metrics["completions/min_terminated_length"] = lengths[ended].min()
        metrics["completions/max_terminated_length"] = lengths[ended].max()
    metrics |= episode_metrics([sample.completion.output for sample in samples])
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        values = np.array([sample.rewards[name] for sample in samples if name in sample.rewards])
        metrics[f"rewards/{name}/mean"] = values.mean()
        metrics[f"rewards/{name}/std"] = values.std()
    return {name: float(value) for name, value in metrics.items()}


def episode_metrics(outputs: Sequence[Output]) -> dict[str, float]:
    """Return how episodes went, by their names in docs/metrics.md; nothing where no environment has been asked."""
    turns = [turn for output in outputs for turn in output.turns]
    if not turns:
        return {}
    reasons = Counter(output.finish_reason for output in outputs)
    remembered = [turn.saved_s for turn in turns if turn.saved_s is not None]
    numbers: dict[str, list[float]] = {}
    for turn in turns:
        for name, value in turn.metrics.items():
            numbers.setdefault(f"environment/{name}", []).append(value)
    return {
        "episodes/turns": len(turns) / len(outputs),
        "episodes/reply_tokens": sum(turn.stop - turn.start - (turn.rerendered or 0) for turn in turns) / len(outputs),
        "episodes/parts": 1 + sum(turn.rerendered is not None for turn in turns) / len(outputs),
        "environment/wait_s": sum(turn.waited_s for turn in turns) / len(turns),
        "environment/remembered_frac": len(remembered) / len(turns),
        "environment/saved_s": sum(remembered),
        **{f"episodes/{reason}_frac": reasons[reason] / len(outputs) for reason in _LIMITS},
        **{name: sum(values) / len(values) for name, values in numbers.items()},
    }


def staleness_metrics(samples: Sequence[Sample], step: int) -> dict[str, float]:
    """Return how many updates older than the step's policy the policies were that sampled its tokens."""
    ages = step - np.concatenate([sample.completion.output.policy_versions for sample in samples])
    return {"off_policy/staleness/mean": float(ages.mean()), "off_policy/staleness/max": float(ages.max())}


def metrics_of(rounds: Sequence[SamplingRound]) -> dict[str, float]:
    """Return the times and rates of all rounds together."""
    results = [result for each in rounds for result in each.by_rank]
    rollout_s = sum(each.rollout_s for each in rounds)
    sampled_s = max((each.sampled_s for each in results if each.sampled_s is not None), default=rollout_s)
    busy_s, num_ranks = sum(result.busy_s for result in results), len(rounds[0].by_rank)
    first, *others = (len({sample.prompt.id for sample in each.samples}) for each in rounds)
    return {
        **over_workers([result.metrics for result in results], [result.busy_s for result in results]),
        "timing_s/rollout": rollout_s,
        "timing_s/reward": sum(each.scored_s for each in rounds),  # what was not hidden behind the rollout
        "rollout/tokens_per_s": sum(result.num_tokens for result in results) / max(sampled_s, 1e-9),
        "rollout/bubble_frac": max(0.0, 1 - busy_s / max(num_ranks * rollout_s, 1e-9)),
        "rollout/replaced_groups": sum(others) / first,
    }


@dataclass(slots=True)
class AcceptanceTotals:
    """The totals of how far drafts carried whole answers."""

    tokens: int = 0
    request_passes: int = 0  # an answer's passes in which it got tokens
    drafted: int = 0  # draft nodes verified
    accepted: int = 0  # draft nodes that became tokens

    def count(self, completions: Iterable[Completion]) -> None:
        """Add answers."""
        for completion in completions:
            self.tokens += completion.output.num_sampled
            self.request_passes += completion.num_passes
            self.drafted += completion.num_drafted
            self.accepted += completion.num_accepted

    @property
    def accept_rate(self) -> float:
        """Drafted tokens that were accepted, over those that were verified; 0 without drafts."""
        return self.accepted / max(self.drafted, 1)

    @property
    def accept_length(self) -> float:
        """Tokens a pass and answer; 1 without drafts."""
        return self.tokens / max(self.request_passes, 1)
