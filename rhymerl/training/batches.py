"""The layout of a step's samples, and their split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.algos.base import Batch
from rhymerl.errors import RunError
from rhymerl.models.padding import best_starts
from rhymerl.models.shared_prefixes import of_one_prompt, side_by_side
from rhymerl.replayed import RouteArray
from rhymerl.types import Sample

_OVERHEAD_TOKENS = 512  # what an empty micro-batch costs on a CPU: its many small operations
_READS_A_TOKEN = 16  # tokens whose keys and values, copied, take the memory of all that is kept of one


def step_batch(samples: Sequence[Sample], version: int, *, needs_rewards: bool = True) -> Batch:
    """Return all samples of a step, in the host's memory, for the policy of that `version`.

    No token is trained of samples without a reward that they need.
    """
    completions = [sample.completion for sample in samples]
    replays = any(completion.output.kept is not None for completion in completions)
    width = max(map(len, samples))
    shape = (len(samples), width)
    mask, is_stale = np.zeros((2, *shape), np.bool_)
    logprobs, log_masses = np.zeros((2, *shape))
    for i, sample in enumerate(samples):
        output = sample.completion.output
        mask[i, : len(sample)] = sample.loss_mask & (sample.has_reward or not needs_rewards)
        is_stale[i, : len(sample)] = output.policy_versions != version
        logprobs[i, : len(sample)] = output.logprobs
        if replays:
            log_masses[i, : len(sample)] = output.log_masses
    number: dict[str, int] = {}
    return Batch(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64).nan_to_num(),
        groups=torch.tensor([number.setdefault(sample.prompt.id, len(number)) for sample in samples]),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(logprobs),
        is_stale=torch.from_numpy(is_stale),
        log_masses=torch.from_numpy(log_masses) if replays else None,
        limits=torch.tensor([completion.request.sampling.max_tokens for completion in completions]),
        is_truncated=torch.tensor([completion.output.is_cut for completion in completions]),
        turn_rewards=_turn_rewards(samples, width),
    )


def _turn_rewards(samples: Sequence[Sample], width: int) -> Tensor | None:
    """Return what was earned at the last token of each turn, [B, width]; None where no turns are rewarded."""
    if not any(sample.turn_weight for sample in samples):
        return None
    found = torch.zeros(len(samples), width, dtype=torch.float64)
    for i, sample in enumerate(samples):
        for turn in sample.completion.output.turns:
            found[i, turn.start - 1] += sample.turn_weight * (turn.reward or 0.0)
    return found


def trained_routes(samples: Sequence[Sample], mask: npt.NDArray[np.bool_]) -> RouteArray:
    """Return the experts of the positions in front of trained tokens, [tokens, layers, k]; `mask` is [B, T]."""
    found: list[RouteArray] = []
    for sample, line in zip(samples, mask, strict=True):
        for part in sample.segments:
            if part.routes is None:
                raise RunError(
                    "update.router_aux_loss_coef: nothing says which experts computed the tokens; expected 0"
                )
            found.append(part.routes[len(part.prompt) - 1 : -1][line[part.start :][: len(part.token_ids)]])
    return np.concatenate(found)


def total_tokens(sample: Sample) -> int:
    """Prompt and response, of all parts."""
    return sum(map(len, sample.segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Samples that are computed together: one, or some of a prompt that is computed once."""

    samples: Sequence[int]
    width: int  # tokens that are padded
    extra: int  # tokens that are not

    @property
    def tokens(self) -> int:
        return self.width + self.extra


def units(samples: Sequence[Sample], chosen: Sequence[int], *, max_tokens: int | None, shares: bool) -> list[Unit]:
    """Return the samples at `chosen` one by one, or by prompt if they share it, up to `max_tokens` (None: any).

    What such samples begin with counts once, and little for each of them, which has copies of its keys and values. The
    later parts of an episode count as if each were padded to the longest of all.
    """
    split = {i: samples[i].segments for i in chosen}
    if not shares:
        widths = {i: max(map(len, split[i])) for i in chosen}
        longest = max(widths.values(), default=0)
        return [Unit(samples=[i], width=widths[i], extra=longest * (len(split[i]) - 1)) for i in chosen]
    found: list[Unit] = []
    prompts = {i: max(len(each.prompt) for each in split[i]) for i in chosen}
    keys = {i: split[i][0].keys for i in chosen}
    longest = max(prompts.values(), default=0)
    for indices in of_one_prompt([keys[i][0] for i in chosen]):
        group = [chosen[index] for index in indices]
        width = max(prompts[i] for i in group)
        part, extra = list[int](), 0
        for index, same in side_by_side([keys[i][1] for i in group]):
            first, *later = split[group[index]]
            behind = sum(longest + len(each.token_ids) + longest // _READS_A_TOKEN for each in later)
            whole = len(first.token_ids) + behind
            more = whole - same + (width + same) // _READS_A_TOKEN
            if part and max_tokens is not None and width + extra + more > max_tokens:
                found.append(Unit(samples=part, width=width, extra=extra))
                part, extra, more = [], 0, whole + width // _READS_A_TOKEN
            part, extra = [*part, group[index]], extra + more
        found.append(Unit(samples=part, width=width, extra=extra))
    return found


def micro_batches(
    samples: Sequence[Sample], chosen: Sequence[int], max_tokens: int, *, shares: bool = False
) -> list[list[int]]:
    """Split `chosen` into lists of like length whose padded size stays within `max_tokens` (one sample always fits).

    Of all splits of the samples sorted by length it is the one with the fewest padded tokens, each micro-batch counting
    for some more. If samples share their prompts, these are what is padded.
    """
    parts = units(samples, chosen, max_tokens=max_tokens, shares=shares)
    longest_first = sorted(parts, key=lambda unit: (-unit.width, -unit.extra, unit.samples[0]))
    widths, extras = [unit.width for unit in longest_first], [unit.extra for unit in longest_first]
    return [
        [i for unit in longest_first[start:end] for i in unit.samples]
        for start, end in best_starts(widths, extras, max_tokens=max_tokens, overhead=_OVERHEAD_TOKENS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass of a rank over a micro-batch; of an idle one nothing is kept."""

    samples: Sequence[int]
    is_idle: bool = False


def passes_of(
    rank: int,
    samples: Sequence[Sample],
    dealt: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    shares: bool,
    in_step: bool = False,
) -> list[Pass]:
    """Return a rank's passes over its micro-batches, where each rank has been dealt some of the samples.

    Ranks that have to keep `in_step` make as many as the one with most of them: the others add idle ones, over the
    shortest sample.
    """
    counted = dealt if in_step else [dealt[rank]]
    parts = [micro_batches(samples, mine, max_tokens, shares=shares) for mine in counted]
    mine = parts[rank] if in_step else parts[0]
    num_idle = max(map(len, parts)) - len(mine)
    shortest = min(range(len(samples)), key=lambda i: (total_tokens(samples[i]), i)) if num_idle else 0
    return [*(Pass(samples=part) for part in mine), *[Pass(samples=[shortest], is_idle=True)] * num_idle]
