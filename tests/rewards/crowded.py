"""Rewards under a limit of processes: `python crowded.py SCENE`, in a control group. Prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rewards.sandbox.run import Job, Sandbox, SandboxError
from tests.rewards.hostile import CLONER, SHARED

BOMB = f"{CLONER}import time\ndef f(x):\n for _ in range(400): clone({SHARED})\n time.sleep(9)"
THREADS = "import threading, time\ndef f(x):\n all = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(12)]\n for each in all: each.start()\n for each in all: each.join()\n return x + 1"  # fmt: skip
RIGHT = "def f(x): return x + 1"
TESTS = ["assert f(1) == 2"]


class Crowd:
    """Takes all processes that there are but some, for a while."""

    def __init__(self, *, leave: int = 0) -> None:
        self.members: list[int] = []
        with suppress(BlockingIOError):
            while True:
                if (child := os.fork()) == 0:
                    signal.pause()
                self.members.append(child)
        self.go(leave)

    def go(self, number: int | None = None) -> None:
        for _ in range(len(self.members) if number is None else number):
            os.kill(self.members[-1], signal.SIGKILL)
            os.waitpid(self.members.pop(), 0)

    def go_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.go).start()


def beside_bombs() -> dict[str, object]:
    """Twenty right answers and four bombs."""
    reward = Reward("rhymerl.rewards.code", name="r", default=-1.0, timeout_s=20, arguments={"time_limit_s": 2})
    with RewardScorer([reward], num_processes=2, chunk_size=1) as scorer:
        for number in range(24):
            bomb = number % 6 == 0
            scorer.submit(f"{number} {bomb}", BOMB if bomb else [RIGHT, THREADS][number % 2], {"tests": TESTS})
        scores = scorer.collect()
        failures = scorer.metrics()
    rewards = {bomb: [each["r"] for key, each in scores.items() if key.endswith(str(bomb))] for bomb in (True, False)}
    return {"bombs": rewards[True], "right": rewards[False], "failures": sum(failures.values())}


def for_a_while() -> dict[str, object]:
    """No process at first, then enough."""
    with Sandbox() as sandbox:
        Crowd(leave=1).go_after(0.3)  # one for the timer
        return {"passed": sandbox.run(Job(code=RIGHT, tests=TESTS)).passed}


def for_good(*, leave: int, code: str) -> dict[str, object]:
    """Run the code where only as many processes are left, for good."""
    with Sandbox() as sandbox:
        crowd = Crowd(leave=leave)
        try:
            return {"passed": sandbox.run(Job(code=code, tests=TESTS)).passed}
        except SandboxError as error:
            return {"error": str(error)}
        finally:
            crowd.go()


def start_of_processes() -> dict[str, object]:
    """No process for a reward at first."""
    Crowd(leave=1).go_after(0.5)
    with RewardScorer([Reward("user_rewards.length", name="r")]) as scorer:
        for text in ("a", "bb", "ccc"):
            scorer.submit(text, text, {})
        return {"right": [each["r"] for each in scorer.collect().values()]}


SCENES = {
    "beside_bombs": beside_bombs,
    "for_a_while": for_a_while,
    "no_sandbox": lambda: for_good(leave=0, code=RIGHT),
    "no_answer": lambda: for_good(leave=2, code=RIGHT),
    "no_thread": lambda: for_good(leave=9, code=THREADS),
    "start_of_processes": start_of_processes,
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(SCENES[sys.argv[1]]()))
