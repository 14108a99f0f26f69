"""Environments for tests, good ones and bad ones."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.environments.base import Environment, Reply, Turn


@dataclass(frozen=True)
class Counts(Environment):
    """Replies with digits that follow from all that has been said, and ends after so many turns."""

    is_pure = True
    turns: int = 3

    def reply(self, row, turns):
        if len(turns) == self.turns:
            return Reply(reward=1.0, done=True, metrics={"length": len(turns)})
        seen = "".join(turn.text + (turn.reply or "") for turn in turns)
        return Reply(content=f"{sum(map(ord, seen)) % 10}=", reward=0.5)


class Ponders(Counts):
    """Takes its time."""

    def reply(self, row, turns):
        time.sleep(0.05)
        return super().reply(row, turns)


class Echoes(Environment):
    """Repeats the last line of each turn, so that a reply shows whether all turns were there."""

    def reply(self, row, turns):
        said = " ".join(turn.text.rpartition("\n")[2] for turn in turns)
        return None if len(turns) == row["turns"] else f"{len(turns)} {said}"


class Rambles(Environment):
    """Says too much."""

    def reply(self, row, turns):
        return None if len(turns) == row["turns"] else f"{len(turns)} " + "yes 12 " * 200


class Asks(Environment):
    """Does what the row says."""

    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Any:
        match row.get("do"):
            case "raise":
                raise KeyError("nobody")
            case "die":
                os._exit(7)
            case "kill":  # as the kernel does where memory is short
                os.kill(os.getpid(), signal.SIGKILL)
            case "exhaust":
                bytearray(2**62)
            case "slow":
                time.sleep(row["seconds"])
            case "hang":
                time.sleep(600)
            case "spin":
                re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter
            case "print":
                print("hello")
            case "return":
                return row["value"]
        return f"{row['prompt']}{len(turns)}"


class Alone(Asks):
    """Needs a file that one process has for itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state):
        vars(self).update(state)
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os._exit(3)


class Raises(Environment):
    def reply(self, row, turns):
        raise KeyError("nobody")


class Meets(Environment):
    """Replies once four calls are under way at the same time."""

    def __init__(self) -> None:
        self.needed = 4

    def reply(self, row, turns):
        barrier = globals().setdefault("_BARRIER", threading.Barrier(self.needed))
        barrier.wait(60)
        return "met"


class Awaits(Environment):
    async def reply(self, row, turns):
        await asyncio.sleep(0.01)
        return f"{row['prompt']}!"


class Shells(Environment):
    """A session keeps what it has been told, and notes in a file when it is opened and closed."""

    def open(self, row):
        return Shell(row)

    def reply(self, row, turns):
        raise AssertionError("its session is asked")


class Shell:
    def __init__(self, row: Mapping[str, Any]) -> None:
        self.said: list[str] = []
        self.log = row["log"]
        self._note("open")

    def reply(self, row, turns):
        self.said.append(turns[-1].text)
        return None if len(turns) == 3 else ",".join(self.said)

    def close(self) -> None:
        self._note("close")

    def _note(self, words: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{words}\n")


class AsyncShells(Environment):
    """The same by coroutines."""

    async def open(self, row):
        await asyncio.sleep(0.01)
        return AsyncShell(row)

    def reply(self, row, turns):
        raise AssertionError("its session is asked")


class AsyncShell(Shell):
    async def reply(self, row, turns):
        await asyncio.sleep(0.01)
        return super().reply(row, turns)

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        super().close()


class Fails(Environment):
    def __setstate__(self, state):
        raise RuntimeError("no licence")

    def __getstate__(self):
        return {"x": 1}

    def reply(self, row, turns):
        return None


class NeedsAddress(Environment):
    """Nobody gives it its address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def reply(self, row, turns):
        return None


class Litters(Environment):
    """Leaves two processes behind with each reply, one in a session of its own, and notes their ids in a file."""

    def __init__(self, log: str) -> None:
        self.log = log

    def reply(self, row, turns):
        for is_daemon in (False, True):
            process = subprocess.Popen(["sleep", "600"], start_new_session=is_daemon)
            with open(self.log, "a") as file:
                file.write(f"{process.pid}\n")
        return "1" if len(turns) == 1 else None


class Shows(Environment):
    """Gives no reward for anything."""

    def reply(self, row, turns):
        return "1=" if len(turns) == 1 else None


@dataclass(frozen=True)
class Logs(Environment):
    """Notes each call in a file, and fails in the first of them where the row asks for it."""

    path: str
    is_pure = True

    def reply(self, row, turns):
        reply = f"{row['prompt']}{len(turns)}"
        time.sleep(0.05)
        with open(self.path, "a+") as file:
            file.seek(0)
            number = len(file.read().split())
            file.write(f"{reply}\n")
        if number < row.get("fails", 0):
            raise ValueError(f"not the first {row['fails']}")
        return reply
