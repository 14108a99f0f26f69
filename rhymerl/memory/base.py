"""The inputs of a rank's memory estimate: its models' tensors, its update's settings, and an engine beside it."""

from __future__ import annotations

from dataclasses import dataclass

from rhymerl.memory.outline import ModelShape, Outline, Weight, total_bytes

GIB = 2**30
CONTEXT_BYTES = GIB  # of a process on a GPU, before it has any tensor: CUDA's context and the libraries
_SUMMED = 4  # bytes in which gradients of fewer are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks of a run."""

    num_ranks: int = 1
    num_nodes: int = 1
    num_replicas: int = 1  # groups of ranks that hold all weights each; without sharding each rank is one
    is_sharded: bool = False

    @property
    def num_shards(self) -> int:
        """Among how many ranks the weights are divided."""
        return self.num_ranks // self.num_replicas if self.is_sharded else 1

    def divides(self, weight: Weight) -> bool:
        """Return whether each rank holds a part of a weight only."""
        return self.is_sharded and not weight.is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine takes of each of its GPUs, in bytes."""

    weights: int = 0  # 0 for one that computes with the trainer's own
    kv_of_token: int = 0
    row_states: int = 0  # of layers without keys, for all requests and prompts
    dynamic: int = 0  # graphs and activations
    longest_tokens: int = 0  # whose keys and values there is room for at least
    context: int = 0  # CUDA's, of an engine in a process of its own, before it loads anything

    @property
    def parts(self) -> dict[str, int]:
        """Return its bytes by purpose, with room for just the longest sequence."""
        return {
            "engine_weights": self.weights,
            "keys_and_values": self.longest_tokens * self.kv_of_token + self.row_states,
            "engine_rest": self.context + self.dynamic,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that the memory of a rank, and the traffic between ranks, follow from."""

    tensors: Outline  # as the Trainer's precision makes them
    model: ModelShape
    layout: Layout
    is_mixed: bool  # layers compute in two bytes, whatever weights have
    is_eager: bool  # attention whose scores are kept
    states: int  # tensors of the size of what is trained that the optimizer keeps; AdamW's are two
    epochs: int
    mini_batches: int
    micro_batch_tokens: int
    step_tokens: int  # of a rollout step, where all answers are as long as they may be
    chunk_tokens: int  # of logits
    activation_checkpointing: bool
    offloads_optimizer: bool = False  # keeps its tensors in the host's memory except while it steps
    policy_forwards: int = 0  # passes of the policy over all samples in front of the first mini-batch
    engine: EngineShape | None = None  # of a rank's own, or of a worker apart from the ranks; None: not known
    is_apart: bool = False
    in_turn: bool = False  # an engine that gives its memory back for an update

    @property
    def tokens(self) -> int:
        """Return the most tokens of a backward: one sample always fits, even into a smaller micro-batch."""
        return max(min(self.micro_batch_tokens, self.step_tokens), self.model.longest_tokens)

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of the tensors of which a rank has gradients."""
        return total_bytes(self.tensors.trained, self.layout.num_shards)

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters alone are trained, in float32 or better."""
        return any(each.is_full for each in self.tensors.policy)

    @property
    def has_own_critic(self) -> bool:
        """Return whether there is a critic with a backbone."""
        return any(not each.is_whole for each in self.tensors.critic)

    @property
    def stream_itemsize(self) -> int:
        """Return the bytes per element of layers' weights; sharded ones are gathered in the compute dtype."""
        return self.model.compute_itemsize if self.layout.is_sharded else self.model.itemsize

    @property
    def is_cast(self) -> bool:
        """Return whether autocast computes in fewer bits than the weights have."""
        return self.model.compute_itemsize < self.stream_itemsize

    def gathered_itemsize(self, weight: Weight) -> int:
        """Return the bytes of an element while its sharded tensor is whole."""
        return min(2, weight.itemsize) if self.is_mixed else weight.itemsize

    def summed_itemsize(self, weight: Weight) -> int:
        """Return the bytes of an element of its gradient while ranks add it up."""
        return max(_SUMMED, self.gathered_itemsize(weight))
