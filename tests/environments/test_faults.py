"""A fault in one of 50 episodes ends that episode, which is counted; the others keep the tokens that they ever had."""

from __future__ import annotations

import pytest

from rhymerl.types import Output
from rhymerl.workers.host import Host
from tests.environments.test_episodes import Turns, answers, episodes, requests
from tests.environments.worlds import Asks

FAULTY = "0/p/7"


def outputs(timeout_s: float = 60.0, **fault) -> dict[str, Output]:
    """The answers of 50 episodes, in the order in which they end, where one row asks for a fault in each turn."""
    asked = requests(50)
    asked[7] = requests(8, **fault)[7]
    with episodes(Asks(), timeout_s=timeout_s, max_turns=3) as made:
        return answers(Host(Turns(), version=0, episodes=made), asked)


@pytest.fixture(scope="module")
def sound() -> dict[str, Output]:
    return outputs()


def assert_same(found: Output, expected: Output) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.sampled.tolist() == expected.sampled.tolist()
    assert found.finish_reason == expected.finish_reason == "max_turns"


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("kill", "its process was killed by SIGKILL"),
        ("exhaust", "MemoryError"),
        ("spin", "it took longer than 2 s"),
    ],
)
def test_a_fault_ends_its_episode_and_no_other(do, words, sound, caplog):
    found = outputs(2.0, do=do, seconds=10.0)
    faulty = found.pop(FAULTY)
    assert (faulty.finish_reason, faulty.num_sampled, len(faulty.turns)) == ("environment", 3, 1)
    assert len(found) == 49
    for name, output in found.items():
        assert_same(output, sound[name])
    (said,) = caplog.messages
    assert f"episode {FAULTY} (" in said
    assert f") ends early: {words}" in said
    assert said.endswith("(more are only counted, as episodes/environment_frac)")


def test_a_slow_reply_within_the_limit_holds_up_its_own_episode_alone(sound, caplog):
    found = outputs(do="slow", seconds=1.0)
    assert list(found)[-1] == FAULTY, "all others have ended before it"
    for name, output in found.items():
        assert_same(output, sound[name])
    assert all(turn.waited_s >= 1.0 for turn in found[FAULTY].turns)
    assert not caplog.messages
