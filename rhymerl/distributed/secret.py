"""The secret that only the ranks of a run know, from which their messages get a signature."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rhymerl.errors import ConfigError

VARIABLE = "RHYMERL_SECRET"
_LEAST = 16  # characters


def shared_secret() -> bytes:
    """Return `RHYMERL_SECRET` if it is set, else the content of this user's file.

    Launchers hand the variable on. A missing file is made. Raises ConfigError for a secret that is too short, and for a
    file that others can read or that cannot be made.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        state = os.environ.get("XDG_STATE_HOME")
        folder = Path(state) if state else Path.home() / ".local" / "state"
        return _of_file(folder / "rhymerl" / "secret")
    if len(given) < _LEAST:
        raise ConfigError(
            f"{VARIABLE}: {len(given)} characters; expected at least {_LEAST}, such as those of `openssl rand -hex 32`"
        )
    return given.encode()


def _of_file(path: Path) -> bytes:
    instead = f"or set {VARIABLE} to the same for all ranks"
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read().strip()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise ConfigError(
            f"the ranks need a secret in common, but {path}: {error}; make it usable, {instead}"
        ) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the ranks' secret in {path} is open to other users; remove it (a new one is made), {instead}"
        )
    if len(content) < _LEAST:
        raise ConfigError(f"the ranks' secret in {path} is too short; remove it (a new one is made), {instead}")
    return content


def _make(path: Path) -> None:
    """Make the file whole or not at all, and once: ranks begin at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    with suppress(FileExistsError):
        os.link(mine, path)
    mine.unlink()
