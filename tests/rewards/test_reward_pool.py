"""Misbehaving rewards cost one sample each, and nothing is left behind."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rhymerl.errors import RewardError
from rhymerl.rewards import Reward, RewardScorer
from tests.products import values_first
from tests.rewards.processes import is_alive, wait_until

DEFAULT = -7.0
LACKS_HOME = """
import os

def opening(arguments):
    return os.environ["JUDGE_HOME"]

def judged(completion, judge): return 1.0

judged.opens = {"judge": opening}
"""
FUNCTIONS = ["act", "act_in_batch", "act_async"]


def score(texts: list[str], function: str, *, num_processes: int = 2, chunk_size: int = 16, **settings: Any):
    """Rewards in the order of `texts`, and the metrics that are not zero."""
    reward = Reward(f"user_rewards.{function}", name="r", default=DEFAULT, **settings)
    with RewardScorer([reward], num_processes=num_processes, chunk_size=chunk_size) as scorer:
        for number, text in enumerate(texts):
            scorer.submit(str(number), text, {})
        scores = scorer.collect()
        metrics = {name.removeprefix("rewards/r/"): count for name, count in scorer.metrics().items() if count}
    return [scores[str(number)]["r"] for number in range(len(texts))], metrics


def children() -> list[int]:
    paths = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text().split()]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_cost_those_samples(function: str) -> None:
    errors = ["raise", "exit", "nan", "infinity", "string", "no score"]
    rewards, metrics = score(["a", *errors, "bb"], function, batch=function == "act_in_batch", num_processes=1)
    assert rewards == [1.0, *[DEFAULT] * 6, 2.0]
    assert metrics == {"errors": 6}


@pytest.mark.parametrize(
    ("misdeed", "kind", "functions"),
    [
        ("os._exit", "crashes", ["act", "act_in_batch", "act_async"]),
        ("segfault", "crashes", ["act"]),
        ("sleep", "timeouts", ["act", "act_async"]),
        ("busy", "timeouts", ["act"]),
        ("regex", "timeouts", ["act"]),
        ("late", "timeouts", ["act", "act_async"]),
        ("daemon and os._exit", "crashes", ["act", "act_async"]),
        ("stray bytes", "crashes", ["act", "act_in_batch", "act_async"]),
        ("stray line", "crashes", ["act"]),
        ("stray outcome", "crashes", ["act", "act_async"]),
    ],
)
def test_misdeed_costs_that_one_sample(misdeed: str, kind: str, functions: list[str]) -> None:
    for function in functions:
        texts = ["a", "bb", misdeed, "ccc", "dddd"]
        timeout_s = 0.2 if kind == "timeouts" else 10.0
        batch = function == "act_in_batch"
        rewards, metrics = score(texts, function, timeout_s=timeout_s, batch=batch, num_processes=1)
        assert rewards == [1.0, 2.0, DEFAULT, 3.0, 4.0]
        assert metrics == {kind: 1}


@pytest.mark.parametrize(
    ("misdeed", "function"), values_first(["fork", "fork and raise", "fork and stay", "daemon"], FUNCTIONS)
)
def test_processes_that_a_reward_leaves_behind_count_for_nothing_and_end(misdeed: str, function: str) -> None:
    """They are not the reward process, whether they return, raise or stay."""
    before = set(processes())
    texts = ["a", misdeed, "bb", misdeed, "ccc"]
    rewards, metrics = score(texts, function, num_processes=1, timeout_s=5.0, batch=function == "act_in_batch")
    assert rewards == [float(len(text)) for text in texts]
    assert metrics == {}
    assert wait_until(lambda: set(processes()) <= before)


def processes() -> list[int]:
    """Return the processes of this program's rewards, wherever they have gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"RHYMERL_REWARD_PROCESS={os.getpid()}-".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if is_alive(pid)]


def test_reward_processes_are_killed_before_the_trainer_where_memory_is_short() -> None:
    assert score(["x"], "readiness_to_be_killed") == ([1000.0], {})


