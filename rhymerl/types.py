"""The records that travel through a rollout, in the order in which they are made.

    Prompt -> RolloutRequest (with SamplingParams) -> Draft (a guess) -> Completion -> Sample

Records are frozen; arrays inside them are read-only by convention. L = response tokens, P = prompt
tokens, K = draft nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]
    FloatArray = npt.NDArray[np.float64]
    BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "withdrawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, tokenized: `Prompt(id="7", key="9f…", token_ids=[4, 11, 18], text="29\\n", columns={"answer": "29"})`."""

    id: str  # stable over runs: the row's own `id` column, else a hash of the row
    key: str  # hash of the exact token ids and of the tokenizer and template that made them: history's key
    token_ids: IntArray  # [P]
    text: str  # what was tokenized
    columns: Mapping[str, Any] = field(default_factory=dict)  # every other column of the row, for the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Raises ValueError naming the field that is out of range.

    The order of truncation is temperature, top-k, top-p, min-p, as in most engines.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy; log-probs are then those of temperature 1
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0  # keep tokens whose probability is at least min_p times the largest
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        allowed = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more, and finite"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
        }
        for name, (holds, words) in allowed.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: expected {words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Tokens drawn so far, each with the behaviour log-prob (nats) and the version of the policy that drew it."""

    token_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] untruncated log_softmax(logits / temperature)
    policy_versions: IntArray  # [L]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Ask for one answer. The same request under the same weights always gets the same tokens."""

    id: str  # unique within a step, such as "12/7/3" (step / prompt id / sample)
    prompt: Prompt
    sample: int  # which of the group's answers, from 0
    seed: int  # 64-bit key of the noise; position = index in the response
    sampling: SamplingParams
    generated: Generated | None = None  # go on from these tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess of the next tokens as a tree: parents come first, siblings are distinct.

    `Draft(token_ids=[5, 7, 9], parents=[-1, 0, 0])` guesses 5, then 7 or 9.
    """

    token_ids: IntArray  # [K]
    parents: IntArray  # [K], -1 <= parents[i] < i; -1 = directly after the context
    scores: FloatArray | None = None  # [K] path probability, non-increasing along a path
    match_length: int = 0  # tokens of context that the guess rests on
    sources: IntArray | None = None  # [K] where each node comes from, for metrics

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer, whole (`stop`, `length`) or withdrawn half-way."""

    request: RolloutRequest
    generated: Generated  # includes what the request brought along
    finish_reason: FinishReason
    num_passes: int = 0  # verify passes in which tokens were emitted
    num_drafted: int = 0  # draft nodes verified
    num_accepted: int = 0  # draft nodes that became tokens

    @property
    def token_ids(self) -> IntArray:
        return self.generated.token_ids

    @property
    def logprobs(self) -> FloatArray:
        return self.generated.logprobs

    def resume(self) -> RolloutRequest:
        """The request that goes on from here."""
        return replace(self.request, generated=self.generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A scored answer, ready for the update and for the history."""

    completion: Completion
    text: str  # decoded response without special tokens
    reward: float  # weighted sum of `rewards`
    rewards: Mapping[str, float]  # by reward function
    loss_mask: BoolArray  # [L] which tokens are trained

    @property
    def prompt(self) -> Prompt:
        return self.completion.request.prompt

    def __len__(self) -> int:
        return len(self.completion.token_ids)
