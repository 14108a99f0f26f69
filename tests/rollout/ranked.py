"""Rollout loops over several ranks in threads, with engines that answer at different paces."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rhymerl.distributed import Ranks
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import Rollout, RolloutLoop, RolloutSettings
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    Move,
    PacedScheduler,
    PackedScheduler,
    Progress,
    Scheduler,
    SortedScheduler,
)
from rhymerl.testing import make_prompt
from tests.distributed.threads import Threads, run_ranks
from tests.rollout.tokens import TokenBackend, expected

SETTINGS = RolloutSettings(group_size=3, max_tokens=200)
REWARD = Reward(lambda completion: float(len(completion.split())), name="length", where="main")
PROMPTS = [make_prompt([3, number], id=str(number)) for number in range(8)]


def length(request) -> int:
    """Four to forty tokens, by prompt above all."""
    return 4 + 5 * int(request.prompt.id) + request.seed % 3


class Restless(FIFOScheduler):
    """Moves about half of what is unfinished to anywhere, each time that it is asked."""

    def rebalance(self, progress: Progress) -> list[Move]:
        draw = random.Random(f"{progress.step}/{progress.num_tokens.sum()}")
        workers = range(len(progress.planned))
        return [
            Move(request_id=request.id, worker=draw.choice(workers))
            for request in progress.requests
            if draw.random() < 0.5
        ]


class RestlessHistoPipe(HistoPipeScheduler):
    """Moves as restlessly, once it knows how long answers are, and as long as it knows what it has planned."""

    def rebalance(self, progress: Progress) -> list[Move]:
        return Restless().rebalance(progress) if progress.step in self._longest else []


PACES = {"free": False, "lockstep": True}  # whether ranks keep step
SCHEDULERS = [FIFOScheduler, SortedScheduler, PackedScheduler, HistoPipeScheduler, PacedScheduler, Restless]


class Ranked:
    """Loops over the ranks, each with its own engine; some ranks are slower than others."""

    def __init__(self, scheduler: type[Scheduler] = FIFOScheduler, *, size: int = 3, pass_s: float = 0.0, **settings):
        self.scheduler, self.size, self.pass_s, self.settings = scheduler, size, pass_s, settings

    def loop(self, ranks: Ranks, backend: TokenBackend | None = None) -> RolloutLoop:
        return RolloutLoop(
            backend or TokenBackend(length, pass_s=self.pass_s * (1 + ranks.rank)),
            self.scheduler(),
            scorer=RewardScorer([REWARD]),
            decode=lambda ids: " ".join(map(str, ids)),
            ranks=ranks,
            **self.settings,
        )

    def run(self, num_steps: int, *, states: Sequence[object] = (None,), first: int = 0) -> list[list[Rollout]]:
        """Steps by rank; a rank goes on from a loop's state, if one is given."""

        def work(ranks: Threads) -> list[Rollout]:
            loop = self.loop(ranks)
            if states[0] is not None:
                loop.load_state_dict(states[0])
            results = [run_step(loop, step) for step in range(first, first + num_steps)]
            self.states.append(loop.state_dict())
            return results

        self.states: list[object] = []
        return run_ranks(self.size, work)


def run_step(loop: RolloutLoop, step: int) -> Rollout:
    loop.sync_weights([], step)
    return loop.run(prompts(step), step, SETTINGS, epoch=step // 2, following=prompts(step + 1))


def prompts(step: int):
    return PROMPTS[step % 2 :: 2]


def answers(rollout: Rollout) -> list[tuple[str, list[int]]]:
    return [(sample.completion.request.id, sample.completion.token_ids.tolist()) for sample in rollout.samples]


def check_kept(steps: list[Rollout]) -> int:
    """Every answer is there once, and its tokens are those of the policies that they name; returns how many are old."""
    stale = 0
    for step, rollout in enumerate(steps):
        assert len(rollout.samples) == len({s.completion.request.id for s in rollout.samples}) == 4 * 3
        for sample in rollout.samples:
            versions = sample.completion.output.policy_versions
            assert set(versions.tolist()) <= {step - 1, step}
            assert sample.completion.token_ids.tolist() == expected(sample.completion)
            assert len(sample) >= length(sample.completion.request)
            stale += int((versions < step).sum())
    return stale
