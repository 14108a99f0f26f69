"""Public fakes and small models, for the tests of your own drafters, schedulers, backends and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafts import Draft
from rhymerl.history import Answer
from rhymerl.types import Autocast, Completion, IntArray, Output, Prompt, RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.models.policy import Policy

ModelType = Literal["qwen2", "qwen3", "llama"]


def tiny_policy(
    model_type: ModelType = "qwen2",
    *,
    dtype: Literal["float32", "bfloat16", "float64"] = "float64",
    hidden_size: int = 32,
    num_layers: int = 2,
    tied: bool = False,
    context: int = 256,
    peaked: float = 4.0,
    seed: int = 0,
    **config: Any,
) -> Policy:
    """Return a random model with grouped-query attention over the characters of the running sums.

    `peaked` scales the weight matrices, so that the distributions are neither flat nor one-hot.
    """
    import torch

    from rhymerl.models.policy import PolicySource

    init = {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        **config,
    }
    policy = PolicySource(init=init, dtype=dtype, seed=seed).load()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(peaked)
    return policy


def make_prompt(token_ids: Sequence[int], *, id: str | None = None, **columns: Any) -> Prompt:
    """Return a prompt from bare token ids."""
    ids = np.asarray(token_ids, np.int32)
    key = hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
    return Prompt(id=id or key[:8], key=key, token_ids=ids, text="", columns=columns)


def make_answer(token_ids: npt.ArrayLike, **changed: Any) -> Answer:
    """Return a past answer of step 0; `changed` are fields of it with other values."""
    plain: dict[str, Any] = {"reward": 0.0, "advantage": 0.0, "finish_reason": "stop", "policy_version": 0}
    return Answer(token_ids=np.asarray(token_ids, np.int32), **{**plain, "epoch": 0, "sample": 0, **changed})


def make_requests(
    num_prompts: int,
    *,
    group_size: int = 1,
    vocabulary: int = 19,
    prompt_tokens: tuple[int, int] = (1, 24),
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (1,),
    **sampling: Any,
) -> list[RolloutRequest]:
    """Return random prompts of varying length, `group_size` requests each; `sampling` goes to SamplingParams."""
    source = np.random.default_rng(seed)
    parameters = SamplingParams(**{"max_tokens": 32, "stop_token_ids": stop_token_ids, **sampling})
    requests = []
    for number in range(num_prompts):
        tokens = source.integers(2, vocabulary, source.integers(*prompt_tokens, endpoint=True))
        prompt = make_prompt(tokens.tolist(), id=str(number))
        requests += [
            RolloutRequest(
                id=f"{number}/{sample}",
                prompt=prompt,
                sample=sample,
                seed=int(source.integers(2**62)),
                sampling=parameters,
            )
            for sample in range(group_size)
        ]
    return requests


class RandomTreeDrafter(Drafter):
    """Guesses random trees: an adversary that must not change a single token."""

    def __init__(self, *, vocabulary: int = 19, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.seed = seed
        self._random = np.random.default_rng(seed)

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        nodes: list[tuple[int, int]] = []
        for number in range(int(self._random.integers(0, budget + 1))):
            node = int(self._random.integers(-1, number)), int(self._random.integers(self.vocabulary))
            if node in nodes:
                break
            nodes.append(node)
        parents, tokens = np.array(nodes, np.int32).reshape(-1, 2).T
        return Draft(token_ids=tokens, parents=parents)


class OracleDrafter(Drafter):
    """Drafts the given answers, by request id: the engine's ceiling."""

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        self.answers = {name: np.asarray(tokens, np.int32) for name, tokens in answers.items()}

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        done = len(context) - len(request.prompt.token_ids)
        tokens = self.answers[request.id][done : done + budget]
        return Draft(token_ids=tokens, parents=np.arange(-1, len(tokens) - 1, dtype=np.int32))


class ScriptedBackend(RolloutBackend):
    """Answers from a function of the request, `batch` a pass and in order: for tests of everything but a backend."""

    counts_passes = True

    def __init__(self, answer: Callable[[RolloutRequest], Sequence[int]], *, batch: int = 64) -> None:
        self.answer = answer
        self.batch = batch
        self._waiting: list[RolloutRequest] = []
        self._drafter: Drafter | None = None

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        """Start nothing; the drafter is only closed again."""
        self._drafter = drafter

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._waiting[:0] = reversed(requests)  # the next one is at the end

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        size = self.batch * (1 if max_passes is None else max_passes)
        batch = [self._waiting.pop() for _ in range(min(size, len(self._waiting)))]
        return [self._completion(request, self.answer(request), "stop") for request in batch]

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = None if ids is None else set(ids)
        taken = [r for r in reversed(self._waiting) if wanted is None or r.id in wanted]
        self._waiting = [r for r in self._waiting if wanted is not None and r.id not in wanted]
        return [self._completion(request, (), "withdrawn") for request in taken]

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Scripted answers follow no weights."""

    def progress(self) -> Mapping[str, int]:
        return {r.id: len(r.output) if r.output else 0 for r in reversed(self._waiting)}

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self._drafter = None

    @staticmethod
    def _completion(request: RolloutRequest, tokens: Sequence[int], reason: Any) -> Completion:
        return Completion(request=request, output=replace(Output.of(tokens, finish_reason=reason), num_passes=1))
