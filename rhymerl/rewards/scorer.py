"""Scores completions as they finish: what the RolloutLoop sees of rewards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from rhymerl.errors import require_at_least
from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call
from rhymerl.rewards.failures import Failures
from rhymerl.rewards.functions import turn_rewards
from rhymerl.rewards.lines import Outcome
from rhymerl.rewards.local import LocalReward
from rhymerl.rewards.pool import PendingCall, RewardPool
from rhymerl.types import Completion

if TYPE_CHECKING:
    import torch

_FAILURES = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _ScoredSample:
    """A sample and its rewards so far."""

    text: str
    columns: Mapping[str, Any]
    completion: Completion | None
    scores: dict[str, float]
    num_expected: int  # outcomes that are not there yet
    failed: list[tuple[Reward, Outcome]] = field(default_factory=list)

    def is_of(self, text: str, columns: Mapping[str, Any], completion: Completion | None) -> bool:
        """Return whether it was begun for this very sample."""
        outputs = [each.output if each is not None else None for each in (self.completion, completion)]
        return self.text == text and self.columns is columns and outputs[0] is outputs[1]


class RewardScorer:
    """Runs every reward on every submitted sample. A context manager: leaving it ends the reward processes.

    Reward processes may `begin` with samples before they are submitted. One thread at a time may use it. `chunk_size`
    is how many samples a process gets at once, and so how many coroutines of an async reward run at the same time in a
    process. Raises ValueError when a value is out of range or two names are equal.
    """

    def __init__(self, rewards: Sequence[Reward], *, num_processes: int = 2, chunk_size: int = 16) -> None:
        require_at_least({"num_processes": (num_processes, 1), "chunk_size": (chunk_size, 1)})
        self.rewards = list(rewards)
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards={names}: expected distinct names")
        self.chunk_size = chunk_size
        self._defaults = {reward.name: reward.default for reward in self.rewards}
        self._samples: dict[str, _ScoredSample] = {}  # submitted
        self._begun: dict[str, _ScoredSample] = {}  # not submitted yet
        self._num_failed: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._failures = Failures()
        # Of a profile: a reward's name and when it was there, in time.monotonic().
        self.log: list[tuple[str, float]] | None = None
        pooled = [reward for reward in self.rewards if reward.where == "pool"]
        self._pool = RewardPool(pooled, self._deliver, num_processes=num_processes, chunk_size=chunk_size)
        local = [reward for reward in self.rewards if reward.where != "pool"]
        poll = self._pool.poll
        self._local = [LocalReward(each, self._deliver, chunk_size=chunk_size, poll=poll) for each in local]

    @property
    def begins(self) -> bool:
        """Return whether there is something to `begin` with: rewards of reward processes."""
        return bool(self._pool.rewards)

    @property
    def turn_weight(self) -> float:
        """Return the weight of turn rewards in a sample's reward, taken from the function that sums them."""
        return sum(reward.weight for reward in self.rewards if reward.call is turn_rewards)

    def begin(self, key: str, text: str, columns: Mapping[str, Any], completion: Completion | None = None) -> None:
        """Let reward processes score a sample that is perhaps submitted later; nothing else of it is done before."""
        self._forget([key])
        self._begun[key] = self._sent_to_pool(text, columns, completion)

    def forget(self) -> None:
        """Forget samples that were only begun: they will not be submitted."""
        self._forget(list(self._begun))

    def _forget(self, keys: Sequence[str]) -> None:
        gone = {self._begun.pop(key) for key in keys if key in self._begun}
        if gone:
            self._pool.discard(gone)

    def _sent_to_pool(self, text: str, columns: Mapping[str, Any], completion: Completion | None) -> _ScoredSample:
        sample = _ScoredSample(
            text=text,
            columns=columns,
            completion=completion,
            scores=dict(self._defaults),
            num_expected=len(self.rewards),
        )
        for index, reward in enumerate(self._pool.rewards):
            self._pool.put(PendingCall(index, sample, Call(text, reward.select(columns, completion))))
        return sample

    def poll(self) -> None:
        """Send to reward processes, and take from them, what can be without waiting. Raises as `submit` does."""
        self._pool.flush()

    def submit(self, key: str, text: str, columns: Mapping[str, Any], completion: Completion | None = None) -> None:
        """Queue a sample; where='main' runs now (async and batch functions once a chunk of them is full).

        `completion` is for functions that ask for more of it than its text. Raises RewardError when a reward process
        cannot work at all.
        """
        if key in self._samples:
            raise ValueError(f"key={key!r}: submitted twice")
        begun = self._begun.get(key)
        if begun is not None and begun.is_of(text, columns, completion):
            self._samples[key] = self._begun.pop(key)
        else:
            self._forget([key])
            self._samples[key] = self._sent_to_pool(text, columns, completion)
        for local in self._local:
            local.put(self._samples[key], Call(text, local.reward.select(columns, completion)))
        if len(self._samples) % self.chunk_size == 0:
            self._pool.poll()

    def collect(
        self, device: torch.device | str | None = None, *, order: Sequence[str] | None = None
    ) -> dict[str, dict[str, float]]:
        """Wait for all samples; return rewards by key and name.

        They are in the order of submission or in `order`, without rewards that do not apply. Rewards with
        where='engine' run here, in that order, so give one that no timing changes. Raises RewardError when a reward
        process cannot work at all.
        """
        keys = list(self._samples) if order is None else list(order)
        if len(keys) != len(self._samples) or set(keys) != set(self._samples):
            raise ValueError(f"order: expected the {len(self._samples)} submitted keys, each once")
        self._pool.flush()
        samples = {key: self._samples[key] for key in keys}
        for local in self._local:
            in_order = samples if local.reward.where == "engine" else self._samples
            extra = {"device": device} if local.reward.takes_device else {}
            local.run([self._samples[key] for key in in_order], extra=extra)
        self._samples = {}
        self._pool.drain(partial(_drop_scored, list(samples.values())))
        absent = Counter(reward.name for sample in samples.values() for reward in self.rewards)
        absent -= Counter(name for sample in samples.values() for name in sample.scores)
        for key, sample in samples.items():
            self._count_failures(key, sample)
        unrewarded = sum(not sample.scores for sample in samples.values()) if self.rewards else 0
        self._failures += Failures(num_samples=len(samples), num_absent=dict(absent), num_unrewarded=unrewarded)
        return {key: sample.scores for key, sample in samples.items()}

    def metrics(self) -> dict[str, float]:
        """Return the failed calls since the last call of this, by reward and kind: `rewards/{name}/errors`."""
        names = [f"rewards/{reward.name}/{kind}" for reward in self.rewards for kind in _FAILURES.values()]
        counts, self._num_failed = self._num_failed, Counter()
        return {name: counts[name] for name in names}

    def failures(self) -> Failures:
        """Return the failures of the samples that were collected since the last call of this."""
        failures, self._failures = self._failures, Failures()
        return failures

    def close(self) -> None:
        """End the reward processes; unfinished work is lost. May be called twice."""
        self._pool.close()
        for local in self._local:
            local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()

    def _deliver(self, reward: Reward, sample: _ScoredSample, outcome: Outcome) -> None:
        sample.num_expected -= 1
        if outcome.kind == "ok":
            sample.scores[reward.name] = outcome.value
        elif outcome.kind == "absent":
            del sample.scores[reward.name]
        else:
            sample.failed.append((reward, outcome))
        if self.log is not None:
            self.log.append((reward.name, outcome.finished_at))

    def _count_failures(self, key: str, sample: _ScoredSample) -> None:
        for reward, outcome in sample.failed:
            name, metric = reward.name, f"rewards/{reward.name}/{_FAILURES[outcome.kind]}"
            drops = reward.on_failure == "drop"
            if drops:
                del sample.scores[name]
            dropped = {name: 1} if drops else {}
            self._num_failed[metric] += 1
            self._failures += Failures(num_failed={name: 1}, num_dropped=dropped, first={name: outcome.message})
            if metric not in self._logged:
                self._logged.add(metric)
                _LOG.warning(
                    "%s: failed on sample %s%s, which gets %s: %s (more of this kind are only counted, as %s)",
                    reward.setting,
                    key,
                    f" ({sample.completion.request.prompt.location})" if sample.completion is not None else "",
                    "no reward from it" if drops else f"{reward.default:g}",
                    outcome.message,
                    metric,
                )


def _drop_scored(samples: list[_ScoredSample]) -> bool:
    """Return whether all of them are scored; those at the end that are leave the list."""
    while samples and not samples[-1].num_expected:
        samples.pop()
    return not samples
