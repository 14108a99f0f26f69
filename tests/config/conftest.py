from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE = """
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rhymerl.drafters.base import Drafter
from rhymerl.tasks import Task

if TYPE_CHECKING:
    from nowhere import Unseen


class MyDrafter(Drafter):
    def __init__(self, *, depth: int = 2, max_nodes: int = 8, inner: Drafter | None = None) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: expected at least 1")
        self.depth = depth
        self.max_nodes = max_nodes
        self.inner = inner

    def propose(self, request, context, budget):
        raise NotImplementedError


class MyFan(Drafter):
    def __init__(self, *, width: int = 2, widths: Mapping[str, int] | None = None, reason: str = "") -> None:
        if width > 2:
            raise ValueError(f"width={width}: expected at most 2")
        for name, value in (widths or {}).items():
            if value > 2:
                raise ValueError(f"widths.{name}={value}: expected at most 2")
        if reason:
            raise ValueError(reason)
        self.width = width
        self.widths = widths
        self.reason = reason

    def propose(self, request, context, budget):
        raise NotImplementedError


class Settings:
    def __init__(
        self,
        *,
        count: int = 1,
        rate: float = 0.5,
        on: bool = False,
        name: str = "it",
        where: Path | None = None,
        mode: Literal["fast", "slow"] = "fast",
        any_of: int | str | None = None,
        table: Mapping[str, float] | None = None,
        free: Mapping[str, Any] | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        items: Sequence[int] = (),
        unseen: Unseen | None = None,
        seed: int = 0,
    ) -> None:
        for name_, value in locals().copy().items():
            if name_ != "self":
                setattr(self, name_, value)


@dataclass(kw_only=True)
class Record:
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Job:
    def __init__(self, drafter: Drafter, task: Task | None = None, *, rewards: Mapping[str, Any] | None = None,
                 record: Record | None = None) -> None:
        self.drafter, self.task, self.rewards, self.record = drafter, task, rewards, record


class Forgetful:
    def __init__(self, *, size: int = 1) -> None:
        self._size = size


class Greedy:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


def run(job: Job, *, times: int) -> tuple[Job, int]:
    return job, times
"""

MAIN = """
defaults: [{drafter: none}, {task: null}, {scheduler: fifo}, _self_]
seed: 0
run_dir: runs/${config_name:}-${now:%Y}
ckpt_path: null
rewards: null
checkpoint: {every_n_steps: 10, keep: 2}
settings: {_target_: my_module.Settings, seed: "${seed}"}
job: {_target_: my_module.Job, drafter: "${drafter}", task: "${task}", rewards: "${rewards}", record: {_target_: my_module.Record}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory: the current one, with my_module.py and main.yaml, which uses packaged groups."""
    (tmp_path / "my_module.py").write_text(MODULE)
    (tmp_path / "main.yaml").write_text(MAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("my_module", "broken", "lazy"):
        sys.modules.pop(name, None)
