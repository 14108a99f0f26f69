"""What an update needs of a device's memory beside the weights: arithmetic on a model's sizes, no device is asked."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 2**30
_RESERVE_BYTES = 2 * GIB  # weights on their way to an engine, workspaces of kernels, batches
_RESERVE_SHARE = 0.1  # of the activations: fragments of the allocator, and what the estimate misses


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

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def lasting(self) -> int:
        """What stays while an engine answers: gradients and activations are freed at a step's end."""
        return self.moments + self.reserve

    def __str__(self) -> str:
        parts = ", ".join(f"{each.name} {getattr(self, each.name) / GIB:.1f}" for each in fields(self))
        return f"{self.total / GIB:.1f} ({parts})"


def update_memory(shape: UpdateShape) -> UpdateMemory:
    """Return what a step takes at its peak, which is the backward of the largest micro-batch.

    Gradients and AdamW's two moments have the dtype of what is trained, and a fused step has no temporaries. A reference model is no part
    of it: it is there before an engine is, and its passes keep nothing for a backward. Neither are the sums over ranks, which
    come when activations have gone.
    """
    activations = _activations(shape)
    return UpdateMemory(
        gradients=shape.trained_bytes,
        moments=2 * shape.trained_bytes,
        activations=activations,
        logits=_logits(shape),
        reserve=_RESERVE_BYTES + int(_RESERVE_SHARE * activations),
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
    ends = 0 if shape.has_adapters else 2 * shape.vocabulary * shape.hidden * shape.weight_itemsize
    return 4 * chunk + ends
