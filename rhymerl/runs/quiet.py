"""Keep other libraries' chatter off the terminal, in whole runs only: importing rhymerl silences nothing."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Read by the libraries when they are imported; what the user has set stays.
_VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
# Lightning sets the level of its outer loggers when it is imported; these, from which the chatter comes, it leaves
# alone.
_LOGGERS = (
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.utilities.rank_zero",
)
_WARNINGS = (
    r".*LeafSpec.*",
    r".*does not have many workers.*",
    r"Checkpoint directory .* exists and is not empty.*",
    r".*`Trainer\(barebones=.*",
    r".*litlogger.*",
    r"The number of training batches .* is smaller than the logging interval.*",
    r"GPU available but not used.*",
    r"Using ModelCheckpoint with manual optimization.*",
    r"Found \d+ module\(s\) in eval mode at the start of training.*",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings, errors and rhymerl's own words still come through; everything is as before afterwards."""
    variables = {name: value for name, value in _VARIABLES.items() if name not in os.environ}
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    os.environ.update(variables)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    before, threading.excepthook = threading.excepthook, _quiet_thread
    try:
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        threading.excepthook = before
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for name in variables:
            os.environ.pop(name, None)


def _quiet_thread(arguments: threading.ExceptHookArgs) -> None:
    """Silence TensorBoard's writer thread: its error is raised again, in one line, at the next write."""
    if not (isinstance(arguments.exc_value, OSError) and type(arguments.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(arguments)
