"""Layers that go from token to token, behind shared prompts: short convolutions, gated delta nets and Mamba 2.

A prompt is computed once. Its last inputs and its state go to each answer behind it, with gradients. An answer that
begins as another one does reads the other's inputs of the rule and makes their states again: all that is costly in a
layer, its products with weights, is computed once. The rules themselves are those of transformers, or of the kernels
that it has found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature, unwrap
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rhymerl.types import IndexArray

WITHOUT_KEYS = frozenset({"conv", "linear_attention", "mlp", "moe"})  # kinds of layers of hybrids
RECURRENT = frozenset({"conv", "linear_attention", "hybrid"})  # those with a state that goes from token to token
_OUTLINED = 1024  # tokens: some chunks of all rules
# What modules say of the numbers in the state of a gated delta net, and of Mamba 2.
_SIZES = (("num_v_heads", "head_k_dim", "head_v_dim"), ("num_heads", "head_dim", "ssm_state_size"))


def state_bytes(model: nn.Module, itemsize: int) -> int:
    """Return what an engine keeps of a row's past in layers without keys; states are in float32 at least."""
    found = 0
    for each in model.modules():
        if isinstance(each, nn.Conv1d) and _is_convolution(each):
            found += each.in_channels * (each.kernel_size[0] - 1) * itemsize
        for names in _SIZES:
            if all(hasattr(each, name) for name in ("A_log", *names)):
                found += math.prod(getattr(each, name) for name in names) * max(4, itemsize)
    return found


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of layers that go from token to token: each has a convolution."""
    return [each for each in model.modules() if any(map(_is_convolution, each.children()))]


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


def kept_bytes(module: nn.Module, hidden: int, dtype: torch.dtype) -> int:
    """Return what a module of a layer keeps of a token for a backward: what autograd saves, without any content.

    The rules are transformers' in torch; kernels, which keep less, take no tensors without content. 0 of a module that
    takes more than tokens, whose states neither the engine nor a shared prompt knows.
    """
    if _takes_more_than_tokens(module):
        return 0
    plug_in(module, "rhymerl_outline", dict.fromkeys(BEHIND_PROMPTS, _in_torch))
    parts = (*module.named_parameters(), *module.named_buffers())
    weights = {
        name: torch.empty(each.shape, dtype=dtype, device="meta", requires_grad=isinstance(each, nn.Parameter))
        for name, each in parts  # each may be this rank's part of a tensor
    }
    tokens = torch.empty(1, _OUTLINED, hidden, dtype=dtype, device="meta", requires_grad=True)
    own = [each.untyped_storage()._cdata for each in weights.values()]
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        functional_call(module, weights, (tokens,), {"rhymerl_outline": True})
    return sum(each.nbytes() for number, each in kept.items() if number not in own) // _OUTLINED


def _takes_more_than_tokens(module: nn.Module) -> bool:
    needed = [each for each in signature(module.forward).parameters.values() if each.default is Parameter.empty]
    return sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in needed) > 1


def _in_torch(*args: Any, rhymerl_plain: Callable[..., Any], rhymerl_outline: bool, **settings: Any) -> Any:
    return unwrap(rhymerl_plain)(*args, **settings)


def at(rows: Tensor, indices: Tensor) -> Tensor:
    """Return rows, [L, dim], at indices of any shape; repeated ones sum their gradients in a fixed order."""
    return F.embedding(indices, rows)


@dataclass(slots=True, kw_only=True)
class TokenPaths:
    """What comes before each token of a packed pass of L tokens: G prompts, padded to P tokens, and buckets of runs."""

    lengths: IndexArray  # [G] of prompts
    before: Sequence[Sequence[IndexArray]]  # of each bucket: flat indices of the tokens before each run
    own: Sequence[IndexArray]  # of the prompts and of each bucket: those of its own, [B, T]
    device: torch.device | str
    _found: dict[int | None, list[Tensor]] = field(default_factory=dict)

    def last(self, kept: int | None) -> list[Tensor]:
        """Return indices [B, S + T] of the prompts and of each bucket: of tokens before each run, and of its own.

        They are the `kept` last ones; None: all behind its prompt. L stands for none, and for the padding of prompts.
        """
        if kept not in self._found:
            self._found[kept] = [torch.from_numpy(each).to(self.device) for each in self._find(kept)]
        return self._found[kept]

    def _find(self, kept: int | None) -> Iterator[IndexArray]:
        prompts, nobody = self.own[0], sum(each.size for each in self.own)
        real = np.where(np.arange(prompts.shape[1]) < self.lengths[:, None], prompts, nobody)
        yield _led([prompts[0, :0]] * len(prompts), real, width=kept or 0, fill=nobody)
        for lines, own in zip(self.before, self.own[1:], strict=True):
            ends = [self.lengths[line[0] // prompts.shape[1]] if kept is None else len(line) - kept for line in lines]
            some = [line[max(end, 0) :] for line, end in zip(lines, ends, strict=True)]
            yield _led(some, own, width=max(map(len, some)) if kept is None else kept, fill=nobody)

    @property
    def prompts(self) -> list[Tensor]:
        """Return which prompt each run of each bucket has, [B]."""
        width = self.own[0].shape[1]
        return [torch.tensor([line[0] // width for line in lines], device=self.device) for lines in self.before]


def _led(before: Sequence[IndexArray], own: IndexArray, *, width: int, fill: int) -> IndexArray:
    """Return own tokens, [B, T], with those before them, on the left filled up to `width`: [B, width + T]."""
    found = np.full((len(own), width), fill, np.int64)
    for line, each in zip(found, before, strict=True):
        line[width - len(each) :] = each
    return np.concatenate([found, own], 1)


def _rows(tokens: Tensor) -> Tensor:
    """Return tokens, [1, L, ...], as lines [L + 1, size]; the last is nobody's: zeros, which leave a state as it is."""
    return F.pad(tokens[0].flatten(1), (0, 0, 0, 1))


