"""Kinds of configs, by command: each kind has a setting that the kinds above it in the table lack."""

from __future__ import annotations

from pathlib import Path

from rhymerl.config.files import locate, packaged_names, read_chain
from rhymerl.errors import ConfigError

_OWN_SETTING = {  # by the command that takes the kind
    "fit": "module",
    "rollout": "passes",
    "replay": "from_epoch",
    "simulate": "lengths",
    "bench rollout": "pairs",
    "bench drafter": "edits",
    "bench costs": "measure",
    "warmstart": "warmstart",
    "sglang-args": "out",
}


def names_of(kind: str) -> list[str]:
    """Return the packaged configs of a kind; all of them for one that is not known."""
    return [name for name in packaged_names() if kind not in _OWN_SETTING or kind_of(locate(name)) == kind]


def check_kind(name_or_path: str | Path, kind: str) -> None:
    """Raise ConfigError where there is no such config, and for one that another command takes."""
    path = locate(name_or_path, lambda: names_of(kind))
    found = kind_of(path)
    if kind not in _OWN_SETTING or found == kind:
        return
    known = ", ".join(names_of(kind))
    if found is not None:
        raise ConfigError(
            f"--config {name_or_path}: is a config of rhymerl {found}, not of rhymerl {kind}; "
            f"expected the path of a .yaml file, or one of {known}"
        )
    raise ConfigError(
        f"--config {name_or_path}: is no config of rhymerl {kind}, as it lacks {_OWN_SETTING[kind]!r}; build on one of {known}"
    )


def kind_of(path: Path) -> str | None:
    """Return the command whose config a file is; None for one of no command."""
    settings = {str(name) for file in read_chain(path) for name in file.body}
    return next((kind for kind, own in _OWN_SETTING.items() if own in settings), None)
