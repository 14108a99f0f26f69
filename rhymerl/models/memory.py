"""What an update needs of a device's memory beside the weights: arithmetic on a model's sizes, no device is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Generic, TypeVar

T = TypeVar("T")

GIB = 2**30
CONTEXT_BYTES = GIB  # of a process on a GPU, before it has any tensor: CUDA's context and the libraries
_RESERVE_BYTES = 2 * GIB  # weights on their way to an engine, workspaces of kernels, batches
_STEP_TOKENS = 1024  # between numbers of micro_batch_tokens that are tried
_LORA_RANK = 16  # the default of adapter=lora
_RESERVE_SHARE = 0.1  # of activations and of keys and values: fragments of the allocator, and what the estimate misses


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShape:
    """The sizes that decide what an update needs; those of a decoder with gated MLPs (Llama and its kin)."""

    layers: int
    hidden: int
    attention: int  # query heads x their size
    intermediate: int
    vocabulary: int
    weight_bytes: int  # of all parameters, as they are held
    trained_bytes: int  # of those with a gradient
    weight_itemsize: int
    itemsize: int  # of what layers compute: 2 under autocast to bfloat16
    has_adapters: bool = False  # which alone are trained, in float32 or better
    backbones: int = 1  # 2 with a critic that has its own
    score_bytes: int = (
        0  # attention scores that a token keeps in each layer; flash and memory-efficient kernels keep none
    )
    micro_batch_tokens: int
    longest_tokens: int  # a sample always fits, however few tokens a micro-batch may have
    chunk_tokens: int  # of logits
    activation_checkpointing: bool = False
    states: int = 2  # tensors of the size of what is trained that the optimizer keeps; AdamW's are two
    offloads_optimizer: bool = False  # keeps them in the host's memory except while it steps
    gathered_bytes: int = (
        0  # of weights and gradients that sharded ranks have whole for a moment; heads' gradients are among them
    )

    @property
    def tokens(self) -> int:
        """The most tokens of a backward."""
        return max(self.micro_batch_tokens, self.longest_tokens)

    @property
    def is_cast(self) -> bool:
        """Whether autocast computes in fewer bits than the weights have."""
        return self.itemsize < self.weight_itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMemory:
    """Bytes by what they are for."""

    gradients: int
    moments: int
    activations: int
    logits: int
    reserve: int
    gathered: int = 0
    lasting_moments: int  # while an engine answers; a resumed run loads offloaded ones onto the device, too, when the engine is there

    @property
    def total(self) -> int:
        """What there is at the worst moment: offloaded moments are there when activations are not."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "lasting_moments"}

    @property
    def lasting(self) -> int:
        """What stays while an engine answers: gradients and activations are freed at a step's end."""
        return self.lasting_moments + self.reserve

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in self._parts().items() if size or name != "gathered"
        )
        return f"{self.total / GIB:.1f} ({parts})"


def update_memory(shape: UpdateShape) -> UpdateMemory:
    """Return what a step takes at its peak, which is the backward of the largest micro-batch.

    Gradients and the optimizer's moments have the dtype of what is trained, and a fused step has no temporaries. Offloaded moments take the room
    that the activations have left by then, so they count as far as they are more than that. A reference model is no part
    of it: it is there before an engine is, and its passes keep nothing for a backward. Neither are the sums over ranks, which
    come when activations have gone.
    """
    activations, logits, moments = _activations(shape), _logits(shape), shape.states * shape.trained_bytes
    passing = activations + logits + shape.gathered_bytes
    return UpdateMemory(
        gradients=shape.trained_bytes,
        moments=max(moments - passing, 0) if shape.offloads_optimizer else moments,
        activations=activations,
        logits=logits,
        reserve=_RESERVE_BYTES + int(_RESERVE_SHARE * activations),
        gathered=shape.gathered_bytes,
        lasting_moments=moments,
    )


def layer_bytes(shape: UpdateShape) -> int:
    """Return what a layer keeps of a token for its backward, as transformers' modules are written (SDPA, nothing compiled).

    With hidden size H, attention width A, intermediate size I, b bytes an element and s in the residual stream (b, or a weight's under
    autocast):

    - two norms compute in at least 4 bytes and keep their input and, in s, the normalised one: 2 H (max(4, s) + s)
    - attention keeps query, key, value and output, key and value counted as if expanded to all heads: 4 A b
    - the MLP keeps gate, silu(gate) and up: 3 I b
    - linear layers keep their inputs for the gradient of their weights: (2 H + A + I) b, one for q, k and v and one for gate and up. A
      copy for each layer is made where each casts for itself, under autocast and for adapters wider than the model: (5 H + A + I) times the bytes of the copy.
    """
    h, a, i, b = shape.hidden, shape.attention, shape.intermediate, shape.itemsize
    stream = shape.weight_itemsize
    kept = 2 * h * (max(4, stream) + stream) + 4 * a * b + 3 * i * b + shape.score_bytes
    if shape.is_cast:
        return kept + (5 * h + a + i) * b
    if shape.has_adapters and b < 4:
        return kept + (5 * h + a + i) * 4
    return kept + (2 * h + a + i) * b


