"""The demands of a module on its data, checked before any compute."""

from __future__ import annotations

import logging

import torch

from rhymerl.algos.base import Algorithm
from rhymerl.algos.policy_gradient import PolicyGradient
from rhymerl.backends.base import Backend
from rhymerl.data import PromptDataModule
from rhymerl.distributed.first import is_first_rank
from rhymerl.environments.build import EpisodeSettings
from rhymerl.errors import ConfigError
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings
from rhymerl.schedulers.base import Scheduler
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.settings import UpdateSettings
from rhymerl.workers import RunAhead, follows_clock

_LOG = logging.getLogger(__name__)


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


def warn_of_parts(
    policy: Policy, rollout: RolloutSettings, backend: Backend, episodes: EpisodeSettings | None = None, **parts: object
) -> None:
    """Say, on rank 0, what may surprise people.

    No token ends an answer; an engine cannot say what truncation left; a chat template does more than append replies;
    parts keep a run from repeating bit for bit that should.
    """
    if not is_first_rank():
        return
    if not has_stop(policy, rollout):
        _LOG.warning(
            "rollout.stop_token_ids=[]: no stop token is known, since neither the model's config nor its tokenizer names one, so each "
            "answer goes on to rollout.max_tokens; name the tokens that end an answer"
        )
    if rollout.sampling(()).replay and not backend.keeps_sets:
        _LOG.warning(
            "rollout.sampling_replay=null: %s cannot say what truncation left to sample from, so tokens are sampled from the truncated "
            "policy and the whole one is trained; rollout.sampling_replay=false trains that with any backend",
            type(backend).__name__,
        )
    if episodes is not None:
        episodes.warn()
    for name, part in parts.items() if torch.are_deterministic_algorithms_enabled() else ():
        if getattr(part, "deterministic", None) is False:
            _LOG.warning(
                "Trainer(deterministic=True), and %s=%s(deterministic=False) goes by the clock, so a run repeats up to rounding only; give it "
                "deterministic=True",
                name,
                type(part).__name__,
            )


def has_stop(policy: Policy, rollout: RolloutSettings) -> bool:
    """Return whether any token ends an answer."""
    return bool(policy.stop_token_ids or rollout.stop_token_ids)


def check_algorithm(algo: Algorithm, *, rollout: RolloutSettings, update: UpdateSettings, backend: Backend) -> None:
    """Raise ValueError for groups from which it cannot learn, and for a bound that no update would ever use.

    Likewise for a replay of sampling or of experts that the backend cannot give.
    """
    if rollout.sampling_replay and not backend.keeps_sets:
        raise ValueError(
            f"rollout.sampling_replay=true: {type(backend).__name__} cannot say what truncation left to sample from; expected null or "
            "false, or an embedded engine"
        )
    if update.router_replay and not backend.says_routes:
        raise ValueError(
            f"update.router_replay=true: {type(backend).__name__} cannot say which experts computed a token; expected null or false, or "
            "an embedded engine"
        )
    if update.router_aux_loss_coef and not backend.says_routes:
        raise ValueError(
            f"update.router_aux_loss_coef={update.router_aux_loss_coef}: {type(backend).__name__} cannot say which experts computed a "
            "token, and so not how they are loaded; expected 0, or an embedded engine"
        )
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


def check_workers(
    backend: Backend, scheduler: Scheduler, *, workers: int | None, num_ranks: int, run_ahead: RunAhead, lockstep: bool
) -> None:
    """Raise ConfigError for a number of workers that the backend cannot have or cannot keep in lockstep."""
    if workers not in (None, num_ranks) and not backend.workers_are_remote:
        raise ConfigError(
            f"workers={workers}: with {type(backend).__name__} every rank is a worker; expected null, {num_ranks}, or backend=ray"
        )
    if lockstep and backend.workers_are_remote and not backend.counts_passes:
        raise ConfigError(
            f"deterministic=true: workers of {type(backend).__name__} cannot count passes, by which they would keep step; expected embedded "
            "engines, or deterministic=false"
        )
    number = workers or num_ranks
    if lockstep and backend.workers_are_remote and (least := backend.least_workers(number)) < number:
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


def longest_tokens(
    datamodule: PromptDataModule,
    *,
    rollout: RolloutSettings,
    evaluation: EvaluationSettings,
    has_environment: bool = False,
) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    parts = [(loader, evaluation.rollout(rollout, name)) for name, loader in datamodule.validation_loaders.items()]
    parts += [(datamodule.train_loader, rollout)] if datamodule.train_loader is not None else []
    longest = [
        max(len(prompt.token_ids) for prompt in loader.prompts) + settings.max_tokens for loader, settings in parts
    ]
    return max(longest, default=0) + (rollout.most_reply_tokens if has_environment else 0)
