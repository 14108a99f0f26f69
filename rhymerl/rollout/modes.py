"""What a worker does that has finished its queue while others have not, and what becomes of it."""

from __future__ import annotations

from typing import Literal

from rhymerl.errors import ConfigError

RunAhead = Literal["off", "draft", "keep"]


def check_run_ahead(run_ahead: str, max_staleness: int) -> None:
    """Raise ConfigError for a mode that does not exist, or that the staleness allowed (in steps) rules out.

    off: it waits. draft: it begins the next step, whose tokens are drawn again after the update, along the earlier ones as drafts.
    keep: it begins the next step, and its tokens stay in the answers.
    """
    if run_ahead not in ("off", "draft", "keep"):
        raise ConfigError(f"run_ahead={run_ahead!r}: expected one of off, draft, keep")
    if max_staleness not in (0, 1):
        raise ConfigError(f"max_staleness={max_staleness}: expected 0 or 1")
    if run_ahead == "keep" and max_staleness == 0:
        raise ConfigError(
            "max_staleness=0: run_ahead=keep trains on tokens of the policy before; expected max_staleness=1, or "
            "run_ahead=draft or off"
        )
