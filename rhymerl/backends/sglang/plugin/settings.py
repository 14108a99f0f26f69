"""The settings that an engine's processes read: a file that an environment variable names."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rhymerl.backends.remote.drafter_feed import Counters, FeedReader
from rhymerl.backends.sglang.nodes import uniform
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.backends.sglang.plugin.names import VARIABLE
from rhymerl.backends.sglang.plugin.probe import Findings
from rhymerl.backends.sglang.plugin.warm_up import warm_up
from rhymerl.budgets import Budget, FixedBudget, GoodputBudget
from rhymerl.config import describe, instantiate
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.wrapped import innermost
from rhymerl.errors import BackendError, ConfigError

COUNTERS, FEED = "counters", "feed"  # in the folder
_REPORT = "plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The configs of drafter and budget, the import path of their classes, and the folder shared with the trainer."""

    drafter: Mapping[str, Any]
    budget: Mapping[str, Any]
    folder: str
    paths: tuple[str, ...]
    has_route: bool = False  # the trainer does not write to the folder: it sends the history over HTTP

    @classmethod
    def of(cls, drafter: Drafter, budget: Budget | None, folder: Path, *, has_route: bool = False) -> EngineSettings:
        """Describe a drafter and a budget, by default goodput's, for the engine's process.

        This process's import path is included, so that a class of the user's own is found there. Raises ConfigError for
        one that cannot be built again in the engine's process.
        """
        return cls(
            drafter=_described("drafter", drafter),
            budget=_described("budget", GoodputBudget() if budget is None else budget),
            folder=str(folder),
            paths=tuple(path or os.getcwd() for path in sys.path),
            has_route=has_route,
        )

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
            names = ("drafter", "budget", "folder")
            known = {name: content[name] for name in names}
            return cls(**known, paths=tuple(content["paths"]), has_route=content.get("has_route", False))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackendError(
                f"{VARIABLE}={path!r}: expected the file that `rhymerl sglang-args` writes ({error!r})"
            ) from error

    def report(self, found: Findings) -> None:
        """Report that the plugin is in place, and what it lacks; each process of the engine reports the same."""
        path = Path(self.folder) / _REPORT
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(found)))
        os.replace(draft, path)

    @staticmethod
    def read_report(folder: Path) -> Findings:
        """Return what the engine with this `folder` lacks. Raises BackendError when it has not loaded the plugin."""
        try:
            return Findings(**json.loads((folder / _REPORT).read_text()))
        except FileNotFoundError as error:
            raise BackendError(
                "SGLang has not loaded rhymerl's plugin: is rhymerl installed in its environment, and SGLANG_PLUGINS unset? "
                "Its log tells why a plugin has failed"
            ) from error

    def budget_of(self, n: int) -> Budget:
        """Return the budget, limited to the nodes of an engine whose passes have at most `n` tokens of a request."""
        return uniform(instantiate(self.budget, key="budget"), n - 1)

    def drafting(self, budget: Budget, vocabulary: int) -> EngineDrafting:
        """Return the drafter with its link to the engine; messages unread by an earlier engine are removed."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        drafter: Drafter = instantiate(self.drafter, key="drafter")
        folder = Path(self.folder)
        for left in (folder / FEED).glob("*"):
            left.unlink()
        feed, counters = FeedReader(folder / FEED, drafter), Counters(folder / COUNTERS)
        return EngineDrafting(drafter, budget, vocabulary=vocabulary, feed=feed, counters=counters)

    def warm_up(self, n: int, vocabulary: int) -> None:
        """Compile what drafting calls, after `drafting`; but never call a user's own drafter, which may count calls."""
        for budget in (FixedBudget(n - 1), self.budget_of(n)):
            drafter: Drafter = instantiate(self.drafter, key="drafter")
            if type(innermost(drafter)).__module__.startswith("rhymerl."):
                # By this clock each pass takes as long as any other: then drafts pay, and there is no pass that a slow
                # machine leaves out.
                warm_up(EngineDrafting(drafter, budget, vocabulary=vocabulary, clock=itertools.count().__next__))


def _described(key: str, component: Drafter | Budget) -> Mapping[str, Any]:
    try:
        return describe(component)
    except TypeError as error:
        raise ConfigError(
            f"{key}={type(component).__name__}: cannot be built again in SGLang's process ({error}); "
            "give it by class and settings, or take backend=embedded"
        ) from error
