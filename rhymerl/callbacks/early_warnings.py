"""Early warnings of a run: what looks wrong in its metrics, and which setting to look at."""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np

from rhymerl.backends.spans import EVALUATION
from rhymerl.rewards.failures import Failures
from rhymerl.rollout import Rollout
from rhymerl.training.checks import has_stop
from rhymerl.types import Sample

_LOG = logging.getLogger(__name__)

WINDOW = 5  # steps over which a metric is averaged
MOST_ALIKE = 0.9  # share of groups whose rewards are equal
MOST_CLIPPED = 0.25  # share of answers cut off
MOST_KL = 0.1  # nats a token, with at least KL_GROWTH times what it was
KL_GROWTH = 2.0
LEAST_GAIN_LEFT = 0.5  # of the tokens that drafts added to a pass when they were best
LEAST_GAIN = 0.2  # tokens a pass; less is not worth a warning
AS_GOOD = 0.9  # of the share of drafts that was right then: a budget that asks less often leaves it as it is
MOST_IDLE = 0.3  # share of the workers' time
_WATCHED = (
    "completions/clipped_ratio",
    "environment/idle_frac",
    "episodes/length_frac",
    "frac_reward_zero_std",
    "kl",
    "rollout/bubble_frac",
    "rollout/spec_accept_length",
    "rollout/spec_accept_rate",
    "spec/draft_hit_rate",
    "budget/nodes_per_pass",
)
Advantages = Callable[[Sequence[int]], Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """What a rule looks at: the run up to its latest step."""

    metrics: dict[str, list[float]]  # of all steps, the latest last; a metric that a run does not log is empty
    # Of the last WINDOW steps: how all answers were rewarded alike, as `equal_rewards` says it.
    equal_rewards: Sequence[str | None]
    idle: dict[int, float]  # by worker: the share of the latest step's rollout in which it decoded nothing
    runs_ahead: bool = False  # whether workers may begin the next step
    failing: Sequence[str] = ()  # sentences about rewards that failed in the last WINDOW steps
    left_out: Sequence[bool] = ()  # of these steps: whether all answers were cut off and left out of the loss
    leaves_one: bool = False  # whether truncation left a single token everywhere in the latest step
    algo: Any = None
    has_stop: bool = True  # whether any token ends an answer

    def is_lasting(self, steps: Sequence[object]) -> bool:
        """Return whether something holds in the first step, or in the last WINDOW ones."""
        is_first = len(self.metrics["frac_reward_zero_std"]) == 1
        return bool(steps) and all(steps) and (is_first or len(steps) == WINDOW)

    def mean(self, name: str, *, end: int | None = None) -> float | None:
        """Return the mean of the last WINDOW steps, or of those before the index `end`; None where there are fewer."""
        values = self.metrics.get(name, [])[:end][-WINDOW:]
        return float(np.mean(values)) if len(values) == WINDOW else None

    def share_right(self, *, end: int | None = None) -> float:
        """Return the share of right drafts in the last WINDOW steps, weighted by verified nodes; NaN without any."""
        names = ("rollout/spec_accept_rate", "spec/draft_hit_rate", "budget/nodes_per_pass")
        found = [(self.metrics.get(name) or [1.0] * WINDOW)[:end][-WINDOW:] for name in names]
        right: float = sum(rate * hits * nodes for rate, hits, nodes in zip(*found, strict=False))
        return right / (sum(found[-1]) or math.nan)


Rule = Callable[[Recent], str | None]


def all_rewards_alike(recent: Recent) -> str | None:
    """Return a warning if nothing can be learned, in the first step or in the last WINDOW ones."""
    words = recent.equal_rewards[-1]
    is_known = bool(recent.failing) or recent.is_lasting(recent.left_out)  # why they are
    if words is None or is_known or not recent.is_lasting(recent.equal_rewards):
        return None
    return (
        f"{words}, so nothing is learned from them. samples.jsonl shows some of them. Either the reward misses what they say "
        "(exact_match compares the whole response, numeric_match its last number), or the problems are too hard or too easy"
    )


def most_rewards_alike(recent: Recent) -> str | None:
    """Return a warning if few groups are left that teach something."""
    share = recent.mean("frac_reward_zero_std")
    if share is None or share < MOST_ALIKE or recent.failing or all(recent.equal_rewards):
        return None
    return (
        f"all answers have the same reward for {share:.0%} of the prompts, which teach nothing. rollout.dynamic_sampling replaces "
        "them by others; easier or harder prompts, or a larger rollout.group_size, leave fewer"
    )


def truncation(recent: Recent) -> str | None:
    """Return a warning if many answers are cut off."""
    if recent.is_lasting(recent.left_out):
        return "all answers are cut off at rollout.max_tokens and left out of the loss, so nothing is learned: raise it"
    share = recent.mean("episodes/length_frac")  # other limits end episodes, too
    share = recent.mean("completions/clipped_ratio") if share is None else share
    if share is None or share < MOST_CLIPPED:
        return None
    words = f"{share:.0%} of the answers are cut off at rollout.max_tokens. "
    if not recent.has_stop:
        return f"{words}No stop token is known: set rollout.stop_token_ids"
    instead = {
        "overlong_fraction": "algo.overlong_fraction=0.2 makes those near the limit worth less",
        "mask_truncated": "algo.mask_truncated=true leaves those that are cut off out of the loss",
    }
    advice = [does for name, does in instead.items() if not getattr(recent.algo, name, None)]
    return f"{words}Raise it{'; where answers ramble, ' if advice else ''}{', and '.join(advice)}"


def one_token_left(recent: Recent) -> str | None:
    """Return a warning if truncation leaves nothing to choose from, so that no probability has a gradient."""
    if not recent.leaves_one:
        return None
    return (
        "truncation left a single token to sample from everywhere. Over that alone its probability is 1 whatever the policy says, so nothing "
        "is learned: raise rollout.top_k or rollout.top_p, or lower rollout.min_p"
    )


def calls_fail(recent: Recent) -> str | None:
    """Rewards fail, or do not apply, more often than now and then."""
    return "; ".join(recent.failing) or None


def kl_grows(recent: Recent) -> str | None:
    """Return a warning if the policy moves away from its reference."""
    now, before = recent.mean("kl"), recent.mean("kl", end=-2 * WINDOW)
    if now is None or before is None or now < MOST_KL or now < KL_GROWTH * before:
        return None
    return (
        f"kl is {now:.3g} nats a token, {now / max(before, 1e-9):.1f} times what it was {2 * WINDOW} steps ago: the policy leaves "
        "its reference behind. A higher algo.kl_coef or a lower update.learning_rate holds it"
    )


def acceptance_falls(recent: Recent) -> str | None:
    """Return a warning if drafts add less to a pass than before, beyond a budget that asks less often."""
    values = recent.metrics.get("rollout/spec_accept_length", [])
    if len(values) < 2 * WINDOW:
        return None
    means = np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid") - 1
    best, now = float(means.max()), float(means[-1])
    if best < LEAST_GAIN or now > LEAST_GAIN_LEFT * best:
        return None
    was, right = recent.share_right(end=int(means.argmax()) + WINDOW), recent.share_right()
    if not right <= AS_GOOD * was:  # or nan: none was asked for
        return None
    return (
        f"acceptance length fell from {1 + best:.2f} to {1 + now:.2f}, and the share of drafts that is right from {was:.0%} to {right:.0%}: "
        "answers repeat their history less. Where entropy or kl rise, a lower update.learning_rate helps; history.window=1 drops older "
        "answers. drafter=none is worth a try once rollout/speedup is below 1"
    )


def _idle_share(recent: Recent) -> float | None:
    """Return the workers' idle share if it is worth a warning; without the first step, in which they start."""
    name = "rollout/bubble_frac"
    share = recent.mean(name)
    return share if share is not None and len(recent.metrics[name]) > WINDOW and share >= MOST_IDLE else None


def _awaits_replies(recent: Recent, idle: float) -> bool:
    """Return whether workers waited for their environments in most of the time without work."""
    # Of the time in which they decoded, or waited for these alone.
    of_work = recent.mean("environment/idle_frac") or 0.0
    return of_work * (1 - idle) > (1 - of_work) * idle / 2


def replies_awaited(recent: Recent) -> str | None:
    """Environments keep workers waiting, even one alone."""
    share = _idle_share(recent)
    if share is None or not _awaits_replies(recent, share):
        return None
    ahead = (
        "" if recent.runs_ahead or len(recent.idle) < 2 else ", run_ahead=auto or keep begins the next step meanwhile"
    )
    return (
        f"workers decoded nothing in {share:.0%} of the time of rollouts, mostly because environments had not replied. More data.prompts_per_step "
        f"or a larger rollout.group_size give them other answers meanwhile{ahead}, and an environment that is_pure is asked once about what is the same"
    )


def workers_idle(recent: Recent) -> str | None:
    """Workers wait for one another."""
    share = _idle_share(recent)
    if share is None or len(recent.idle) < 2 or _awaits_replies(recent, share):
        return None
    worker = max(recent.idle, key=lambda each: recent.idle[each])
    most = f", worker {worker} in {recent.idle[worker]:.0%} of the latest" if recent.idle[worker] >= MOST_IDLE else ""
    fill = "" if recent.runs_ahead else "run_ahead=auto (on-policy) or keep (one step off) fills the rest, "
    return (
        f"workers decoded nothing in {share:.0%} of the time of rollouts{most}. "
        f"scheduler=sorted or packed evens them out, {fill}and more data.prompts_per_step leave less of it"
    )


RULES: Sequence[Rule] = (
    calls_fail,
    all_rewards_alike,
    most_rewards_alike,
    truncation,
    one_token_left,
    kl_grows,
    acceptance_falls,
    replies_awaited,
    workers_idle,
)


class EarlyWarnings(L.Callback):
    """Warns of what the rules find, each at most once in `every_n_steps` rollout steps. Rank 0 only.

    `latest` has the warnings of the latest step, and `holding` those given so far that hold in it, for callbacks that
    come later. Needs a RhymeModule. A resumed run begins to watch anew.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self.latest: list[str] = []
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._equal: deque[str | None] = deque(maxlen=WINDOW)
        self._left_out: deque[bool] = deque(maxlen=WINDOW)
        self._failures: deque[Failures] = deque(maxlen=WINDOW)
        self.holding: list[str] = []
        self._warned: dict[Rule, tuple[int, str]] = {}  # the step and the words of the latest warning

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rollout: Rollout | None = pl_module.last_rollout
        self.latest = []
        if rollout is None or not trainer.is_global_zero:
            return
        metrics = {name: float(trainer.callback_metrics[name]) for name in _WATCHED if name in trainer.callback_metrics}
        if not pl_module.algo.learns_from_rewards:
            metrics["frac_reward_zero_std"] = 0.0  # equal ones are none to be warned of
        for name, value in metrics.items():
            self._metrics[name].append(value)
        share = metrics["frac_reward_zero_std"]
        self._equal.append(equal_rewards(rollout.samples, frac_zero_std=share, advantages=pl_module.advantages))
        self._left_out.append(all_left_out(rollout.samples, pl_module.advantages))
        self._failures.append(rollout.failures)
        recent = Recent(
            metrics=self._metrics,
            equal_rewards=list(self._equal),
            idle=idle_of(rollout),
            runs_ahead=pl_module.run_ahead != "off",
            failing=sum(self._failures, Failures()).sentences(),
            left_out=list(self._left_out),
            leaves_one=leaves_one(rollout.samples),
            algo=pl_module.algo,
            has_stop=has_stop(pl_module.policy, pl_module.rollout),
        )
        found = {rule: words for rule in RULES if (words := rule(recent)) is not None}
        for rule, words in found.items():
            self._say(rule, words, pl_module.num_rollouts)
        self.holding = [self._warned[rule][1] for rule in found]

    def _say(self, rule: Rule, words: str, step: int) -> None:
        if rule not in self._warned or step - self._warned[rule][0] >= self.every_n_steps:
            self._warned[rule] = (step, words)
            self.latest.append(words)
            _LOG.warning("step %d: %s", step, words)


def leaves_one(samples: Sequence[Sample]) -> bool:
    """Return whether truncation has left a single token wherever one was sampled, as far as the engine has noted it."""
    kept = [(sample.completion.output.kept, sample.loss_mask) for sample in samples]
    return all(sets is not None and bool((sets.counts[mask] == 1).all()) for sets, mask in kept)


def idle_of(rollout: Rollout) -> dict[int, float]:
    """Return the share of the rollout in which each worker decoded nothing."""
    seconds: dict[int, float] = defaultdict(float)
    for span in rollout.spans:
        is_busy = span.activity == "decode" and span.number != EVALUATION
        seconds[span.worker] += span.seconds if is_busy else 0.0
    whole = max(rollout.metrics["timing_s/rollout"], 1e-9)
    return {worker: max(0.0, 1 - busy / whole) for worker, busy in seconds.items()}


def all_left_out(samples: Sequence[Sample], advantages: Advantages) -> bool:
    """Return whether all answers of a step were cut off at their limit, and are left out of the loss for it."""
    are_cut = all(sample.completion.output.is_cut for sample in samples)
    return are_cut and all(each is None for each in advantages(range(len(samples))))


def equal_rewards(samples: Sequence[Sample], *, frac_zero_std: float, advantages: Advantages) -> str | None:
    """Return how a step's answers are rewarded alike, so that they teach nothing; None where some differ.

    `frac_zero_std` is the step's metric; `advantages` are asked, by index of a sample, only where it is 1.
    """
    if frac_zero_std < 1:
        return None
    turns = [turn for sample in samples for turn in sample.completion.output.turns]
    if samples[0].turn_weight and all(turn.reward is None for turn in turns):
        return f"the environment gave no reward in any of the {len(samples):,} episodes"
    rewards = {sample.reward for sample in samples if sample.has_reward}
    if not rewards:
        return f"no reward applies to any of the {len(samples):,} answers"
    if len(rewards) == 1:
        return f"all {sum(sample.has_reward for sample in samples):,} answers have the same reward ({rewards.pop():g})"
    if any(advantages(range(len(samples)))):
        return None  # the baseline is not the group's
    return "all answers to each prompt have the same reward"
