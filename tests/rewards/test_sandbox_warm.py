"""One warm process for many answers: it is fast, and no answer finds anything of another one or of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rhymerl.rewards.sandbox.run import Job, JobResult, Sandbox, SandboxError, missing_walls
from tests.rewards.processes import descendants, is_alive, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers its sandbox not all walls"
)


@pytest.fixture
def started() -> Callable[[], list[int]]:
    """The processes of a test; pytest's own may have others, of earlier tests."""
    before = set(descendants())
    return lambda: [pid for pid in descendants() if pid not in before]


@pytest.fixture
def sandbox(started: Callable[[], list[int]]) -> Iterator[Sandbox]:
    with Sandbox() as opened:
        yield opened


def returned(sandbox: Sandbox, code: str) -> object:
    """Return what the function `f` of the code returns."""
    report = sandbox.run(Job(code=code, tests=[{"input": []}], entry_point="f"))
    assert report.values, report.failure
    return report.values[0]


def test_what_an_answer_changes_is_gone_with_it(sandbox: Sandbox) -> None:
    changes = """
import builtins, math, os, random, re, sys
def f():
    math.pi, builtins.len, re.match = 3, None, None
    sys.modules["os"] = sys.modules["sandbox.examiner"].examine = None
    sys.modules["sandbox.remote"].Peer.serve = sys.modules["sandbox.wire"].encode = None
    random.seed(1)
    os.environ["seen"] = "yes"
    sys.path.clear()
"""
    looks = """
import math, os, random, re, sys
def f(): return [round(math.pi, 2), len("ab"), bool(re.match("a", "a")), os.environ.get("seen"), bool(sys.path)]
"""
    for _ in range(2):
        sandbox.run(Job(code=changes, tests=["f()"]))
        assert returned(sandbox, looks) == [3.14, 2, True, None, True]


def test_answers_draw_different_random_numbers(sandbox: Sandbox) -> None:
    draws = {returned(sandbox, "import random\ndef f(): return random.random()") for _ in range(3)}
    assert len(draws) == 3


def test_an_answer_has_its_own_descriptors_alone(sandbox: Sandbox) -> None:
    """It has those of a program of its own, and two pipes to its examiner."""
    code = "import os, stat\ndef f(): return [fd for fd in range(1000) if is_open(fd)]\ndef is_open(fd):\n try: return bool(os.fstat(fd))\n except OSError: return False"
    assert returned(sandbox, code) == [0, 1, 2, 3, 4]


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user has nobody else to be")
def test_an_answer_of_root_is_nobody(sandbox: Sandbox) -> None:
    code = "import os\ndef f(): return [*os.getresuid(), *os.getresgid(), *os.getgroups()]"
    with pytest.raises(AssertionError, match="Operation not permitted"):
        returned(sandbox, code)
    users = returned(sandbox, "import os\ndef f(): return [os.getuid(), os.geteuid(), os.getgid(), os.getegid()]")
    assert isinstance(users, list)
    assert len({0, *users}) == 2


def test_nothing_of_earlier_answers_and_tests_is_in_the_memory_of_a_later_one(sandbox: Sandbox) -> None:
    for _ in range(3):
        sandbox.run(Job(code="x = 'needle-7351'", tests=["assert x == 'needle-7351'", "assert x == 'needle-1537'"]))
    code = """
import os
def f():
    found, start, pipe = [], id(f) & ~0xFFF, os.pipe()
    write = __import__("ctypes").CDLL(None).write
    for page in range(start - 2**24, start + 2**24, 4096):
        if write(pipe[1], __import__("ctypes").c_void_p(page), 4096) > 0:
            data = os.read(pipe[0], 4096)
            found += [part[:4] for part in data.split(b"needle-")[1:]]
    return sorted({"needle-" + each.decode() for each in found if each.isdigit()})
"""
    job = Job(code=code, tests=[{"input": []}], entry_point="f", time_limit_s=20)
    assert list(sandbox.run(job).values) == [[]]
    seen = Job(code=f"own = 'needle-' + '1234'\n{code}", tests=[{"input": []}], entry_point="f", time_limit_s=20)
    assert list(sandbox.run(seen).values) == [["needle-1234"]], "it would be found"


def test_threads_share_it(sandbox: Sandbox) -> None:
    def square(number: int) -> JobResult:
        return sandbox.run(Job(code="def f(x): return x * x", tests=[f"assert f({number}) == {number**2}"]))

    with ThreadPoolExecutor(6) as pool:
        assert [report.passed for report in pool.map(square, range(30))] == [1] * 30


def test_it_is_started_anew_where_it_was_killed(sandbox: Sandbox, started: Callable[[], list[int]]) -> None:
    (warm,) = started()
    assert returned(sandbox, "def f(): return 1") == 1
    assert wait_until(lambda: started() == [warm])
    os.kill(warm, signal.SIGKILL)
    assert returned(sandbox, "def f(): return 1") == 1
    assert wait_until(lambda: len(started()) == 1)
    assert started() != [warm]


def test_an_answer_whose_sandbox_is_killed_is_tried_again(sandbox: Sandbox, started: Callable[[], list[int]]) -> None:
    """The killer may be one that ends what takes most memory, for instance."""
    (warm,) = started()
    code = "import time\ndef f(): time.sleep(0.5); return 1"
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(returned, sandbox, code)
        assert wait_until(lambda: len(started()) == 4)
        os.kill(warm, signal.SIGKILL)
        assert found.result() == 1


def test_closing_it_ends_what_runs(started: Callable[[], list[int]]) -> None:
    failures = []

    def run() -> None:
        try:
            sandbox.run(Job(code="def f():\n while True: pass", tests=["f()"], time_limit_s=60))
        except SandboxError as error:
            failures.append(str(error))

    with Sandbox() as sandbox:
        thread = threading.Thread(target=run)
        thread.start()
        assert wait_until(lambda: len(started()) == 4), "it, a warden, an examiner, an answer"
        running = started()
        scores = {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in running}
        assert scores == {"1000"}, "they are killed before this process where memory is short"
    assert wait_until(lambda: not any(map(is_alive, running)))
    thread.join()
    assert len(failures) == 1
    sandbox.close()


def test_a_module_that_it_cannot_import_is_told() -> None:
    with pytest.raises(SandboxError, match="a sandbox did not come up: ModuleNotFoundError: No module named 'no_such'"):
        Sandbox(modules=["no_such"]).__enter__()


def test_answers_find_its_modules_imported(tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text("words = 'hello'")
    with Sandbox(folders=[str(tmp_path)], modules=["greeting"]) as sandbox:
        assert returned(sandbox, "import greeting\ndef f(): return greeting.words") == "hello"
        code = f"def f():\n try: return open({str(tmp_path / 'greeting.py')!r}).read()\n except OSError: return None"
        assert returned(sandbox, code) is None
