"""The rollout loop: prompts in, scored samples out. It knows no variant of anything, only the bases."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.rewards import RewardScorer
from rhymerl.schedulers.base import Scheduler, check_plan
from rhymerl.types import Completion, Prompt, RolloutRequest, Sample, SamplingParams, Split

if TYPE_CHECKING:
    from rhymerl.types import IntArray

Decode = Callable[["IntArray"], str]


class RolloutSettings:
    """How answers are asked for. Raises ConfigError naming the setting that is out of range."""

    def __init__(
        self,
        *,
        group_size: int = 8,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if group_size < 1:
            raise ConfigError(f"rollout.group_size={group_size}: expected at least 1")
        self.group_size = group_size
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.stop_token_ids = tuple(stop_token_ids)
        self.sampling(())  # checks the ranges

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        """Parameters of one request: the policy's own stop ids and the ones asked for besides."""
        try:
            return SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                stop_token_ids=tuple(sorted({*stop_token_ids, *self.stop_token_ids})),
            )
        except ValueError as error:
            raise ConfigError(f"rollout.{error}") from error


def request_seed(run_seed: int, step: int | str, prompt: Prompt, sample: int, round_number: int = 0) -> int:
    """The 64-bit noise key of a request: two steps, prompts, samples or rounds never share their draws."""
    name = f"{run_seed}/{step}/{prompt.key}/{prompt.id}/{sample}/{round_number}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def requests_of(
    prompts: Sequence[Prompt],
    step: int | str,
    settings: RolloutSettings,
    *,
    seed: int,
    stop_token_ids: Sequence[int],
    split: Split = "train",
) -> list[RolloutRequest]:
    """`group_size` requests a prompt, in canonical order; `seed` is the run's, `stop_token_ids` are the policy's."""
    sampling = settings.sampling(stop_token_ids)
    return [
        RolloutRequest(
            id=f"{step}/{prompt.id}/{sample}",
            prompt=prompt,
            sample=sample,
            seed=request_seed(seed, step, prompt, sample),
            sampling=sampling,
            split=split,
        )
        for prompt in prompts
        for sample in range(settings.group_size)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The answers of one step, in canonical (prompt, sample) order, and how they came about."""

    samples: list[Sample]
    metrics: Mapping[str, float]


class RolloutLoop:
    """Asks a backend for answers, scores them as they finish, and lets history, scheduler and the backend's drafter learn.

    The backend has been started. One loop serves one rank.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        scheduler: Scheduler,
        *,
        scorer: RewardScorer,
        decode: Decode,
        history: HistoryStore | None = None,
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        device: Any = None,
    ) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.scorer = scorer
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)
        self.seed = seed
        self.device = device
        self.history = history if history is not None else HistoryStore()
        self.backend.follow(self.history)

    def run(
        self,
        prompts: Sequence[Prompt],
        step: int | str,
        settings: RolloutSettings,
        *,
        epoch: int = 0,
        split: Split = "train",
    ) -> Rollout:
        """`group_size` scored answers a prompt. `step` keys the noise, `epoch` and `split` say where in the history they go.

        Drafter and scheduler learn from the split `train` only; the history of the other serves its own drafts.
        """
        started = time.perf_counter()
        requests = requests_of(prompts, step, settings, seed=self.seed, stop_token_ids=self.stop_token_ids, split=split)
        plan = self.scheduler.plan(requests, 1, step if isinstance(step, int) else 0)
        check_plan(plan, requests, num_workers=1, scheduler=type(self.scheduler).__name__)
        self.backend.submit(plan[0])
        answers = self._drain(len(requests))
        if split == "train":
            self.backend.rest()
        generated_s = time.perf_counter() - started
        scores = self.scorer.collect(device=self.device, order=[request.id for request in requests])
        samples = [self._sample(*answers[request.id], scores[request.id]) for request in requests]
        scored_s = time.perf_counter() - started - generated_s
        if split == "train":
            self.backend.learn(samples)
            self.scheduler.learn(samples)
        self._remember(samples, epoch, split)
        metrics = {
            **rollout_metrics(samples),
            **self.backend.metrics(),
            **self.scorer.metrics(),
            "history/tokens": float(self.history.num_tokens),
            "history/bytes": float(self.history.bytes),
            "timing_s/rollout": generated_s,
            "timing_s/reward": scored_s,  # what was not hidden behind the rollout
            "rollout/tokens_per_s": sum(map(len, samples)) / max(generated_s, 1e-9),
        }
        return Rollout(samples=samples, metrics=metrics)

    def _remember(self, samples: Sequence[Sample], epoch: int, split: Split) -> None:
        for prompt, answers in answers_of(samples, epoch):
            self.history.add(prompt, answers, split)
        self.backend.follow(self.history)

    def _drain(self, count: int) -> dict[str, tuple[Completion, str]]:
        """All completions and their texts by request id; each goes to the reward functions the moment it is done."""
        answers: dict[str, tuple[Completion, str]] = {}
        while len(answers) < count:
            finished = self.backend.collect()
            if not finished:
                raise BackendError(f"{type(self.backend).__name__} lost {count - len(answers)} of {count} requests")
            for completion in finished:
                request = completion.request
                text = self.decode(completion.token_ids)
                answers[request.id] = completion, text
                self.scorer.submit(request.id, text, request.prompt.columns)
        return answers

    def _sample(self, completion: Completion, text: str, rewards: Mapping[str, float]) -> Sample:
        return Sample(
            completion=completion,
            text=text,
            reward=sum(reward.weight * rewards[reward.name] for reward in self.scorer.rewards),
            rewards=rewards,
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
        )


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards and lengths of a step's samples, by their names in docs/metrics.md."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(sample) for sample in samples])
    ended = np.array([sample.completion.finish_reason == "stop" for sample in samples])
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample.reward)
    spread = np.array([np.std(group) for group in groups.values()])
    metrics = {
        "reward": rewards.mean(),
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
    for name in samples[0].rewards:
        values = np.array([sample.rewards[name] for sample in samples])
        metrics[f"rewards/{name}/mean"] = values.mean()
        metrics[f"rewards/{name}/std"] = values.std()
    return {name: float(value) for name, value in metrics.items()}
