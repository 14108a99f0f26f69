"""RollPacker (arXiv 2509.21009): tail batching."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from benchmarks.scheduling.peers.base import EarlyStopScheduler, Group
from rhymerl.types import RolloutRequest


class RollPackerScheduler(EarlyStopScheduler):
    """Short steps launch `over` times as many prompts and answers as they train on, and take the first to end.

    The prompts that were too slow are kept. When there are enough for a step, they make a long one, in which each has
    as many answers as are trained on and all are waited for. As everything is sampled by the newest policy, their
    answers begin anew.

    Left out: the other parts of the system (elastic parallelism, scheduling of rewards, training on a stream), and that
    surplus answers stop as soon as their prompt has enough: here they run until the step ends. The paper's over is
    1.25.
    """

    def __init__(self, *, prompts: int, group_size: int, over: float = 1.25) -> None:
        super().__init__(prompts=prompts, group_size=group_size)
        self.over = over
        self._slow: list[Group] = []
        self._groups: dict[str, Group] = {}
        self._ended: dict[str, list[RolloutRequest]] = {}  # the first answers, by prompt
        self._whole: list[str] = []

    def launch(self, groups: Iterator[Group]) -> list[RolloutRequest]:
        is_long = len(self._slow) >= self.prompts
        if is_long:
            chosen, self._slow = self._slow[: self.prompts], self._slow[self.prompts :]
        else:
            chosen = list(islice(groups, round(self.over * self.prompts)))
        more = round(self.over * self.group_size)
        asked = [group[more : more + self.group_size] if is_long else group[:more] for group in chosen]
        self._groups = {group[0].prompt.id: group for group in chosen}
        self._ended = {prompt: [] for prompt in self._groups}
        return [request for group in asked for request in group]

    def finished(self, request: RolloutRequest) -> bool:
        ended = self._ended[request.prompt.id]
        if len(ended) < self.group_size:
            ended.append(request)
            if len(ended) == self.group_size:
                self._whole.append(request.prompt.id)
        return len(self._whole) >= self.prompts

    def trained(self) -> list[RolloutRequest]:
        found = [request for prompt in self._whole for request in self._ended[prompt]]
        self._slow += [group for prompt, group in self._groups.items() if prompt not in self._whole]
        self._whole = []
        return found