def test_hanging_batch_is_split_to_find_the_guilty() -> None:
    rewards, metrics = score(["a", "sleep", "bb"], "act_in_batch", batch=True, timeout_s=0.1)
    assert rewards == [1.0, DEFAULT, 2.0]
    assert metrics == {"timeouts": 1}


def test_batch_of_wrong_length_is_split() -> None:
    rewards, metrics = score(["a", "short", "bb"], "act_in_batch", batch=True)
    assert (rewards, metrics) == ([1.0, 1.0, 2.0], {})


def test_every_sample_may_be_bad() -> None:
    rewards, metrics = score(["os._exit"] * 5 + ["raise"] * 5, "act")
    assert rewards == [DEFAULT] * 10
    assert metrics == {"crashes": 5, "errors": 5}


def test_a_dying_process_neither_loses_nor_doubles_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    texts = [f"{'os._exit' if number in (3, 11, 40) else 'fine'}:{number}" for number in range(48)]
    reward = Reward("user_rewards.witness", default=DEFAULT, arguments={"path": str(path)})
    with RewardScorer([reward], chunk_size=8) as scorer:
        for text in texts:
            scorer.submit(text, text, {})
        scores = scorer.collect()
    assert {key: each["witness"] for key, each in scores.items()} == {
        text: DEFAULT if text.startswith("os._exit") else 4.0 for text in texts
    }
    assert Counter(path.read_text().splitlines()) == Counter(texts)


def test_async_rewards_of_a_chunk_run_at_the_same_time() -> None:
    rewards, _ = score(["16"] * 16, "meet", num_processes=1, timeout_s=100)
    assert rewards == [1.0] * 16


def test_async_limit_is_per_sample_and_own_timeouts_are_errors() -> None:
    rewards, metrics = score(["a", "await", "own timeout", "bb"], "act_async", timeout_s=0.3)
    assert rewards == [1.0, DEFAULT, DEFAULT, 2.0]
    assert metrics == {"timeouts": 1, "errors": 1}


def test_async_timeout_spares_the_process() -> None:
    rewards = [Reward("user_rewards.process"), Reward("user_rewards.act_async", timeout_s=0.1)]
    pids = set()
    with RewardScorer(rewards, num_processes=1) as scorer:
        for text in ["a", "await", "bb"]:
            scorer.submit(text, text, {})
            pids.add(scorer.collect()[text]["process"])
    assert len(pids) == 1


def test_a_process_keeps_one_event_loop() -> None:
    rewards, _ = score(["x"] * 9, "Loops.count", num_processes=1, chunk_size=3)
    assert rewards == [1.0] * 9


def test_async_batch() -> None:
    assert score(["a", "bb", "ccc"], "batch_nap", batch=True) == ([1.0, 2.0, 3.0], {})


@pytest.mark.parametrize(("function", "sizes"), values_first(FUNCTIONS, [(1, 3), (3, 16)]))
def test_rewards_do_not_depend_on_processes_chunks_or_order(function: str, sizes: tuple[int, int]) -> None:
    texts = ["x" * number for number in range(20)] + ["raise"]
    settings = {"num_processes": sizes[0], "chunk_size": sizes[1], "batch": function == "act_in_batch"}
    expected = [float(number) for number in range(20)] + [DEFAULT]
    assert score(texts, function, **settings)[0] == expected
    assert score(texts[::-1], function, **settings)[0] == expected[::-1]


def test_printing_and_reading_stdin_harm_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert score(["print"] * 3, "act") == ([5.0] * 3, {})
    assert score(["x"], "reads_stdin") == ([0.0], {})
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "user output" in captured.err


def test_no_heavy_import_in_a_reward_process() -> None:
    assert score(["x"], "has_torch") == ([0.0], {})


