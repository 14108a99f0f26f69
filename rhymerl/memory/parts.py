"""The bytes that a rank holds on its device, by purpose; the plan is their sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from rhymerl.memory.base import CONTEXT_BYTES, GIB, EngineShape, Setup
from rhymerl.memory.outline import ModelShape, Weight, total_bytes
from rhymerl.models.sharding import BLOCK_BYTES

_RESERVE_BYTES = 2 * GIB  # weights on their way to an engine, workspaces of kernels, batches
_RESERVE_SHARE = 0.1  # of activations and of keys and values: fragments of the allocator, and what the estimate misses
_MODELS = ("weights", "critic", "reference")
_UPDATE = ("gradients", "moments", "activations", "head_chunks", "reserve", "gathered")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the rank that holds the most."""

    parts: Mapping[str, int]  # by what they are for
    lasting: int  # of an update, while an engine answers: gradients and activations are freed at a step's end
    in_turn: bool  # an engine that sleeps during updates takes turns with them

    @property
    def models(self) -> int:
        return sum(self.parts[name] for name in _MODELS)

    @property
    def update(self) -> int:
        """Return the bytes of an update at its worst moment, beside the weights."""
        return sum(self.parts[name] for name in _UPDATE)

    @property
    def beside_engine(self) -> int:
        """Return the bytes beside an engine's weights, keys and values while it answers."""
        return self.lasting if self.in_turn else self.update

    @property
    def total(self) -> int:
        """Return the bytes at the worst moment: engine and update, or weights on their way between updates."""
        engine = self.parts["engine_weights"] + self.parts["keys_and_values"]
        shared = self.parts["engine_rest"] + max(engine + self.beside_engine, self.update)
        return self.parts["context"] + self.models + max(shared, self.lasting + self.parts["weight_buffers"])

    def update_words(self) -> str:
        """Return the memory of the update in GiB, and its parts."""
        names = {name: name.replace("head_chunks", "logits") for name in _UPDATE}
        parts = ", ".join(
            f"{word} {self.parts[name] / GIB:.1f}"
            for name, word in names.items()
            if self.parts[name] or name != "gathered"
        )
        return f"{self.update / GIB:.1f} ({parts})"


def rank_memory(setup: Setup) -> RankMemory:
    """Return what a rank holds; what workers apart from the ranks hold is not theirs.

    An update's peak is the backward of the largest micro-batch. Gradients and the optimizer's moments have the dtype of
    what is trained, and a fused step has no temporaries. Offloaded moments take the room that the activations have left
    by then, so they count as far as they are more than that; but a resumed run loads them onto the device when an
    engine is there. Passes of a reference keep nothing for a backward. Sums over ranks come when activations have gone.
    """
    tensors, shards = setup.tensors, setup.layout.num_shards
    engine = setup.engine if setup.engine is not None and not setup.is_apart else EngineShape()
    activations, chunks, gathered = _activations(setup), _head_chunks(setup), _gathered(setup)
    moments = setup.states * setup.trained_bytes
    offloaded = activations + chunks + gathered if setup.offloads_optimizer else 0
    reserve = _RESERVE_BYTES + int(_RESERVE_SHARE * activations)
    parts = {
        "weights": total_bytes(tensors.policy, shards),
        "critic": total_bytes(tensors.critic, shards),
        "reference": total_bytes(tensors.reference, shards),
        "gradients": setup.trained_bytes,
        "moments": max(moments - offloaded, 0),
        "activations": activations,
        "head_chunks": chunks,
        "gathered": gathered,
        "weight_buffers": _weight_buffers(setup),
        **engine.parts,
        "reserve": reserve,
        "context": CONTEXT_BYTES,  # of the rank itself
    }
    return RankMemory(parts=parts, lasting=moments + reserve, in_turn=setup.in_turn)


