"""Environments in processes: many calls at once, and a call that fails costs its own episode only."""

from __future__ import annotations

import time

import pytest

from rhymerl.environments.base import Environment, Reply, Turn, checked_reply
from rhymerl.environments.pool import EnvironmentPool, Replied
from rhymerl.errors import EpisodeError
from tests.environments.worlds import Alone, Asks, AsyncShells, Awaits, Fails, Meets, Shells

TURNS = [Turn(text="a", reply="b"), Turn(text="c")]


def replies_of(environment: Environment, rows: dict[str, dict], *, turns=TURNS, **settings) -> dict[str, Replied]:
    pool = EnvironmentPool(environment, **settings)
    try:
        for name, row in rows.items():
            pool.ask(name, {"prompt": name, **row}, turns)
        found: dict[str, Replied] = {}
        while len(found) < len(rows):
            for each in pool.replied(None):
                assert each.episode not in found, "twice"
                found[each.episode] = each
        return found
    finally:
        pool.close()


def test_every_call_gets_its_own_reply():
    found = replies_of(Asks(), {f"e{number}": {} for number in range(50)})
    assert {name: each.reply for name, each in found.items()} == {
        f"e{number}": Reply(content=f"e{number}2") for number in range(50)
    }


def test_calls_run_at_the_same_time():
    found = replies_of(Meets(), {f"e{number}": {} for number in range(4)}, num_processes=1)
    assert {each.reply.content for each in found.values()} == {"met"}


def test_coroutines_are_awaited():
    assert replies_of(Awaits(), {"e": {}})["e"].reply == Reply(content="e!")


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("raise", "KeyError: 'nobody' (worlds.py:"),
        ("die", "its process exited with code 7"),
        ("hang", "it took longer than 2 s"),
    ],
)
def test_a_call_that_fails_costs_its_episode_and_no_other(do, words):
    rows = {f"e{number}": {"do": do if number == 5 else ""} for number in range(12)}
    found = replies_of(Asks(), rows, num_processes=1, timeout_s=2.0)
    assert found["e5"].reply is None
    assert found["e5"].failure.startswith(words)
    assert all(each.reply == Reply(content=f"{name}2") for name, each in found.items() if name != "e5")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "TypeError: it returned 3, expected text, chat messages, a Reply or None"),
        (Reply(content=3), "TypeError: it returned 3, expected text"),
        (
            {"role": "user", "content": None},
            "TypeError: it returned the message {'role': 'user', 'content': None}, exp",
        ),
        ("", "ValueError: it returned '', expected a reply, or None where the episode is over"),
        ([], "ValueError: it returned [], expected a reply"),
        (
            [{"content": "x"}],
            "TypeError: it returned the message {'content': 'x'}, expected one with the strings 'role' and",
        ),
        ([{"role": "assistant", "content": "x"}], "ValueError: it returned a message of the assistant"),
        (Reply(content="x", reward=float("nan")), "ValueError: its reward is nan, expected a finite number"),
        (Reply(content="x", metrics={"a": "b"}), "ValueError: its metrics['a'] is 'b', expected a finite number"),
    ],
)
def test_what_is_no_reply_is_named(value, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        checked_reply(value)
    assert f"{caught.typename}: {caught.value}".startswith(words)


def test_what_is_printed_goes_elsewhere():
    assert replies_of(Asks(), {"e": {"do": "print"}})["e"].reply == Reply(content="e2")


def test_an_environment_that_a_process_cannot_have_is_an_error():
    with pytest.raises(EpisodeError, match="its process cannot import it: RuntimeError: no licence"):
        replies_of(Fails(), {"e": {}})


def test_a_process_that_never_starts_is_an_error_though_another_one_works(tmp_path):
    """What an episode asks goes to its own process, so no other one does that process's work."""
    rows = {f"e{number}": {"prompt": "1"} for number in range(8)}
    with pytest.raises(EpisodeError, match=r"^an environment's process did not start: .* code 3$"):
        replies_of(Alone(str(tmp_path / "lock")), rows, num_processes=2)


def test_what_is_forgotten_is_not_replied():
    pool = EnvironmentPool(Asks(), num_processes=1)
    for name in ("one", "two"):
        pool.ask(name, {"prompt": name}, TURNS)
    pool.forget("one")
    assert [each.episode for each in pool.replied(None)] == ["two"]
    assert pool.replied(None) == []
    pool.close()


@pytest.mark.parametrize("environment", [Shells(), AsyncShells()], ids=["plain", "async"])
def test_a_session_lives_as_long_as_its_episode_and_is_replayed_where_it_is_not_there(environment, tmp_path):
    row = {"log": str(tmp_path / "log")}
    turns = [Turn(text="a", reply="a"), Turn(text="b", reply="a,b"), Turn(text="c")]
    pool = EnvironmentPool(environment, num_processes=1)
    told = []
    for number in (1, 2):
        pool.ask("e", row, [*turns[: number - 1], Turn(text=turns[number - 1].text)])
        told += [each.reply.content for each in pool.replied(None)]
    assert told == ["a", "a,b"]
    assert (tmp_path / "log").read_text() == "open\n"
    pool.close()
    assert (tmp_path / "log").read_text() == "open\nclose\n", "a run that ends, ends its sessions"
    assert replies_of(environment, {"e": row}, turns=turns)["e"].reply == Reply()
    assert (tmp_path / "log").read_text() == "open\nclose\n" * 2


def test_a_session_ends_with_its_episode_whoever_ends_it(tmp_path):
    pool = EnvironmentPool(Shells(), num_processes=1)
    row = {"log": str(tmp_path / "log")}
    pool.ask("e", row, [Turn(text="a")])
    pool.replied(None)
    pool.forget("e")
    pool.ask("e", row, [Turn(text="x")])
    assert [each.reply.content for each in pool.replied(None)] == ["x"], "a session of its own"
    pool.close()
    assert sorted((tmp_path / "log").read_text().split()) == ["close"] * 2 + ["open"] * 2


def test_what_json_cannot_say_is_a_failure_of_its_call_alone():
    value = [{"role": "tool", "content": "x", "at": {1, 2}}]
    found = replies_of(Asks(), {"bad": {"do": "return", "value": value}, "good": {}}, num_processes=1)
    assert found["bad"].failure.startswith("TypeError: Object of type set is not JSON serializable")
    assert found["good"].reply == Reply(content="good2")


def test_a_process_that_reads_nothing_holds_nobody_up():
    rows = {f"e{number}": {"do": "spin" if number == 0 else "", "text": "x" * 40_000} for number in range(20)}
    found = replies_of(Asks(), rows, num_processes=1, timeout_s=2.0)
    assert [name for name, each in found.items() if each.reply is None] == ["e0"]


def test_replies_that_waited_for_somebody_to_look_are_not_late():
    pool = EnvironmentPool(Asks(), num_processes=1, timeout_s=2.0)
    for number in range(30):
        pool.ask(f"e{number}", {"prompt": "x" * 60_000}, TURNS)
    found = pool.replied(None)
    time.sleep(4)
    while len(found) < 30:
        found += pool.replied(None)
    pool.close()
    assert all(each.reply is not None for each in found)
