"""What a rank of a run holds on its device, as arithmetic on the shapes of its models: no tensor is made, no device is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from transformers import PreTrainedModel

from rhymerl.algos.base import Algorithm, Need
from rhymerl.backends.base import Backend
from rhymerl.budgets.base import Budget
from rhymerl.data import PromptDataModule
from rhymerl.drafters.base import Drafter
from rhymerl.models.critic import Critic
from rhymerl.models.logprobs import default_chunk_tokens
from rhymerl.models.memory import CONTEXT_BYTES, EngineShape, ModelShape, UpdateShape, shared_bytes, update_memory
from rhymerl.models.outline import Outline, Weight, model_shape, outline, total_bytes
from rhymerl.models.sharding import BLOCK_BYTES
from rhymerl.rollout import RolloutSettings
from rhymerl.training.checks import longest_tokens
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.fsdp2 import FSDP2Strategy
from rhymerl.training.offload import HOST
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.trainer import datamodule_of

_MIXED = "-mixed"
_ITEMSIZES = {"bf16-true": 2, "64-true": 8}  # of weights, by the precisions that cast them
_FULL = 4  # bytes in which gradients of fewer are summed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that the memory of a rank, and the traffic between ranks, follow from."""

    tensors: Outline
    model: ModelShape
    layout: Layout
    precision: str  # the Trainer's
    needs: frozenset[Need]
    has_own_critic: bool
    is_eager: bool  # attention whose scores are kept
    states: int
    epochs: int
    mini_batches: int
    micro_batch_tokens: int
    step_tokens: int  # of a rollout step, where all answers are as long as they may be
    chunk_tokens: int
    activation_checkpointing: bool
    offloads_optimizer: bool = False
    finds_proximal: bool = False  # by a pass of its own over all samples
    engine: EngineShape | None = None  # of a rank's own, or of a worker apart from the ranks; None: not known
    is_apart: bool = False
    in_turn: bool = False  # an engine that gives its memory back for an update

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute in fewer bits than weights have."""
        return self.precision.endswith(_MIXED)

    @property
    def cast_tensors(self) -> Outline:
        """The tensors as the Trainer's precision makes them."""
        itemsize = _ITEMSIZES.get(self.precision)
        return self.tensors if itemsize is None else self.tensors.cast(itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the rank that holds the most, by what they are for."""

    weights: int
    critic: int
    reference: int
    gradients: int
    moments: int  # offloaded ones as far as they need more room than the activations that they take turns with
    activations: int
    head_chunks: int  # of logits, and gradients of head and embedding
    gathered: int  # weights and gradients that sharded ranks have whole for a moment
    weight_buffers: int  # a block on its way to workers, and the next one; or a tensor for a copy in the rank
    engine_weights: int
    keys_and_values: int
    engine_rest: int  # graphs, activations and CUDA's context of the engine
    reserve: int
    context: int  # CUDA's, of the rank itself
    total: int  # at the worst moment: an engine that sleeps during updates takes turns with them

    @property
    def models(self) -> int:
        """All weights."""
        return self.weights + self.critic + self.reference


def rank_memory(setup: Setup) -> RankMemory:
    """Return what a rank holds; what workers apart from the ranks hold is not theirs."""
    tensors, shards = setup.cast_tensors, setup.layout.num_shards
    update = update_memory(update_shape(setup))
    engine = setup.engine if setup.engine is not None and not setup.is_apart else _NO_ENGINE
    weights, critic, reference = (
        total_bytes(each, shards) for each in (tensors.policy, tensors.critic, tensors.reference)
    )
    largest = max(shards * each.part(shards) * each.itemsize for each in tensors.policy)
    sent = 2 * min(BLOCK_BYTES, largest) if setup.is_apart else largest  # a copy in the rank gets one tensor at a time
    buffers = sent if setup.layout.is_sharded else 0
    beside = shared_bytes(update, engine, in_turn=setup.in_turn)
    return RankMemory(
        weights=weights,
        critic=critic,
        reference=reference,
        gradients=update.gradients,
        moments=update.moments,
        activations=update.activations,
        head_chunks=update.logits,
        gathered=update.gathered,
        weight_buffers=buffers,
        engine_weights=engine.weights,
        keys_and_values=engine.least - engine.weights,
        engine_rest=engine.context + engine.dynamic,
        reserve=update.reserve,
        context=CONTEXT_BYTES,
        total=CONTEXT_BYTES
        + weights
        + critic
        + reference
        + max(beside, update.lasting + buffers),  # these come between two updates
    )


_NO_ENGINE = EngineShape(weights=0, kv_of_token=0, dynamic=0, longest_tokens=0)


def update_shape(setup: Setup) -> UpdateShape:
    """Return the sizes of what a rank's update holds."""
    tensors, model, layout = setup.cast_tensors, setup.model, setup.layout
    itemsize = max(each.itemsize for each in tensors.policy if not each.is_full)
    computed = min(2, itemsize) if setup.is_mixed else itemsize
    return UpdateShape(
        layers=model.layers,
        hidden=model.hidden,
        attention=model.heads * model.head_size,
        intermediate=model.intermediate,
        vocabulary=model.vocabulary,
        weight_bytes=total_bytes(tensors.updated, layout.num_shards),
        trained_bytes=total_bytes(tensors.trained, layout.num_shards),
        # Sharded weights are gathered in what layers compute: there is no cast.
        weight_itemsize=computed if layout.is_sharded else itemsize,
        itemsize=computed,
        has_adapters=any(each.is_full for each in tensors.policy),
        backbones=2 if setup.has_own_critic else 1,
        score_bytes=model.heads * model.longest_tokens * (4 + itemsize) if setup.is_eager else 0,
        micro_batch_tokens=min(setup.micro_batch_tokens, setup.step_tokens),
        longest_tokens=model.longest_tokens,
        chunk_tokens=setup.chunk_tokens,
        activation_checkpointing=setup.activation_checkpointing,
        states=setup.states,
        offloads_optimizer=setup.offloads_optimizer,
        gathered_bytes=_gathered(setup, tensors) if layout.is_sharded else 0,
    )


# -- sharded weights ---------------------------------------------------------------------------------------------------


def gathered_itemsize(setup: Setup, weight: Weight) -> int:
    """Return the bytes of an element while its tensor is whole."""
    return min(2, weight.itemsize) if setup.is_mixed else weight.itemsize


def summed_itemsize(setup: Setup, weight: Weight) -> int:
    """Return the bytes of an element of its gradient while ranks add it up."""
    return max(_FULL, gathered_itemsize(setup, weight))


def _gathered(setup: Setup, tensors: Outline) -> int:
    """Return the bytes of groups that are whole at the worst moment of a backward.

    These are a group with its gradient, which is laid out once more for the sum, and the next one while it comes, twice: in one piece and as
    tensors. What belongs to no layer stays from beginning to end.
    """
    lasting, passing, following = 0, 0, 0
    for weights in (tensors.policy, tensors.critic):
        *groups, rest = list(_groups(setup, weights)) or [(0, 0, 0)]
        lasting += sum(rest)
        passing = max([passing, *(whole + gradient + summed for whole, gradient, summed in groups)])
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
            sum(shards * each.part(shards) * gathered_itemsize(setup, each) for each in found),
            sum(each.count * gathered_itemsize(setup, each) for each in trained),
            sum(shards * each.part(shards) * summed_itemsize(setup, each) for each in trained),
        )


