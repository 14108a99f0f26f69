"""The cost of a pass in the engine that a config names, as a file for `budget.costs` or `backend.costs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.bench import costs, sglang
from rhymerl.bench.base import environment
from rhymerl.bench.policy import PolicyBench
from rhymerl.config import instantiate, recorded
from rhymerl.errors import ConfigError, at_least, check_ranges, require_at_least
from rhymerl.progress import SILENT, ProgressBar


@dataclass(kw_only=True)
class MeasureSettings:
    """Settings for timing passes: `nodes` draft nodes a request, `passes` passes, `rounds` times; the least counts.

    Null leaves it to the engine: the embedded one takes 0, 1, 2, 4, 8, 16 and 32 nodes and 12 passes; SGLang 0, 1, 3, 7
    and 15 nodes, each in an engine of its own, and 64 passes.
    """

    nodes: Sequence[int] | None = None
    passes: int | None = at_least(1, None)
    rounds: int = at_least(1, 3)

    def __post_init__(self) -> None:
        check_ranges(self)
        require_at_least({"nodes": (min(self.nodes, default=-1) if self.nodes is not None else 0, 0)})

    @property
    def given(self) -> dict[str, Any]:
        """Return the settings that are not null."""
        return {name: value for name, value in vars(self).items() if value is not None}


class CostsBench(PolicyBench):
    """Passes of `backend` over the numbers of running requests up to those in `concurrency`."""

    def run(self, progress: ProgressBar = SILENT) -> dict[str, Any]:
        """Return the content of the file; `costs` is what is read of it."""
        backend: RolloutBackend = instantiate(self.config.backend, key="backend")
        settings: MeasureSettings = instantiate(self.config.measure, key="measure")
        if isinstance(backend, SGLangBackend):
            result = self._of_sglang(backend, settings)
        elif isinstance(backend, EmbeddedBackend):
            result = self._of_embedded(settings, progress)
        else:
            raise ConfigError(f"backend={type(backend).__name__}: expected embedded or sglang")
        return {**result, "environment": environment(), "config": recorded(self.config)}

    def _of_embedded(self, settings: MeasureSettings, progress: ProgressBar) -> Mapping[str, Any]:
        most_running = max(self.config.concurrency)
        table = costs.measure_costs(
            self.policy.model, self.requests("costs"), most_running=most_running, progress=progress, **settings.given
        )
        costs.report(table)
        return {"engine": "embedded", "costs": table.points()}

    def _of_sglang(self, backend: SGLangBackend, settings: MeasureSettings) -> Mapping[str, Any]:
        if backend.url is not None:
            raise ConfigError(f"backend.url={backend.url!r}: expected null; engines are started to be measured")
        fewer = [each for each in self.config.concurrency if each < backend.max_running]
        bench = sglang.SGLangCosts(
            lambda nodes: instantiate({**self.config.backend, "nodes": nodes}, key="backend"),
            self.policy,
            self.requests("costs"),
            rows=[*fewer, backend.max_running],
            **settings.given,
        )
        result = sglang.result_of(bench.run(), backend.expected_accept_rate)
        sglang.report(result, backend.expected_accept_rate)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return {**result, "sglang": version("sglang"), "gpu": gpu}
