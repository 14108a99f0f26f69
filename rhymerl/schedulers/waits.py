"""Predictions of how long episodes wait for their environment, from how long earlier ones to the same prompt did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rhymerl.errors import at_least, check_ranges
from rhymerl.types import Output, RolloutRequest, Sample

_FASTEST = 0.1  # share of a step's episodes: these were hardly held up by others


@dataclass(kw_only=True, eq=False)
class WaitPredictor:
    """Predicts how many tokens an episode could sample while it waits for its environment, in all its turns.

    That is the unit of predicted lengths, whatever the unit of `costs` is. A prompt's seconds are the median of its
    group, moving over epochs by `momentum`. The seconds of a token come from the time between an episode's first and
    last reply in which it did not wait. So nothing is predicted before an episode with two replies has ended, and never
    for an answer of one turn, or a prompt without an answer. `max_prompts` as for LengthPredictor.
    """

    momentum: float = 0.5
    max_prompts: int = at_least(1, 1_000_000)

    def __post_init__(self) -> None:
        check_ranges(self)
        self._seconds: dict[str, float] = {}  # by key, the latest answered last
        self._token_s = 0.0  # 0: not known yet

    def predict(self, request: RolloutRequest) -> float:
        """Return the tokens that the answers to the request's prompt could sample while they wait."""
        return self._seconds.get(request.prompt.key, 0.0) / self._token_s if self._token_s else 0.0

    def learn(self, samples: Sequence[Sample]) -> None:
        """The finished answers of a step, groups whole."""
        groups: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            if turns := sample.completion.output.turns:
                groups[sample.prompt.key].append(sum(turn.waited_s for turn in turns))
        if not groups:
            return
        for key, seconds in groups.items():
            now = median(seconds)
            self._seconds[key] = self._moved(self._seconds.pop(key, now), now)
        while len(self._seconds) > self.max_prompts:
            del self._seconds[next(iter(self._seconds))]
        paces = sorted(filter(None, (_token_s(sample.completion.output) for sample in samples)))
        if paces:
            now = paces[int(_FASTEST * len(paces))]
            self._token_s = self._moved(self._token_s or now, now)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": dict(self._seconds), "token_s": self._token_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._token_s = dict(state["seconds"]), state["token_s"]

    def _moved(self, before: float, now: float) -> float:
        return self.momentum * before + (1 - self.momentum) * now


def _token_s(output: Output) -> float:
    """Return the seconds of a token between the first and the last reply to an episode; 0 where there are no two."""
    turns = [turn for turn in output.turns if turn.replied_at]
    if len(turns) < 2:
        return 0.0
    first, *between, last = turns
    seconds = last.replied_at - first.replied_at - sum(turn.waited_s for turn in (*between, last))
    tokens = last.start - first.stop - sum(turn.stop - turn.start for turn in between)
    return max(seconds, 0.0) / max(tokens, 1)
