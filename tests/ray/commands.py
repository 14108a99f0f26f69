"""`rhymerl fit` with workers in Ray actors, in processes of its own, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rhymerl.callbacks import AtomicCheckpointIO

ROOT = Path(__file__).parents[2]
# Twelve problems, four a step: three steps a pass, six in all. In float64, so that tokens follow from the weights
# alone.
SETTINGS = [
    "fit",
    "--config=quickstart_ray",
    "deterministic=false",
    "model.dtype=float64",
    "trainer.precision=64-true",
    "trainer.max_steps=6",
    "trainer.limit_val_batches=0",
    "task.train_size=12",
    "task.validation_size=4",
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=48",
    "update.learning_rate=1e-3",
    "checkpoint.every_n_steps=1",
    "record_rollouts=true",
]


def start(run_dir: Path, *settings: str, host: str | None = None) -> subprocess.Popen[str]:
    """Start `rhymerl fit`, perhaps in a network namespace; it and its cluster share the variable RUN_OF_TEST."""
    return subprocess.Popen(
        [
            *(["ip", "netns", "exec", host] if host else []),
            sys.executable,
            "-m",
            "rhymerl",
            *SETTINGS,
            f"run_dir={run_dir}",
            *settings,
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RUN_OF_TEST": str(run_dir),
            "TMPDIR": str(temporary(run_dir.parent)),
        },
        start_new_session=True,
    )


def temporary(tmp_path: Path) -> Path:
    """A folder of a test's own with a short path, since sockets lie below it."""
    folder = Path("/tmp") / f"rrl{abs(hash(str(tmp_path))) % 10**8}"
    folder.mkdir(exist_ok=True)
    return folder


def finish(process: subprocess.Popen[str], *, timeout_s: float = 900) -> dict[str, Any]:
    """Its result. Raises AssertionError, with its words, where it failed."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def fit(run_dir: Path, *settings: str) -> dict[str, Any]:
    return finish(start(run_dir, *settings))


def one_process(run_dir: Path, *settings: str) -> dict[str, Any]:
    """The same run without Ray."""
    return fit(run_dir, "backend=embedded", "workers=null", "run_ahead='off'", *settings)


def answers(run_dir: Path) -> list[tuple[Any, ...]]:
    """Epoch, prompt, sample and tokens of all that was recorded, in its order."""
    with gzip.open(run_dir / "rollouts.jsonl.gz", "rt") as file:
        found = [json.loads(line) for line in file]
    return [(row["epoch"], row["prompt_id"], row["sample"], tuple(row["response_tokens"])) for row in found]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Those of its last checkpoint, whole."""
    path = run_dir / "checkpoints" / "last.ckpt"
    return AtomicCheckpointIO().load_checkpoint(path, weights_only=True)["state_dict"]


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def processes(run_dir: Path, name: str = "") -> list[int]:
    """Process ids of a run and its cluster, of those whose command line begins so."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"RUN_OF_TEST={run_dir}".encode() in variables and command.startswith(name):
            found.append(int(folder.name))
    return found


def actors(run_dir: Path) -> list[int]:
    """Those that have been made: one that is stopped before is missed only when `backend.start_timeout_s` is over."""
    made = set(processes(run_dir, "ray::RayWorker")) - set(processes(run_dir, "ray::RayWorker.__init__"))
    return sorted(made)


def wait_until_gone(run_dir: Path, within_s: float = 200) -> None:
    """Raise AssertionError where processes or files of its cluster stay."""
    until = time.monotonic() + within_s
    while (left := processes(run_dir)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{each}/cmdline").read_text() for each in left]


def end(sequence: Sequence[int], sign: int = signal.SIGKILL) -> None:
    for number in sequence:
        try:
            os.kill(number, sign)
        except ProcessLookupError:
            continue