def kv_tokens_beside(setup: Setup | None, engine: EngineShape, free_bytes: int) -> int:
    """Return how many tokens' keys and values fit into free memory beside an update in the same process.

    A part of it is left to the engine's passes and to fragments of the allocator.
    """
    beside = rank_memory(setup).update if setup is not None else _RESERVE_BYTES
    return max(int((1 - _RESERVE_SHARE) * (free_bytes - beside - engine.row_states)) // engine.kv_of_token, 0)


# -- the backward ------------------------------------------------------------------------------------------------------


class LayerBytes(NamedTuple):
    """The bytes that parts of layers keep of a token for a backward, each with its norm."""

    attention: int
    mlp: int
    recurrent: int

    def layer(self, model: ModelShape) -> int:
        """Return those of a layer that keeps the most: some have attention beside what is recurrent."""
        has_both = model.layers_with_keys + model.recurrent_layers > model.layers
        return (sum if has_both else max)((self.attention, self.recurrent)) + self.mlp

    def total(self, model: ModelShape) -> int:
        """Return those of all layers."""
        return model.layers_with_keys * self.attention + model.recurrent_layers * self.recurrent + model.mlps * self.mlp


def layer_bytes(setup: Setup) -> LayerBytes:
    """Return the bytes of parts of layers, as in transformers' modules (SDPA, nothing compiled).

    With hidden size H, attention width A, intermediate size I, b bytes an element and s in the residual stream (b, or a
    weight's under autocast):

    - a norm computes in at least 4 bytes and keeps its input and, in s, the normalised one: H (max(4, s) + s)
    - attention keeps query, key, value and output, key and value counted as if expanded to all heads: 4 A b
    - the MLP keeps gate, silu(gate) and up: 3 I b
    - linear layers keep their inputs for the gradient of their weights: (H + A) b, one for q, k and v, and (H + I) b,
      one for gate and up. A copy for each layer is made where each casts for itself, under autocast and for adapters
      wider than the model: (3 H + A) and (2 H + I) times the bytes of the copy.
    - eager attention keeps its scores; flash and memory-efficient kernels keep none.
    - recurrent layers: `rhymerl.models.recurrent.kept_bytes`.
    """
    model, b, stream = setup.model, setup.model.compute_itemsize, setup.stream_itemsize
    h, a, i = model.hidden, model.attention, model.intermediate
    scores = model.heads * model.longest_tokens * (4 + model.itemsize) if setup.is_eager else 0
    norm = h * (max(4, stream) + stream)
    is_copied = setup.is_cast or (setup.has_adapters and b < 4)
    copy = b if setup.is_cast or not is_copied else 4
    return LayerBytes(
        attention=norm + 4 * a * b + scores + ((3 if is_copied else 1) * h + a) * copy,
        mlp=norm + 3 * i * b + ((2 if is_copied else 1) * h + i) * copy,
        recurrent=norm + model.recurrent_bytes,
    )


def _activations(setup: Setup) -> int:
    """Return what all layers keep, the same again for one layer's gradients, and autocast's copies of weights.

    With checkpointing a layer keeps its input, and one at a time all the rest.
    """
    model, found = setup.model, layer_bytes(setup)
    if setup.activation_checkpointing:
        a_token = model.layers * model.hidden * setup.stream_itemsize + 2 * found.layer(model)
    else:
        a_token = found.total(model) + found.layer(model)
    backbones = 2 if setup.has_own_critic else 1
    casts = total_bytes(setup.tensors.updated) // model.itemsize * model.compute_itemsize if setup.is_cast else 0
    return backbones * setup.tokens * a_token + casts


def _head_chunks(setup: Setup) -> int:
    """Return the bytes of four chunks of logits, and of head and embedding gradients before they are summed.

    Logits are in float32 or better; the gradients exist if they are trained. Among sharded ranks these gradients are
    gathered ones.
    """
    model = setup.model
    chunk = min(setup.chunk_tokens, setup.tokens) * model.vocabulary * max(4, model.compute_itemsize)
    is_counted = setup.has_adapters or setup.layout.is_sharded
    ends = 0 if is_counted else 2 * model.vocabulary * model.hidden * model.itemsize
    return 4 * chunk + ends


# -- sharded weights ---------------------------------------------------------------------------------------------------


def _weight_buffers(setup: Setup) -> int:
    """Return the bytes of two blocks on their way to workers, or of the largest tensor for a copy in the rank."""
    if not setup.layout.is_sharded:
        return 0
    shards = setup.layout.num_shards
    largest = max(shards * each.part(shards) * each.itemsize for each in setup.tensors.policy)
    return 2 * min(BLOCK_BYTES, largest) if setup.is_apart else largest


def _gathered(setup: Setup) -> int:
    """Return the bytes of groups of sharded weights that are whole at the worst moment of a backward.

    These are a group with its gradient, which is laid out once more for the sum, and the next one while it comes,
    twice: in one piece and as tensors. What belongs to no layer stays from beginning to end.
    """
    if not setup.layout.is_sharded:
        return 0
    lasting, passing, following = 0, 0, 0
    for weights in (setup.tensors.policy, setup.tensors.critic):
        *groups, rest = list(_groups(setup, weights)) or [(0, 0, 0)]
        lasting += sum(rest)
        passing = max([passing, *map(sum, groups)])
        following = max([following, *(2 * whole for whole, _, _ in groups)])
    return lasting + passing + following


def _groups(setup: Setup, weights: tuple[Weight, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield for each group the bytes of its weights, of its gradients, and of these while they are added up."""
    shards = setup.layout.num_shards
    ordered = sorted((each for each in weights if not each.is_whole), key=lambda each: each.group)
    for _, group in groupby(ordered, key=lambda each: each.group):
        found = list(group)
        trained = [each for each in found if each.is_trained]
        yield (
            sum(shards * each.part(shards) * setup.gathered_itemsize(each) for each in found),
            sum(each.count * setup.gathered_itemsize(each) for each in trained),
            sum(shards * each.part(shards) * setup.summed_itemsize(each) for each in trained),
        )
