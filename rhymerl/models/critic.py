"""The critic: what rewards it expects of the rest of an answer, learned beside the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError, at_least, check_ranges
from rhymerl.models.decoder import decoder_of
from rhymerl.models.deferred import DeferredWeights
from rhymerl.models.logprobs import TokenBatch, hidden_states
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.models.rope import refuse_longer
from rhymerl.models.sharding import replica


@dataclass(kw_only=True, eq=False)
class CriticSettings:
    """The settings for learning values, for an algorithm that has them (PPO).

    Without `shared` the critic has a backbone of its own: at first a copy of the policy's, or the language model at
    `path` (a directory or hub name, with the policy's tokenizer). With `shared` it is one head on the policy's
    backbone, and both train the backbone. The head starts at random with a standard deviation of `head_std`; at 0 the
    first values are 0. In the first `warmup_steps` rollout steps the policy does not move, a shared backbone included.
    """

    shared: bool = False
    path: str | None = None
    learning_rate: float = at_least(0, 1e-5)  # of the critic's own weights
    head_std: float = at_least(0, 0.0)
    warmup_steps: int = at_least(0, 0)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.shared and self.path is not None:
            raise ValueError(
                f"path={self.path!r} with shared=true: a shared critic has no backbone to load; set one of them"
            )

    def build(self, policy: Policy, *, seed: int) -> Critic:
        """Return a critic of the policy as it is. Raises ConfigError if `path` is no language model of its tokens."""
        if self.shared:
            return Critic(self, decoder_of(policy.model), body=None, seed=seed)
        source = policy if self.path is None else self._load(self.path, policy)
        decoder = decoder_of(source.model)
        body = copy.deepcopy(decoder) if self.path is None else decoder
        # A decoder may be deeper in the model than its base.
        name = next((name for name, each in source.model.named_modules() if each is decoder), "")
        prefix = f"{name}." if name else ""
        return Critic(self, body, body=body.train(), seed=seed, weights=source.weights, prefix=prefix)

    def outline(self, model: PreTrainedModel) -> Critic:
        """Return the critic of a policy model without content, itself without content: see `PolicySource.outline`."""
        source = model if self.path is None else PolicySource.like(model, self.path).outline(setting="critic")
        decoder = decoder_of(source)
        return Critic(self, decoder, body=None if self.shared else copy.deepcopy(decoder), seed=0)

    def _load(self, path: str, policy: Policy) -> Policy:
        loaded = PolicySource.like(policy.model, path).load(setting="critic")
        if not policy.tokenizer.get_vocab().items() <= loaded.tokenizer.get_vocab().items():
            raise ConfigError(f"critic.path={path!r}: its tokens are not the policy's; it needs the same tokenizer")
        return loaded


class Critic(nn.Module):
    """A value head, on a backbone of its own (`body`) or on the hidden states of the policy's."""

    def __init__(
        self,
        settings: CriticSettings,
        backbone: PreTrainedModel,
        *,
        body: PreTrainedModel | None,
        seed: int,
        weights: DeferredWeights | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.settings = settings
        self.body = body
        self.weights = weights  # see Policy; there, the names of the body's begin with `prefix`
        self.prefix = prefix
        self.head = ValueHead(backbone.config.get_text_config().hidden_size, std=settings.head_std, seed=seed)
        self.head.to(device="cpu" if backbone.device.type == "meta" else backbone.device, dtype=backbone.dtype)
        self.register_load_state_dict_pre_hook(_check_saved)  # type: ignore[no-untyped-call]

    def forward(self, batch: TokenBatch, hidden: Tensor | None) -> Tensor:
        """Return the value before each response token, [N]; `hidden` are the policy's states [N, H] if shared."""
        if self.body is not None:
            hidden = hidden_states(self.body, batch)
        assert hidden is not None, "a shared critic reads the policy's hidden states"
        values: Tensor = self.head(hidden)
        return values

    def check(self, longest_tokens: int) -> None:
        """Raise ConfigError when a prompt with its answer is longer than the backbone's context."""
        if self.body is not None:
            refuse_longer(self.body, longest_tokens, setting=f"critic.path={self.settings.path!r}")


class ValueHead(nn.Module):
    """One linear output, in float32 or better whatever the rest of the model is in."""

    def __init__(self, hidden_size: int, *, std: float, seed: int) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(std * torch.randn(hidden_size, generator=source, device="cpu"))
        self.bias = nn.Parameter(torch.zeros((), device="cpu"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the value of each state: [N, H] -> [N]."""
        weight, bias = replica(self.weight), replica(self.bias)
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.to(weight.dtype) @ weight + bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueHead:
        def in_full(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        super()._apply(in_full, recurse)  # type: ignore[no-untyped-call]
        return self


def _check_saved(critic: nn.Module, state: Mapping[str, Any], prefix: str, *ignored: Any) -> None:
    """Raise ConfigError for weights of another kind of critic, where torch would list them all."""
    assert isinstance(critic, Critic)
    saved = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    if not saved:
        raise ConfigError("the checkpoint holds no critic: it is of a run whose algorithm learned no values")
    saved_own = any(name.startswith("body.") for name in saved)
    if saved_own == critic.settings.shared:
        kind = "a backbone of its own" if saved_own else "the policy's"
        raise ConfigError(
            f"critic.shared={str(critic.settings.shared).lower()}: the critic in the checkpoint has {kind}; "
            f"expected {str(not saved_own).lower()}"
        )