# -- of a module -------------------------------------------------------------------------------------------------------


class Trained(Protocol):
    """The parts of a RhymeModule that decide what its ranks hold."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    algo: Algorithm
    rollout: RolloutSettings
    update: UpdateSettings
    evaluation: EvaluationSettings
    drafter: Drafter
    budget: Budget
    backend: Backend


def shape_of(module: Trained, trainer: Any) -> UpdateShape:
    """Return the sizes of what the update of a Trainer's rank holds, for an engine that shares its device."""
    return update_shape(setup_of(module, trainer, datamodule_of(trainer)))


def setup_of(module: Trained, trainer: Any, datamodule: PromptDataModule) -> Setup:
    """Return what the memory of the ranks of a Trainer follows from, once the data has been prepared."""
    longest = longest_tokens(datamodule, rollout=module.rollout, evaluation=module.evaluation)
    loader = datamodule.train_loader
    of_step = loader.prompts_per_step * module.rollout.group_size * longest if loader is not None else longest
    head = module.model.get_output_embeddings()
    assert head is not None, "prove_update has found one"
    return make_setup(
        module.model,
        module.critic,
        reference=module.reference,
        layout=_layout(trainer),
        precision=str(trainer.precision),
        algo=module.algo,
        update=module.update,
        longest=longest,
        step_tokens=of_step,
        chunk_tokens=module.update.chunk_tokens or default_chunk_tokens(head),
        offloads_optimizer=module.update.offload_optimizer and trainer.strategy.root_device.type != HOST.type,
        backend=module.backend,
        drafter=module.drafter,
        budget=module.budget,
    )


def _layout(trainer: Any) -> Layout:
    strategy = trainer.strategy
    if isinstance(strategy, FSDP2Strategy):
        return Layout(
            num_ranks=trainer.world_size,
            num_nodes=trainer.num_nodes,
            num_replicas=strategy.num_replicas,
            is_sharded=True,
        )
    return Layout(num_ranks=trainer.world_size, num_nodes=trainer.num_nodes, num_replicas=trainer.world_size)


def make_setup(
    model: PreTrainedModel,
    critic: Critic | None,
    *,
    reference: PreTrainedModel | None,
    layout: Layout,
    precision: str,
    algo: Algorithm,
    update: UpdateSettings,
    longest: int,
    step_tokens: int,
    chunk_tokens: int,
    offloads_optimizer: bool,
    backend: Backend,
    drafter: Drafter,
    budget: Budget | None,
) -> Setup:
    """Return what memory follows from; the models may be on the meta device, the reference may be the model itself."""
    itemsize = _ITEMSIZES.get(precision, model.dtype.itemsize)
    shape = model_shape(
        model, longest, itemsize=itemsize, compute_itemsize=min(2, itemsize) if precision.endswith(_MIXED) else itemsize
    )
    return Setup(
        tensors=outline(model, reference=reference, critic=critic),
        model=shape,
        layout=layout,
        precision=precision,
        needs=algo.needs,
        has_own_critic=critic is not None and critic.body is not None,
        is_eager=model.config.get_text_config()._attn_implementation == "eager",
        states=update.states,
        epochs=update.epochs,
        mini_batches=update.mini_batches,
        micro_batch_tokens=update.micro_batch_tokens,
        step_tokens=step_tokens,
        chunk_tokens=chunk_tokens,
        activation_checkpointing=update.activation_checkpointing,
        offloads_optimizer=offloads_optimizer,
        finds_proximal=_finds_proximal(algo, update, backend),
        engine=backend.memory(shape, drafter, budget),
        is_apart=backend.workers_are_remote,
        in_turn=backend.release_memory,
    )


def _finds_proximal(algo: Algorithm, update: UpdateSettings, backend: Backend) -> bool:
    learns = update.optimizer_steps == 1 and not algo.prepares_by_proximal
    return "proximal" in algo.needs and not backend.draws_exactly and not learns
