"""The records of a rollout: settings, requests, scored samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from rhymerl.backends.spans import WorkerSpan
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.rewards.failures import Failures
from rhymerl.types import Prompt, RolloutRequest, Sample, SamplingParams, Split


@dataclass(kw_only=True, eq=False)
class RolloutSettings:
    """The settings for sampling answers. Raises ValueError naming the argument that is out of range.

    `skip_special_tokens` leaves the tokenizer's special tokens out of the texts that rewards and files get; otherwise
    only the stop token is left out. `dynamic_sampling` is the number of rounds in which groups with equal rewards,
    which teach nothing, may be replaced by groups of other prompts (DAPO, arXiv 2503.14476, section 3.2). Such groups
    stay after the last round.

    Where top-k, top-p or min-p is on, `sampling_replay` trains the truncated policy: the engine keeps which tokens were
    left to sample from, and log-probs of engine and update are over these alone. None: where the backend can.

    With an environment an answer is an episode of at most `max_turns` turns. At most `max_tokens` are sampled in all
    turns, and `max_turn_tokens` in one (None: as many as are left). A reply is cut to `max_reply_tokens`, and takes at
    most `reply_timeout_s`. `reply_memory_mb` remembers the latest replies of an environment that is a pure function; 0
    asks it every time. With `history=rerender` an episode goes on from the chat template's rendering of all that was
    said, wherever that does not begin with the tokens that stand there.
    """

    group_size: int = at_least(1, 8)  # answers to a prompt
    max_tokens: int = 256
    temperature: float = 1.0  # of sampling; 0 takes the most probable token
    top_k: int = 0  # sample from so many most probable tokens; 0: all
    top_p: float = 1.0  # sample from the fewest most probable tokens that have this probability together
    min_p: float = 0.0  # sample from tokens that have at least this share of the largest probability
    sampling_replay: bool | None = None
    stop_token_ids: Sequence[int] = ()  # end an answer, beside the policy's own
    skip_special_tokens: bool = True
    dynamic_sampling: int = at_least(0, 0)
    max_turns: int = at_least(1, 8)
    max_turn_tokens: int | None = at_least(1, None)
    max_reply_tokens: int = at_least(1, 512)
    reply_timeout_s: float = 60.0
    history: Literal["keep", "rerender"] = "keep"
    reply_memory_mb: int = at_least(0, 64)  # of each worker

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                f"dynamic_sampling={self.dynamic_sampling}: the rewards of a group of one are always equal, so each would be replaced; "
                "expected 0, or a group_size of at least 2"
            )
        require(self.reply_timeout_s > 0, "reply_timeout_s", self.reply_timeout_s, "more than 0 seconds")
        require(self.reply_timeout_s < inf, "reply_timeout_s", self.reply_timeout_s, "a finite number")
        require(self.history in ("keep", "rerender"), "history", self.history, "keep or rerender")
        self.stop_token_ids = tuple(self.stop_token_ids)
        self.sampling(())  # checks the ranges of its parameters

    @property
    def most_reply_tokens(self) -> int:
        """Return the most tokens that an environment's replies may add to an answer."""
        return (self.max_turns - 1) * self.max_reply_tokens

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        """Return the parameters of one request, with the policy's stop ids and the further ones of the settings."""
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_token_ids=tuple(sorted({*stop_token_ids, *self.stop_token_ids})),
        )
        return replace(params, replay=params.truncates and self.sampling_replay is not False)


def request_seed(run_seed: int, step: int | str, prompt: Prompt, sample: int, round_number: int = 0) -> int:
    """Return the 64-bit noise key of a request: two steps, prompts, samples or rounds never share their draws."""
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
    round_number: int = 0,
) -> list[RolloutRequest]:
    """Return `group_size` requests a prompt, in canonical order, from the run's `seed` and the policy's stop tokens."""
    sampling = settings.sampling(stop_token_ids)
    return [
        RolloutRequest(
            id=f"{step}/{prompt.id}/{sample}",
            prompt=prompt,
            sample=sample,
            seed=request_seed(seed, step, prompt, sample, round_number),
            sampling=sampling,
            split=split,
            step=step if split == "train" and isinstance(step, int) else None,
        )
        for prompt in prompts
        for sample in range(settings.group_size)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The answers of one step, in canonical (prompt, sample) order, and how they came about."""

    samples: list[Sample]
    metrics: Mapping[str, float]
    failures: Failures = field(default_factory=Failures)  # of the rewards, on all ranks
    spans: Sequence[WorkerSpan] = ()  # what all workers did since the former one
