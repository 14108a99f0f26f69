"""SGLang's side of a running batch: requests whose answers are known, verified pass by pass as SGLang does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rhymerl.backends.remote.wire import to_custom_params
from rhymerl.backends.sglang.plugin.arrays import TreeArrays
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.drafters import Drafter
from rhymerl.drafts import Draft
from rhymerl.history import Answer
from rhymerl.testing import make_answer
from rhymerl.types import RolloutRequest
from tests.backends.sglang.trees import path_of

BEHIND = 17  # what is sampled behind the end of an answer


@dataclass
class FakeRequest:
    """The part of SGLang's `Req` that is read; `truth` is what it will draw."""

    rid: str
    origin_input_ids: list[int]
    truth: list[int]
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    finished_reason: Any = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def draw(self, index: int) -> int:
        return self.truth[index] if index < len(self.truth) else BEHIND

    def commit(self, tokens: Sequence[int]) -> None:
        """Take up all that a pass has sampled, as SGLang's scheduler does, whether or not the answer ended before."""
        if self.finished():
            return
        self.output_ids.extend(tokens)
        if any(token in self.sampling_params.stop_token_ids for token in tokens):
            self.end("stop")
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.end("length")

    def end(self, kind: str) -> None:
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})


def fake(request: RolloutRequest, answer: Sequence[int], *, rid: str | None = None, **params: Any) -> FakeRequest:
    """Return the request as it arrives in SGLang; `answer` is all of it, what was generated before included."""
    before = request.output.token_ids.tolist() if request.output is not None else []
    sampling = request.sampling
    given = {
        "custom_params": json.loads(json.dumps(to_custom_params(request, feed=0))),
        "max_new_tokens": sampling.max_tokens - len(before),
        "temperature": sampling.temperature or 1.0,
        "top_k": 1 if sampling.temperature == 0 else sampling.top_k or 2**30,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": set(sampling.stop_token_ids),
        "ignore_eos": False,
    }
    return FakeRequest(
        rid=rid or f"rid-{request.id}",
        origin_input_ids=[*request.prompt.token_ids.tolist(), *before],
        truth=list(answer)[len(before) :],
        sampling_params=SimpleNamespace(**{**given, **params}),
    )


def propose(
    drafting: EngineDrafting, batch: Sequence[FakeRequest], ahead: Sequence[Sequence[int]]
) -> TreeArrays | None:
    """Return the batch's trees; `ahead` was sampled and is not in its output ids."""
    return drafting.propose(batch, lambda: ahead)


def step(drafting: EngineDrafting, batch: Sequence[FakeRequest], ahead: Sequence[Sequence[int]]) -> list[list[int]]:
    """One verified pass: the tokens that it draws for each request."""
    trees = propose(drafting, batch, ahead)
    if trees is None:
        return [[request.draw(len(request.output_ids) + len(ahead[r]))] for r, request in enumerate(batch)]
    mask, sampled = trees.mask(), []
    for r, request in enumerate(batch):
        known = [*request.origin_input_ids, *request.output_ids, *ahead[r]]
        assert trees.token_ids[r, 0] == known[-1], "node 0 is not the engine's last token"
        done = len(request.output_ids) + len(ahead[r])
        predictions = np.array([request.draw(done + depth) for depth in mask[r].sum(-1) - 1])
        path = path_of(mask[r], trees.token_ids[r], predictions)
        sampled.append(predictions[path].tolist())
    return sampled


def run(drafting: EngineDrafting, requests: Sequence[FakeRequest], *, overlap: bool = False) -> None:
    """Run all to their ends in one batch; with `overlap` a pass is prepared before the last one is committed."""
    first = [[request.draw(0)] for request in requests]  # sampled where the prompt was read
    batch, ahead = list(requests), first
    while batch:
        if not overlap:
            batch, ahead = commit(batch, ahead)
            ahead = step(drafting, batch, [()] * len(batch))
        else:
            sampled = step(drafting, batch, ahead)
            batch, ahead = commit(batch, ahead, sampled)
    propose(drafting, [], [])


def commit(batch, tokens, sampled=None):
    """Return the requests that go on, with what was sampled for them."""
    for request, new in zip(batch, tokens, strict=True):
        request.commit(new)
    going = [i for i, request in enumerate(batch) if not request.finished()]
    return [batch[i] for i in going], [sampled[i] for i in going] if sampled is not None else []


class Recorder(Drafter):
    """Drafts trees from answers that it knows, with some mistakes, and writes down what it is told of each request."""

    def __init__(self, answers: Mapping[str, Sequence[int]] | None = None) -> None:
        self.answers = answers or {}
        self.told: dict[str, list[Any]] = {}
        self.contexts: list[np.ndarray] = []

    def propose(self, request, context, budget):
        self.contexts.append(context)
        done = len(context) - len(request.prompt.token_ids)
        before = len(request.output) if request.output is not None else 0
        answer = self.answers.get(request.id, ())
        if done == before:  # SGLang has no drafts where it reads the prompt
            return Draft(token_ids=[], parents=[])
        assert not answer or context[len(request.prompt.token_ids) :].tolist() == list(answer[:done])
        tokens, parents, parent = [], [], -1
        for token in answer[done : done + 1 + done * 7 % 4]:
            parents += [parent, parent]
            tokens += [(token + 1) % 19, token]
            parent = len(tokens) - 1
        return Draft(
            token_ids=np.array(tokens[:budget], np.int32),
            parents=np.array(parents[:budget], np.int32),
        )

    def note(self, request, *what):
        self.told.setdefault(request.id, []).append(what)

    def start(self, request):
        generated = request.output.token_ids.tolist() if request.output is not None else []
        prompt = request.prompt
        known = (request.sample, request.seed, request.split, request.sampling, prompt.id, prompt.key)
        self.note(request, "start", *known, prompt.token_ids.tolist(), generated)

    def accept(self, request, token_ids, num_accepted):
        self.note(request, "accept", np.array(token_ids).tolist(), int(num_accepted))

    def finish(self, completion):
        self.note(completion.request, "finish", completion.token_ids.tolist(), completion.finish_reason)


def answer(tokens: Sequence[int]) -> Answer:
    """An answer of the past."""
    return make_answer(tokens, reward=1.0)
