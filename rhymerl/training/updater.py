"""The optimizer steps of a rollout step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from rhymerl.algos.base import Algorithm, Batch, Need, Totals
from rhymerl.algos.functional import masked_sum
from rhymerl.distributed.base import Alone, Ranks
from rhymerl.errors import RunError
from rhymerl.models.checkpointing import checkpointing
from rhymerl.models.critic import Critic
from rhymerl.models.cudnn import without_cudnn_attention
from rhymerl.models.logprobs import TokenBatch, hidden_states, policy_output, token_batch, token_logprobs
from rhymerl.models.lora import without_adapters
from rhymerl.models.policy import evaluating, is_random
from rhymerl.models.routing import Routing, expert_loads, routed, routers_of
from rhymerl.models.sharding import call, is_sharded, sum_replicas, whole
from rhymerl.models.shared_prefixes import sharing
from rhymerl.training.batches import passes_of, step_batch, trained_routes
from rhymerl.training.passes import balance_samples, over_samples, split_behind
from rhymerl.training.settings import UpdateSettings
from rhymerl.types import FloatArray, Sample

_ORDER, _DROPOUT = 0, 1  # what random numbers are for
# What a pass fills in, and the name of its time; in this order on every rank.
_PASSES: Mapping[Need, tuple[str, str]] = {
    "proximal": ("proximal_logprobs", "old_log_prob"),
    "reference": ("reference_logprobs", "ref"),
    "values": ("values", "values"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The values that all mini-batches of a step have in common."""

    samples: Sequence[Sample]
    batch: Batch
    optimizer: Any
    schedule: LambdaLR
    trains_policy: bool  # not while the critic warms up


