"""A drafter that writes down the sources of accepted tokens, for servers whose processes a test cannot see into."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.drafts import Draft, DraftSource


class CountingDrafter(HistoryTreeDrafter):
    """Each process writes a file behind the name `log`: accepted tokens by step and source."""

    def __init__(self, *, log: str) -> None:
        super().__init__()
        self.log = log
        self._drafts: dict[str, Draft] = {}
        self._counts: dict[str, Counter[str]] = {}

    def propose_batch(self, requests, contexts, budgets):
        drafts = super().propose_batch(requests, contexts, budgets)
        self._drafts |= {request.id: drafts.draft(r) for r, request in enumerate(requests)}
        return drafts

    def accept(self, request, token_ids, num_accepted):
        draft, at = self._drafts.pop(request.id, None), -1
        counts = self._counts.setdefault(request.id.partition("/")[0], Counter())
        for token in token_ids[:num_accepted].tolist() if draft is not None else ():
            nodes = zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True)
            at = next(node for node, found in enumerate(nodes) if found == (token, at))
            counts[DraftSource(min(int(draft.sources[at]), DraftSource.HISTORY)).name] += 1

    def finish(self, completion):
        super().finish(completion)
        Path(f"{self.log}.{os.getpid()}").write_text(json.dumps(self._counts))


def accepted(log: Path) -> dict[int, Counter[str]]:
    """The counts of all processes by step."""
    totals: dict[int, Counter[str]] = {}
    for path in log.parent.glob(f"{log.name}.*"):
        for step, counts in json.loads(path.read_text()).items():
            totals.setdefault(step, Counter()).update(counts)
    return totals
