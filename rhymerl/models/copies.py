"""Copies of a policy, for engines that compute with weights of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from rhymerl.errors import BackendError
from rhymerl.models.policy import Policy, write_files
from rhymerl.models.wrapped import auto_class


def policy_of(
    files: Mapping[str, str], *, dtype: torch.dtype, attention: str, device: torch.device | str, in_host: bool = False
) -> Policy:
    """Return a policy of this architecture for an engine on `device`, `in_host` memory if set; weights come later."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    place = torch.device("cpu" if in_host else device)
    with place:
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    elsewhere = torch.device(device) if in_host else None
    return Policy(model=model.to(place), tokenizer=tokenizer, trained_on=elsewhere)


def twin_of(policy: Policy, *, in_host: bool = False) -> Policy:
    """Return a policy of the same architecture and device, whole and without adapters; see `policy_of`."""
    model, attention = policy.model, policy.model.config._attn_implementation
    return policy_of(policy.files(), dtype=model.dtype, attention=attention, device=model.device, in_host=in_host)


def copy_weights(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> None:
    """Write all parameters of a model, one after another. Raises BackendError if names or shapes differ."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in named:
            parameter = parameters.pop(name, None)
            if parameter is None:
                raise _another_model(f"only the trainer's has {name!r}")
            if parameter.shape != tensor.shape:
                raise _another_model(f"{name!r} has another shape")
            parameter.copy_(tensor)
    if parameters:
        raise _another_model(f"only the engine's has {min(parameters)!r}")


def _another_model(difference: str) -> BackendError:
    return BackendError(f"an engine's model is not the trainer's: {difference}")
