"""Evaluation: how validation prompts are answered, and what is said of the answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhymerl.data.base import ONLY_SET
from rhymerl.errors import RewardError, at_least, check_ranges, did_you_mean, require_at_least
from rhymerl.rewards import Reward
from rhymerl.rewards.calls import Attempt
from rhymerl.rewards.failures import Failures
from rhymerl.rewards.hooks import Extract
from rhymerl.rewards.resolve import find
from rhymerl.rollout import Rollout, RolloutSettings
from rhymerl.rollout.results import by_prompt
from rhymerl.training.state import Learner
from rhymerl.types import Sample

_OF_A_SET = ("samples", "temperature", "max_tokens")
_RIGHT = 1 - 1e-9  # the reward from which on an answer counts as right; a weighted sum of rewards may be rounded


@dataclass(kw_only=True, eq=False)
class EvaluationSettings:
    """Answers each validation prompt `samples` times at `temperature`; all else is as in training rollouts.

    A run is evaluated before and after training, and every `every_n_steps` rollout steps in between if that is not 0.
    `sets` overrides settings for a data set: `{"greedy": {"temperature": 0, "samples": 1}}`. An answer is right when
    its reward is at least 1: the reward that `right_by` names, or else the weighted sum of all. `extract` is the dotted
    name of a function that extracts the answer from a text, for maj@k; by default the first reward's that has one.
    """

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None  # None: as in training
    every_n_steps: int = at_least(0, 0)
    sets: Mapping[str, Mapping[str, float | int | None]] | None = None
    right_by: str | None = None
    extract: str | None = None

    def __post_init__(self) -> None:
        self._extract: Extract | None = _extractor(self.extract) if self.extract is not None else None
        check_ranges(self)
        _check(self._of(""))
        for name, values in (self.sets or {}).items():
            for key in values:
                if key not in _OF_A_SET:
                    known = ", ".join(_OF_A_SET)
                    raise ValueError(
                        f"sets.{name}.{key}: unknown setting{did_you_mean(key, _OF_A_SET)}; known: {known}"
                    )
            _check(self._of(name), f"sets.{name}.")

    def rollout(self, training: RolloutSettings, name: str = ONLY_SET) -> RolloutSettings:
        """Return the settings of a rollout on the data set `name`."""
        asked = self._of(name)
        changed = {
            "group_size": asked["samples"],
            "max_tokens": asked["max_tokens"] or training.max_tokens,
            "temperature": asked["temperature"],
        }
        # Nothing is trained on these answers.
        return replace(training, sampling_replay=False, dynamic_sampling=0, **changed)

    def max_tokens_of(self, name: str) -> int | None:
        """Return the limit on answers to the data set `name`, None for the limit of training."""
        limit: int | None = self._of(name)["max_tokens"]
        return limit

    def metrics(self, answered: Mapping[str, Sequence[Sample]], rewards: Sequence[Reward]) -> dict[str, float]:
        """Return an evaluation's metrics from the answers by data set; names without a set are means over the sets."""
        extract = self._extract or next((reward.extract for reward in rewards if reward.extract), None)
        found = [
            evaluation_metrics(samples, name, right_by=self.right_by, extract=extract)
            for name, samples in answered.items()
        ]
        means = {name: float(np.mean([each[name] for each in found])) for name in _OVERALL}
        return means | {name: value for each in found for name, value in each.items() if name not in means}

    def why_nothing_passes(self, metrics: Mapping[str, float]) -> str | None:
        """Return a sentence about data sets whose answers get rewards but never pass; None if there is none."""
        passes = {name.split("/")[1]: name for name in metrics if "/pass@" in name}  # that of all answers comes last
        means = {name.split("/")[1]: metrics[name] for name in metrics if "/mean@" in name}
        tasks = [task for task, name in passes.items() if metrics[name] == 0 < means[task]]
        if not tasks or self.right_by is not None:
            return None
        return (
            f"pass@k is 0 for {', '.join(tasks)}, since no answer's reward reaches 1, from which on it counts as right; "
            "evaluation.right_by can name the reward that says so"
        )

    def _of(self, name: str) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _OF_A_SET} | dict((self.sets or {}).get(name, {}))


