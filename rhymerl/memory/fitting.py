"""Settings with which a rank takes less memory, and the fewest with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rhymerl.memory.base import Setup
from rhymerl.memory.outline import Outline, OutlineWeights, Weight
from rhymerl.memory.parts import rank_memory

_STEP_TOKENS = 1024  # between numbers of tokens that are tried
_DEVICES = (2, 4, 8)  # of one node, that are tried
_TIMES = (1, 2, 4, 8, 16, 32, 64)  # as many nodes, that are tried
_APART: dict[str, Any] = {"is_apart": True, "in_turn": False}
_LORA_RANK = 16  # the default of adapter=lora


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """The change of a setting that takes less memory."""

    words: str  # of the command line, for `str.format` with the setup that it makes
    apply: Callable[[Setup], Iterable[Setup]]  # what it makes of a setup: for each value of a number, the nearest first
    is_number: bool = False  # chosen so that nothing is missing, if it can be

    def applied(self, setup: Setup, device_bytes: int) -> tuple[str, Setup]:
        """Return the words for the first value that fits, else for the last one, and the setup with it."""
        found = setup
        for found in self.apply(setup):
            if not self.is_number or missing_bytes(found, device_bytes) <= 0:
                break
        return self.words.format(found), found


def missing_bytes(setup: Setup, device_bytes: int) -> int:
    """Return the bytes that are too few on a device of that many, 0 or less where a rank fits."""
    return rank_memory(setup).total - device_bytes


def nearest(setup: Setup, device_bytes: int) -> list[str] | None:
    """Return the fewest settings with which a rank fits, none where it does; None where no settings are known to."""
    found = fewest_changes(setup, list(changes(setup)), device_bytes)
    return None if found is None else found[0]


def fewest_changes(setup: Setup, known: Sequence[MemoryChange], device_bytes: int) -> tuple[list[str], int] | None:
    """Return the words of the fewest changes that fit, and the bytes to spare then; the first among ties.

    Numbers are chosen last. None where not even all changes are enough.
    """
    for count in range(len(known) + 1):
        for chosen in combinations(known, count):
            words, found = [], setup
            for change in sorted(chosen, key=lambda each: each.is_number):
                word, found = change.applied(found, device_bytes)
                words.append(word)
            if (missing := missing_bytes(found, device_bytes)) <= 0:
                return words, -missing
    return None


def advice(words: Sequence[str] | None) -> str:
    """Return what to do, in words."""
    if words is None:
        return "no settings are known to fit: take a smaller model, or larger or more GPUs"
    return f"with {' '.join(words)} it should fit"


# -- what takes less ---------------------------------------------------------------------------------------------------


def changes(setup: Setup, *, with_ranks: bool = True) -> Iterator[MemoryChange]:
    """Yield the settings that take less memory, of ranks too (`with_ranks`); least change to training first."""
    engine = None if setup.is_apart else setup.engine
    if not setup.activation_checkpointing:
        yield _change("update.activation_checkpointing=true", activation_checkpointing=True)
    if engine is not None and engine.context and not setup.in_turn:
        yield _change("backend.release_memory=true", in_turn=True)
    yield MemoryChange(
        words="update.micro_batch_tokens={0.micro_batch_tokens}", apply=_in_smaller_parts, is_number=True
    )
    if engine is not None and not engine.weights:
        yield MemoryChange(words="backend.kv_tokens={0.engine.longest_tokens}", apply=_with_fewer_keys, is_number=True)
    if not setup.offloads_optimizer:
        yield _change("update.offload_optimizer=true", offloads_optimizer=True)
    if with_ranks:
        yield from _changes_of_ranks(setup)
    if setup.model.itemsize == 4:
        yield MemoryChange(words="trainer.precision=bf16-true", apply=_in_half)
    if not setup.has_adapters:
        yield MemoryChange(words="adapter=lora", apply=_with_adapters)


def _changes_of_ranks(setup: Setup) -> Iterator[MemoryChange]:
    """Yield them. An engine in a rank goes to workers of their own where weights are sharded."""
    layout, words = setup.layout, "trainer.strategy=fsdp2" if setup.is_apart else "trainer.strategy=fsdp2 backend=ray"
    sharded = replace(layout, num_replicas=1, is_sharded=True)
    if layout.is_sharded and not setup.is_apart:
        yield _change("backend=ray", **_APART)
    if layout.is_sharded and layout.num_replicas > 1:
        yield _change("trainer.strategy.num_replicas=1", layout=sharded)
    if not layout.is_sharded and layout.num_ranks > 1:
        yield _change(words, layout=sharded, **_APART)
    if layout.num_ranks == 1:
        yield MemoryChange(
            words=f"trainer.devices={{0.layout.num_ranks}} {words}", apply=_on_more_devices, is_number=True
        )
    else:
        yield MemoryChange(words="trainer.num_nodes={0.layout.num_nodes}", apply=_on_more_nodes, is_number=True)


def _change(words: str, **fields: Any) -> MemoryChange:
    return MemoryChange(words=words, apply=lambda setup: [replace(setup, **fields)])


def _in_smaller_parts(setup: Setup) -> Iterator[Setup]:
    least = max(setup.model.longest_tokens, _STEP_TOKENS)
    for tokens in range(setup.tokens - _STEP_TOKENS, least - 1, -_STEP_TOKENS):
        yield replace(setup, micro_batch_tokens=tokens)


def _with_fewer_keys(setup: Setup) -> Iterator[Setup]:
    if setup.engine is not None:
        least = -(-setup.model.longest_tokens // _STEP_TOKENS) * _STEP_TOKENS
        for tokens in range(setup.engine.longest_tokens - _STEP_TOKENS, least - 1, -_STEP_TOKENS):
            yield replace(setup, engine=replace(setup.engine, longest_tokens=tokens))


def _on_more_devices(setup: Setup) -> Iterator[Setup]:
    for devices in _DEVICES:
        layout = replace(setup.layout, num_ranks=devices, num_replicas=1, is_sharded=True)
        yield replace(setup, layout=layout, **_APART)


def _on_more_nodes(setup: Setup) -> Iterator[Setup]:
    """Without sharding more of them hold as much each."""
    layout = setup.layout
    for times in _TIMES if layout.is_sharded else ():
        more = replace(layout, num_ranks=times * layout.num_ranks, num_nodes=times * layout.num_nodes)
        yield replace(setup, layout=more)


def _in_half(setup: Setup) -> Iterator[Setup]:
    model = replace(setup.model, itemsize=2, compute_itemsize=2)
    yield replace(setup, tensors=setup.tensors.cast(2), model=model, is_mixed=False)


def _with_adapters(setup: Setup) -> Iterator[Setup]:
    """With adapters of the default rank on all linear layers of the decoder the policy is its own reference."""
    model = setup.model
    parameters = 4 * (model.hidden + model.attention) + 3 * (model.hidden + model.intermediate)
    adapters = Weight(shape=(_LORA_RANK * model.layers * parameters,), itemsize=max(4, model.itemsize), is_full=True)
    policy, critic = (_frozen(weights) for weights in (setup.tensors.policy, setup.tensors.critic))
    if setup.has_own_critic:
        critic = (*critic, adapters)
    yield replace(setup, tensors=Outline(policy=(*policy, adapters), critic=critic))


def _frozen(weights: OutlineWeights) -> OutlineWeights:
    return tuple(each if each.is_whole else replace(each, is_trained=False) for each in weights)
