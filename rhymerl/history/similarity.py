"""The similarity of a run's answers to the epoch before, on which drafters and schedulers depend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.history.traces import TraceRecord
from rhymerl.types import FloatArray, IndexArray

_PREFIX_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """Share of response tokens that repeat the epoch before, by epoch and over all epochs that have one before."""

    overall: float  # NaN when there is nothing to compare
    by_epoch: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStability:
    """The stability of prompts' ranks by length from one epoch to the next; the means are over epochs."""

    same_group: float  # share of prompts that stay in their group; 1 / num_groups is chance
    spearman: float  # NaN in an epoch in which all prompts are alike, which the mean leaves out
    same_group_by_epoch: Mapping[int, float]
    spearman_by_epoch: Mapping[int, float]


def similarity(records: Iterable[TraceRecord]) -> Similarity:
    """Return the similarity of RhymeRL (arXiv 2508.18588): matched tokens / all tokens.

    Each answer is walked from its first token. The last 3 tokens of the walk may occur in answers to the same prompt in
    the epoch before. Then the longest run that follows such an occurrence and goes on as the answer does is matched,
    and the walk goes on behind it. Otherwise, or if that run is empty, the next token is not matched, and the walk goes
    on behind that. So the first 3 tokens of an answer never match. Answers whose prompt has none in the epoch before
    are left out.
    """
    listed = list(records)
    epochs = np.array([record.epoch for record in listed], np.int64)
    lengths = np.array([len(record.response_tokens) for record in listed], np.int64)
    group, before = _groups(listed)
    num_matched = _num_matched(listed, lengths, group, before)
    compared = before >= 0
    chosen = {int(epoch): compared & (epochs == epoch) for epoch in np.unique(epochs[compared])}
    return Similarity(
        overall=_share(num_matched[compared], lengths[compared]),
        by_epoch={epoch: _share(num_matched[these], lengths[these]) for epoch, these in chosen.items()},
    )


def length_stability(records: Iterable[TraceRecord], *, num_groups: int = 8) -> LengthStability:
    """Rank the prompts that both of two adjacent epochs have by the median length of their answers, in each.

    Equal medians share their mean rank r (from 0); of n prompts, a prompt is in group floor(r · num_groups / n).
    The correlation is Spearman's: Pearson's of the ranks.
    """
    medians = _medians(records)
    same, spearman = {}, {}
    for epoch, now in sorted(medians.items()):
        before = medians.get(epoch - 1, {})
        both = [prompt for prompt in now if prompt in before]
        if both:
            ranks = np.stack([_ranks([medians[each][prompt] for prompt in both]) for each in (epoch - 1, epoch)])
            groups = ranks * num_groups // len(both)
            same[epoch] = float((groups[0] == groups[1]).mean())
            spearman[epoch] = _correlation(ranks)
    return LengthStability(
        same_group=_mean(same), spearman=_mean(spearman), same_group_by_epoch=same, spearman_by_epoch=spearman
    )


def _groups(records: Sequence[TraceRecord]) -> tuple[IndexArray, IndexArray]:
    """Return each record's (epoch, prompt) number and the one of the epoch before, -1 if there is none."""
    names = [(record.epoch, record.prompt_id) for record in records]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    before = [numbers.get((epoch - 1, prompt_id), -1) for epoch, prompt_id in names]
    return np.array([numbers[name] for name in names], np.int64), np.array(before, np.int64)


def _num_matched(
    records: Sequence[TraceRecord], lengths: IndexArray, group: IndexArray, before: IndexArray
) -> IndexArray:
    """Return [records] matched tokens, which the epoch before has in a row with the 3 tokens before them."""
    if not lengths.sum():
        return np.zeros(len(records), np.int64)
    answer = np.repeat(np.arange(len(records)), lengths)[_PREFIX_TOKENS:]
    grams = _grams(np.concatenate([record.response_tokens for record in records]))
    whole = answer == np.repeat(np.arange(len(records)), lengths)[: len(answer)]  # not across two answers
    answer, grams = answer[whole], grams[whole]
    span = len(whole) + 1
    matched = np.isin(before[answer] * span + grams, group[answer] * span + grams)
    return np.bincount(answer[matched], minlength=len(records))


def _grams(tokens: IndexArray) -> IndexArray:
    """Return [N - 3] a number below N for each 4 tokens in a row, the same for the same tokens."""
    ids = np.unique(tokens, return_inverse=True)[1]
    pairs = np.unique(ids[:-1] * len(ids) + ids[1:], return_inverse=True)[1]
    return np.unique(pairs[:-2] * len(ids) + pairs[2:], return_inverse=True)[1]


def _medians(records: Iterable[TraceRecord]) -> dict[int, dict[str, float]]:
    """Return median lengths: epoch -> prompt id -> median length."""
    lengths: dict[int, dict[str, list[int]]] = {}
    for record in records:
        lengths.setdefault(record.epoch, {}).setdefault(record.prompt_id, []).append(len(record.response_tokens))
    return {
        epoch: {prompt: float(np.median(each)) for prompt, each in of_epoch.items()}
        for epoch, of_epoch in lengths.items()
    }


def _ranks(values: Sequence[float]) -> FloatArray:
    """Return ranks [N] from 0; equal values share their mean rank."""
    _, locations, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - counts + (counts - 1) / 2)[locations]
    return ranks


def _correlation(ranks: FloatArray) -> float:
    deviations = ranks - ranks.mean(axis=1, keepdims=True)
    norm = float(np.sqrt(np.prod((deviations**2).sum(axis=1))))
    return float(np.prod(deviations, axis=0).sum()) / norm if norm else math.nan


def _share(part: IndexArray, whole: IndexArray) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() else math.nan


def _mean(by_epoch: Mapping[int, float]) -> float:
    known = [value for value in by_epoch.values() if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