@dataclass(eq=False, repr=False)
class Updater:
    """Runs the optimizer steps of one rollout step, on every rank the same ones.

    `backward` and `autocast` are the trainer's, with its precision and strategy; a backward adds to this rank's
    gradients only. `draws_exactly` is the backend's. `reference` and `critic` exist when the algorithm needs them; the
    reference may be the model itself if that has adapters. If it `shares_prefixes`, the answers to a prompt are
    computed behind one copy of it, and their shared prefixes once.
    """

    model: PreTrainedModel
    algorithm: Algorithm
    settings: UpdateSettings
    _: KW_ONLY
    temperature: float
    seed: int
    backward: Callable[[Tensor], None]
    autocast: Callable[[], AbstractContextManager[Any]]
    draws_exactly: bool = False
    shares_prefixes: bool = False
    reference: PreTrainedModel | None = None
    critic: Critic | None = None
    ranks: Ranks = field(default_factory=Alone)

    def __post_init__(self) -> None:
        self._batch: Batch | None = None  # of the latest step, until `forget`
        self._places: Mapping[int, int] = {}  # of the samples that are in it
        self._routers = routers_of(self.model)
        self._is_random = is_random(self.model)
        self._is_sharded = is_sharded(self.model)

    def run(self, samples: Sequence[Sample], step: int, *, optimizer: Any, schedule: LambdaLR) -> Mapping[str, float]:
        """Run all mini-batches of the step, in an order that follows from (seed, step); returns metrics.

        Samples without a reward that they need are left out; where none has one, nothing is trained. A collective:
        every rank gives all samples of the step in the same order. All get the same metrics but for times.
        """
        needs_none = not self.algorithm.learns_from_rewards
        counted = [i for i, each in enumerate(samples) if needs_none or each.has_reward] or range(len(samples))
        self._places = {i: place for place, i in enumerate(counted)}
        with self._attention(), without_cudnn_attention():
            return self._run([samples[i] for i in counted], step, optimizer, schedule)

    def _attention(self) -> AbstractContextManager[None]:
        if not self.shares_prefixes:
            return nullcontext()
        own = self.critic.body if self.critic is not None else None
        return sharing([model for model in (self.model, self.reference, own) if model is not None])

    def _run(self, samples: Sequence[Sample], step: int, optimizer: Any, schedule: LambdaLR) -> Mapping[str, float]:
        times: dict[str, float] = {}
        batch = self._prepared(samples, step, times)
        warms_up = self.critic is not None and step < self.critic.settings.warmup_steps
        work = _Work(
            samples=samples,
            batch=batch,
            optimizer=optimizer,
            schedule=schedule,
            trains_policy=not warms_up,
        )
        with _timed(times, "update"):
            metrics = self._train(work, step)
        found = self.algorithm.metrics(batch)
        if work.trains_policy:
            self.algorithm.adapt(batch)
        self._batch = batch
        return {**metrics, **found, **times}

    def advantages(self, indices: Sequence[int]) -> list[float | None]:
        """Return the mean advantage over the tokens of each of these samples of the latest step.

        None where none is trained, or after `forget`.
        """
        batch = self._batch
        if batch is None or batch.advantages is None:
            return [None] * len(indices)
        places = [self._places.get(index) for index in indices]
        trained = [None if i is None else batch.advantages[i][batch.mask[i]] for i in places]
        return [float(each.mean()) if each is not None and len(each) else None for each in trained]

    def forget(self) -> None:
        """Free the step's batch and gradients, once nobody needs them: an engine may need their memory."""
        self._batch = None
        for model in [self.model, *([self.critic] if self.critic is not None else [])]:
            model.zero_grad()

    # -- before the first mini-batch -----------------------------------------------------------------------------

    def _prepared(self, samples: Sequence[Sample], step: int, times: dict[str, float]) -> Batch:
        """Return the step's batch with all that the algorithm needs, and its advantages."""
        batch = step_batch(samples, step, needs_rewards=self.algorithm.learns_from_rewards)
        for need, (column, name) in _PASSES.items():
            asked = self._asked(need, samples, step)
            if asked:
                with _timed(times, name):
                    whole = batch.behaviour_logprobs.clone()  # where nothing is asked, because it is known
                    found = self._pass(need, [samples[i] for i in asked])
                    if need == "values" and "final_values" in self.algorithm.needs:
                        found, final = split_behind(found, [len(samples[i]) for i in asked])
                        batch = replace(batch, final_values=final)
                    whole[asked, : found.shape[1]] = found
                    found_in: Any = {column: whole}
                    batch = replace(batch, **found_in)
        if self._learns_proximal and (asked := self._sampled_otherwise(samples, step)):
            awaits = torch.zeros(len(samples), dtype=torch.bool).index_fill(0, torch.tensor(asked), True)
            batch = replace(batch, awaits_proximal=awaits)
        with _timed(times, "advantage"):
            return self.algorithm.prepare(batch)

    def _asked(self, need: Need, samples: Sequence[Sample], version: int) -> list[int]:
        """Return the samples that a pass has to go over."""
        needs = self.algorithm.needs
        if need != "proximal":
            return list(range(len(samples))) if need in needs else []
        is_wanted = bool(needs & {"proximal", "proximal_in_loss"}) and not self._learns_proximal
        return self._sampled_otherwise(samples, version) if is_wanted else []

    def _sampled_otherwise(self, samples: Sequence[Sample], version: int) -> list[int]:
        """Return the samples whose behaviour log-probs differ from the current policy's by more than rounding."""
        versions = [sample.completion.output.policy_versions for sample in samples]
        return [i for i, each in enumerate(versions) if not (self.draws_exactly and (each == version).all())]

    @property
    def _learns_proximal(self) -> bool:
        """Return whether the only update of a step finds the proximal log-probs in its own pass."""
        needs = self.algorithm.needs
        is_wanted = "proximal_in_loss" in needs and "proximal" not in needs
        return is_wanted and self.settings.optimizer_steps == 1 and not self._is_random

    def _pass(self, need: Need, samples: Sequence[Sample]) -> Tensor:
        """Return what a pass over all samples finds for a `need`, [B, T]."""
        work = {"proximal": self._proximal, "reference": self._of_reference, "values": self._values}[need]
        models = [model for model in (self.model, self.reference, self.critic) if model is not None]
        with ExitStack() as modes:
            for model in models:
                modes.enter_context(evaluating(model))
            return over_samples(
                samples,
                work,
                ranks=self.ranks,
                device=self.model.device,
                max_tokens=self.settings.micro_batch_tokens,
                behind=need == "values" and "final_values" in self.algorithm.needs,
                shares=self.shares_prefixes,
                in_step=self._is_sharded,
            )

    def _proximal(self, tokens: TokenBatch) -> Tensor:
        with self._routed(tokens):
            return self._logprobs(self.model, tokens)

    def _of_reference(self, tokens: TokenBatch) -> Tensor:
        assert self.reference is not None, "an algorithm that needs a reference gets one"
        with without_adapters(self.model) if self.reference is self.model else nullcontext():
            return self._logprobs(self.reference, tokens)

    def _logprobs(self, model: PreTrainedModel, tokens: TokenBatch) -> Tensor:
        chunk = self.settings.chunk_tokens
        with self.autocast():
            return token_logprobs(model, tokens, temperature=self.temperature, chunk_tokens=chunk)

    def _values(self, tokens: TokenBatch) -> Tensor:
        assert self.critic is not None, "an algorithm that needs values gets a critic"
        with self.autocast(), self._routed(tokens):
            states = partial(hidden_states, self.model, tokens)
            return tokens.scatter(
                self.critic(tokens, call(self.model, states) if self.critic.settings.shared else None)
            )

    # -- mini-batches ----------------------------------------------------------------------------------------------

    def _train(self, work: _Work, step: int) -> dict[str, float]:
        """Run all epochs of mini-batches; returns their metrics, of all ranks."""
        dropout = int(np.random.default_rng([self.seed, step, _DROPOUT]).integers(2**62))
        # not torch.manual_seed, which writes a stack trace for every kind of device that was never used: 3 ms
        torch.default_generator.manual_seed(dropout + self.ranks.rank)
        if self.model.device.type != "cpu":
            torch.get_device_module(self.model.device).manual_seed(dropout + self.ranks.rank)
        mine, found = list[dict[str, float]](), list[dict[str, float]]()
        for part in self._parts(len(work.samples), step):
            mine.append(self._mini_batch(work, part))
            work = replace(work, batch=work.batch.after_update()) if work.trains_policy else work
            if self.algorithm.may_stop:
                found += self._over_ranks(mine[-1:])
                if self.algorithm.stops(found[-1]):
                    break
        return _merged(found or self._over_ranks(mine), mean=True)

    def _parts(self, count: int, step: int) -> Iterator[list[int]]:
        """Yield the samples of each mini-batch, in every epoch others."""
        for epoch in range(self.settings.epochs):
            order = np.random.default_rng([self.seed, step, _ORDER, epoch]).permutation(count)
            for part in np.array_split(order, min(self.settings.mini_batches, count)):
                yield part.tolist()

    def _over_ranks(self, mine: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
        """Return what all ranks together found in each mini-batch; this is a collective."""
        return [_merged(each, mean=False) for each in zip(*self.ranks.gather(mine), strict=True)]

    def _mini_batch(self, work: _Work, chosen: list[int]) -> dict[str, float]:
        """Return this rank's part of the metrics."""
        totals = Totals(num_tokens=max(1, int(work.batch.mask[chosen].sum())), num_samples=len(chosen))
        dealt = balance_samples(work.samples, chosen, self.ranks.size, shares=self.shares_prefixes)
        work.optimizer.zero_grad()
        loads = None
        if self.settings.router_aux_loss_coef:
            routes = trained_routes([work.samples[i] for i in chosen], work.batch.mask[chosen].numpy())
            loads = expert_loads(routes, self._routers)
        metrics = self._backward(work, dealt, totals, loads)
        parameters = [p for each in self._trained(work).values() for p in each]
        if self._is_sharded:  # then their backward has summed them, but for replicas
            sum_replicas(parameters)
        else:
            self.ranks.sum_gradients(parameters)
        of_all = self._step(work)
        return {**metrics, **of_all} if self.ranks.rank == 0 else metrics

    def _trained(self, work: _Work) -> dict[str, list[nn.Parameter]]:
        """Return the parameters that move now, by the prefix of their metrics."""
        models: dict[str, nn.Module] = {"": self.model} if work.trains_policy else {}
        if self.critic is not None:
            models["critic/"] = self.critic
        return {name: [p for p in model.parameters() if p.requires_grad] for name, model in models.items()}

    def _backward(
        self, work: _Work, dealt: Sequence[list[int]], totals: Totals, loads: FloatArray | None
    ) -> dict[str, float]:
        """Add up gradients of the samples of this rank; returns their metrics, none where there are no samples."""
        collected: list[Mapping[str, Tensor]] = []
        most, shares = self.settings.micro_batch_tokens, self.shares_prefixes
        with self._checkpointing():
            for each in passes_of(self.ranks.rank, work.samples, dealt, most, shares=shares, in_step=self._is_sharded):
                self.ranks.check()
                samples = [work.samples[i] for i in each.samples]
                tokens = token_batch(samples, self.model.device, shares=shares)
                with self._routed(tokens, loads) as routing:
                    loss, metrics = self._loss(work, each.samples, tokens, totals, routing)
                    self.backward(0.0 * loss if each.is_idle else loss)
                if not each.is_idle:
                    collected.append(metrics)
        return _merged([{name: float(m[name]) for name in m} for m in collected], mean=False)

    def _routed(self, tokens: TokenBatch, loads: FloatArray | None = None) -> AbstractContextManager[Routing]:
        """Context in which the policy's passes over these tokens, and their backward, take the experts of sampling."""
        routers = () if tokens.routes is None else self._routers
        return routed(routers, tokens.routes, replays=self.settings.router_replay is not False, loads=loads)

    def _loss(
        self, work: _Work, part: Sequence[int], tokens: TokenBatch, totals: Totals, routing: Routing
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        mine = work.batch.select(torch.tensor(part), tokens.response.shape[1]).to(self.model.device)
        with self.autocast():
            output = policy_output(
                self.model,
                tokens,
                temperature=self.temperature,
                chunk_tokens=self.settings.chunk_tokens,
                critic=self.critic,
                reference=self.reference if "divergence" in self.algorithm.needs else None,
                trains_policy=work.trains_policy,
                trains_entropy="entropy_gradient" in self.algorithm.needs,
            )
        mine = mine.cast(output.logprobs.dtype)
        if mine.awaits_proximal is not None:
            known = torch.where(mine.awaits_proximal[:, None], output.logprobs.detach(), mine.behaviour_logprobs)
            mine = replace(mine, proximal_logprobs=known, awaits_proximal=None)
        loss, metrics = self.algorithm.loss(mine, output, totals)

        def mean(values: Tensor) -> Tensor:
            of_tokens = tokens.scatter(values[tokens.indices].to(output.logprobs.dtype))
            return masked_sum(of_tokens, mine.mask) / totals.num_tokens

        if routing.differs is not None:
            metrics = {**metrics, "sampling/routed_otherwise_frac": mean(routing.differs)}
        if routing.balance is not None:
            balance = mean(routing.balance)
            metrics = {**metrics, "router_aux_loss": balance.detach()}
            loss = loss + self.settings.router_aux_loss_coef * balance
        return loss, metrics

    def _checkpointing(self) -> AbstractContextManager[None]:
        """Context in which the layers of the models keep their inputs only.

        It is off outside, where an engine runs the same layers.
        """
        if not self.settings.activation_checkpointing:
            return nullcontext()
        own = self.critic.body if self.critic is not None else None
        return checkpointing([self.model, *([own] if own is not None else [])])

    def _step(self, work: _Work) -> dict[str, float]:
        """Move the weights by the gradient, which is the same on every rank."""
        most = self.settings.max_grad_norm or math.inf
        found = {name: nn.utils.clip_grad_norm_(each, most) for name, each in self._trained(work).items()}
        norms = {name: float(whole(norm)) for name, norm in found.items()}  # before they were clipped
        for name, norm in norms.items():
            if not math.isfinite(norm):
                raise RunError(
                    f"the gradient is not finite ({norm}): the weights are left as they were; go on from the last "
                    f"checkpoint with a smaller {'critic' if name else 'update'}.learning_rate"
                )
        rates = list(map(float, work.schedule.get_last_lr()))  # the policy's groups come first, the critic's last
        metrics = {f"{name}grad_norm": norm for name, norm in norms.items()}
        work.optimizer.step()
        work.schedule.step()
        return {**metrics, "learning_rate": rates[0], **({"critic/lr": rates[-1]} if self.critic else {})}


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[f"timing_s/{name}"] = time.perf_counter() - started


def _merged(parts: Sequence[Mapping[str, float]], *, mean: bool) -> dict[str, float]:
    """Return one metric for each name that any part has, from the parts that have it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combine(name, [part[name] for part in parts if name in part], mean=mean) for name in names}


def _combine(name: str, values: Sequence[float], *, mean: bool) -> float:
    if name.endswith("/min"):
        return min(values)
    if name.endswith("/max"):
        return max(values)
    return sum(values) / (len(values) if mean else 1)
