"""A memory of replies: what is asked again is not called again, and nobody can tell but by the clock."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.environments import Environment, Python, Reply, Tools, Turn, calculator, pure
from rhymerl.environments.base import is_remembered
from rhymerl.environments.episodes import Episodes
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.environments.reply_cache import ENTRY_BYTES, ReplyCache, key_of
from rhymerl.errors import EpisodeError
from rhymerl.tasks import RunningSum
from rhymerl.types import Output, RolloutRequest
from rhymerl.workers.host import Host
from tests.environments import user_tools
from tests.environments.test_episodes import STEP, Digits, Turns, answers, requests
from tests.environments.worlds import Asks, Counts, Logs, Shells
from tests.products import values_first

TURNS = [Turn(text="a", reply="b"), Turn(text="c")]


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def remembering_pool(environment: Environment) -> EnvironmentPool:
    return EnvironmentPool(environment, num_processes=1, memory=ReplyCache(2**20))


@contextmanager
def remembering(log: Path, **settings) -> Iterator[EnvironmentPool]:
    with closing(remembering_pool(Logs(str(log)))) as pool:
        yield pool


def calls(log: Path) -> list[str]:
    return log.read_text().split()


def all_replies(pool: EnvironmentPool, count: int) -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    while len(found) < count and (replied := pool.replied(None)):
        for each in replied:
            assert each.episode not in found, "twice"
            found[each.episode] = each
    assert len(found) == count
    assert pool.replied(0.0) == []
    return found


# -- keys and room -----------------------------------------------------------------------------------------------------


def test_other_rows_and_transcripts_have_other_keys() -> None:
    calls = [
        ({"prompt": "x"}, [Turn(text="a")]),
        ({"prompt": "x", "answer": "1"}, [Turn(text="a")]),
        ({"prompt": "x", "answer": 1}, [Turn(text="a")]),
        ({"prompt": "x", "answer": np.arange(5000)}, [Turn(text="a")]),
        ({"prompt": "x", "answer": np.where(np.arange(5000) == 2500, 0, np.arange(5000))}, [Turn(text="a")]),
        ({"prompt": "x"}, [Turn(text="a ")]),
        ({"prompt": "x"}, [Turn(text="a", reply="b"), Turn(text="c")]),
        ({"prompt": "x"}, [Turn(text="a", reply="bc"), Turn(text="")]),
        ({"prompt": "x"}, [Turn(text="a", reply=[{"role": "user", "content": "b"}]), Turn(text="c")]),
    ]
    assert len({key_of(Counts(), *call) for call in calls}) == len(calls)


def test_equal_calls_have_equal_keys() -> None:
    messages = [{"role": "tool", "content": "\ud800 1"}]
    row, again = {"prompt": "x" * 50, "tests": [[1, 2], 3.5]}, {"prompt": "x" * 49 + "x", "tests": [[1, 2], 3.5]}
    turns = [Turn(text="a" * 30, reply=messages), Turn(text="")]
    assert key_of(Counts(), row, turns) == key_of(
        Counts(), again, [replace(turns[0], text="a" * 29 + "a", reply=list(messages)), turns[1]]
    )


def test_columns_that_cannot_be_sent_are_an_error() -> None:
    with pytest.raises(EpisodeError, match="the row's columns cannot be sent to an environment's process"):
        key_of(Counts(), {"prompt": "x", "function": lambda: None}, TURNS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5000)), max_size=40))
def test_the_latest_replies_stay_as_far_as_there_is_room(steps) -> None:
    memory, twin = ReplyCache(4000), list[tuple[int, int]]()  # keys and sizes, the one that goes next first
    for is_looked_up, key, length in steps:
        size = dict(twin).get(key)
        found = memory.get(str(key))
        assert (found is not None) == (size is not None)
        if size is not None:
            twin.remove((key, size))
            twin.append((key, size))
        elif not is_looked_up:
            reply = Reply(content="x" * length)
            memory.add(str(key), reply, 0.5)
            twin.append((key, len(pickle.dumps((reply, 0.5))) + ENTRY_BYTES))
            while sum(size for _, size in twin) > 4000:
                twin.pop(0 if twin[-1][1] <= 4000 else -1)
            assert twin == [] or memory.get(str(twin[-1][0])) is not None
        assert memory.num_bytes == sum(size for _, size in twin)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_equal_calls_at_the_same_time_are_one(log) -> None:
    with remembering(log) as pool:
        for name in ("one", "two", "three"):
            pool.ask(name, {"prompt": "p"}, TURNS)
        pool.ask("other", {"prompt": "q"}, TURNS)
        found = all_replies(pool, 4)
    assert sorted(calls(log)) == ["p2", "q2"]
    assert [found[name].reply for name in ("one", "two", "three", "other")] == [Reply(content="p2")] * 3 + [
        Reply(content="q2")
    ]
    assert found["one"].saved_s is found["other"].saved_s is None
    assert found["two"].saved_s == found["three"].saved_s == found["one"].took_s > 0
    assert all(each.waited_s >= each.took_s for each in found.values())


def test_a_call_that_has_been_answered_is_not_made_again(log) -> None:
    with remembering(log) as pool:
        pool.ask("one", {"prompt": "p"}, TURNS)
        (first,) = pool.replied(None)
        pool.ask("two", {"prompt": "p"}, TURNS)
        pool.ask("three", {"prompt": "q"}, TURNS)
        (second,) = pool.replied(None)
        assert second.episode == "two", "it waits for nothing"
        assert (second.reply, second.waited_s, second.saved_s) == (first.reply, 0.0, first.took_s)
        assert [each.episode for each in pool.replied(None)] == ["three"]
    assert calls(log) == ["p2", "q2"]


def test_another_text_is_another_call(log) -> None:
    with remembering(log) as pool:
        for number, turns in enumerate([TURNS, [TURNS[0], Turn(text="d")], [Turn(text="c")]]):
            pool.ask(f"e{number}", {"prompt": "p"}, turns)
        all_replies(pool, 3)
    assert sorted(calls(log)) == ["p1", "p2", "p2"]


def test_a_failure_is_not_remembered_and_costs_one_episode(log) -> None:
    row = {"prompt": "p", "fails": 1}
    with remembering(log) as pool:
        for name in ("one", "two", "three"):
            pool.ask(name, row, TURNS)
        found = all_replies(pool, 3)
        assert found["one"].failure.startswith("ValueError: not the first 1")
        assert {name: each.reply for name, each in found.items()} == {
            "one": None,
            "two": Reply(content="p2"),
            "three": Reply(content="p2"),
        }
        assert len(calls(log)) == 3
        pool.ask("four", row, TURNS)
        assert all_replies(pool, 1)["four"].reply == Reply(content="p2")
        assert len(calls(log)) == 4
        pool.ask("five", row, TURNS)
        assert all_replies(pool, 1)["five"].saved_s is not None
    assert len(calls(log)) == 4


def test_who_leaves_does_not_take_the_reply_away_from_others(log) -> None:
    with remembering(log) as pool:
        for name in ("one", "two", "three"):
            pool.ask(name, {"prompt": "p"}, TURNS)
        pool.forget("one")
        found = all_replies(pool, 2)
        assert found.keys() == {"two", "three"}
        assert (found["two"].saved_s, found["three"].saved_s) == (None, found["two"].took_s)
        pool.ask("one", {"prompt": "p"}, TURNS)
        pool.forget("one")
        assert pool.replied(None) == [], "a reply that was there is forgotten too"
    assert calls(log) == ["p2"]


def test_where_all_leave_nobody_is_waited_for(log) -> None:
    with remembering(log) as pool:
        for name in ("one", "two"):
            pool.ask(name, {"prompt": "p"}, TURNS)
        for name in ("two", "one"):
            pool.forget(name)
        assert pool.replied(None) == []
        pool.ask("one", {"prompt": "p"}, TURNS)
        assert all_replies(pool, 1)["one"].reply == Reply(content="p2")


def test_who_leaves_after_a_failure_is_asked_about_no_more(log) -> None:
    with remembering(log) as pool:
        for name in ("one", "two"):
            pool.ask(name, {"prompt": "p", "fails": 1}, TURNS)
        assert [each.episode for each in pool.replied(None)] == ["one"]
        pool.forget("two")
        assert pool.replied(None) == []


# -- whose replies are remembered --------------------------------------------------------------------------------------


class PureShells(Shells):
    is_pure = True


class PureSum(RunningSum):
    is_pure = True

    def reply(self, row, turns):
        return "?"


@pure
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (Counts(), True),
        (Asks(), False),
        (PureShells(), False),
        (PureSum(), True),
        (RunningSum(), False),
        (Tools(tools=[calculator, double], calls="hermes"), True),
        (Tools(tools=[calculator, user_tools.add], calls="hermes"), False),
        (Tools(tools=[calculator, user_tools.Counter], calls="hermes"), False),
    ],
)
def test_replies_are_remembered_of_pure_functions_without_sessions(environment, expected) -> None:
    assert is_remembered(environment) == expected


def test_tools_that_are_functions_need_no_session() -> None:
    assert not Tools(tools=[user_tools.add], calls="hermes").has_sessions
    assert Tools(tools=[user_tools.Counter], calls="hermes").has_sessions
    assert not Environment.is_pure
    assert not getattr(Python, "is_pure", False)


# -- episodes ----------------------------------------------------------------------------------------------------------


@contextmanager
def episodes(*, remembers: bool = True, **settings) -> Iterator[Episodes]:
    decode = {"decode": lambda ids: "".join(chr(48 + each % 10) for each in ids), "context_tokens": 100}
    asked = remembering_pool(Counts()) if remembers else EnvironmentPool(Counts(), num_processes=1)
    with closing(Episodes(asked, Digits(), **decode, **settings)) as made:
        yield made


def group(count: int) -> list[RolloutRequest]:
    """Pairs that say the same."""
    return [replace(request, seed=17 * (number // 2)) for number, request in enumerate(requests(count))]


@pytest.mark.parametrize(("seed", "lockstep"), values_first(range(3), [False, True]))
def test_with_a_memory_an_episode_has_the_same_tokens_wherever_it_goes_on(seed, lockstep) -> None:
    asked, draw = group(8), random.Random(seed)
    with episodes(remembers=False) as made:
        plain = answers(Host(Turns(), version=0, episodes=made), asked)
    found: dict[str, Output] = {}
    with episodes(lockstep=lockstep) as one, episodes(lockstep=lockstep) as other:
        hosts = [Host(Turns(), version=0, episodes=made) for made in (one, other)]
        hosts[0].submit(asked, priority=0, versions=STEP)
        while len(found) < len(asked):
            for host in hosts:
                host.decode(timeout_s=0.01, max_passes=draw.randint(1, 2))
                found |= {each.request.id: each.output for each in host.finished}
                host.finished.clear()
            here, there = draw.sample(hosts, 2)
            here.withdraw([each.id for each in asked if draw.random() < 0.3])
            released, here.released = here.released, []
            there.submit([each.resume() for each in released], priority=0, versions=STEP)
    for name, output in plain.items():
        assert found[name].token_ids.tolist() == output.token_ids.tolist()
        assert [(each.start, each.reply, each.reward) for each in found[name].turns] == [
            (each.start, each.reply, each.reward) for each in output.turns
        ]
    assert all(turn.saved_s is None for output in plain.values() for turn in output.turns)
    assert any(turn.saved_s is not None for output in found.values() for turn in output.turns)


def test_in_lockstep_a_remembered_reply_joins_when_all_others_do() -> None:
    first, second, third = requests(3)
    output = Output.of([1, 2, 3], finish_reason="turn")
    with episodes(lockstep=True) as made:
        made.ask(first, output)
        assert [name for name, _ in made.replied(0.0)] == [first.id]
        made.ask(third, output)
        made.ask(second, Output.of([4, 5, 6], finish_reason="turn"))
        assert [name for name, _ in made.replied(0.0)] == [second.id, third.id]
        assert not made.num_waiting
