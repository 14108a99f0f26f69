"""The records that travel through a rollout, in the order in which they are made.

    Prompt -> RolloutRequest (with SamplingParams) -> Draft (a guess), DraftBatch -> Completion -> Sample

Records are frozen; arrays inside them are read-only by convention. L = response tokens, P = prompt
tokens, K = draft nodes, R = requests of a batch, N = draft nodes of a batch. numpy is imported when first used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]
    IndexArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]
    BoolArray = npt.NDArray[np.bool_]

MaybeInfinite = Annotated[float, "may be infinite"]  # of a setting; all others have to be finite
FinishReason = Literal["stop", "length", "withdrawn"]
Split = Literal["train", "validation"]  # their histories are kept apart


class DraftSource(IntEnum):
    """The origin of a draft node; HISTORY + a is an answer that is `a` epochs older than the newest."""

    UNKNOWN = -1
    OWN = 0  # the request's own prompt and tokens
    SIBLING = 1  # another answer to the same prompt that is being generated now
    RUN_AHEAD = 2
    OTHER = 3  # an answer to another prompt
    HISTORY = 4


NOT_DRAFTED = -2  # in the place of a DraftSource: of a token that no draft had


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, tokenized: `Prompt(id="7", key="9f…", token_ids=[4, 11, 18], text="29\\n", columns={"answer": "29"})`."""

    id: str  # stable over runs: the row's own `id` column, else a hash of the row
    key: str  # hash of the exact token ids and of the tokenizer and template that made them: history's key
    token_ids: IntArray  # [P]; integers of any width may be given
    text: str  # what was tokenized
    columns: Mapping[str, Any] = field(default_factory=dict)  # every other column of the row, for the reward
    location: str = field(
        default="", repr=False, compare=False
    )  # of the row, for messages: "data.train='a.jsonl', line 3"

    def __post_init__(self) -> None:
        import numpy as np

        given = np.asarray(self.token_ids)
        if given.dtype != np.int32:  # equal prompts have equal bytes: prefixes are shared by these
            object.__setattr__(
                self, "token_ids", given.astype(np.int32, casting="same_kind" if len(given) else "unsafe")
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings for sampling tokens. Raises ValueError naming the field that is out of range.

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
class Output:
    """The tokens sampled for a request so far, and what they took. L = tokens."""

    token_ids: IntArray  # [L]
    logprobs: (
        FloatArray  # [L] untruncated log_softmax(logits / temperature), in nats, of the policy that sampled the token
    )
    policy_versions: IntArray  # [L] of that policy
    finish_reason: FinishReason = "withdrawn"
    num_passes: int = 0  # verify passes in which tokens were emitted
    num_drafted: int = 0  # draft nodes verified
    num_accepted: int = 0  # draft nodes that became tokens
    sources: npt.NDArray[np.int8] | None = (
        None  # [L] DraftSource of accepted tokens, NOT_DRAFTED for others; for reports
    )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left to sample."""
        return self.finish_reason != "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Ask for one answer. The same request under the same weights always gets the same tokens."""

    id: str  # unique within a step, such as "12/7/3" (step / prompt id / sample)
    prompt: Prompt
    sample: int  # which of the group's answers, from 0
    seed: int  # 64-bit key of the noise; position = index in the response
    sampling: SamplingParams
    split: Split = "train"
    step: int | None = None  # of training; None outside it. Those of a later step may be answered ahead of it
    output: Output | None = None  # go on from here
    prefetched: IntArray | None = (
        None  # a draft of the whole answer: what the policy before sampled with the same noise
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess of the next tokens as a tree: parents come first, siblings are distinct.

    `Draft(token_ids=[5, 7, 9], parents=[-1, 0, 0])` guesses 5, then 7 or 9.
    """

    token_ids: IntArray  # [K]
    parents: IntArray  # [K], -1 <= parents[i] < i; -1 = directly after the context
    scores: FloatArray | None = None  # [K] path probability, non-increasing along a path
    match_length: int = 0  # tokens of context that the guess rests on
    sources: IntArray | None = None  # [K] DraftSource of each node, for metrics

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """The drafts of a running batch, packed: request r owns the nodes starts[r]:starts[r + 1].

    Parents count from the request's own first node: `parents=[-1, 0, -1], starts=[0, 2, 3]` is a path of two and a single node.
    """

    token_ids: IntArray  # [N]
    parents: IntArray  # [N] -1 = directly after the context
    starts: IndexArray  # [R + 1]
    scores: FloatArray  # [N] path probability, NaN where the drafter gave none
    match_length: IntArray  # [R]
    sources: npt.NDArray[np.int8]  # [N] DraftSource
    problems: Mapping[int, str] = field(default_factory=dict)  # by r: why a draft could not be packed; it is empty here
    _requests: IndexArray | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def pack(cls, drafts: Sequence[Draft]) -> DraftBatch:
        """Return one batch of single drafts. Never raises: a draft that is no two lists of integers goes to `problems`."""
        import numpy as np

        given: Sequence[object] = drafts  # they come from anybody's drafter
        problems = {r: problem for r, draft in enumerate(given) if (problem := _packing_problem(draft))}
        usable = [draft for r, draft in enumerate(drafts) if r not in problems]
        counts = [0 if r in problems else len(draft) for r, draft in enumerate(drafts)]
        return cls(
            token_ids=_joined([draft.token_ids for draft in usable]),
            parents=_joined([draft.parents for draft in usable]),
            starts=np.cumsum([0, *counts], dtype=np.int64),
            scores=_joined_or([(draft.scores, len(draft)) for draft in usable], np.nan, np.float64),
            match_length=np.array([draft.match_length if isinstance(draft, Draft) else 0 for draft in given], np.int32),
            sources=_joined_or([(draft.sources, len(draft)) for draft in usable], -1, np.int8),
            problems=problems,
        )

    @property
    def counts(self) -> IndexArray:
        """Nodes of each request, [R]."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def requests(self) -> IndexArray:
        """Return which request each node belongs to, [N]."""
        import numpy as np

        if self._requests is None:
            object.__setattr__(self, "_requests", np.repeat(np.arange(len(self)), self.counts))
        assert self._requests is not None
        return self._requests

    def draft(self, r: int) -> Draft:
        """Return the draft of request r; scores and sources are None where the batch has none."""
        import numpy as np

        nodes = slice(int(self.starts[r]), int(self.starts[r + 1]))
        scores, sources = self.scores[nodes], self.sources[nodes]
        return Draft(
            token_ids=self.token_ids[nodes],
            parents=self.parents[nodes],
            scores=None if np.isnan(scores).all() else scores,
            match_length=int(self.match_length[r]),
            sources=None if (sources == -1).all() else sources.astype(np.int32),
        )

    def spread(self, indices: IndexArray, num_requests: int) -> DraftBatch:
        """Return these drafts at the ascending `indices` [R] among `num_requests` requests, nothing for the others."""
        import numpy as np

        if len(indices) == num_requests:
            return self
        counts, match_length = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int32)
        counts[indices], match_length[indices] = self.counts, self.match_length
        problems = {int(indices[r]): problem for r, problem in self.problems.items()}
        return replace(
            self, starts=np.concatenate([[0], np.cumsum(counts)]), match_length=match_length, problems=problems
        )


def _packing_problem(draft: object) -> str | None:
    """Return why the arrays of a draft cannot stand side by side with others', None when they can."""
    import numpy as np

    if not isinstance(draft, Draft):
        return f"a {type(draft).__name__}; expected a rhymerl.Draft"
    try:
        tokens, parents = np.asarray(draft.token_ids), np.asarray(draft.parents)
    except ValueError as error:  # lists of unequal lists
        return f"token_ids and parents must be two lists of one length ({error})"
    if tokens.ndim != 1 or tokens.shape != parents.shape:
        return f"token_ids {tokens.shape} and parents {parents.shape} must be two lists of one length"
    if len(tokens) and not (tokens.dtype.kind in "iu" and parents.dtype.kind in "iu"):
        return f"token_ids ({tokens.dtype}) and parents ({parents.dtype}) must be integers"
    for name, values in (("scores", draft.scores), ("sources", draft.sources)):
        if values is not None and np.shape(values) != tokens.shape:
            return f"{name} {np.shape(values)} must be as long as token_ids {tokens.shape}"
    return None


def _joined(parts: Sequence[IntArray]) -> IntArray:
    """One int32 array; what lies beyond int32 is cut to its ends, so that it stays out of every range."""
    import numpy as np

    whole = np.concatenate(parts) if parts else np.empty(0, np.int32)
    limits = np.iinfo(np.int32)
    return whole if whole.dtype == np.int32 else whole.clip(limits.min, limits.max).astype(np.int32)


def _joined_or(parts: Sequence[tuple[npt.NDArray[Any] | None, int]], missing: float, dtype: npt.DTypeLike) -> Any:
    """One array of what is given; None stands for so many times `missing`."""
    import numpy as np

    if all(values is None for values, _ in parts):
        return np.full(sum(count for _, count in parts), missing, dtype)
    return np.concatenate(
        [np.full(count, missing, dtype) if values is None else np.asarray(values, dtype) for values, count in parts]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer, whole (`stop`, `length`) or withdrawn half-way."""

    request: RolloutRequest
    output: Output  # includes what the request brought along

    @property
    def token_ids(self) -> IntArray:
        return self.output.token_ids

    @property
    def logprobs(self) -> FloatArray:
        return self.output.logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.output.finish_reason

    @property
    def num_passes(self) -> int:
        return self.output.num_passes

    @property
    def num_drafted(self) -> int:
        return self.output.num_drafted

    @property
    def num_accepted(self) -> int:
        return self.output.num_accepted

    def resume(self) -> RolloutRequest:
        """Return the request that goes on from here."""
        return replace(self.request, output=self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A scored answer, ready for the update and for the history."""

    completion: Completion
    text: str  # decoded response without special tokens
    reward: float  # weighted sum of `rewards`; NaN where the run has reward functions, and none of them applies
    rewards: Mapping[str, float]  # by reward function, of those that apply
    loss_mask: BoolArray  # [L] which tokens are trained

    @property
    def prompt(self) -> Prompt:
        return self.completion.request.prompt

    @property
    def has_reward(self) -> bool:
        """Return whether it counts in its group and in the update."""
        return not isnan(self.reward)

    def __len__(self) -> int:
        return len(self.completion.token_ids)


class Ratio(float):
    """A metric that is `part` / `whole`, 0 without a whole; of several ranks together it is that of the sums."""

    __slots__ = ("part", "whole")
    part: float
    whole: float

    def __new__(cls, part: float, whole: float) -> Self:
        ratio = super().__new__(cls, part / whole if whole else 0.0)
        ratio.part, ratio.whole = part, whole
        return ratio

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.part, self.whole
