"""Numbers that one process counts and another one reads."""

from __future__ import annotations

from rhymerl.backends.remote.drafter_feed import COUNTS, Counters


def test_what_was_counted_since_the_last_look(tmp_path):
    trainer = Counters(tmp_path / "counters", new=True)
    engine = Counters(tmp_path / "counters")
    assert dict(trainer.since()) == dict.fromkeys(COUNTS, 0.0)
    engine.add(asks=3, draft_s=0.5)
    engine.add(asks=1)
    seen = trainer.since()
    assert (seen["asks"], seen["draft_s"], seen["hits"]) == (4, 0.5, 0)
    assert trainer.since()["asks"] == 0
    engine.add(asks=2)
    assert trainer.since()["asks"] == 2


def test_a_new_engine_counts_from_nothing(tmp_path):
    first = Counters(tmp_path / "counters", new=True)
    first.add(passes=5)
    second = Counters(tmp_path / "counters", new=True)
    second.add(passes=2)
    assert second.since()["passes"] == 2
