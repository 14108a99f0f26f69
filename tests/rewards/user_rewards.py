"""Rewards that users might write, good and bad. The text of a completion says what the function shall do with it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

STRAY = {
    "stray bytes": b"bytes that nobody asked for",
    "stray line": b"a line that nobody asked for\n",
    "stray outcome": b'[0, "ok", 99.0, "", 0.0]\n',
}


def write_everywhere(data: bytes) -> None:
    for fd in range(3, 64):
        with suppress(OSError):
            os.write(fd, data)


def be_daemon() -> None:
    """One that has left the process group, and of which no parent knows."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.waitpid(child, 0)


def length(completion: str) -> float:
    return float(len(completion))


def act(completion: str) -> Any:
    """Its own length, unless the completion names a misdeed."""
    match completion:
        case "raise":
            raise ZeroDivisionError("no luck")
        case "exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "sleep":
            time.sleep(60)
        case "busy":
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN) if number < 32 else None
            while True:
                pass
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock for years
        case "nan":
            return float("nan")
        case "infinity":
            return float("inf")
        case "none":
            return None
        case "string":
            return "1.0"
        case "score":
            return {"score": 2, "format": "good"}
        case "score of none":
            return {"score": None}
        case "no score":
            return {"reward": 2}
        case "late":
            time.sleep(0.4)
        case "fork":
            os.fork()  # both return
        case "fork and raise":
            if os.fork() == 0:
                raise ZeroDivisionError("no luck")
        case "fork and stay":
            if os.fork() == 0:
                time.sleep(60)
        case "daemon":
            be_daemon()
        case "daemon and os._exit":
            be_daemon()
            os._exit(3)
        case "stray bytes" | "stray line" | "stray outcome":
            write_everywhere(STRAY[completion])
        case "print":
            print("user output " * 1000, flush=True)
    return len(completion)


def act_in_batch(completions: list[str]) -> list[Any]:
    if "short" in completions:
        return [1.0]
    return [act(completion) for completion in completions]


async def act_async(completion: str) -> Any:
    if completion == "await":
        await asyncio.sleep(60)
    elif completion == "own timeout":
        raise TimeoutError("the judge did not answer")
    await asyncio.sleep(0.01)
    return act(completion)


MEETINGS: dict[asyncio.AbstractEventLoop, asyncio.Barrier] = {}


async def meet(completion: str) -> float:
    """Return 1 once as many calls as the completion says run at the same time."""
    await MEETINGS.setdefault(asyncio.get_running_loop(), asyncio.Barrier(int(completion))).wait()
    return 1.0


async def batch_nap(completions: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]


class Loops:
    seen: ClassVar[set[int]] = set()

    @staticmethod
    async def count(completion: str) -> float:
        """Return how many event loops this process has used."""
        Loops.seen.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return float(len(Loops.seen))


def process(completion: str) -> float:
    return float(os.getpid())


def readiness_to_be_killed(completion: str) -> float:
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())


def has_torch(completion: str) -> float:
    return float("torch" in sys.modules or "transformers" in sys.modules or "lightning" in sys.modules)


def reads_stdin(completion: str) -> float:
    return float(len(sys.stdin.read()))


def answered(completion: str, *, answer: str, bonus: float = 0.0) -> float:
    return float(completion == answer) + bonus


def count_columns(completion: str, **columns: Any) -> float:
    return float(len(columns))


def batch_answered(completions: list[str], *, answer: list[str], scale: float) -> list[float]:
    return [scale * (completion == each) for completion, each in zip(completions, answer, strict=True)]


def on_device(completion: str, *, device: str) -> float:
    return float(device == "cuda:1")


def of_answer(completion: str, *, prompt: str, token_ids: list[int], finish_reason: str) -> float:
    """Return what an answer's own values say, as a number."""
    return len(prompt) + 10 * sum(token_ids) + 1000 * (finish_reason == "stop")


def of_answers(
    completions: list[str], *, prompt: list[str], token_ids: list[list[int]], finish_reason: list[str]
) -> list[float]:
    return [
        of_answer(text, prompt=one, token_ids=ids, finish_reason=reason)
        for text, one, ids, reason in zip(completions, prompt, token_ids, finish_reason, strict=True)
    ]


def only_keywords(*, completion: str) -> float:
    return 0.0


def witness(completion: str, *, path: str) -> Any:
    """Leaves one line a call in `path`: shows what has run more than once."""
    with open(path, "a") as file:
        file.write(f"{completion}\n")
    return act(completion.partition(":")[0])


@contextmanager
def open_ledger(arguments: Mapping[str, Any]) -> Iterator[list[str]]:
    """Says in the file `path` when it is opened and closed."""
    with open(arguments["path"], "a") as file:
        file.write("opened\n")
        file.flush()
        yield []
        file.write("closed\n")


def recorded(completion: str, *, path: str, ledger: list[str]) -> float:
    """Return how many calls share a ledger."""
    ledger.append(completion)
    return float(len(ledger))


recorded.opens = {"ledger": open_ledger}

not_a_function = 3
