"""The guards of conftest.py, each seen to fail."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

pytest_plugins = "pytester"

LEAKS = """
    import os, subprocess, sys, threading, time

    def test_clean():
        worker = threading.Thread(target=time.sleep, args=(0.01,))
        worker.start()
        worker.join()
        subprocess.run([sys.executable, "-c", "0"], check=True)

    def test_sets_variable():
        os.environ["LEFT_BEHIND"] = "1"

    def test_starts_without_the_variable():
        assert "LEFT_BEHIND" not in os.environ

    def test_removes_variable():
        del os.environ["GIVEN"]

    def test_gets_the_variable_back():
        assert os.environ["GIVEN"] == "1"

    def test_starts_thread():
        threading.Thread(target=time.sleep, args=(30,), name="left running", daemon=True).start()

    def test_starts_process():
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
"""


def test_each_leak_fails_its_own_test_by_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace("GRACE_S = 3.0", "GRACE_S = 0.3"))
    pytester.makepyfile(LEAKS)
    monkeypatch.setenv("GIVEN", "1")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=7, errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "*ERROR at teardown of test_sets_variable*",
            "the test leaks the environment variable LEFT_BEHIND",
            "*ERROR at teardown of test_removes_variable*",
            "the test leaks the environment variable GIVEN",
            "*ERROR at teardown of test_starts_thread*",
            "the test leaks the thread 'left running'",
            "*ERROR at teardown of test_starts_process*",
            "the test leaks the process * (*import time; time.sleep(30)*)",
        ]
    )


def test_a_connection_to_another_machine_is_refused() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection,
        pytest.raises(RuntimeError, match="tried to connect to"),
    ):
        connection.connect(("192.0.2.1", 9))


def test_a_connection_to_this_machine_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
    assert os.environ["HF_HUB_OFFLINE"] == "1"
