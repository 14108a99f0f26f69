"""The command line in this process, as the integration tests have it; and models by family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.combinations.factors import policy_of
from tests.integration.conftest import one_thread, rhymerl

__all__ = ["one_thread", "rhymerl"]

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a family's model, which is made when it is first asked for."""

    @cache
    def folder(family: str, *, seed: int = 0, is_chat: bool = False) -> Path:
        path = tmp_path_factory.mktemp(family)
        policy_of(family, seed=seed, is_chat=is_chat).save(path)
        return path

    return folder
