"""The rewards that a module is given: built, checked against its data, and tried on the data's own answers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import Any

from rhymerl.algos.base import Algorithm
from rhymerl.data import PromptDataModule, PromptLoader
from rhymerl.data.base import columns_of
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError, DataError, did_you_mean
from rhymerl.models.policy import Policy
from rhymerl.rewards import Reward, build_rewards, check_reward, tag_match, turn_rewards
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.hyperparameters import refuse_lost
from rhymerl.types import Prompt

_LOG = logging.getLogger(__name__)
_MOST_S = 5.0  # of a start; a computer algebra system takes milliseconds an answer


class RewardTrial:
    """Tries rewards on the answers of the data, once on the same data, and remembers what is to be said about them."""

    def __init__(self) -> None:
        self._tried_on: list[PromptLoader | None] = []
        self._remarks: list[str] = []

    def run(self, rewards: Sequence[Reward], datamodule: PromptDataModule) -> None:
        """Raise ConfigError for rewards that fail on the data's own answers."""
        loaders = [datamodule.train_loader, *datamodule.validation_loaders.values()]
        if loaders != self._tried_on:
            self._remarks = [
                f"{reward.setting}: only this process has the function, so it runs here, where nothing ends a call that hangs; "
                "in a module of its own it runs in reward processes"
                for reward in rewards
                if reward.is_only_here
            ]
            self._remarks += [words for reward in rewards for words in check_answers(reward, datamodule.prompts)]
            self._tried_on = loaders

    def warn(self) -> None:
        for words in self._remarks if is_first_rank() else ():
            _LOG.warning("%s", words)


def checked_rewards(
    rewards: Any,
    datamodule: PromptDataModule,
    *,
    evaluation: EvaluationSettings,
    algo: Algorithm,
    environment: object = None,
) -> list[Reward]:
    """Return the reward functions: `rewards`, else the task's, else the sum of an `environment`'s turn rewards.

    Raises ConfigError for none with an `algo` that learns from them; see `check_reward` and `check_evaluation`.
    """
    refuse_lost(rewards=rewards)
    task_reward = datamodule.task.reward if datamodule.task is not None else None
    default = turn_rewards if task_reward is None and environment is not None else task_reward
    built = build_rewards(rewards if rewards is not None else default)
    if not built and algo.learns_from_rewards:
        raise ConfigError(
            "rewards=null: name at least one reward function (or a task or environment, which bring their own)"
        )
    columns, gaps = columns_of(datamodule.prompts)
    for reward in built:
        check_reward(reward, columns, gaps=gaps)
    check_evaluation(evaluation, datamodule.validation_names, built)
    return built


def check_tags(rewards: Iterable[Reward], policy: Policy) -> None:
    """Raise ConfigError for tags that are special tokens, where texts come without these."""
    special = {*policy.special_tokens.values()}
    for reward in rewards:
        tags = reward.arguments.get("tags", ()) if reward.call is tag_match else ()
        for mark in [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>") if mark in special]:
            raise ConfigError(
                f"rewards.{reward.name}.arguments.tags={list(tags)!r}: {mark!r} is a special token, without which rewards get their texts; "
                "set rollout.skip_special_tokens=false"
            )


def check_evaluation(evaluation: EvaluationSettings, names: Iterable[str], rewards: Sequence[Reward]) -> None:
    """Raise ConfigError for an unknown data set or reward; `names` are the validation sets'."""
    known, functions = list(names), [reward.name for reward in rewards]
    for name in evaluation.sets or {}:
        if name not in known:
            raise ConfigError(
                f"evaluation.sets.{name}: no data set of data.validation; there is {', '.join(known)}{did_you_mean(name, known)}"
            )
    if evaluation.right_by is not None and evaluation.right_by not in functions:
        raise ConfigError(
            f"evaluation.right_by={evaluation.right_by!r}: no reward of the run; "
            f"expected one of {', '.join(functions)}, or null"
        )


def check_answers(reward: Reward, prompts: Collection[Prompt]) -> list[str]:
    """Return sentences about rows whose answer a ready-made reward compares badly, each with the first such row.

    Raises DataError where there are rows that no completion could match. As many rows are tried as a few seconds allow.
    """
    try_answer = getattr(reward.call, "try_answer", None)
    if try_answer is None or "answer" in reward.arguments:
        return []
    known: dict[str, str] = {}  # what is wrong, by the answer
    refused: list[tuple[Prompt, str]] = []
    found: dict[str, list[Prompt]] = {}
    tried, end = 0, monotonic() + _MOST_S
    for prompt in prompts:
        if tried and monotonic() > end:
            break
        tried += 1
        answer = prompt.columns["answer"]
        try:
            if (shown := repr(answer)) not in known:
                known[shown] = try_answer(answer)
            found.setdefault(known[shown], []).append(prompt)
        except ValueError as error:
            refused.append((prompt, str(error)))
    of = f"of the {'first ' if tried < len(prompts) else ''}{tried:,} rows"
    if refused:
        first, problem = refused[0]
        raise DataError(
            f"{first.location}: {problem}; {len(refused):,} {of} have an answer that {reward.setting} cannot match with anything"
        )
    return [
        f"{reward.setting}: the answers of {len(rows):,} {of} {words}, the first at {rows[0].location}: {rows[0].columns['answer']!r:.80}"
        for words, rows in found.items()
        if words
    ]
