"""An SGLang server that does not outlive the trainer: python -m rhymerl.backends.sglang.serve SERVER-ARGUMENTS

The trainer holds the other end of standard input. When that closes, however the trainer went, the whole process group ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Run `sglang.launch_server` with the same arguments, in a process group of its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before the arguments are read: they name what the plugin registers
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":  # SGLang's processes are spawned, and import this module again
    main()
