"""The words about a run beside its steps: what is trained, on what, where; and how to resume after an early end."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rhymerl.backends.base import Backend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.data import PromptDataModule
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import UsageError
from rhymerl.training.checkpoint import step_of
from rhymerl.training.module import RhymeModule

_GIT_S = 2.0  # for an answer of git


def banner(module: RhymeModule, datamodule: PromptDataModule, trainer: Any, run_dir: Path) -> str:
    """Return a block of lines, before a run begins."""
    lines = {**_what(module, datamodule, trainer), "run_dir": str(run_dir)}
    if (words := embedded_on_gpu(module.backend, trainer.strategy.root_device.type)) is not None:
        lines["engine"] = words
    if _rounds_coarsely(module, trainer):
        lines["rounding"] = (
            "bfloat16: another drafter may change single tokens, not their distribution (docs/correctness.md)"
        )
    return "\n".join(f"{name:<8} {words}" for name, words in lines.items())


def facts(trainer: Any, module: RhymeModule) -> dict[str, str]:
    """Return what the header of a report says of a run."""
    data, path = trainer.datamodule, module.model.name_or_path
    what = _what(module, data, trainer)
    program = Path(sys.argv[0]).name.replace("__main__.py", "rhymerl")
    found = {
        **what,
        "model": f"{path}: {what['model']}" if path else what["model"],
        "data": str(data.train) if isinstance(data.train, str | Path) else type(data.task or data.train).__name__,
        "command": shlex.join([program, *sys.argv[1:]]),
        "commit": _commit(),
    }
    return {name: words for name, words in found.items() if words is not None}


def _commit() -> str | None:
    """Return the commit of the current directory, and whether files differ from it; None where there is none."""
    git = partial(subprocess.run, capture_output=True, text=True, check=False, timeout=_GIT_S)
    try:
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout if commit else ""
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{commit}, with changes" if changed else commit or None


def _what(module: RhymeModule, datamodule: PromptDataModule, trainer: Any) -> dict[str, str]:
    return {"model": _model(module), "device": _device(trainer), "prompts": _prompts(module, datamodule)}


def _model(module: RhymeModule) -> str:
    sizes = [(each.numel(), each.requires_grad) for each in module.model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    share = "all trained" if trained == total else f"{trained:,} trained"
    return f"{type(module.model).__name__}, {total:,} parameters, {share}"


def _device(trainer: Any) -> str:
    device = trainer.strategy.root_device
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    ranks = f", {trainer.world_size} ranks" if trainer.world_size > 1 else ""
    return f"{name}, {trainer.precision}{ranks}"


def embedded_on_gpu(backend: Backend, device_type: str) -> str | None:
    """Return what to say of an engine that is meant for development, on a device of type "cuda"; None of any other."""
    if device_type != "cuda" or not isinstance(backend, EmbeddedBackend):
        return None
    return "embedded, a default for development: on a GPU backend=sglang is several times as fast (docs/sglang.md)"


def _rounds_coarsely(module: RhymeModule, trainer: Any) -> bool:
    """Return whether weights, passes or an engine of its own have 16 bits."""
    found = (trainer.precision, module.model.dtype, getattr(module.backend, "dtype", None))
    return any("16" in str(each) for each in found)


def _prompts(module: RhymeModule, datamodule: PromptDataModule) -> str:
    loader = datamodule.train_loader
    assert loader is not None
    words = f"{len(loader.prompts):,}, {loader.prompts_per_step:,} a step with {module.rollout.group_size} answers each"
    held_out = datamodule.num_validation_prompts
    return f"{words}; {held_out:,} held out" if held_out else words


def how_to_go_on(run_dir: Path) -> str | None:
    """Return where the run is, and with what words it goes on; None without a checkpoint."""
    steps = [step for path in run_dir.glob("checkpoints/step=*.ckpt") if (step := step_of(path)) is not None]
    if not steps:
        return None
    return (
        f"The run in {run_dir} is saved up to step {max(steps)}; to go on: rhymerl resume {shlex.quote(str(run_dir))}"
    )


@contextmanager
def noting_how_to_go_on(run_dir: Path) -> Iterator[None]:
    """Context in which what ends the run carries `how_to_go_on` as a note, on the first rank.

    Errors of wrong input carry none.
    """
    try:
        yield
    except BaseException as error:
        if is_first_rank() and not isinstance(error, UsageError) and (note := how_to_go_on(run_dir)):
            error.add_note(note)
        raise