def _convolve(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    rhymerl_paths: TokenPaths,
    rhymerl_plain: Callable[..., Tensor],
    **_: object,
) -> Tensor:
    """The convolution of a layer over the paths of the pass: [1, C, L] -> [1, C, L]."""
    kept, tokens = weight.shape[-1] - 1, _rows(inputs.transpose(1, 2))
    rows = [at(tokens, each).transpose(1, 2) for each in rhymerl_paths.last(kept)]
    found = [rhymerl_plain(each, weight, bias, activation=activation)[..., kept:] for each in rows]
    return torch.cat([each.transpose(0, 1).flatten(1) for each in found], 1)[None]


def _behind_prompts(paths: TokenPaths, terms: Sequence[Tensor], rule: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """Return what a rule finds of terms [1, L, ...]: it gets a state, or None, and the terms of tokens [B, T]."""
    lines, found = [_rows(each) for each in terms], list[Tensor]()
    state: Tensor | None = None
    for tokens, own, prompt in zip(paths.last(None), paths.own, [None, *paths.prompts], strict=True):
        given = [at(line, tokens).unflatten(-1, each.shape[2:]) for line, each in zip(lines, terms, strict=True)]
        mine = None if state is None or prompt is None else at(state.flatten(1), prompt).unflatten(1, state.shape[1:])
        output, after = rule(mine, *given)
        state = after if state is None else state
        found.append(output[:, -own.shape[1] :].flatten(0, 1))
    return torch.cat(found)[None]


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    rhymerl_paths: TokenPaths,
    rhymerl_plain: Callable[..., tuple[Tensor, Tensor]],
    **settings: Any,
) -> tuple[Tensor, None]:
    """The rule over the paths of the pass: [1, L, heads, dim] -> [1, L, heads, dim of values]."""

    def rule(state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        more = {**settings, "initial_state": state, "output_final_state": True}
        return rhymerl_plain(q, k, v, g=g, beta=beta, **more)

    return _behind_prompts(rhymerl_paths, (query, key, value, g, beta), rule), None


def _mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    *,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    rhymerl_paths: TokenPaths,
    rhymerl_plain: Callable[..., tuple[Tensor, Tensor]],
    **settings: Any,
) -> Tensor:
    """The scan over the paths of the pass: [1, L, heads, dim] -> [1, L, heads, dim]."""
    step = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)  # here, so that it is 0 where there is no token
    plain = {"dt_softplus": False, "dt_bias": None, "dt_limit": (0.0, math.inf), "return_final_states": True}

    def rule(state: Tensor | None, x: Tensor, step: Tensor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return rhymerl_plain(x, step, rate, k, q, **{**settings, **plain, "initial_states": state})

    return _behind_prompts(rhymerl_paths, (hidden_states, step, key, query), rule)


def _not_fused(*_: object, **__: object) -> None:
    """A kernel for a whole layer takes no paths: the layer goes on with its convolution and its scan."""


BEHIND_PROMPTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}


def plug_in(model: nn.Module, keyword: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Put functions in the place of those that a model's layers call, in calls with this keyword; others stay."""
    for name in {type(each).__module__ for each in model.modules()}:
        source = sys.modules[name]
        for function in functions.keys() & vars(source).keys():
            if not hasattr(vars(source)[function], "rhymerl_functions"):
                setattr(source, function, _one_of(vars(source)[function]))
            vars(source)[function].rhymerl_functions[keyword] = functions[function]


def _one_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    functions: dict[str, Callable[..., Any]] = {}

    @wraps(theirs)
    def call(*args: Any, **settings: Any) -> Any:
        for keyword in functions.keys() & settings.keys():
            return functions[keyword](*args, rhymerl_plain=theirs, **settings)
        return theirs(*args, **settings)

    call.rhymerl_functions = functions  # type: ignore[attr-defined]
    return call
