"""Passes of drafting that nobody sees, before an engine says that it is ready.

In them numba compiles or loads what passes call. Within the first answers that would hold up every request, and a
budget would take it for the price of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rhymerl.backends.remote.wire import to_custom_params
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting, not_yet_known
from rhymerl.history import Answer, HistoryStore
from rhymerl.types import Prompt, RolloutRequest, SamplingParams

_PROMPT = np.arange(8, dtype=np.int32)
_ANSWER = [1, 2, 3, 4, 5, 6, 7, 0] * 6  # as likely as not drafted right
_TOKENS_A_PASS = 3
_REQUESTS = 2  # to one prompt


@dataclass(eq=False)
class _Request:
    """A request that always samples the same answer."""

    sample: int
    output_ids: Sequence[int] = field(default_factory=lambda: _ANSWER[:1])

    def __post_init__(self) -> None:
        sampling = SamplingParams(max_tokens=len(_ANSWER))
        prompt = Prompt(id="warm-up", key="warm-up", token_ids=_PROMPT, text="")
        request = RolloutRequest(
            id=f"warm-up-{self.sample}", prompt=prompt, sample=self.sample, seed=0, sampling=sampling, split="train"
        )
        self.rid = request.id
        self.origin_input_ids: Sequence[int] = _PROMPT.tolist()
        self.sampling_params: Any = SimpleNamespace(
            custom_params=to_custom_params(request, feed=0),
            max_new_tokens=len(_ANSWER),
            stop_token_ids=None,
            ignore_eos=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
        )

    def finished(self) -> bool:
        return len(self.output_ids) == len(_ANSWER)


def warm_up(drafting: EngineDrafting) -> None:
    """Answer a few requests with earlier answers in the history; `drafting` itself is of no use afterwards."""
    requests = [_Request(sample) for sample in range(_REQUESTS)]
    history = HistoryStore()
    answer = Answer(
        token_ids=np.array(_ANSWER, np.int32),
        reward=1.0,
        advantage=0.0,
        finish_reason="length",
        policy_version=0,
        epoch=0,
        sample=0,
    )
    history.add(Prompt(id="warm-up", key="warm-up", token_ids=_PROMPT, text=""), [answer])
    drafting.protocol.follow(history.snapshot())
    while not requests[0].finished():
        done = [len(request.output_ids) for request in requests]
        cached = [len(_PROMPT) + count - 1 for count in done]
        trees = drafting.propose(requests, lambda: not_yet_known(requests, cached, list))  # noqa: B023
        if trees is not None:
            trees.mask()
        drafting.catch_up()
        for request, count in zip(requests, done, strict=True):
            request.output_ids = _ANSWER[: count + _TOKENS_A_PASS]
    drafting.flush()
    drafting.protocol.close()
