"""The records that travel through a rollout, in the order in which they are made.

    Prompt -> RolloutRequest (with SamplingParams) -> Completion (with Output) -> Sample

Records are frozen; arrays inside them are read-only by convention. L = response tokens, P = prompt tokens. numpy is
imported when first used. What guesses the tokens in between is in drafts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from rhymerl.errors import require
from rhymerl.replayed import KeptSets, RouteArray, last_routes, routes_behind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# As text, which only a type checker reads: whoever imports them imports no numpy.
IntArray: TypeAlias = "npt.NDArray[np.int32]"
IndexArray: TypeAlias = "npt.NDArray[np.int64]"
FloatArray: TypeAlias = "npt.NDArray[np.float64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"

Autocast = Callable[[], AbstractContextManager[object]]  # makes the context of a forward pass, the update's own
MaybeInfinite = Annotated[float, "may be infinite"]  # of a setting; all others have to be finite
# How an answer ended. `withdrawn` and `turn` are of one that goes on: the latter waits for its environment's reply. The
# last three are of episodes: the environment had more to say than `max_turns` or the model's context allow, or it
# failed.
FinishReason = Literal["stop", "length", "withdrawn", "turn", "max_turns", "context", "environment"]
WHOLE: tuple[FinishReason, ...] = ("stop", "length", "max_turns", "context", "environment")  # of ended answers
Split = Literal["train", "validation"]  # their histories are kept apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data set, tokenized.

    For example `Prompt(id="7", key="9f…", token_ids=[4, 11, 18], text="29\\n", columns={"answer": "29"})`.
    """

    id: str  # stable over runs: the row's own `id` column, else a hash of the row
    key: str  # hash of the exact token ids and of the tokenizer and template that made them: history's key
    token_ids: IntArray  # [P]; integers of any width may be given
    text: str  # what was tokenized
    columns: Mapping[str, Any] = field(default_factory=dict)  # every other column of the row, for the reward
    messages: Sequence[Mapping[str, Any]] = ()  # that the tokenizer's template made it of; none of plain text
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

    @property
    def is_chat(self) -> bool:
        """Return whether it was made of chat messages."""
        return bool(self.messages)


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
    replay: bool = False  # where truncation is on, `Output.kept` has what it left, and log-probs are over that

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        is_finite = 0 <= self.temperature < float("inf")
        require(is_finite, "temperature", self.temperature, "0 (greedy) or more, and finite")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")

    @property
    def truncates(self) -> bool:
        """Return whether some tokens may be ruled out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The end of an episode's turn, and the environment's reply: tokens `start` to `stop` of the answer."""

    start: int
    stop: int  # start, where the episode is over
    text: str  # what the policy has said in it, without the token that ends it
    reply: Any = None  # text or chat messages, as plain data
    reward: float | None = None  # of the turn, if the environment gives any
    metrics: Mapping[str, float] = field(default_factory=dict)
    waited_s: float = 0.0
    replied_at: float = 0.0  # in Unix time of the worker's machine; 0 where nobody was asked
    saved_s: float | None = None  # of waiting, where the reply was remembered
    rerendered: int | None = None  # where a part of the episode begins: tokens in front of the reply's, said before

    def shifted(self, num_tokens: int) -> TurnEnd:
        """Return the turn's end in an answer with `num_tokens` more tokens in front."""
        return replace(self, start=self.start + num_tokens, stop=self.stop + num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of an episode with a context of its own; an answer whose conversation was never rendered anew is one."""

    prompt: IntArray
    token_ids: IntArray
    start: int  # of `token_ids`, in the answer
    routes: RouteArray | None = None  # of both

    def __len__(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def keys(self) -> tuple[IntArray, IntArray]:
        """Return what tells the tokens of prompt and answer apart in a pass: ids, or lines of an id and its route."""
        if self.routes is None:
            return self.prompt, self.token_ids
        import numpy as np

        ids = np.concatenate([self.prompt, self.token_ids])
        lines = np.column_stack([ids, self.routes.reshape(len(ids), -1)])
        return lines[: len(self.prompt)], lines[len(self.prompt) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The tokens of an answer so far, with counts of passes and drafts. L = tokens.

    They are all sampled, but for the replies of an environment, which `turns` has. Where a part begins, its prompt
    stands in the place of the reply.
    """

    token_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] log_softmax(logits / temperature) over `kept`, in nats, of the policy that sampled it; 0 of replies
    policy_versions: IntArray  # [L] of that policy; of a reply that of the token before
    finish_reason: FinishReason = "withdrawn"
    num_passes: int = 0  # verify passes in which tokens were emitted
    num_drafted: int = 0  # draft nodes verified
    num_accepted: int = 0  # draft nodes that became tokens
    sources: npt.NDArray[np.int8] | None = None  # [L] drafts.DraftSource of accepted tokens, else NOT_DRAFTED
    turns: tuple[TurnEnd, ...] = ()  # those that have ended
    kept: KeptSets | None = None  # [L] of `SamplingParams.replay`; None: log-probs are over all tokens
    routes: RouteArray | None = None  # of the prompt's tokens and its own, up to the last; None: no experts are known

    @classmethod
    def of(
        cls,
        token_ids: npt.ArrayLike = (),
        *,
        logprob: float = 0.0,
        policy_version: int = 0,
        finish_reason: FinishReason = "withdrawn",
    ) -> Output:
        """Return tokens with one log-prob and version; without arguments, an answer without tokens."""
        import numpy as np

        tokens = np.asarray(token_ids, np.int32)
        return cls(
            token_ids=tokens,
            logprobs=np.full(len(tokens), logprob),
            policy_versions=np.full(len(tokens), policy_version, np.int32),
            finish_reason=finish_reason,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice | BoolArray) -> Output:
        """Return some of its tokens, by a slice where it has `kept` or routes; all else stays that of the whole."""
        columns: dict[str, Any] = {
            name: None if column is None else column[part] for name, column in self._columns().items()
        }
        kept = None if self.kept is None else self.kept[cast(slice, part)]
        routes = None if self.routes is None else self.routes_to(max(cast(slice, part).indices(len(self))[:2]))
        return replace(self, **columns, kept=kept, routes=routes)

    def __add__(self, later: Output) -> Output:
        """Return its tokens followed by later ones. Counts are summed; the reason is the later output's."""
        return replace(
            self.followed_by(later),
            num_passes=self.num_passes + later.num_passes,
            num_drafted=self.num_drafted + later.num_drafted,
            num_accepted=self.num_accepted + later.num_accepted,
            turns=self.turns + tuple(each.shifted(len(self)) for each in later.turns),
        )

    def followed_by(self, later: Output) -> Output:
        """Return its tokens followed by later ones; reason and counts are the later output's, as those of the whole."""
        import numpy as np

        pairs = {name: (before, getattr(later, name)) for name, before in self._columns().items()}
        joined: dict[str, Any] = {
            name: None if any(part is None for part in pair) else np.concatenate(pair) for name, pair in pairs.items()
        }
        joined["routes"] = routes_behind(self.routes, later.routes, len(later))
        if self.kept is None and later.kept is None:
            return replace(later, **joined)
        masses = np.concatenate([self.log_masses, later.log_masses])
        return replace(later, **joined, kept=KeptSets.of([*self.kept_sets, *later.kept_sets], masses))

    def routes_to(self, stop: int, count: int | None = None) -> RouteArray | None:
        """Return the routes of all tokens before `stop`, those of the prompt first, or of the last `count` of these."""
        if self.routes is None:
            return None
        found = self.routes[: len(self.routes) - len(self) + stop]
        return found if count is None else last_routes(found, count)

    def _columns(self) -> dict[str, Any]:
        """Return the arrays with one entry a token, by name."""
        return {name: getattr(self, name) for name in ("token_ids", "logprobs", "policy_versions", "sources")}

    def segments(self, prompt: IntArray) -> list[Segment]:
        """Return its segments, in order, where `prompt` stands before the first."""
        begun = [turn for turn in self.turns if turn.rerendered is not None]
        prompts = [prompt, *(self.token_ids[turn.start : turn.stop] for turn in begun)]
        starts, stops = [0, *(turn.stop for turn in begun)], [*(turn.start for turn in begun), len(self)]
        return [
            Segment(
                prompt=each,
                token_ids=self.token_ids[start:stop],
                start=start,
                routes=self.routes_to(stop, len(each) + stop - start),
            )
            for each, start, stop in zip(prompts, starts, stops, strict=True)
        ]

    def conversation(self) -> Output:
        """Return it without the tokens that a part repeats of what was said before, for people and rewards."""
        repeated = [range(turn.start, turn.start + (turn.rerendered or 0)) for turn in self.turns]
        if not any(repeated):
            return self
        import numpy as np

        kept = np.ones(len(self), np.bool_)
        kept[[place for each in repeated for place in each]] = False
        at = np.concatenate([[0], np.cumsum(kept)]).tolist()
        turns = tuple(replace(turn, start=at[turn.start], stop=at[turn.stop], rerendered=None) for turn in self.turns)
        return replace(replace(self, kept=None, routes=None)[kept], turns=turns)

    @property
    def kept_sets(self) -> list[IntArray]:
        """Return the ids over which each token's log-prob is normalised, [L]; of an empty set it is the vocabulary."""
        return self.kept.sets if self.kept is not None else [self.token_ids[:0]] * len(self)

    @property
    def log_masses(self) -> FloatArray:
        """Return those of these sets, [L]; of the vocabulary it is 0."""
        import numpy as np

        return self.kept.log_masses if self.kept is not None else np.zeros(len(self))

    @property
    def is_finished(self) -> bool:
        """Return whether nothing is left to sample."""
        return self.finish_reason in WHOLE

    @property
    def is_cut(self) -> bool:
        """Return whether it was ended by a limit or a failure."""
        return self.is_finished and self.finish_reason != "stop"

    @property
    def sampled(self) -> BoolArray:
        """Return which tokens the policy has sampled, [L]: all but those of replies."""
        import numpy as np

        mask = np.ones(len(self), np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.stop] = False
        return mask

    @property
    def num_sampled(self) -> int:
        return len(self) - sum([turn.stop - turn.start for turn in self.turns])


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
    may_go_on: bool = False  # behind what an environment replies to it: an engine keeps what it has computed for it
    prefetched: IntArray | None = None  # a draft of the whole answer: of the policy before, with the same noise
    segment: int = 0  # of an episode in segments: which of them this asks for


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
        """Return the request that continues this answer."""
        return replace(self.request, output=self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A scored answer, ready for the update and for the history."""

    completion: Completion
    text: str  # decoded response without special tokens
    reward: float  # weighted sum of `rewards`; NaN where the run has reward functions, and none of them applies
    rewards: Mapping[str, float]  # by reward function, of those that apply
    loss_mask: BoolArray  # [L] which tokens are trained
    turn_weight: float = 0.0  # of the rewards that an environment gave for turns, in `reward`

    @property
    def prompt(self) -> Prompt:
        return self.completion.request.prompt

    @property
    def has_reward(self) -> bool:
        """Return whether it counts in its group and in the update."""
        return not isnan(self.reward)

    @property
    def num_sampled(self) -> int:
        return self.completion.output.num_sampled

    @property
    def segments(self) -> list[Segment]:
        return self.completion.output.segments(self.prompt.token_ids)

    def __len__(self) -> int:
        return len(self.completion.token_ids)


class Ratio(float):
    """A metric `part` / `whole`, 0 without a whole; over several ranks, the ratio of the sums."""

    __slots__ = ("part", "whole")
    part: float
    whole: float

    def __new__(cls, part: float, whole: float) -> Self:
        ratio = super().__new__(cls, part / whole if whole else 0.0)
        ratio.part, ratio.whole = part, whole
        return ratio

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.part, self.whole
