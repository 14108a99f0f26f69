"""Rollouts without training, from a resolved config: what `rhymerl rollout` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rhymerl.backends.base import Backend
from rhymerl.budgets.base import Budget
from rhymerl.config import instantiate
from rhymerl.data.base import columns_of
from rhymerl.drafters.base import Drafter
from rhymerl.environments.build import EpisodeSettings, environment_of, prepared
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.folders import open_folder
from rhymerl.history import HistoryStore
from rhymerl.history.traces import TraceWriter, record_of
from rhymerl.models.policy import Policy
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.printing import print_table, readable, say
from rhymerl.rewards import RewardScorer, build_rewards, check_columns
from rhymerl.rollout import Rollout, RolloutLoop, RolloutSettings
from rhymerl.rollout.metrics import AcceptanceTotals
from rhymerl.schedulers.base import Scheduler
from rhymerl.training.episodes import checked_episodes
from rhymerl.types import Prompt
from rhymerl.workers import backend_of_workers

_PROMPTS_AT_A_TIME = 1024  # written together: the more, the fuller the engine
_COLUMNS = {  # of the table
    "answers": "answers",
    "tokens": "tokens",
    "tokens_per_s": "tok/s",
    "spec_accept_rate": "accept rate",
    "spec_accept_length": "accept length",
    "reward": "reward",
}


@dataclass(slots=True)
class AnswerTotals:
    """The totals of one epoch, which answers all prompts once, or of all epochs."""

    answers: int = 0
    forward_passes: int = 0
    seconds: float = 0.0  # of decoding
    rewards: float = 0.0
    num_rewarded: int = 0  # answers to which a reward applies
    acceptance: AcceptanceTotals = field(default_factory=AcceptanceTotals)

    def count(self, rollout: Rollout) -> None:
        self.answers += len(rollout.samples)
        self.forward_passes += int(rollout.metrics.get("rollout/passes", 0))
        self.seconds += rollout.metrics["timing_s/rollout"]
        rewards = [sample.reward for sample in rollout.samples if sample.has_reward]
        self.rewards += sum(rewards)
        self.num_rewarded += len(rewards)
        self.acceptance.count(sample.completion for sample in rollout.samples)

    def result(self, *, with_reward: bool) -> dict[str, float]:
        """Return the figures, by the names of docs/metrics.md where they are the same thing."""
        figures: dict[str, float] = {
            "answers": self.answers,
            "tokens": self.acceptance.tokens,
            "forward_passes": self.forward_passes,
            "rollout_s": round(self.seconds, 3),
            "tokens_per_s": round(self.acceptance.tokens / max(self.seconds, 1e-9), 1),
            "spec_accept_rate": self.acceptance.accept_rate,
            "spec_accept_length": self.acceptance.accept_length,
        }
        return {**figures, "reward": self.rewards / max(self.num_rewarded, 1)} if with_reward else figures


def generate(config: DictConfig, *, progress: ProgressBar = SILENT) -> dict[str, Any]:
    """Answer all prompts `passes` times and write each answer with its log-probs; see configs/rollout.yaml.

    Raises ConfigError and DataError for bad input before anything is computed or overwritten. A run that is killed
    leaves what it had written, in whole lines.
    """
    _check_settings(config)
    out = checked_out(config.out, overwrite=config.overwrite)
    data = instantiate(config.data, key="data")
    settings: RolloutSettings = instantiate(config.rollout, key="rollout")
    if settings.dynamic_sampling:
        raise ConfigError(
            f"rollout.dynamic_sampling={settings.dynamic_sampling}: nothing is trained here, so no group has to teach; expected 0"
        )
    if settings.sampling_replay:
        raise ConfigError(
            "rollout.sampling_replay=true: nothing is trained here, and recorded log-probs are those of the whole policy; expected null or false"
        )
    settings.sampling_replay = False
    policy = _policy(config)
    environment = prepared(config.get("environment"), policy.tokenizer)
    tools = environment.tool_schemas if environment is not None else ()
    prompts = data.read(policy, max_tokens=settings.max_tokens, tools=tools)
    replier = environment_of(environment, data.task)
    longest = min(_longest_tokens(prompts, settings, has_environment=replier is not None), policy.context_tokens)
    episodes = checked_episodes(
        replier,
        policy,
        settings,
        prompts,
        chat=data.chat,
        longest_tokens=longest,
        num_processes=config.environment_workers,
    )
    if episodes is not None:
        episodes.warn()
    with_more = {"with_logprobs": True, "with_waits": not config.deterministic}
    whole, passes = AnswerTotals(), []
    with (
        _repeatable(config.deterministic),
        _loop(config, policy, prompts, settings, longest, episodes, progress) as loop,
        TraceWriter(out, keep_bytes=0 if config.overwrite else None) as writer,
    ):
        for number in range(config.passes):
            passes.append(AnswerTotals())
            with progress.during(f"answers of epoch {number}", len(prompts) * settings.group_size):
                for rollout in _answers(loop, policy, prompts, number, settings):
                    writer.write(record_of(sample, number, **with_more) for sample in rollout.samples)
                    for totals in (whole, passes[-1]):
                        totals.count(rollout)
            _note(number, config.passes, passes[-1])
    totals_of = [each.result(with_reward=config.rewards is not None) for each in (whole, *passes)]
    return {"out": str(out), "passes": config.passes, **totals_of[0], "by_pass": totals_of[1:]}


def checked_out(name: str | None, *, overwrite: bool) -> Path:
    """Return the file to write. Raises ConfigError for a directory, a missing one, and an existing file."""
    if name is None:
        raise ConfigError("out=null: name the file to write, .jsonl or .jsonl.gz")
    path = Path(str(name))
    if path.is_dir():
        raise ConfigError(f"out={str(name)!r}: is a directory; expected the name of a file, .jsonl or .jsonl.gz")
    if not path.parent.is_dir():
        raise ConfigError(
            f"out={str(name)!r}: there is no directory {str(path.parent)!r}; make it, or give another file"
        )
    if path.exists() and not overwrite:
        raise ConfigError(f"out={str(name)!r}: exists already; give another file, or set overwrite=true")
    open_folder(path.parent, setting="out")
    return path


def _check_settings(config: DictConfig) -> None:
    limits = {name: (config[name], 1) for name in ("passes", "environment_workers")}
    require_at_least(limits, error=ConfigError)
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed}: expected 0 to {2**32 - 1}")


def _policy(config: DictConfig) -> Policy:
    policy: Policy = instantiate(config.model, key="model").load()
    policy.model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return policy


def _longest_tokens(prompts: Sequence[Prompt], settings: RolloutSettings, *, has_environment: bool) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + settings.max_tokens
    return longest + (settings.most_reply_tokens if has_environment else 0)


def _answers(
    loop: RolloutLoop, policy: Policy, prompts: Sequence[Prompt], number: int, settings: RolloutSettings
) -> Iterator[Rollout]:
    for first in range(0, len(prompts), _PROMPTS_AT_A_TIME):
        loop.sync_weights(policy.named_weights(), 0)
        rollout = loop.run(prompts[first : first + _PROMPTS_AT_A_TIME], number, settings, epoch=number)
        rollout.failures.check(loop.scorer.rewards, "an epoch")
        yield rollout


@contextmanager
def _loop(
    config: DictConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: RolloutSettings,
    longest_tokens: int,
    episodes: EpisodeSettings | None,
    progress: ProgressBar,
) -> Iterator[RolloutLoop]:
    """A rollout loop with history, drafter and budget, once all that can be known to be wrong has been checked."""
    rewards = build_rewards(instantiate(config.rewards, key="rewards"))
    columns, gaps = columns_of(prompts)
    for reward in rewards:
        check_columns(reward, columns, gaps=gaps)
    history: HistoryStore = instantiate(config.history, key="history")
    drafter: Drafter = instantiate(config.drafter, key="drafter", kind=Drafter)
    budget: Budget = instantiate(config.budget, key="budget", kind=Budget)
    scheduler = instantiate(config.scheduler, key="scheduler", kind=Scheduler)
    backend: Backend = backend_of_workers(instantiate(config.backend, key="backend", kind=Backend))
    backend.check(longest_tokens)
    backend.check_drafting(drafter, budget)
    with backend, RewardScorer(rewards, num_processes=1) as scorer:
        backend.start(policy, drafter, budget=budget)
        loop = RolloutLoop(
            backend,
            scheduler,
            scorer=scorer,
            decode=partial(policy.decode, skip_special_tokens=settings.skip_special_tokens),
            history=history,
            stop_token_ids=policy.stop_token_ids,
            seed=config.seed,
            device=policy.model.device,
            num_workers=config.get("workers"),
            progress=progress,
            episodes=episodes,
            lockstep=config.deterministic and episodes is not None,  # or the clock says which replies come first
        )
        with closing(loop):
            yield loop


@contextmanager
def _repeatable(wanted: bool) -> Iterator[None]:
    """Context in which torch takes algorithms that repeat bit for bit, if that is wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _note(number: int, of: int, totals: AnswerTotals) -> None:
    tokens, seconds = totals.acceptance.tokens, max(totals.seconds, 1e-9)
    words = f"epoch {number}, {number + 1} of {of}  {tokens:,} tokens  {tokens / seconds:,.0f} tok/s"
    say(words)


def report(result: Mapping[str, Any]) -> None:
    """Print a table by epoch, which the file and `rhymerl replay` count likewise, and the totals."""
    shown = {name: words for name, words in _COLUMNS.items() if name in result}
    columns = ["epoch", *shown.values()]
    rows = [
        [str(number), *(readable(each[name], digits=3) for name in shown)]
        for number, each in enumerate(result["by_pass"])
    ]
    total = ["all", *(readable(result[name], digits=3) for name in shown)]
    print_table(columns, rows, title="Rollouts", left=["epoch"], total=total)
    say(f"{result['forward_passes']:,} forward passes; the answers are in {result['out']}")
