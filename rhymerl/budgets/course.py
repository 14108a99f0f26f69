"""The course of a budget that probes: what its next passes do, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# plain: the drafter is left alone. trial: so too, to see what that costs. probe: it is asked for some requests, to see
# whether drafts would pay. draft: for all, because they do.
Kind = Literal["plain", "trial", "probe", "draft"]

PROBED = 8  # requests that a probe asks for
PROBE_NODES = 16  # of each; also the first reach
TRUST = 4  # times as many nodes as have been verified at once may be tried: beyond that nobody knows what a pass costs
_TRUSTED = 128  # so many at first


@dataclass(slots=True)
class ProbeCourse:
    """The next thing to do, and the reason."""

    reach: float  # how many nodes of a request are worth asking for: those that are then cut away cost time too
    drafts: bool = False  # the drafter is asked for all requests, because that pays
    misses: int = 0  # passes in a row in which it did not seem to
    rows: int = 0  # of the batch for which that was decided
    passes: int = 0
    probes: int = 0
    trusted: int = _TRUSTED  # nodes that may be verified at once
    batch: tuple[int, bool] = (
        0,
        False,
    )  # requests, and whether their tokens are worth the same, for which these two were chosen:
    gain: float = 1.0
    num_asked: int = 0
    attempt: list[Kind] = field(default_factory=list)  # kinds of the passes that come next, of a probe under way
