"""Code in the sandbox: what it may, and that whatever else it tries costs its own reward and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rewards.sandbox.remote import CALLS, EVERYTHING, Peer, Remote
from rhymerl.rewards.sandbox.run import Job, missing_walls, run
from rhymerl.rewards.sandbox.wire import BrokenMessageError, decode, encode
from tests.rewards.hostile import FORGERIES, FUNCTIONS, PROGRAMS, SECRET
from tests.rewards.machines import NOBODY
from tests.rewards.processes import descendants, is_alive, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers no namespaces or no seccomp"
)
HERE = Path(__file__).parent


def passed(code: str, *tests: Any, **settings: Any) -> int:
    return run(Job(code=code, tests=tests, stops_at_failure=False, **settings)).passed


# -- what code may -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2"),
        ("def f(x): return x + 1", "assert f(x=1) == 2\nassert f(2) == 3"),
        ("def f(n): return 2**n", "assert f(30000) == 2**30000"),
        ("def f(): return {1: (2, [3.5, None, b'4']), 'a': {5, 6}}", "assert f() == {1: (2, [3.5, None, b'4']), 'a': {6, 5}}"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "assert f() + f() == f() * 2"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): x.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
        ("def f(x): x.clear()", "a = {1: 2}\nf(a)\nassert a == {}"),
        ("def f(g, x): return g(x)", "assert f(lambda x: x * 2, 4) == 8"),
        ("def f(g): return lambda x: g(g(x))", "assert f(lambda x: x * 2)(4) == 16"),
        ("def f(n):\n for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert 2 in f(3)"),
        ("def f(x):\n if x < 0: raise ValueError('below 0')", "try: f(-1)\nexcept ValueError as e: assert str(e) == 'below 0'\nelse: assert 0"),
        ("class Bad(KeyError): pass\ndef f(): raise Bad('x')", "try: f()\nexcept KeyError: pass\nelse: assert 0"),
        (
            "class Stack:\n def __init__(self): self.all = []\n def push(self, x): self.all.append(x)\n def __len__(self): return len(self.all)",
            "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.all == [4] and s",
        ),
        ("class P:\n def __init__(self, x): self.x = x\n def __eq__(self, o): return self.x == o.x", "assert P(1) == P(1) and P(1) != P(2)"),
        ("import threading\ndef f():\n a = []\n t = threading.Thread(target=a.append, args=(1,))\n t.start(); t.join()\n return a", "assert f() == [1]"),
        ("import asyncio\nasync def g(): await asyncio.sleep(0); return 5\ndef f(): return asyncio.run(g())", "assert f() == 5"),
        ("import json, re, itertools, heapq, decimal, datetime, random, sqlite3\ndef f(): return re.sub('a', 'b', 'a')", "assert f() == 'b'"),
        ("def f(): return 1\nif __name__ == '__main__': f(input())", "import math\nassert math.isclose(f(), 1)"),
        ("import os\ndef f(): return dict(os.environ).get('HOME')", "assert f() is None"),
        ("def f(): return 'x' * 2**16", "print(f())\nassert f()[0] == 'x'"),
        ("def f(): return 1", "if f() != 1: exit(1)\nassert f.__name__ == 'f'"),
        ("def f(g, x): return g(x)", "assert f(len, [1]) == 1 and f(int, '2') == 2 and f(str.upper, 'a') == 'A'"),
        ("def f(g, x): return g(x)", "import math, operator\nassert f(math.sqrt, 4) == 2 and f(dict.fromkeys, 'a') == {'a': None}"),
        ("def f(g, *x): return g(*x)", "from operator import add\nassert f(add, 1, 2) == 3 and f(eval, '1 + 1') == 2 and f(int.__add__, 1, 2) == 3"),
        ("def f(x, kind): return isinstance(x, kind)", "assert f(1, int) and not f(1, str)"),
        ("def f(error): raise error('no')", "try: f(KeyError)\nexcept KeyError as e: assert e.args == ('no',)\nelse: assert 0"),
        ("def f(g):\n for x in (1, 2): g(x)", "a, b = [], set()\nf(a.append)\nf(b.add)\nassert a == [1, 2] and b == {1, 2}"),
        ("def f(g):\n for x in (1, 2): g(x)", "class All:\n total = 0\n def add(self, x): self.total += x\na = All()\nf(a.add)\nassert a.total == 3"),
        ("def f(x): return x", "a = object()\nassert f(a) is a"),
    ],
)  # fmt: skip
def test_functions(code: str, test: str) -> None:
    report = run(Job(code=code, tests=[test]))
    assert (report.passed, report.failure) == (1, "")


def test_entry_points() -> None:
    code = "class Solution:\n def add(self, a, b): return (a, a + b)"
    pairs = [{"input": [1, 2], "output": [1, 3]}, {"input": [1, 2], "output": [1, 4]}]
    assert passed(code, *pairs, entry_point="Solution().add") == 1
    check = "def check(candidate):\n    assert candidate(1, 2) == (1, 3)"
    assert passed(code, check, entry_point="Solution().add") == 1
    assert passed(code, check.replace("3", "4"), entry_point="Solution().add") == 0
    assert passed("def sum(a, b): return a * b", "assert sum(3, 4) == 12", entry_point="sum") == 1
    assert passed("def sum(a, b): return a * b", "assert sum(3, 4) == 12") == 0, "else a builtin stays Python's own"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(int(input()) * 2)", "84"),
        ("import sys\nfor line in sys.stdin: print(int(line) * 2, '  ')", "84\n\n"),
        ("import sys\nsys.stdout.write(str(2 * int(sys.stdin.buffer.readline())))", "84"),
        ("def main(): print(int(open(0).read()) * 2)\nif __name__ == '__main__': main()", "84"),
        ("print(84)\nexit()", "84"),
        ("print('\\u00e4')", "\u00e4"),
    ],
)
def test_programs(code: str, output: str) -> None:
    assert passed(code, {"input": "42\n", "output": output}, {"input": "42", "output": "no"}, is_program=True) == 1


def test_a_program_starts_anew_for_each_test() -> None:
    code = "import math\nmath.seen = getattr(math, 'seen', 0) + 1\nprint(math.seen)"
    assert passed(code, *[{"input": "", "output": "1"}] * 3, is_program=True) == 3


def test_installed_packages_only_when_asked_for() -> None:
    code = "import numpy\ndef f(): return numpy.arange(3).tolist()"
    folder = str(Path(__import__("numpy").__file__).parents[1])
    assert passed(code, "assert f() == [0, 1, 2]") == 0
    assert passed(code, "assert f() == [0, 1, 2]", folders=[folder], memory_mb=2048) == 1


def test_an_array_library_takes_values_from_an_object_and_not_its_word() -> None:
    """numpy would otherwise read the memory of the tests where an object says, and take what it says for a result."""
    test = "import numpy\nassert abs(numpy.subtract(f(), [1.0])) < 1e-6"
    lies = """
