"""What the parts of `gpu.py` run with: packages from wheels, variables, and the card."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import ROOT, Part, graphs

PLUGIN = "[sglang.srt.plugins]\nrhymerl = rhymerl.backends.sglang.plugin:register\n"
OF_TESTS = "RHYMERL_SGLANG_GPU"  # tests/sglang/test_gpu.py
GPU = "a GPU"
CPU = "cpu"  # in the place of a card
# In a process of its own, because one that asks keeps some of the card's memory.
ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def unpack(wheels: Path, site: Path) -> None:
    """Install the wheels into `site`, and tell SGLang of the plugin of this tree, which need not be installed."""
    files = sorted(map(str, wheels.glob("*.whl"))) if wheels.is_dir() else []
    done = site / ".done"
    if files and (not done.exists() or done.read_text().split() != files):
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site))
        if subprocess.run([*pip, *files], check=False).returncode:  # one is broken: the others bring rows all the same
            for file in files:
                if subprocess.run([*pip, "--upgrade", file], check=False).returncode:
                    print(f"{file}: cannot be installed; parts that need it are left out", flush=True)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text("\n".join(files))
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    try:
        importlib.metadata.version("rhymerl")
    except importlib.metadata.PackageNotFoundError:
        about = site / "rhymerl-0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rhymerl\nVersion: 0\n")
        (about / "entry_points.txt").write_text(PLUGIN)
    importlib.invalidate_caches()


def card(variables: Mapping[str, str]) -> str | None:
    """Return the name of the GPU that torch sees, or None."""
    if importlib.util.find_spec("torch") is None:
        return None
    asked = subprocess.run([sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def short(name: str) -> str:
    """Return a card's name for a file: h100 of "NVIDIA H100 80GB HBM3"."""
    model = re.search(r"\b[A-Z]{1,3}\d{2,4}\b", name)
    return model[0].lower() if model else re.sub(r"\W+", "-", name.lower()).strip("-")


def missing(part: Part, *, has_card: bool) -> list[str]:
    """Return what the part needs and is not there. Packages of `unpack` are there."""
    return [
        *([GPU] if part.needs_gpu and not has_card else []),
        *(name for name in part.needs if importlib.util.find_spec(name) is None),
    ]


def environment(
    site: Path, *, folder: Path, server: Sequence[str] = (), variables: Sequence[str] = (), on_cpu: bool = False
) -> dict[str, str]:
    """Return the environment of the parts: the checkout, the wheels, no network, and unbuffered output.

    A kill swallows no output. Tests are told of SGLang's further arguments and variables by it. What numba compiles
    stays in `folder`, next to a card.
    """
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    of_machine = {
        "arguments": _values([*graphs(server), *server]),
        "environment": dict(each.split("=", 1) for each in variables),
    }
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", OF_TESTS: json.dumps(of_machine)}
    if on_cpu:
        return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""}
    return {"NUMBA_CACHE_DIR": str(folder / "numba"), **os.environ, **own}


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE with numbers and true or false as such."""
    found: dict[str, Any] = dict(word.split("=", 1) for word in words)
    for name, value in found.items():
        with suppress(ValueError):
            found[name] = json.loads(value)
    return found
