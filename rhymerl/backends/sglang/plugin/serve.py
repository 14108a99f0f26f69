"""An SGLang server that does not outlive the trainer: python -m rhymerl.backends.sglang.plugin.serve SERVER-ARGUMENTS

The trainer holds the other end of standard input. When that closes, however the trainer went, the whole process group
ends, and the files go that a trainer could not remove which was killed: among them may be a whole model, in memory.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rhymerl.backends.sglang.plugin.names import FOLDERS, VARIABLE


def main() -> None:
    """Run `sglang.launch_server` with the same arguments, in a process group of its own."""
    folders = left_behind(sys.argv, os.environ.get(VARIABLE, ""))
    threading.Thread(target=_end_with_parent, args=(folders,), daemon=True).start()
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before the arguments are read: they name what the plugin registers
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")


def left_behind(arguments: Sequence[str], settings: str) -> list[str]:
    """Return the folders that a backend has made for the engine of these arguments and of the file `settings`.

    The weights' folder is in the backend's own, or its name begins like that one's, or else is somebody's.
    """
    own = Path(settings).parent
    if not own.name.startswith(FOLDERS):
        return []
    weights = [folder for word, folder in pairwise(arguments) if word == "--model-path"]
    return [str(own), *(folder for folder in weights if f"{Path(folder).name}-".startswith(f"{own.name}-"))]


def _end_with_parent(folders: Sequence[str]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    try:
        if folders:  # by a process that outlives the group, whose end must not wait for a disk
            subprocess.Popen(["rm", "-rf", "--", *folders], start_new_session=True)
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":  # SGLang's processes are spawned, and import this module again
    main()
