"""The demands of a module on its data, checked before any compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rhymerl.algos.base import Algorithm
from rhymerl.algos.policy_gradient import PolicyGradient
from rhymerl.backends.base import Backend
from rhymerl.backends.hosted.base import HostedBackend
from rhymerl.data import PromptDataModule
from rhymerl.errors import ConfigError
from rhymerl.models.policy import Policy
from rhymerl.rewards import Reward, build_rewards, check_reward, tag_match
from rhymerl.rewards.resolve import nearest
from rhymerl.rollout import RolloutSettings
from rhymerl.schedulers.base import Scheduler
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.hyperparameters import refuse_lost
from rhymerl.training.settings import UpdateSettings
from rhymerl.workers import RunAhead, follows_clock


def check_answers_fit(policy: Policy, *, rollout: RolloutSettings, evaluation: EvaluationSettings) -> None:
    """Raise ConfigError when an answer alone may fill the model's context."""
    of_sets = {f"evaluation.sets.{name}": evaluation.max_tokens_of(name) or 1 for name in evaluation.sets or {}}
    limits = {"rollout": rollout.max_tokens, "evaluation": evaluation.max_tokens or 1, **of_sets}
    for name, value in limits.items():
        if value >= policy.context_tokens:
            raise ConfigError(
                f"{name}.max_tokens={value}: the model's context is {policy.context_tokens} tokens, "
                "and the prompt needs some of them"
            )


def check_algorithm(algo: Algorithm, *, rollout: RolloutSettings, update: UpdateSettings) -> None:
    """Raise ValueError when it cannot learn from these groups, or would never be asked for a bound between a step's updates."""
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature=0: greedy answers of a group are all the same, so nothing can be learned from them; "
            "expected more than 0 (evaluation.temperature may be 0)"
        )
    try:
        algo.check(group_size=rollout.group_size)
    except ValueError as error:
        names_size = str(error).startswith("group_size=")
        raise ValueError(f"{'rollout.' if names_size else 'algo: '}{error}") from error
    if isinstance(algo, PolicyGradient) and algo.max_kl is not None and update.optimizer_steps == 1:
        raise ValueError(
            f"algo.max_kl={algo.max_kl} with update.epochs=1 and update.mini_batches=1: a step has one update, after which there is "
            "nothing to leave out; expected more of either, or algo.max_kl=null"
        )


def check_evaluation(evaluation: EvaluationSettings, names: Iterable[str], rewards: Sequence[Reward]) -> None:
    """Raise ConfigError for a data set or a reward that there is not; `names` are those of the validation sets."""
    known, functions = list(names), [reward.name for reward in rewards]
    for name in evaluation.sets or {}:
        if name not in known:
            raise ConfigError(
                f"evaluation.sets.{name}: no data set of data.validation; there is {', '.join(known)}{nearest(name, known)}"
            )
    if evaluation.right_by is not None and evaluation.right_by not in functions:
        raise ConfigError(
            f"evaluation.right_by={evaluation.right_by!r}: no reward of the run; "
            f"expected one of {', '.join(functions)}, or null"
        )


def check_workers(
    backend: Backend, scheduler: Scheduler, *, workers: int | None, num_ranks: int, run_ahead: RunAhead, lockstep: bool
) -> None:
    """Raise ConfigError for a number of workers that the backend cannot have, and where they are to keep step and could not."""
    if workers not in (None, num_ranks) and not isinstance(backend, HostedBackend):
        raise ConfigError(
            f"workers={workers}: with {type(backend).__name__} every rank is a worker; expected null, {num_ranks}, or backend=ray"
        )
    if lockstep and isinstance(backend, HostedBackend) and not backend.counts_passes:
        raise ConfigError(
            f"deterministic=true: workers of {type(backend).__name__} cannot count passes, by which they would keep step; expected embedded "
            "engines, or deterministic=false"
        )
    number = workers or num_ranks
    if lockstep and isinstance(backend, HostedBackend) and (least := backend.least_workers(number)) < number:
        raise ConfigError(
            f"deterministic=true: backend.min_workers={least} of {number} workers lets some come in the middle of a run, and what they "
            "would answer has been answered elsewhere; expected null, or deterministic=false"
        )
    if lockstep and number > 1 and follows_clock(scheduler, run_ahead) and not backend.counts_passes:
        raise ConfigError(
            f"deterministic=true with {number} workers and run_ahead={run_ahead}, scheduler={type(scheduler).__name__}: "
            f"{type(backend).__name__} cannot count passes, by which workers keep step; expected run_ahead=off with a scheduler that "
            "moves nothing, such as fifo, or backend=embedded"
        )


def longest_tokens(datamodule: PromptDataModule, *, rollout: RolloutSettings, evaluation: EvaluationSettings) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    parts = [(loader, evaluation.rollout(rollout, name)) for name, loader in datamodule.validation_loaders.items()]
    parts += [(datamodule.train_loader, rollout)] if datamodule.train_loader is not None else []
    longest = [
        max(len(prompt.token_ids) for prompt in loader.prompts) + settings.max_tokens for loader, settings in parts
    ]
    return max(longest, default=0)


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


def checked_rewards(rewards: Any, datamodule: PromptDataModule, *, evaluation: EvaluationSettings) -> list[Reward]:
    """Return the reward functions, the task's where `rewards` is None.

    Raises ConfigError for none; see `check_reward` and `check_evaluation`.
    """
    refuse_lost(rewards=rewards)
    task_reward = datamodule.task.reward if datamodule.task is not None else None
    built = build_rewards(rewards if rewards is not None else task_reward)
    if not built:
        raise ConfigError("rewards=null: name at least one reward function (or a task, which brings its own)")
    columns, gaps = datamodule.columns, datamodule.gaps
    for reward in built:
        check_reward(reward, columns, gaps=gaps)
    check_evaluation(evaluation, datamodule.validation_names, built)
    return built