def test_start_does_not_count_as_time_of_the_first_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import time\ntime.sleep(0.6)\ndef fine(completion): return 1.0\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardScorer([Reward("slow_to_import.fine", timeout_s=0.05)]) as scorer:
        scorer.submit("a", "x", {})
        assert scorer.collect() == {"a": {"fine": 1.0}}


@pytest.mark.parametrize(
    ("in_process", "message"),
    [("raise OSError('no disk')", "OSError: no disk"), ("import os; os._exit(9)", "code 9")],
)
def test_a_process_that_cannot_start_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: str, message: str
) -> None:
    module = f"import os\nif os.getpid() != {os.getpid()}:\n    {in_process}\ndef fine(completion): return 1.0\n"
    (tmp_path / f"bad_{len(message)}.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardScorer([Reward(f"bad_{len(message)}.fine")]) as scorer:
        scorer.submit("a", "x", {})
        with pytest.raises(RewardError, match=message):
            scorer.collect()


def test_a_function_of_a_module_that_no_dotted_name_can_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "01_rewards.py").write_text("def fine(completion): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardScorer([Reward(importlib.import_module("01_rewards").fine)]) as scorer:
        scorer.submit("a", "x", {})
        assert scorer.collect() == {"a": {"fine": 1.0}}


def test_what_a_hook_raises_at_the_start_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacks_home.py").write_text(LACKS_HOME)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardScorer([Reward("lacks_home.judged")]) as scorer:
        scorer.submit("a", "x", {})
        with pytest.raises(RewardError, match=r"cannot import it: KeyError: 'JUDGE_HOME' \(lacks_home.py:5\)"):
            scorer.collect()


def test_columns_that_cannot_travel_are_an_error() -> None:
    with RewardScorer([Reward("user_rewards.count_columns")]) as scorer:
        scorer.submit("a", "x", {"lock": threading.Lock()})
        with pytest.raises(RewardError, match=r"rewards.count_columns.function=.*cannot be sent"):
            scorer.collect()


def test_failures_are_logged_once_by_reward_and_kind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        score(["raise", "raise", "nan", "os._exit", "a"], "act")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert any("no luck (user_rewards.py:" in message or "finite number" in message for message in messages)
    assert any("its process exited with code 3" in message for message in messages)


def test_nothing_is_left_after_close() -> None:
    num_threads, num_fds, others = threading.active_count(), len(os.listdir("/proc/self/fd")), set(children())
    rewards = [Reward("user_rewards.process"), Reward("user_rewards.act", timeout_s=0.2)]
    scorer = RewardScorer(rewards)
    for number in range(40):
        scorer.submit(str(number), "sleep" if number == 7 else "x", {})
    scorer.collect()
    scorer.submit("hangs while it is closed", "sleep", {})
    assert len(set(children()) - others) == 2
    scorer.close()
    scorer.close()
    assert set(children()) <= others
    assert threading.active_count() == num_threads
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize("busy_with", ["idle", "sleep", "regex"])
def test_reward_processes_die_with_a_killed_parent(busy_with: str) -> None:
    program = f"""
import sys, time
sys.path[:] = {sys.path!r}
from rhymerl.rewards import Reward, RewardScorer
rewards = [Reward("user_rewards.process"), Reward("user_rewards.act", timeout_s=60)]
scorer = RewardScorer(rewards, num_processes=1)
scorer.submit("a", "x", {{}})
pid = int(scorer.collect()["a"]["process"])
if {busy_with!r} != "idle":
    scorer.submit("b", {busy_with!r}, {{}})
    for _ in range(20):
        time.sleep(0.02)
        scorer.submit(str(time.time()), "x", {{}})
print(pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))


def test_ctrl_c_does_not_reach_the_reward_processes() -> None:
    with RewardScorer([Reward("user_rewards.process")], num_processes=1) as scorer:
        scorer.submit("a", "x", {})
        pid = int(scorer.collect()["a"]["process"])
        assert os.getpgid(pid) != os.getpgrp()