class Array:
    __array_priority__ = 1e9
    __array_interface__ = {"shape": (1,), "typestr": "<f8", "data": b"12345678", "version": 3}
    __array_wrap__ = lambda *_: 0.0
def f(): return Array()
"""
    has = {"folders": [str(Path(__import__("numpy").__file__).parents[1])], "memory_mb": 2048}
    assert passed(lies, test, **has) == 0
    assert passed("class Array(list): pass\ndef f(): return Array([1.0])", test, **has) == 1
    assert (
        passed(
            "class Array:\n __len__ = lambda _: 1\n __getitem__ = lambda _, place: [1.0][place]\nf = Array", test, **has
        )
        == 1
    )


def test_half_of_the_tests_and_the_first_failure() -> None:
    job = Job(code="def f(x): return x", tests=["assert f(1) == 1", "assert f(1) == 2, 'no'", "assert f(3) == 3"])
    assert (run(job).passed, run(job).failure) == (1, "AssertionError: no")
    assert passed(job.code, *job.tests) == 2
    hangs = ["assert f(1) == 1", "while True: f(1)", "assert f(1) == 1"]
    assert passed(job.code, *hangs, time_limit_s=0.5) == 1
    wordless = "class Words:\n def __str__(self): raise ValueError\nf = Words"
    assert passed(wordless, "assert not f(), f()", "assert f()") == 1


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("from unittest.mock import Mock\nf(Mock())", "Mock"),
        ("from unittest.mock import Mock\ntry: f(Mock())\nexcept TypeError: pass", "Mock"),
        ("from functools import partial\nf(partial(type))", "partial"),
        ("class Node: pass\nf(Node)", "type"),
        ("class Node:\n def __call__(self): return 1\nf([1, {2: Node()}])", "Node"),
        ("f('{}'.format)", "builtin_function_or_method"),
        ("f(print, key=lambda: 1, other=exec('def g(): pass') or g)", "function"),
        ("from functools import lru_cache\nassert f(lambda: lru_cache(lambda: 1)) == 1", "_lru_cache_wrapper"),
    ],
)
def test_tests_that_hand_over_what_can_be_made_to_lie_judge_nobody(test: str, kind: str) -> None:
    code = "def f(x, *_, **__): return x() if type(x).__name__ == 'Remote' else 1"
    report = run(Job(code=code, tests=["assert f(1) == 1", test, "assert f(1) == 1"], stops_at_failure=False))
    assert report.unfit.startswith(f"they hand an object of {kind} to the answer, which could call it; expected ")
    assert report.passed == 1


# -- what it may not
# -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacked:
    """A machine after all attacks, each with whatever it lacks accepted by name."""

    missing: dict[str, str]
    refusal: str
    found: dict[str, list[Any]]
    processes_left: int
    files: dict[str, str]


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("whole", []),
        ("container", ["namespaces"]),
        pytest.param("without_namespaces", ["namespaces", "process_limit"], marks=pytest.mark.slow),
        pytest.param("ordinary_user", [], marks=pytest.mark.slow),
        pytest.param("without_seccomp", ["seccomp"], marks=pytest.mark.slow),
    ],
)
def test_attacks_gain_nothing_and_leave_nothing(kind: str, missing: list[str], tmp_path: Path) -> None:
    """This is one test, so that each kind of machine is attacked once."""
    if kind == "container" and os.getuid() != 0:
        pytest.skip("only root can be root in a container")
    after = attacked(kind, tmp_path)
    assert list(after.missing) == missing
    attacks = [*FUNCTIONS.values(), *FORGERIES.values(), *PROGRAMS.values()]
    assert len(after.found) == sum(not {*attack.needs} & {*missing} for attack in attacks)
    assert {name: words for name, (passed, words) in after.found.items() if passed or not words} == {}
    assert after.processes_left == 0
    assert after.files == {"secret": SECRET}
    indices = [Path(tempfile.gettempdir()), Path.home(), Path()]
    assert [index for index in indices if (index / "written-7351").exists()] == []
    assert after.refusal.startswith(
        "rewards.code.function='rhymerl.rewards.code': this machine offers" if missing else ""
    )
    assert after.refusal.endswith(
        f"rewards.code.arguments.unsafe_without={missing}".replace("'", "") if missing else ""
    )
    assert bool(after.refusal) == bool(missing)


def attacked(kind: str, folder: Path) -> Attacked:
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o777)  # nothing but the sandbox shall keep an answer from it
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [python_of(kind), str(HERE / "machines.py"), kind, str(folder), str(server.getsockname()[1])]
        with subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TOKEN": SECRET},
        ) as process:
            out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    return Attacked(
        **json.loads(out),
        processes_left=settled(lambda: sum(session == process.pid for session in sessions())),
        files={path.name: path.read_text() for path in folder.iterdir()},
    )


def python_of(kind: str) -> str:
    """One that others may run too, where the answer becomes another user without a root directory of its own."""
    if kind not in ("ordinary_user", "container") or os.getuid() != 0:
        return sys.executable
    for python in filter(None, [sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")]):
        probe = (
            "import sys; sys.path.insert(0, sys.argv[1]); import rhymerl.rewards; assert sys.version_info >= (3, 11)"
        )
        try:
            done = subprocess.run(
                [python, "-c", probe, str(HERE.parents[1])],
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                capture_output=True,
            )
        except PermissionError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip("an ordinary user can run no Python here")


def sessions() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(int(path.read_text().rpartition(")")[2].split()[3]))
    return found


def settled(count: Callable[[], int]) -> int:
    """Return what is left of it after a moment."""
    give_up = time.monotonic() + 30.0
    while (left := count()) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def test_what_is_expected_is_nowhere_in_the_memory_of_the_answer() -> None:
    """Not even for code that reads all of it."""
    code = """
