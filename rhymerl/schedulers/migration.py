"""The choice of unfinished requests that are better off elsewhere."""

from __future__ import annotations

import numpy as np

from rhymerl.schedulers.base import Move, Progress
from rhymerl.types import FloatArray


def outliers_to_running(progress: Progress, longest: FloatArray, *, alpha: float, beta: float) -> list[Move]:
    """Return moves of requests that delay their worker and have outgrown their group, to longer running groups.

    A request moves when at most the share `alpha` of its worker's requests is unfinished and it is longer than `beta`
    times longest[worker]. It goes where the longest group runs; of equals, to the worker with the fewest unfinished
    requests.
    """
    unfinished = np.bincount(progress.workers, minlength=len(progress.planned))
    is_last = unfinished <= np.maximum(alpha * progress.planned, 1)
    outgrown = is_last[progress.workers] & (progress.num_tokens > beta * longest[progress.workers])
    moves: list[Move] = []
    for index in np.flatnonzero(outgrown).tolist():
        source = int(progress.workers[index])
        targets = np.flatnonzero(~is_last & (unfinished > 0) & (longest > longest[source]))
        if len(targets) == 0:
            continue
        target = int(targets[np.lexsort((targets, unfinished[targets], -longest[targets]))[0]])
        unfinished[target] += 1
        moves.append(Move(request_id=progress.requests[index].id, worker=target))
    return moves
