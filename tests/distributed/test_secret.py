"""The secret that only the ranks of a run know: from the environment, or from a file that is this user's alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rhymerl.distributed.secret import shared_secret
from rhymerl.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RHYMERL_SECRET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rhymerl" / "secret"


def test_that_of_the_environment_comes_first(path, monkeypatch):
    monkeypatch.setenv("RHYMERL_SECRET", "0123456789abcdef")
    assert shared_secret() == b"0123456789abcdef"
    assert not path.exists()


def test_one_that_is_too_short_is_refused(path, monkeypatch):
    monkeypatch.setenv("RHYMERL_SECRET", "short")
    with pytest.raises(ConfigError, match=r"RHYMERL_SECRET: 5 characters; expected at least 16.*openssl rand -hex 32"):
        shared_secret()


def test_else_it_is_made_once_and_for_this_user_alone(path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: shared_secret(), range(32)))
    assert len(found) == 1
    assert len(found.pop()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == ["secret"]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602])
def test_a_file_that_others_can_open_is_refused(path, mode):
    shared_secret()
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to other users; remove it.*RHYMERL_SECRET"):
        shared_secret()


def test_a_file_without_a_secret_is_refused(path):
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="too short; remove it"):
        shared_secret()


def test_a_place_that_cannot_be_used_is_named(path, tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(
        ConfigError, match=r"state/rhymerl/secret: .*Not a directory.*set RHYMERL_SECRET to the same for all ranks"
    ):
        shared_secret()
