"""The lengths on which tournament.py judges schedulers: synthetic, recorded, and from traces of public services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rhymerl.simulation import RecordedLengths, SyntheticLengths
from rhymerl.simulation.base import LengthSource, StepWork

TRACES = Path(__file__).parents[1] / "traces"
DRAWN = 2.25  # times as many answers as are asked for: the lengths of the figures are those of such draws
PROMPT_SHARE = (
    0.65  # of the variance of a service's lengths, as normal scores, is given to the prompt: its trace does not say
)
_SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)

# Quantiles, at _SHARES, of the tokens that requests to public services generated.
# AzureLLMInferenceTrace 2023 (github.com/Azure/AzurePublicDataset, arXiv 2311.18677): 8 819 requests and 19 366.
AZURE_CODE = (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 825, 1899)
AZURE_CONVERSATION = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000)
# conversation_trace of the FAST25 release (github.com/kvcache-ai/Mooncake, arXiv 2407.00079): 12 031 requests.
MOONCAKE = (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1118, 2000, 2000)


class ServiceLengths(LengthSource):
    """Lengths that have given quantiles; PROMPT_SHARE of the variance of their normal scores is the prompt's."""

    def __init__(self, quantiles: Sequence[float], *, prompts_per_step: int, group_size: int) -> None:
        self.quantiles = quantiles
        self.base = SyntheticLengths(
            prompts_per_step=prompts_per_step, group_size=group_size, cap=int(quantiles[-1]), steps_per_epoch=5
        )

    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        source, cdf = np.random.default_rng(seed), np.vectorize(NormalDist().cdf)
        shape = (self.base.prompts_per_step, self.base.group_size)
        prompts = source.standard_normal((self.base.steps_per_epoch, shape[0], 1))
        found = []
        for step, work in enumerate(self.base.steps(num_steps, seed)):
            own = source.standard_normal(shape)
            scores = PROMPT_SHARE**0.5 * prompts[step % len(prompts)] + (1 - PROMPT_SHARE) ** 0.5 * own
            lengths = np.interp(cdf(scores), _SHARES, self.quantiles).round().astype(np.int64).ravel()
            found.append(StepWork(requests=work.requests, lengths=lengths, is_cut=np.zeros(len(lengths), np.bool_)))
        return found


class ShuffledTrace(LengthSource):
    """A trace's lengths; the seed says which prompts share a step. Answers beyond it repeat some of their prompt's."""

    def __init__(self, trace: Path, *, prompts_per_step: int, group_size: int) -> None:
        self.epochs = RecordedLengths(trace, prompts_per_step=1_000_000).steps(1_000_000, 0)
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size

    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        source = np.random.default_rng(seed)
        names = sorted({request.prompt.id for request in self.epochs[0].requests})
        order = [names[i] for i in source.permutation(len(names))]
        parts = [order[i : i + self.prompts_per_step] for i in range(0, len(order), self.prompts_per_step)]
        return [self._step(epoch, part, source) for epoch in self.epochs for part in parts][:num_steps]

    def _step(self, epoch: StepWork, names: Sequence[str], source: np.random.Generator) -> StepWork:
        indices: dict[str, list[int]] = {name: [] for name in names}
        for index, request in enumerate(epoch.requests):
            if request.prompt.id in indices:
                indices[request.prompt.id].append(index)
        chosen, requests = [], []
        for name, recorded in indices.items():
            more = source.choice(recorded, max(self.group_size - len(recorded), 0)).tolist()
            first = epoch.requests[recorded[0]]
            chosen += [*recorded, *more]
            requests += [
                replace(first, id=f"{name}/{sample}", sample=sample) for sample in range(len(recorded) + len(more))
            ]
        return StepWork(requests=requests, lengths=epoch.lengths[chosen], is_cut=epoch.is_cut[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Steps of `prompts` prompts with `group_size` answers each, for `num_workers` workers with `max_running` slots."""

    source: Callable[..., LengthSource]
    num_workers: int
    prompts: int
    group_size: int
    warm_up: int  # steps that do not count: an epoch
    max_running: int | None = None

    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        source = self.source(prompts_per_step=self.prompts, group_size=round(DRAWN * self.group_size))
        return [self._asked(work) for work in source.steps(num_steps, seed)]

    def _asked(self, work: StepWork) -> StepWork:
        kept = [number for number, request in enumerate(work.requests) if request.sample < self.group_size]
        return StepWork(
            requests=[work.requests[number] for number in kept], lengths=work.lengths[kept], is_cut=work.is_cut[kept]
        )


def _trace(name: str) -> Callable[..., LengthSource]:
    return partial(ShuffledTrace, TRACES / f"{name}.jsonl.gz")


_MANY = {"num_workers": 16, "prompts": 64, "group_size": 16, "warm_up": 5}
WORKLOADS = {
    "log-normal": Workload(source=SyntheticLengths, **_MANY),
    "log-normal, 24 slots": Workload(source=SyntheticLengths, max_running=24, **_MANY),
    "running sums": Workload(source=_trace("running_sum"), num_workers=4, prompts=32, group_size=8, warm_up=2),
    "long sums": Workload(source=_trace("long_sum"), num_workers=4, prompts=16, group_size=8, warm_up=4),
    "SmolLM2's sums": Workload(
        source=_trace("smollm2_harder_sums"), num_workers=4, prompts=12, group_size=6, warm_up=2
    ),
    "Azure code": Workload(source=partial(ServiceLengths, AZURE_CODE), **_MANY),
    "Azure conversation": Workload(source=partial(ServiceLengths, AZURE_CONVERSATION), **_MANY),
    "Mooncake conversation": Workload(source=partial(ServiceLengths, MOONCAKE), **_MANY),
}