def _activations(shape: UpdateShape) -> int:
    """Return what all layers keep, and as much as one keeps again for gradients on their way; copies of weights that autocast makes too.

    With checkpointing a layer keeps its input, and one at a time all the rest.
    """
    layer = layer_bytes(shape)
    if shape.activation_checkpointing:
        a_token = shape.layers * shape.hidden * shape.weight_itemsize + 2 * layer
    else:
        a_token = (shape.layers + 1) * layer
    casts = shape.weight_bytes // shape.weight_itemsize * shape.itemsize if shape.is_cast else 0
    return shape.backbones * shape.tokens * a_token + casts


def _logits(shape: UpdateShape) -> int:
    """Return four chunks of logits in float32 or better, and, where it is trained, the gradients of head and embedding before they are added up."""
    chunk = min(shape.chunk_tokens, shape.tokens) * shape.vocabulary * max(4, shape.itemsize)
    is_counted = shape.has_adapters or shape.gathered_bytes > 0
    ends = 0 if is_counted else 2 * shape.vocabulary * shape.hidden * shape.weight_itemsize
    return 4 * chunk + ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a policy that decide what an engine needs."""

    parameters: int  # of the policy without adapters
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int  # of its weights
    compute_itemsize: int  # of what layers compute
    longest_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine takes of each of its GPUs, in bytes."""

    weights: int  # 0 for one that computes with the trainer's own
    kv_of_token: int
    dynamic: int  # graphs and activations
    longest_tokens: int  # whose keys and values there is room for at least
    context: int = 0  # CUDA's, of an engine in a process of its own, before it loads anything

    @property
    def least(self) -> int:
        """The static memory without which the longest sequence has no room."""
        return self.weights + self.longest_tokens * self.kv_of_token


def shared_bytes(update: UpdateMemory, engine: EngineShape, *, in_turn: bool) -> int:
    """Return what an update and an engine take of one device, beside the trainer's weights.

    If the engine gives weights, keys and values back for an update (`in_turn`), only what an update leaves behind stands beside them.
    """
    always = engine.context + engine.dynamic
    if in_turn:
        return always + max(engine.least + update.lasting, update.total)
    return always + engine.least + update.total


def kv_tokens_beside(update: UpdateShape | None, engine: EngineShape, free_bytes: int) -> int:
    """Return for how many tokens there is room for keys and values in what is free, which an engine in the trainer's process shares with an update.

    A part of it is left to the engine's passes and to fragments of the allocator.
    """
    beside = update_memory(update).total if update is not None else _RESERVE_BYTES
    return max(int((1 - _RESERVE_SHARE) * (free_bytes - beside)) // engine.kv_of_token, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Generic[T]):
    """A setting that takes less memory: what becomes of a case, and the words of the command line for it."""

    apply: Callable[[T], tuple[str, T]]
    is_number: bool = False  # chosen so that nothing is missing, if it can be


def fewest_changes(
    case: T, changes: Sequence[Alternative[T]], missing: Callable[[T], int]
) -> tuple[list[str], T] | None:
    """Return the fewest changes with which nothing is missing, and what the case becomes; of equally many the first ones.

    Numbers are chosen last. None where not even all changes are enough.
    """
    for count in range(len(changes) + 1):
        for chosen in combinations(changes, count):
            words, found = [], case
            for change in sorted(chosen, key=lambda each: each.is_number):
                word, found = change.apply(found)
                words.append(word)
            if missing(found) <= 0:
                return words, found
    return None


def with_fewer_tokens(update: UpdateShape, missing: Callable[[UpdateShape], int]) -> UpdateShape:
    """Return the shape with the most tokens of a backward with which nothing is missing, or else with the fewest that there may be."""
    fewer = range(update.tokens - _STEP_TOKENS, max(update.longest_tokens, _STEP_TOKENS) - 1, -_STEP_TOKENS)
    found = update
    for tokens in fewer:
        found = replace(update, micro_batch_tokens=tokens)
        if missing(found) <= 0:
            break
    return found


def lora_parameters(update: UpdateShape) -> int:
    """Return the parameters of adapters on all linear layers of the decoder."""
    h, a, i = update.hidden, update.attention, update.intermediate
    return _LORA_RANK * update.layers * (4 * (h + a) + 3 * (h + i))


def with_lora(update: UpdateShape) -> UpdateShape:
    """Return the shape with adapters in float32 instead of what is trained."""
    return replace(update, trained_bytes=4 * lora_parameters(update), has_adapters=True)
