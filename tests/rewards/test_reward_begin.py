"""Samples that reward processes begin with before they are submitted."""

from __future__ import annotations

from contextlib import closing

from rhymerl.rewards import Reward, RewardScorer


def test_a_sample_that_was_begun_is_counted_when_it_is_submitted():
    reward = Reward("user_rewards.act", name="r", default=-1.0)
    columns: dict[str, object] = {}
    with closing(RewardScorer([reward], num_processes=1)) as scorer:
        for text in ["raise", "abc", "os._exit", "ab"]:
            scorer.begin(text, text, columns)
        scorer.poll()
        scorer.submit("first", "a", columns)
        assert scorer.collect() == {"first": {"r": 1.0}}
        assert not any(scorer.metrics().values())
        assert not scorer.failures().num_failed
        for text in ["ab", "raise", "os._exit"]:
            scorer.submit(text, text, columns)
        scorer.submit("abc", "another text", columns)
        assert scorer.collect() == {
            "ab": {"r": 2.0},
            "raise": {"r": -1.0},
            "os._exit": {"r": -1.0},
            "abc": {"r": 12.0},
        }
        assert scorer.metrics() == {"rewards/r/errors": 1, "rewards/r/timeouts": 0, "rewards/r/crashes": 1}
        assert scorer.failures().num_failed == {"r": 2}


def test_what_is_forgotten_is_neither_waited_for_nor_counted():
    reward = Reward("user_rewards.act", name="r", timeout_s=10_000)
    with closing(RewardScorer([reward], num_processes=2, chunk_size=1)) as scorer:
        for number in range(8):
            scorer.begin(f"a{number}", "regex" if not number else "raise", {})  # that one takes years
        scorer.poll()
        scorer.forget()
        scorer.submit("a1", "abc", {})
        assert scorer.collect() == {"a1": {"r": 3.0}}
        assert not any(scorer.metrics().values())
