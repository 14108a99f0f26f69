"""What a run says that drafts were worth is of a drafter that knows what the run's own knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Run

DRAFTER = """
from rhymerl import Draft, Drafter


class Pupil(Drafter):
    def __init__(self) -> None:
        self.known = 0

    def {hook}:
        self.known += 1

    def propose(self, request, context, budget):
        print("asked, knowing", self.known)
        return Draft(token_ids=[], parents=[])
"""


@pytest.mark.parametrize("hook", ["learn(self, samples)", "follow(self, delta)"])
def test_the_drafter_that_is_measured_is_not_empty(
    hook: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rhymerl: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_pupil.py").write_text(DRAFTER.format(hook=hook))
    done = rhymerl(*settings, "drafter=my_pupil.Pupil", "trainer.max_steps=2", "budget=fixed", "run_dir=run")
    assert done.code == 0, done.err
    (*_, last) = (line for line in done.out.splitlines() if line.startswith("asked, knowing"))
    assert int(last.split()[-1]) > 0
