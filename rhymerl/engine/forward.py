"""The engine's forward pass: directly over the model's modules if proved equal, else through transformers."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine import inputs
from rhymerl.engine.attention import AttentionPlan, Bucket, ComparedPlan, TilePlan, packed
from rhymerl.engine.direct import DirectForward, can_be_direct
from rhymerl.engine.graphs import Graphs
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layer_steps import ComparedSteps, CompiledSteps, TorchSteps, TritonSteps
from rhymerl.engine.layout import BucketLayout, PassLayout, lay_out_pass
from rhymerl.engine.recurrent import BY_ROWS
from rhymerl.engine.routes import RouteStore
from rhymerl.engine.rows import Rows
from rhymerl.engine.tiles import TileLayout, tile
from rhymerl.models.attention import narrowed
from rhymerl.models.cudnn import without_cudnn_attention
from rhymerl.models.logits import num_tokens
from rhymerl.models.recurrent import plug_in
from rhymerl.types import Autocast

# Largest difference of log-probs between the direct forward and transformers' own, as a share of the largest one.
_SHARE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-8}
# Largest difference of what a kernel finds, as a share of the largest number: what is in between is rounded elsewhere.
_SHARE_OF_KERNELS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_log = logging.getLogger("rhymerl")
# Waking other threads for each of a model's products costs more than they bring when all of them take about a
# millisecond. By work and not by time, so that a run repeats bit for bit.
_FEW_OPERATIONS = 5e7


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """One thread for a pass of few floating-point operations; torch's own number is restored afterwards."""
    usual = torch.get_num_threads()
    if operations > _FEW_OPERATIONS or usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class Forward:
    """Runs the passes of one model over one KV store; `autocast` is entered around each.

    With `stays_ready` the model is left in its state for passes until `forget` is called: where nobody else runs it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        *,
        autocast: Autocast,
        stays_ready: bool = False,
    ) -> None:
        plug_in(model, "rhymerl_states", BY_ROWS)
        self._stays_ready = stays_ready
        self._entered: ExitStack | None = None  # the state for passes, while the model is in it
        self.model = model
        self.store = store
        self.routes = RouteStore(model, store.num_slots)
        self.autocast = autocast
        self._operations = 2.0 * model.num_parameters(exclude_embeddings=True)  # of one token
        self._inputs = inputs.Inputs(model.device)
        self._direct: DirectForward | None = None
        self._is_stale = False  # casts of weights are of others than the model's
        self._is_forgotten = True  # the direct forward is to be looked up again
        self._graphs = Graphs(self._inputs)
        self._addresses: list[int] = []  # of what graphs read
        self._proved: list[object] = []  # of what the comparison below was made
        self._steps: type[TorchSteps] | None = None  # which are proved
        self.kind: type[TorchSteps] | None = None  # of passes since the last `ready`; None = by transformers
        self._tile_tokens: Callable[[int], int] | None = None  # where attention by tiles is proved

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Context in which passes may run, and which may be entered again within.

        Entering and leaving walks all modules.
        """
        with ExitStack() as stack:
            if self._entered is None:
                stack.enter_context(packed(self.model))
                self._prepare()
                self._entered = stack.pop_all()
                if not self._stays_ready:
                    stack.callback(self._leave)
            elif self._is_forgotten:
                self._prepare()
            yield

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None

    def _prepare(self) -> None:
        self._is_forgotten = False
        if self.model.device != self._inputs.device:
            self._inputs = inputs.Inputs(self.model.device)
            self._graphs = Graphs(self._inputs)
        with self.autocast():
            self._direct = self._direct_forward()
        self.kind = None if self._direct is None else self._steps
        if self._has_graphs:
            self._look_where_weights_are()

    def _look_where_weights_are(self) -> None:
        """Drop the graphs where what they read is elsewhere."""
        assert self._direct is not None
        addresses = [*self._addresses_of_weights(), *(each.data_ptr() for each in self._direct.casts())]
        if addresses != self._addresses:
            self._graphs.forget()
            self._addresses = addresses

    def _addresses_of_weights(self) -> list[int]:
        return [each.data_ptr() for each in (*self.model.parameters(), *self.model.buffers())]

    def forget(self) -> None:
        """Drop autocast's copies of weights; called before weights change, and when no more work is left.

        With CUDA graphs, which read the copies, they stay and are renewed in place.
        """
        self._is_stale = self._has_graphs
        if not self._has_graphs:
            self._direct = None
        self._is_forgotten = True
        if self._stays_ready:
            self._leave()

    @property
    def is_on_host(self) -> bool:
        """Return whether logits are where compiled CPU code reads them."""
        return inputs.on_host(self._inputs.device)

    @property
    def tile_tokens(self) -> Callable[[int], int] | None:
        """Return how tokens are laid out in tiles (see `lay_out`), or None; to be called within `ready`."""
        return self._tile_tokens

    @property
    def _has_graphs(self) -> bool:
        return self._tile_tokens is not None and self._direct is not None

    def logits(self, layout: PassLayout, also: Sequence[npt.NDArray[Any]] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return logits [M, V] at every root and draft node, and the arrays `also` on the model's device.

        The arrays travel with the pass's own inputs. On a CPU logits are float32 or better.
        """
        with threads_for(self._operations * layout.num_tokens):
            logits, there = self._run(self._direct, self.store, layout, also, graphs=self._graphs)
        if not self.is_on_host:
            return logits, there
        return (logits if logits.dtype == torch.float64 else logits.float()).contiguous(), there

    def _run(
        self,
        direct: DirectForward | None,
        store: KVStore,
        layout: PassLayout,
        also: Sequence[npt.NDArray[Any]] = (),
        *,
        graphs: Graphs | None = None,  # those of the store
        compared: ComparedPlan | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        if layout.tiles is not None and direct is not None:
            assert graphs is not None
            with self.autocast():
                return graphs.logits(direct, store, layout, also)
        buckets = [_arrays(each, layout.num_tokens) for each in layout.buckets]
        own = (layout.slots, layout.token_ids, layout.positions, layout.logit_indices)
        of_tiles = layout.tiles.arrays if layout.tiles is not None else []
        of_buckets = [each for arrays in buckets for each in arrays.values()]
        there = iter(self._inputs.put([*own, *of_tiles, *of_buckets, *also]))
        store.write_slots, token_ids, positions, indices = islice(there, len(own))
        on_device = islice(there, len(of_tiles))
        tiles = TilePlan.of(layout.tiles, on_device, positions) if layout.tiles is not None else None
        made = [Bucket(**{name: next(there) for name in arrays}) for arrays in buckets]
        of_rows = AttentionPlan(made, layout.paged, tiles, store, positions)
        plan = compared.beside(of_rows) if compared else of_rows
        with self.autocast(), without_cudnn_attention():
            if direct is not None:
                at = None if len(indices) == len(token_ids) else indices
                return direct(token_ids, positions, at, plan), [*there]
            store.states.begin(layout)
            with self.routes.noted(store.write_slots) if store is self.store else nullcontext():
                logits: Tensor = self.model(
                    input_ids=token_ids[None],
                    position_ids=positions[None],
                    past_key_values=store,
                    use_cache=True,
                    logits_to_keep=indices,
                    rhymerl_plan=plan,
                    rhymerl_states=store.states,
                ).logits[0, :, : num_tokens(self.model)]
        return logits, [*there]

    # -- the direct forward ----------------------------------------------------------------------------------------

    def _direct_forward(self) -> DirectForward | None:
        """Return the direct forward over the model's modules as they are now, and prove what passes use.

        None where there is none, or where it does not compute the same.
        """
        if not self.store.is_allocated:
            return None
        modules, dtype = list(self.model.modules()), self._product_dtype()
        kind: type[TorchSteps] | None = None
        if can_be_direct(self.model, modules):
            kind = CompiledSteps if self.is_on_host and dtype == torch.float32 else TorchSteps
        proved: list[object] = [kind, dtype, self._inputs.device, *modules]
        if self._proved != proved:
            self._direct = None
            self._prove(kind, has_kernels=takes_kernels(self._inputs.device, dtype))
            self._proved = proved
        if self._steps is None:
            return None
        if self._is_stale and not self._can_refresh():
            self._direct = None
        if self._direct is None:
            self._is_stale = False
            return DirectForward(self.model, self.store, self._steps())
        if self._is_stale:
            self._direct.refresh()
            self._is_stale = False
        return self._direct

    def _can_refresh(self) -> bool:
        """Return whether weights are cast, and those that are not, of norms, are where they were."""
        own = self._addresses_of_weights()
        return self._is_cast() and own == self._addresses[: len(own)]

    def _is_cast(self) -> bool:
        return torch.is_autocast_enabled(self._inputs.device.type)

    def _product_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype(self._inputs.device.type) if self._is_cast() else self.model.dtype

    def _prove(self, kind: type[TorchSteps] | None, *, has_kernels: bool) -> None:
        """Choose how steps between products and attention are computed: by what is proved, the fastest first."""
        self._steps, self._tile_tokens = kind if kind is not None and self._compare(kind) else None, None
        if not has_kernels:
            return
        if self._steps is not None and self._is_right("kernels between products", self._difference_of_steps):
            self._steps = TritonSteps
        if self._is_right("kernels for attention", lambda: self._difference_of_tiles(self._tokens_of_tiles())):
            self._tile_tokens = self._tokens_of_tiles()

    def _compare(self, kind: type[TorchSteps]) -> bool:
        """Return whether two prompts with draft trees get equal log-probs directly and by transformers; warn if not."""
        with narrowed(self.model):
            by_transformers, directly = (self._logprobs_of_example(each) for each in (None, kind))
        difference = (by_transformers - directly).abs().max().item()
        most = _SHARE[self._product_dtype()] * by_transformers.abs().max().item()
        if not difference <= most:
            name = type(self.model).__name__
            _log.warning(
                f"{name}: log-probs of the direct forward differ from transformers' by {difference:.2g} nats (at most {most:.2g}); "
                "passes go through transformers, which takes longer"
            )
        return difference <= most

    def _logprobs_of_example(self, kind: type[TorchSteps] | None) -> Tensor:
        """Return the log-probs [M, vocabulary] of a pass over a store of its own."""
        example = _Example((7, 40), self.model.config.vocab_size, self.store)  # of few queries, and of many
        direct = DirectForward(self.model, example.store, kind()) if kind is not None else None
        logits, _ = self._run(direct, example.store, example.layout)
        return logits.double().log_softmax(-1)

    def _is_right(self, kernels: str, difference_of: Callable[[], float]) -> bool:
        """Return whether kernels run, and differ little enough from torch by the same numbers; warn if not.

        They are compared step by step, because what layers make of a bfloat16's rounding depends on the model: after
        all layers two right kernels can be a nat apart.
        """
        name, most = type(self.model).__name__, _SHARE_OF_KERNELS[self._product_dtype()]
        try:
            difference = difference_of()
        except Exception as error:  # noqa: BLE001 a GPU that they are too large for, or a compiler that is not there
            why = f"do not run ({error})"
        else:
            if difference <= most:
                return True
            why = f"differ from torch by {difference:.2g} of the largest number (at most {most:.2g})"
        _log.warning(f"{name}: the GPU's {kernels} {why}; torch's are used, which take longer")
        return False

    def _difference_of_steps(self) -> float:
        """Return the largest one of a step between products, as a share of the largest number."""
        example, steps = _Example((7, 40), self.model.config.vocab_size, self.store), ComparedSteps()
        self._run(DirectForward(self.model, example.store, steps), example.store, example.layout)
        return steps.difference

    def _tokens_of_tiles(self) -> Callable[[int], int]:
        """Return the tokens of a tile by the widest row of a pass; layers may differ in their heads of keys."""
        heads, dtype = self.model.config.get_text_config().num_attention_heads, self._product_dtype()
        groups = max(heads // each.keys.shape[1] for each in self.store.stores if each.is_initialized)

        def tokens(widest: int) -> int:
            from rhymerl.engine.triton_attention import tokens_of_a_tile

            return tokens_of_a_tile(groups, dtype, widest=widest)

        return tokens

    def _difference_of_tiles(self, tile_tokens: Callable[[int], int]) -> float:
        """Return the largest one of attention in a layer, as a share of the largest number; windows are narrow."""
        found, vocabulary = 0.0, self.model.config.get_text_config().vocab_size
        for widest, splits in ((1, 1), (150, 1), (1, 2)):
            example = _Example((7, 150), vocabulary, self.store)  # of one block of keys, and several
            tiles, positions = example.tiles(tile_tokens(widest)), example.layout.positions
            plan = ComparedPlan.of(tiles, positions, self._inputs, splits=splits)
            with narrowed(self.model):
                direct = DirectForward(self.model, example.store, TorchSteps()) if self._steps is not None else None
                self._run(direct, example.store, example.layout, compared=plan)
            found = max(found, plan.difference)
        return found


class _Example:
    """A pass of two prompts with a draft tree each, over a store of its own."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, like: KVStore) -> None:
        self.store = like.smaller(sum(lengths) + 16)
        rows, source = Rows(2, max(lengths) + 8, self.store.pool), np.random.default_rng(0)
        prompts = [source.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
        tree = Draft(token_ids=np.array([0, 0, 1, 0]) % vocabulary, parents=np.array([-1, 0, -1, 2]))
        row = np.array([rows.enter_prefix(prompt).row for prompt in prompts])
        self._pass = (rows, row, rows.length[row], np.arange(len(row)), DraftBatch.pack([tree] * len(row)))
        self.layout = lay_out_pass(*self._pass, compiled=self.store.is_readable_in_place)

    def tiles(self, most: int) -> TileLayout:
        """Return the same pass in tiles of at most so many tokens."""
        rows, row, chain, emits, drafts = self._pass
        found = tile(rows, row, chain, chain + drafts.counts, emits, drafts, most=most)
        assert found is not None
        return found


def takes_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton's kernels are for this device and type of number."""
    return device.type == "cuda" and dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def _arrays(bucket: BucketLayout, num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """Return the fields of a `Bucket`."""
    arrays = {"kv_slots": bucket.kv_slots.ravel(), "mask": bucket.mask}
    if bucket.mask.shape[:2] == (num_tokens, 1):
        return arrays
    return {**arrays, "queries": bucket.queries, "real": bucket.real, "tokens": bucket.tokens}
