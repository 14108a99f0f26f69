"""Environments of the package verifiers, by the real one: its harness, tool server and scoring."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rhymerl.environments.adapters import Verifiers, VerifiersTask
from rhymerl.environments.base import Reply, Turn
from rhymerl.environments.pool import EnvironmentPool, Replied
from rhymerl.errors import ConfigError

pytest.importorskip("verifiers", reason="needs verifiers: pip install 'rhymerl[verifiers]'")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
HERE = str(Path(__file__).parent)


class Hermes:
    chat_template = "<tool_call>"

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template


@pytest.fixture(autouse=True)
def taskset_is_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)  # for its tool server
    monkeypatch.syspath_prepend(HERE)


def call(a: int, b: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>"


def replied(pool: EnvironmentPool, episode: str, row: dict[str, Any], turns: list[Turn]) -> Replied:
    pool.ask(episode, row, turns)
    (found,) = pool.replied(None)
    return found


def test_tasks_are_rows_and_a_tenth_is_held_out():
    task = VerifiersTask(taskset="verifiers_sums", train_size=6)
    train, validation = task.rows("train"), task.rows("validation")
    assert len(train) == 6
    assert not {row["idx"] for row in train} & {row["idx"] for row in validation}
    for row in train:
        question = {"role": "user", "content": f"What is {row['idx']} + 5?"}
        assert row["prompt"] == row["messages"] == [{"role": "system", "content": "Be brief."}, question]
        assert row["answer"] == str(row["idx"] + 5)


def test_an_episode_goes_through_the_harness_and_is_scored():
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    environment = Verifiers(taskset="verifiers_sums").prepare(Hermes())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert environment.calls == "hermes"
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add"]
    row, other = VerifiersTask(taskset="verifiers_sums").rows("train")[:2]
    with closing(EnvironmentPool(environment, num_processes=1, timeout_s=240)) as pool:
        first = replied(pool, "e", row, [Turn(text=call(row["idx"], 5))])
        result = {"role": "tool", "name": "add", "tool_call_id": "000000000", "content": row["answer"]}
        assert first.reply == Reply(content=[result]), first.failure
        turns = [Turn(text=call(row["idx"], 5), reply=[result]), Turn(text=f"It is {row['answer']}.")]
        last = replied(pool, "e", row, turns)
        assert last.reply == Reply(reward=2.0, done=True, metrics={"right": 2.0, "turns": 2.0}), last.failure
        pool.forget("e")
        again = replied(pool, "e2", row, turns)
        assert again.reply == last.reply, "a session that was lost is told all turns again"
        wrong = replied(pool, "e3", {**other, "messages": other["messages"][1:]}, [Turn(text="It is 7.")])
        assert "the harness asks with another prompt than the row's" in wrong.failure


def test_an_unknown_taskset_is_named():
    with pytest.raises(ValueError, match="taskset='nowhere': .*'nowhere' not found"):
        Verifiers(taskset="nowhere").prepare(Hermes())
    with pytest.raises(ValueError, match="taskset='verifiers_sums': .*agent"):
        Verifiers(taskset="verifiers_sums", settings={"agent": {"turns": 3}}).prepare(Hermes())


def test_a_split_without_tasks_is_an_error():
    class AllTrain(VerifiersTask):
        tenths = ("train",) * 10

    with pytest.raises(ConfigError, match="task.taskset='verifiers_sums' has no task for validation"):
        AllTrain(taskset="verifiers_sums").rows("validation")
