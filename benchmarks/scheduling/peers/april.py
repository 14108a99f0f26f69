"""APRIL (arXiv 2509.18521): over-provisioned prompts, of which the first ones to end are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from benchmarks.scheduling.peers.base import EarlyStopScheduler, Group
from rhymerl.types import RolloutRequest


class APRILScheduler(EarlyStopScheduler):
    """A step runs `over` times as many prompts as it trains on, and ends when enough of them have all their answers.

    What is unfinished goes first in the next step, from the tokens that it has. With `recycle=False` it is dropped:
    that is over-provisioning alone, which APRIL is an answer to. The authors' repository recommends over = 2.
    """

    def __init__(self, *, prompts: int, group_size: int, over: float = 2.0, recycle: bool = True) -> None:
        super().__init__(prompts=prompts, group_size=group_size)
        self.over = over
        self.recycle = recycle
        self._groups: dict[str, Group] = {}  # under way, by prompt
        self._left: dict[str, set[str]] = {}  # ids of their requests that have not ended
        self._whole: list[str] = []  # prompts

    def launch(self, groups: Iterator[Group]) -> list[RolloutRequest]:
        for group in islice(groups, max(round(self.over * self.prompts) - len(self._groups), 0)):
            asked = group[: self.group_size]
            self._groups[asked[0].prompt.id] = asked
            self._left[asked[0].prompt.id] = {request.id for request in asked}
        return [
            request for prompt, group in self._groups.items() for request in group if request.id in self._left[prompt]
        ]

    def finished(self, request: RolloutRequest) -> bool:
        left = self._left[request.prompt.id]
        left.remove(request.id)
        if not left:
            self._whole.append(request.prompt.id)
        return len(self._whole) >= self.prompts

    def trained(self) -> list[RolloutRequest]:
        found = [request for prompt in self._whole for request in self._groups.pop(prompt)]
        self._whole = []
        if not self.recycle:
            self._groups = {}
        return found