def step_name(name: str) -> str:
    """Return what keys the noise of an evaluation on the data set `name`: the same every time."""
    return "evaluation" if name == ONLY_SET else f"evaluation/{name}"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right (arXiv 2107.03374, equation 1)."""
    if num_samples - num_correct < k:
        return 1.0
    wrong = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1 - np.prod(1 - k / wrong))


def majority(answers: Sequence[object], right: Sequence[bool]) -> float:
    """Return the chance that the answer given most often is right; None is no vote.

    Among answers given equally often one is taken by lot, so the result is the chance that this one is right. Answers
    that are extracted alike may have been judged differently: then it is the share of them that were right.
    """
    votes: dict[object, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(each) for each in votes.values() if len(each) == most])) if votes else 0.0


_OVERALL = ("eval/reward", "eval/mean_length", "eval/clipped_ratio")


def evaluation_metrics(
    samples: Sequence[Sample], task: str = ONLY_SET, *, right_by: str | None = None, extract: Extract | None = None
) -> dict[str, float]:
    """Return the metrics of one data set (see docs/metrics.md).

    pass@k is for k = 1, 2, 4 … and all answers of a prompt. Answers without a reward are left out of its mean, and
    prompts with such answers out of pass@k and maj@k. Raises RewardError where no answer has one.
    """
    rewards = [sample.reward for sample in samples if sample.has_reward]
    if not rewards:
        where = f"data.validation{'' if task == ONLY_SET else f'.{task}'}"
        raise RewardError(f"no reward applies to any of the {len(samples):,} answers to {where}")
    most = min(map(len, by_prompt(samples).values()))
    judged = [group for group in by_prompt(samples).values() if all(_is_judged(sample, right_by) for sample in group)]
    right = [[_reward(sample, right_by) >= _RIGHT for sample in group] for group in judged]
    reward = float(np.mean(rewards))
    length = float(np.mean([sample.num_sampled for sample in samples]))
    clipped = float(np.mean([sample.completion.output.is_cut for sample in samples]))
    powers = sorted({2**power for power in range(most.bit_length())} | {most}) if judged else []
    passes = {
        f"eval/{task}/pass@{k}": float(np.mean([pass_at_k(len(group), sum(group), k) for group in right]))
        for k in powers
    }
    votes = list[float]()
    if extract is not None and most > 1:
        answers = [[_extracted(extract, sample.text) for sample in group] for group in judged]
        votes = list(map(majority, answers, right))
    return {
        "eval/reward": reward,
        f"eval/{task}/mean@{most}": reward,
        **passes,
        **({f"eval/{task}/maj@{most}": float(np.mean(votes))} if votes else {}),
        f"eval/{task}/mean_length": length,
        f"eval/{task}/clipped_ratio": clipped,
        "eval/mean_length": length,
        "eval/clipped_ratio": clipped,
    }


def _extracted(extract: Extract, text: str) -> object:
    with Attempt():
        answer = extract(text)
        hash(answer)  # votes are counted
        return answer
    return None


def _is_judged(sample: Sample, name: str | None) -> bool:
    return sample.has_reward if name is None else name in sample.rewards


def _reward(sample: Sample, name: str | None) -> float:
    return sample.reward if name is None else sample.rewards[name]


def _extractor(name: str) -> Callable[[str], object]:
    argument = f"extract={name!r}"
    found = find(name, argument=argument).target
    if not callable(found):
        raise ValueError(f"{argument}: it is of type {type(found).__name__}, expected a function of a text")
    extract: Callable[[str], object] = found
    return extract


def _check(values: Mapping[str, Any], within: str = "") -> None:
    for name, least in (("samples", 1), ("temperature", 0), ("max_tokens", 1)):
        value = values[name]
        if value is None and name != "max_tokens":
            raise ValueError(f"{within}{name}=None: expected a number")
        if name != "temperature" and isinstance(value, float) and not value.is_integer():
            raise ValueError(f"{within}{name}={value}: expected a whole number")
        require_at_least({within + name: (least if value is None else value, least)})


class Evaluator:
    """Collects the answers between `begin` and `end`, which restores the state of `learners` from training."""

    def __init__(self, settings: EvaluationSettings, *learners: Learner) -> None:
        self.num_done = 0
        self.done_at: int | None = None  # rollout steps that had been trained on
        self.metrics: dict[str, float] = {}  # of the latest one
        self.answered: dict[str, list[Sample]] = {}  # in the one under way, by data set
        self._settings = settings
        self._learners = learners
        self._states: list[dict[str, Any]] = []  # of the learners, while one is under way
        self._failures = Failures()  # of the rewards

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after so many rollout steps, and has not been run."""
        every = self._settings.every_n_steps
        return bool(every and step) and step % every == 0 and self.done_at != step

    def begin(self) -> None:
        self._states = [copy.deepcopy(part.state_dict()) for part in self._learners]
        self.answered, self._failures = {}, Failures()

    def add(self, name: str, result: Rollout) -> None:
        self.answered.setdefault(name, []).extend(result.samples)
        self._failures += result.failures

    def end(self, rewards: Sequence[Reward], *, step: int) -> dict[str, float]:
        """Return the metrics of all answers, if any. Raises RewardError if rewards have failed too often."""
        self._failures.check(rewards, "an evaluation")
        found: dict[str, float] = {}
        if self.answered:
            found = self.metrics = self._settings.metrics(self.answered, rewards)
            self.num_done, self.done_at = self.num_done + 1, step
        self.answered = {}
        for part, state in zip(self._learners, self._states, strict=False):
            part.load_state_dict(state)
        self._states = []
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"num_done": self.num_done, "done_at": self.done_at, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_done, self.done_at, self.metrics = state["num_done"], state["done_at"], dict(state["metrics"])
