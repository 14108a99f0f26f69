"""What the collectives of a step send, as arithmetic on the shapes of the models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rhymerl.models.outline import Weight
from rhymerl.training.memory import Setup, gathered_itemsize, summed_itemsize, update_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends to others in a rollout step, by rings, whose answers are all as long as they may be."""

    gathers: int  # weights for passes
    gradients: int
    weights: int  # to rank 0, for workers; or to all others, for copies in the ranks

    @property
    def total(self) -> int:
        """All of them."""
        return self.gathers + self.gradients + self.weights


def traffic(setup: Setup) -> Traffic:
    """Return what a rank sends.

    A ring that gathers or scatters S bytes on R ranks sends S (R - 1) / R from each, and one that adds them up everywhere twice as much.
    Without sharding that is all there is, once an optimizer step; with it weights are gathered for each pass, twice for those with a
    backward, which leaves each rank its part of the sum, and groups of ranks add up their parts.
    """
    tensors, layout = setup.cast_tensors, setup.layout
    steps, backwards, forwards = setup.epochs * setup.mini_batches, num_backwards(setup), num_forwards(setup)
    whole = [each for each in tensors.trained if each.is_whole]
    if not layout.is_sharded:
        return Traffic(gathers=0, gradients=steps * _summed_everywhere(setup, tensors.trained), weights=0)
    divided = [each for each in tensors.trained if not each.is_whole]
    policy, critic, reference = (_gathered(setup, each) for each in (tensors.policy, tensors.critic, tensors.reference))
    of_policy = 2 * backwards + forwards * (
        setup.finds_proximal
        + ("reference" in setup.needs and not tensors.reference)
        + ("values" in setup.needs and not critic)
    )
    of_critic = 2 * backwards + forwards
    return Traffic(
        gathers=of_policy * policy + of_critic * critic + forwards * reference,
        gradients=backwards * _scattered(setup, divided) + steps * _summed_everywhere(setup, whole),
        weights=(1 if setup.is_apart else layout.num_shards - 1) * _part(setup) if layout.num_shards > 1 else 0,
    )


def _part(setup: Setup) -> int:
    return sum(each.part(setup.layout.num_shards) * each.itemsize for each in setup.cast_tensors.policy)


def num_backwards(setup: Setup) -> int:
    """Return the micro-batches of a rank in a step, at most."""
    return setup.epochs * setup.mini_batches * _passes(setup, setup.layout.num_ranks * setup.mini_batches)


def num_forwards(setup: Setup) -> int:
    """Return the passes over all of a rank's samples in front of the first mini-batch, for each model that makes some."""
    return _passes(setup, setup.layout.num_ranks)


def _passes(setup: Setup, parts: int) -> int:
    """Return the passes over one of `parts` equal parts of a step's samples, at most: as many of the longest as fit are in each, and none is divided."""
    longest = setup.model.longest_tokens
    samples = math.ceil(setup.step_tokens / (longest * parts))
    return math.ceil(samples / (update_shape(setup).tokens // longest))


def _gathered(setup: Setup, weights: Iterable[Weight]) -> int:
    shards = setup.layout.num_shards
    return sum(
        (shards - 1) * each.part(shards) * gathered_itemsize(setup, each) for each in weights if not each.is_whole
    )


def _scattered(setup: Setup, weights: Iterable[Weight]) -> int:
    """Return what a backward sends: the sum within a group of ranks, and that of each part over the groups."""
    shards, replicas = setup.layout.num_shards, setup.layout.num_replicas
    parts = sum(each.part(shards) * summed_itemsize(setup, each) for each in weights)
    return (shards - 1) * parts + 2 * (replicas - 1) * parts // replicas


def _summed_everywhere(setup: Setup, weights: Iterable[Weight]) -> int:
    ranks = setup.layout.num_ranks
    return 2 * (ranks - 1) * sum(each.nbytes for each in weights) // ranks