import ctypes
def search():
    found, start = [], id(search) & ~0xFFF
    pipe, write = __import__("os").pipe(), ctypes.CDLL(None).write
    for page in range(start - 2**24, start + 2**24, 4096):
        try:
            written = write(pipe[1], ctypes.c_void_p(page), 4096)
        except OSError:
            continue
        if written > 0:
            data = __import__("os").read(pipe[0], 4096)
            found += [part[:4] for part in data.split(b"needle-")[1:]]
    return [each for each in found if each.isdigit()]
"""
    assert passed(code, "assert search() == [], 'needle-7351'", time_limit_s=20) == 1


@pytest.mark.parametrize("hangs", ["f(1)", "while True: f(1)"])
def test_closing_the_scorer_ends_what_runs(hangs: str) -> None:
    code = "def f(x):\n while True: pass" if hangs == "f(1)" else "def f(x): return x"
    reward = Reward("rhymerl.rewards.code", timeout_s=600, arguments={"time_limit_s": 500})
    before = descendants()
    scorer = RewardScorer([reward], num_processes=1)
    scorer.submit("a", code, {"tests": hangs})
    give_up = time.monotonic() + 100
    while len(running := own_descendants(before)) < 5 and time.monotonic() < give_up:
        scorer.submit(str(time.monotonic()), code, {"tests": hangs})
        time.sleep(0.05)
    assert len(running) >= 5, "a reward process, its warm process, a warden, an examiner, an answer"
    scorer.close()
    assert wait_until(lambda: not any(map(is_alive, running)))


def own_descendants(others: Collection[int]) -> list[int]:
    return [pid for pid in descendants() if pid not in others]


# -- its parts
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(2**80), 0.1, float("inf"), 2j, "\ud800\x00", b"\xff", bytearray(b"1"), [], [[1], (2,)], {1, 2}, {(1,): {"a": 2}}],
)  # fmt: skip
def test_plain_values_travel(value: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    there = json.loads(json.dumps(encode(value, refuse)))
    back = decode(there)
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    "data", [{}, {"int": "x"}, {"set": [[1]]}, {"dict": [1]}, {"tuple": 3}, {"a": 1, "b": 2}, {"Decimal": "x"}]
)
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(BrokenMessageError):
        decode(data)


def test_the_other_end_may_do_what_it_was_allowed() -> None:
    (read, back_write), (back_read, write) = os.pipe(), os.pipe()
    theirs = Peer(back_read, back_write, operations=CALLS)
    theirs.export(lambda: [1, 2])
    server = threading.Thread(target=theirs.serve)
    server.start()
    function = Remote(Peer(read, write, operations=EVERYTHING), 0)
    assert function() == [1, 2]
    with pytest.raises(TypeError, match="__getattr__ is not allowed"):
        _ = function.attribute
    with pytest.raises(AttributeError, match="__globals__ of another process's object is not to be had"):
        _ = function.__globals__
    with pytest.raises(Exception, match="there is no object 1"):
        Remote(Peer(read, write, operations=EVERYTHING), 1)()
    os.close(write)
    server.join()
    for fd in (read, back_read, back_write):
        os.close(fd)
