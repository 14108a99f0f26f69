"""An engine that begins with the first weights that its host is given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.hosted.messages import WeightSource
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError
from rhymerl.models.policy import Policy, write_files


@dataclass(slots=True, kw_only=True)
class EngineLoader:
    """Makes the policy with the first weights, starts the engine on it, and copies later weights into it."""

    make_policy: Callable[[], Policy]
    engine: RolloutBackend
    drafter: Drafter
    budget: Budget | None = None
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    _policy: Policy | None = None

    def __call__(self, source: WeightSource, version: int) -> RolloutBackend:
        is_first = self._policy is None
        policy = self._policy = self._policy or self.make_policy()
        copy_weights(policy.model, source.load())
        if is_first:
            self.engine.owns_policy = True
            self.engine.start(policy, self.drafter, budget=self.budget, autocast=self.autocast)
        self.engine.sync_weights(policy.named_weights(), version)
        return self.engine


def policy_of(
    files: Mapping[str, str], *, dtype: torch.dtype, attention: str, device: torch.device | str, in_host: bool = False
) -> Policy:
    """Return a policy of this architecture for an engine on `device`, `in_host` in the host's memory; its weights come later."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    elsewhere = torch.device(device) if in_host else None
    return Policy(model=model.to("cpu" if in_host else device), tokenizer=tokenizer, trained_on=elsewhere)


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write all parameters of a model. Raises BackendError where their names or shapes are others."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        other = sorted(parameters.keys() ^ tensors.keys())[0]
        raise BackendError(f"a worker's model is not the trainer's: only one of them has {other!r}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise BackendError(f"a worker's model is not the trainer's: {name!r} has another shape")
            parameter.copy_(tensors[name])
