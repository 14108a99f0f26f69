"""Passes that take as long as on another device: a small model then stands for a large one, in real time."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.costs import CostCurve
from rhymerl.engine.layout import PassLayout
from rhymerl.errors import require_at_least
from rhymerl.types import Ratio

_NO_NODES = np.zeros(1)


@dataclass(slots=True, kw_only=True)
class EmulatedDevice:
    """A device whose passes cost what a curve says: seconds by tokens, and `context_s_per_token` per key of a row.

    `context_s_per_pair` is for each key of each token: an accelerator waits for keys that are read, a CPU for products
    with them. With `widths`, which rise, all requests of a pass have as many nodes, as in SGLang: the smallest of them
    that holds the largest draft.
    """

    curve: CostCurve
    context_s_per_token: float = 0.0
    context_s_per_pair: float = 0.0
    scale: float = 1.0
    widths: Sequence[int] = ()
    charged_s: float = field(default=0.0, init=False)
    overrun_s: float = field(default=0.0, init=False)  # of passes that took longer than they should

    @classmethod
    def read(cls, path: str | Path, *, scale: float, lengths: float = 1.0) -> Self:
        """Read {"costs": [[tokens, seconds], ...], "context_s_per_token": seconds} and further costs.

        A token of context stands for `lengths` of the file's. Raises ValueError that begins with `emulate=`.
        """
        try:
            curve = CostCurve.read(path)
            given = json.loads(Path(path).read_text())
            context = {name: float(given.get(name, 0.0)) for name in ("context_s_per_token", "context_s_per_pair")}
        except (TypeError, ValueError) as error:
            raise ValueError(f"emulate={str(path)!r}: {str(error).partition(': ')[2] or error}") from error
        for name, seconds in context.items():
            if seconds < 0:
                raise ValueError(f"emulate={str(path)!r}: {name}={seconds}: expected at least 0")
        scaled = {name: lengths * seconds for name, seconds in context.items()}
        return cls(curve=curve, scale=scale, **scaled)  # type: ignore[arg-type]

    def seconds(self, layout: PassLayout) -> float:
        """Return what a pass costs. The keys of a row are read once for all of its tokens."""
        of_tokens = float(self.curve.seconds(self.num_computed(layout), _NO_NODES, 0)[0])
        of_context = self.context_s_per_token * num_keys(layout) + self.context_s_per_pair * num_pairs(layout)
        return self.scale * (of_tokens + of_context)

    def num_computed(self, layout: PassLayout) -> int:
        """Return the tokens of a pass, the nodes with which drafts are padded included."""
        if not self.widths:
            return layout.num_tokens
        width = self.widths[bisect_left(self.widths, int(layout.drafts.counts.max(initial=0)))]
        return layout.num_tokens - len(layout.node_index) + width * len(layout.emits)

    def now(self) -> float:
        """Return the seconds of the clock by which passes are timed; called in the engine's thread."""
        return time.perf_counter()

    def wait(self, started: float, layout: PassLayout) -> None:
        """Wait until the pass that began at `started`, by the same clock, has taken what it costs."""
        charged = self.seconds(layout)
        left = charged - (self.now() - started)
        self.charged_s += charged
        self.overrun_s += max(-left, 0.0)
        if left > 0:
            time.sleep(left)


def num_keys(layout: PassLayout) -> int:
    """Return the keys of a pass's rows, each counted once."""
    return int(layout.positions[layout.logit_indices[layout.logit_start]].sum()) + len(layout.emits)


def num_pairs(layout: PassLayout) -> int:
    """Return the keys of a pass's tokens: each token has those up to its own."""
    return int(layout.positions.sum()) + layout.num_tokens


class EmulatedBackend(EmbeddedBackend):
    """The embedded engine with passes as long as on another device: given, or a file of costs times `emulate_scale`."""

    def __init__(self, *, emulate: str | Path | EmulatedDevice, emulate_scale: float = 1.0, **engine: Any) -> None:
        super().__init__(**engine)
        require_at_least({"emulate_scale": (emulate_scale, 0)})
        is_device = isinstance(emulate, EmulatedDevice)
        self.device = emulate if is_device else EmulatedDevice.read(emulate, scale=emulate_scale)

    def clock(self) -> float:
        return self.device.now()

    def start(self, *given: Any, **named: Any) -> None:
        super().start(*given, **named)
        logits = self.engine.forward.logits

        def timed(layout: PassLayout, *also: Any) -> Any:
            started = self.device.now()
            found = logits(layout, *also)
            self.device.wait(started, layout)
            return found

        self.engine.forward.logits = timed  # type: ignore[method-assign]

    def metrics(self) -> Mapping[str, float]:
        """Return with the engine's the share of the emulated time by which real passes were too slow for it."""
        return {**super().metrics(), "emulated/overrun_frac": Ratio(self.device.overrun_s, self.device.charged_s)}
