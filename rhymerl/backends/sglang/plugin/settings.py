"""The settings that an engine's processes read: a file that an environment variable names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rhymerl.backends.remote.counters import Counters
from rhymerl.backends.remote.drafter_feed import FeedReader
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.backends.sglang.plugin.names import VARIABLE
from rhymerl.backends.sglang.plugin.probe import Findings
from rhymerl.config import describe, instantiate
from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError, ConfigError

COUNTERS, FEED = "counters", "feed"  # in the folder
_REPORT = "plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The drafter's config, where its class is imported from, and the folder that trainer and engine share."""

    drafter: Mapping[str, Any]
    folder: str
    paths: tuple[str, ...]

    @classmethod
    def of(cls, drafter: Drafter, folder: Path) -> EngineSettings:
        """Describe a drafter, with this process's import path, so that a class of the user's own is found there too.

        Raises ConfigError for a drafter that cannot be built again in the engine's process.
        """
        try:
            described = describe(drafter)
        except TypeError as error:
            raise ConfigError(
                f"drafter={type(drafter).__name__}: cannot be built again in SGLang's process ({error}); "
                "give it by class and settings, or take backend=embedded"
            ) from error
        return cls(drafter=described, folder=str(folder), paths=tuple(path or os.getcwd() for path in sys.path))

    def open(self) -> Path:
        """Prepare the folder for an engine that is about to start; returns the file that it is to be told of."""
        folder = Path(self.folder)
        Counters(folder / COUNTERS, new=True)
        (folder / _REPORT).unlink(missing_ok=True)
        file = folder / "engine.json"
        file.write_text(json.dumps(asdict(self), indent=1))
        return file

    @classmethod
    def of_this_process(cls) -> EngineSettings:
        """Read the file that the environment variable names. Raises BackendError when it names no such file."""
        path = os.environ.get(VARIABLE, "")
        try:
            content = json.loads(Path(path).read_text())
            return cls(drafter=content["drafter"], folder=content["folder"], paths=tuple(content["paths"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackendError(
                f"{VARIABLE}={path!r}: expected the file that `rhymerl sglang-args` writes ({error!r})"
            ) from error

    def report(self, found: Findings) -> None:
        """Say that the plugin is in place, and what it has not found; each process of the engine says the same."""
        path = Path(self.folder) / _REPORT
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(found.to_json())
        os.replace(draft, path)

    @staticmethod
    def read_report(folder: Path) -> Findings:
        """Return what the engine with this `folder` lacks. Raises BackendError when it has not loaded the plugin."""
        try:
            return Findings.from_json((folder / _REPORT).read_text())
        except FileNotFoundError as error:
            raise BackendError(
                "SGLang has not loaded rhymerl's plugin: is rhymerl installed in its environment, and SGLANG_PLUGINS unset? "
                "Its log tells why a plugin has failed"
            ) from error

    def drafting(self, n: int, vocabulary: int) -> EngineDrafting:
        """The drafter, and what stands between it and the engine."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        drafter: Drafter = instantiate(self.drafter, key="drafter")
        folder = Path(self.folder)
        feed, counters = FeedReader(folder / FEED, drafter), Counters(folder / COUNTERS)
        return EngineDrafting(drafter, n, vocabulary=vocabulary, feed=feed, counters=counters)
