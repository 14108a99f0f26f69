"""A proof that an engine computes the policy: engines ignore weights with unknown names and report success."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhymerl.backends.remote.answers import EngineAnswer
from rhymerl.backends.remote.client import LONGEST_S, Client
from rhymerl.backends.remote.wire import to_custom_params
from rhymerl.engine.noise import log_race_times, noise_keys
from rhymerl.errors import BackendError
from rhymerl.models.logits import num_tokens
from rhymerl.models.policy import Policy, evaluating
from rhymerl.types import Prompt, RolloutRequest, SamplingParams

_PROMPT, _ANSWER = 8, 8  # tokens
_SHORT, _SAMPLED, _TEMPERATURE = [1], 32, 2.0  # of sampled answers: the prompt, and their tokens
# Nats of difference for each of the largest logit, by which rounding grows; another model is several nats off.
_SHARE = {"float32": 3e-4, "bfloat16": 2**-6}
_LEAST_LOGIT = 32.0
_policy_free = threading.Lock()  # engines may be proven side by side


def prove_server(client: Client, policy: Policy, dtype: str) -> None:
    """Raise BackendError unless a short greedy answer has the policy's log-probs."""
    rows = policy.model.config.get_text_config().vocab_size
    prompt = [(7 * i) % rows for i in range(1, _PROMPT + 1)]
    sampling, vocabulary = SamplingParams(max_tokens=_ANSWER, temperature=0.0), num_tokens(policy.model)
    of_whom = f"the SGLang engine at {client.url}, a proof"
    wanted = {"return_logprob": True, "logprob_start_len": -1}
    said = _asked(client, prompt, sampling, seed=0, num_tokens=vocabulary, **wanted)
    answer = EngineAnswer.of(said, of_whom=of_whom, most=_ANSWER, vocabulary=vocabulary)
    tokens = torch.from_numpy(answer.token_ids).long()
    logits = _logits(policy, prompt, answer.token_ids.tolist())
    largest = float(logits.abs().max())
    ours = torch.log_softmax(logits[:, :vocabulary], -1).gather(-1, tokens[:, None])[:, 0].numpy()
    worst = float(np.abs(answer.logprobs - ours).max(initial=0.0))
    worst, most = worst if len(ours) else math.inf, _SHARE[dtype] * max(largest, _LEAST_LOGIT)
    if not worst <= most:
        raise BackendError(
            f"the SGLang engine does not compute the policy: log-probs of a short answer differ by {worst:.3g} nats right after "
            f"the weights were handed over, at most {most:.2g} in {dtype} ({type(policy.model).__name__} may go by other names or "
            "settings there)"
        )


def draws_by_seed(client: Client, policy: Policy, dtype: str) -> bool:
    """Return whether tokens follow from a request's seed.

    If one seed gives one answer, another seed has to give another. If it gives two, passes of other shapes may have
    rounded differently: then each token has to be the draw of rhymerl's noise from the policy's logits, up to rounding.
    """
    first, same, other = (_sampled(client, seed) for seed in (1, 1, 2))
    return first != other if first == same else all(_follows(policy, dtype, each, seed=1) for each in (first, same))


def _follows(policy: Policy, dtype: str, tokens: list[int], *, seed: int) -> bool:
    vocabulary = num_tokens(policy.model)
    if len(tokens) != _SAMPLED or not all(0 <= token < vocabulary for token in tokens):
        return False
    logits = _logits(policy, _SHORT, tokens)[:, :vocabulary]
    most = 2 * _SHARE[dtype] * max(float(logits.abs().max()), _LEAST_LOGIT) / _TEMPERATURE  # of two logits
    keys = noise_keys(np.full(_SAMPLED, seed, np.uint64), np.arange(_SAMPLED))
    times = log_race_times(torch.from_numpy(keys.astype(np.int64)), vocabulary)
    scores = logits / _TEMPERATURE - times
    sampled = scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((scores.amax(-1) - sampled <= most).all())


def _sampled(client: Client, seed: int) -> list[int]:
    sampling = SamplingParams(max_tokens=_SAMPLED, temperature=_TEMPERATURE)
    answer = _asked(client, _SHORT, sampling, seed=seed)
    tokens = answer.get("output_ids") if isinstance(answer, Mapping) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise BackendError(
            f"the SGLang engine at {client.url}, a proof: expected output_ids, got {str(answer)[:100]!r}"
        )
    return tokens


def _asked(
    client: Client, token_ids: list[int], sampling: SamplingParams, *, seed: int, num_tokens: int = 0, **wanted: Any
) -> Any:
    """Return what the engine says to a request of its own, whatever stop tokens it knows."""
    name = f"proof-{uuid.uuid4().hex}"
    prompt = Prompt(id=name, key="proof", token_ids=np.array(token_ids, np.int32), text="")
    request = RolloutRequest(id=name, prompt=prompt, sample=0, seed=seed, sampling=sampling, split="train")
    params = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "ignore_eos": True,
        "custom_params": to_custom_params(request, feed=0, num_tokens=num_tokens),
    }
    content = {"rid": name, "input_ids": token_ids, "sampling_params": params, **wanted}
    return client.post("/generate", content, timeout_s=LONGEST_S)


def _logits(policy: Policy, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the logits from which each token of the answer is sampled, [tokens, V] float64, on the CPU."""
    tokens = torch.tensor([[*prompt, *answer]], device=policy.model.device)
    with _policy_free, evaluating(policy.model), torch.no_grad():
        logits: Tensor = policy.model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().cpu()
