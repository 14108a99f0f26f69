"""Guards that hold for every test: nothing leaks, nothing reaches the network, randomness starts at the same place.

torch is not imported here: a test pays for it only when it needs it.
"""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["RHYMERL_SECRET"] = "known to the ranks of all tests"  # else a file in the user's home
os.environ["OMP_WAIT_POLICY"] = "passive"  # as the command line sets it
if os.environ.get("ATEN_CPU_CAPABILITY") in (
    "default",
    "avx2",
):  # as on a CPU without AVX-512: torch asks oneDNN what it has, too
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; torch and numba read this when they are imported
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["NUMBA_NUM_THREADS"] = "1"

# A shell starts what runs in the background deaf to Ctrl-C, nohup to a hang-up, and children inherit that: tests send
# both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

# The same examples in every run, and no verdict from the clock of a busy machine.
settings.register_profile("rhymerl", derandomize=True, deadline=None)
settings.load_profile("rhymerl")

Leak = TypeVar("Leak")

GRACE_S = 3.0  # for threads and processes that are on their way out

# Set by libraries as a side effect; put back after each test without a complaint.
LIBRARY_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",  # lightning: Trainer(deterministic=True)
    "PL_GLOBAL_SEED",  # lightning: seed_everything
    "PL_SEED_WORKERS",  # lightning: seed_everything
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning, at import
    "TORCHINDUCTOR_CACHE_DIR",  # torch, at the first import of its compiler
    "TRITON_CACHE_DIR",  # the same, when it compiles for a GPU
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # the same, when it has compiled for the CPU
}


def is_library_thread(thread: threading.Thread) -> bool:
    """Daemon threads that a library starts once and keeps for the life of the process."""
    return (
        isinstance(thread, threading._DummyThread)  # not Python's: torch's autograd on a device
        or type(thread).__module__ == "tqdm._monitor"
        or thread.name == "InductorSubproc"  # torch's compiler for a GPU hears its worker
    )


def is_library_process(command: str) -> bool:
    """Helpers of the standard library and of torch that live as long as the process."""
    return any(
        name in command
        for name in (
            "multiprocessing.resource_tracker",
            "multiprocessing.forkserver",
            "torch_shm_manager",
            "torch/_inductor/compile_worker",
        )
    )


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves environment variables, threads, child processes or a process group behind."""
    variables, threads, processes = dict(os.environ), set(threading.enumerate()), children()
    yield
    leaks = [
        *leaked_variables(variables),
        *leaked_threads(threads),
        *leaked_processes(processes),
        *leaked_process_group(),
    ]
    if leaks:
        pytest.fail("the test leaks " + "; ".join(leaks), pytrace=False)


def leaked_variables(before: dict[str, str]) -> list[str]:
    """Name every variable that was set, changed or removed, and put the environment back."""
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"the environment variable {name}" for name in sorted(changed - LIBRARY_VARIABLES)]


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Name every thread that is still running after the grace period."""

    def left() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and not is_library_thread(t)]

    return [f"the thread {thread.name!r}" for thread in settle(left)]


def leaked_processes(before: dict[int, str]) -> list[str]:
    """Name every child process that is still running after the grace period, and end it."""

    def left() -> list[tuple[int, str]]:
        multiprocessing.active_children()  # reaps those that have ended
        return [
            (pid, command)
            for pid, command in children().items()
            if pid not in before and not is_library_process(command)
        ]

    found = settle(left)
    for pid, _ in found:
        os.kill(pid, signal.SIGKILL)
    return [f"the process {pid} ({command})" for pid, command in found]


def leaked_process_group() -> list[str]:
    """Name torch's default process group when it is still there, and destroy it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["torch's default process group"]


def settle(left: Callable[[], list[Leak]]) -> list[Leak]:
    """Return what is still there after at most GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def children() -> dict[int, str]:
    """Running child processes and their command lines; zombies are not running. Empty where there is no /proc."""
    found = {}
    for pid in child_pids():
        stat = Path("/proc", pid, "stat")
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid() and state != "Z":
                command = stat.with_name("cmdline").read_bytes().replace(b"\0", b" ")
                found[int(pid)] = command.decode(errors="replace").strip()[:200]
        except OSError:  # it ended while we looked
            continue
    return found


def child_pids() -> list[str]:
    """The kernel's own lists of each thread's children; all processes, which take milliseconds, where it keeps none."""
    if not Path("/proc/self/task").is_dir():
        return []
    lists = glob("/proc/self/task/*/children")
    if not lists:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    pids: list[str] = []
    for name in lists:
        with suppress(OSError):  # the thread has ended; its children are another thread's
            pids += Path(name).read_text().split()
    return pids


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Seed what has been imported, and put torch's process-wide switches back afterwards."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: connections leave this machine in no test."""
    if event != "socket.connect" or not isinstance(arguments[1], tuple):
        return
    host = str(arguments[1][0])
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host in {"localhost", os.uname().nodename}
    if not local:
        raise RuntimeError(f"a test tried to connect to {host}")


sys.addaudithook(refuse_network)
