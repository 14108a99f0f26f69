"""Triton's interpreter in a process of its own, since the choice of it is made when triton is imported, by a variable.

Parent and child exchange pickles on the child's standard input and output: the arguments of a function one way, what it
returns the other.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib import import_module
from typing import Any


class Interpreter:
    """A kernel launcher, such as "rhymerl.engine.triton_draw:draw_with_logprobs", on the CPU; `with` ends it.

    What it did to its arguments is in `arguments` after a call.
    """

    def __init__(self, function: str) -> None:
        self._function = function

    def __enter__(self) -> Interpreter:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, self._function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait(600)
        self._process.stdout.close()

    def __call__(self, *args: Any, **options: Any) -> Any:
        pickle.dump((args, options), self._process.stdin)
        self._process.stdin.flush()
        found, self.arguments = pickle.load(self._process.stdout)  # an EOFError: the child's own error is on stderr
        return found


def _serve(name: str) -> None:
    """Answer until the parent closes the pipe."""
    module, _, function = name.partition(":")
    call = getattr(import_module(module), function)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what prints, prints elsewhere
    while requests.peek(1):
        args, options = pickle.load(requests)
        pickle.dump((call(*args, **options), args), answers)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
