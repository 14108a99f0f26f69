"""What the collectives of a step send, as arithmetic on the shapes of the models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rhymerl.memory.base import Setup
from rhymerl.memory.outline import Weight, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends to others in a rollout step, by rings, whose answers are all as long as they may be."""

    gathers: int  # weights for passes
    gradients: int
    weights: int  # to rank 0, for workers; or to all others, for copies in the ranks


def traffic(setup: Setup) -> Traffic:
    """Return what a rank sends.

    A ring that gathers or scatters S bytes on R ranks sends S (R - 1) / R from each, and one that adds them up
    everywhere twice as much. Without sharding that is all there is, once an optimizer step; with it weights are
    gathered for each pass, twice for those with a backward, which leaves each rank its part of the sum, and groups of
    ranks add up their parts.
    """
    tensors, layout = setup.tensors, setup.layout
    backwards, forwards = num_backwards(setup), num_forwards(setup)
    policy, critic, reference = (_gathered(setup, each) for each in (tensors.policy, tensors.critic, tensors.reference))
    gathers = (2 * backwards + forwards * setup.policy_forwards) * policy
    gathers += (2 * backwards + forwards) * critic + forwards * reference
    kept = total_bytes(each for each in tensors.trained if not layout.divides(each))  # of gradients, on each rank
    everywhere = 2 * (layout.num_ranks - 1) * kept // layout.num_ranks
    sums = backwards * _scattered(setup) + setup.epochs * setup.mini_batches * everywhere
    part = sum(each.part(layout.num_shards) * each.itemsize for each in tensors.policy)
    others = layout.num_shards - 1
    return Traffic(gathers=gathers, gradients=sums, weights=(min(1, others) if setup.is_apart else others) * part)


def num_backwards(setup: Setup) -> int:
    """Return the micro-batches of a rank in a step, at most."""
    return setup.epochs * setup.mini_batches * _passes(setup, setup.layout.num_ranks * setup.mini_batches)


def num_forwards(setup: Setup) -> int:
    """Return the passes over all of a rank's samples before the first mini-batch, for each model that makes some."""
    return _passes(setup, setup.layout.num_ranks)


def _passes(setup: Setup, parts: int) -> int:
    """Return the most passes over one of `parts` equal parts of a step's samples.

    Each holds as many of the longest samples as fit, and no sample is divided.
    """
    longest = setup.model.longest_tokens
    samples = math.ceil(setup.step_tokens / (longest * parts))
    return math.ceil(samples / (setup.tokens // longest))


def _gathered(setup: Setup, weights: Iterable[Weight]) -> int:
    shards = setup.layout.num_shards
    return sum(
        (shards - 1) * each.part(shards) * setup.gathered_itemsize(each) for each in weights if not each.is_whole
    )


def _scattered(setup: Setup) -> int:
    """Return what a backward sends: the reduce-scatter in a group of ranks, and each part's sum over groups."""
    shards, replicas = setup.layout.num_shards, setup.layout.num_replicas
    divided = filter(setup.layout.divides, setup.tensors.trained)
    parts = sum(each.part(shards) * setup.summed_itemsize(each) for each in divided)
    return (shards - 1) * parts + 2 * (replicas - 1) * parts // replicas
