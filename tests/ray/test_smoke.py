"""The one test with a real Ray cluster that every `make test` runs."""

from __future__ import annotations

from tests.ray.commands import answers, fit, wait_until_gone


def test_workers_in_ray_actors_train_a_policy_and_leave_nothing_behind(tmp_path, temporary_folder):
    result = fit(tmp_path / "run", "trainer.max_steps=3")
    assert result["steps"] == 3
    assert len(answers(tmp_path / "run")) == 3 * 16
    wait_until_gone(tmp_path / "run")
    assert not list(temporary_folder.glob("ray*"))
