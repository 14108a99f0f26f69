"""What this machine has for a run, and what a run would use of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rhymerl.config.interpolation import packages_folder
from rhymerl.distributed.cores import usable_cores
from rhymerl.version import __version__

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30
_LEAST_SHARED_BYTES = 1 * _GIB  # with which Ray and several ranks have room for messages
_LEAST_DISK_BYTES = 5 * _GIB  # some checkpoints of a small model


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator."""

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An extra of the package, as in pip install 'rhymerl[NAME]'; `missing` are absent or wrong requirements."""

    name: str
    missing: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as a run finds it."""

    versions: Mapping[str, str]  # of Python, this package and what it requires
    devices: Sequence[Device]
    cpu_cores: int  # that this process may use
    memory_bytes: int
    free_memory_bytes: int  # what could be had without swapping
    shared_memory_bytes: int | None  # free in /dev/shm; None where there is none
    free_disk_bytes: int  # where runs would go
    extras: Sequence[Extra]
    missing_walls: Mapping[str, str]  # of the sandbox for programs, with the reason
    uses: Mapping[str, str]  # part -> what a run with default settings takes
    problems: Sequence[str]  # sentences, each with what to do


def examine(run_dir: Path = Path("runs")) -> Machine:
    """Look at this machine; starts nothing but a sandbox that tries its walls."""
    devices, walls = _devices(), _missing_walls()
    extras, unmet = _extras(), _unmet(_requirements(None))
    total, free = _memory()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None
    disk = shutil.disk_usage(next(each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.exists()))
    return Machine(
        versions=_versions(),
        devices=devices,
        cpu_cores=usable_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        shared_memory_bytes=shared,
        free_disk_bytes=disk.free,
        extras=extras,
        missing_walls=walls,
        uses=_uses(devices, {each.name for each in extras if not each.missing}, walls),
        problems=list(_problems(unmet, devices, shared, disk.free)),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "rhymerl": __version__}
    found |= {name: version for name, _ in _requirements(None) if (version := _version(name)) is not None}
    import torch

    if torch.version.cuda:
        found["cuda of torch"] = torch.version.cuda
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(extra: str | None) -> list[tuple[str, str]]:
    """Return what the package requires on this machine, or one of its extras, as (name, requirement)."""
    from packaging.requirements import Requirement

    def is_asked(each: Requirement, extra: str) -> bool:
        return each.marker is None or each.marker.evaluate({"extra": extra})

    known = map(Requirement, metadata.requires("rhymerl") or ())
    asked = [each for each in known if is_asked(each, extra or "") and not (extra and is_asked(each, ""))]
    return [(each.name, f"{each.name}{each.specifier}") for each in asked]


def _unmet(requirements: Iterable[tuple[str, str]]) -> list[str]:
    from packaging.requirements import Requirement

    return [
        f"{text} ({version or 'not installed'})"
        for name, text in requirements
        for version in [_version(name)]
        if version is None or not Requirement(text).specifier.contains(version, prereleases=True)
    ]


def _extras() -> list[Extra]:
    names = metadata.metadata("rhymerl").get_all("Provides-Extra") or []
    return [Extra(name=name, missing=_unmet(_requirements(name))) for name in names]


def _devices() -> list[Device]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(name=torch.cuda.get_device_name(index), memory_bytes=total, free_bytes=free))
    return found


def _memory() -> tuple[int, int]:
    """Return the machine's memory and what is free of it, or what its container may have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = Path("/proc/meminfo")
    lines = found.read_text().splitlines() if found.exists() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
    limit, used = (_number_in(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or limit >= total:
        return total, available
    return limit, min(available, max(limit - (used or 0), 0))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # `max`: no limit
        return None


def _missing_walls() -> Mapping[str, str]:
    if sys.platform != "linux":
        return {"sandbox": f"it needs Linux, and this is {sys.platform}"}
    from rhymerl.rewards.sandbox.run import SandboxError, missing_walls

    try:
        return missing_walls()
    except SandboxError as error:
        return {"sandbox": str(error)}


def _uses(devices: Sequence[Device], extras: set[str], walls: Mapping[str, str]) -> dict[str, str]:
    import torch
    from lightning import Trainer

    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    device = trainer.strategy.root_device
    ranks = f", {trainer.world_size} ranks" if trainer.world_size > 1 else ""
    has_triton = importlib.util.find_spec("triton") is not None
    kernel = "Triton's kernel" if devices and has_triton else "torch" if devices else "compiled loops on the CPU"
    return {
        "device": f"{device}{ranks}, {trainer.precision}",
        "threads": f"{torch.get_num_threads()} of torch",
        "engine": _engine(len(devices), "sglang" in extras),
        "sampling": kernel,
        "sandbox": "without " + ", ".join(f"{name} ({why})" for name, why in walls.items()) if walls else "all walls",
        "packages": str(packages_folder()),
    }


def _engine(num_devices: int, has_sglang: bool) -> str:
    """Return which engine to take here, and why."""
    if num_devices == 0:
        return "embedded, the default: SGLang's engine is for GPUs"
    faster = "wherever both have been measured on a GPU, it is several times as fast"
    lighter = "embedded, the default, needs no second copy of the weights and starts at once"
    if has_sglang:
        return f"backend=sglang: {faster} (docs/gpu.md); {lighter}"
    return f"{lighter}; backend=sglang is not installed: {faster} (docs/gpu.md)"


def _problems(unmet: Sequence[str], devices: Sequence[Device], shared: int | None, disk: int) -> Iterable[str]:
    if unmet:
        yield f"Requirements that are not met: {', '.join(unmet)}; pip install rhymerl brings them."
    if not devices and Path("/proc/driver/nvidia/version").exists():
        yield "There is a driver for NVIDIA GPUs, but torch finds none: install torch's build for its CUDA."
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        yield (
            f"/dev/shm has {shared / _GIB:.1f} GiB free, and Ray and SGLang want more than "
            f"{_LEAST_SHARED_BYTES / _GIB:.0f}: give the container more (docker run --shm-size)."
        )
    if disk < _LEAST_DISK_BYTES:
        yield f"The disk has {disk / _GIB:.1f} GiB free, which may be too little for checkpoints: set run_dir elsewhere."


def lines_of(machine: Machine) -> list[tuple[str, str]]:
    """Return what people read, as (name, words)."""
    ready = [each.name for each in machine.extras if not each.missing]
    absent = [f"{each.name} ({', '.join(each.missing)})" for each in machine.extras if each.missing]
    shared = machine.shared_memory_bytes
    return [
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("devices", "; ".join(map(_device_words, machine.devices)) or "no GPU that torch can use"),
        ("CPU", f"{machine.cpu_cores} cores for this process"),
        ("memory", f"{machine.free_memory_bytes / _GIB:.1f} of {machine.memory_bytes / _GIB:.1f} GiB free"),
        ("shared", f"{shared / _GIB:.1f} GiB free in /dev/shm" if shared is not None else "no /dev/shm"),
        ("disk", f"{machine.free_disk_bytes / _GIB:.1f} GiB free"),
        ("extras", ", ".join(ready) or "none"),
        ("not there", "; ".join(absent) or "nothing"),
        *((f"uses {name}" if name == "device" else name, words) for name, words in machine.uses.items()),
        *(("PROBLEM", words) for words in machine.problems),
    ]


def _device_words(device: Device) -> str:
    return f"{device.name}, {device.free_bytes / _GIB:.1f} of {device.memory_bytes / _GIB:.1f} GiB free"
