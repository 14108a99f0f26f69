"""Environments behind an OpenEnv server, which runs here, and is asked by the package's own client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from rhymerl.environments.adapters import OpenEnv, OpenEnvTask
from rhymerl.environments.base import Reply, Turn
from rhymerl.environments.pool import EnvironmentPool, Replied

pytest.importorskip("openenv", reason="needs openenv: pip install 'rhymerl[openenv]'")
pytestmark = pytest.mark.filterwarnings("ignore")
FINE = {"malformed_actions": 0.0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    try:
        for _ in range(1200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def replied(pool: EnvironmentPool, episode: str, seed: int, texts: list[str]) -> Replied:
    turns = [*(Turn(text=text, reply="…") for text in texts[:-1]), Turn(text=texts[-1])]
    pool.ask(episode, {"prompt": "", "seed": seed}, turns)
    (found,) = pool.replied(None)
    return found


def test_an_episode_is_a_session_of_the_server(url):
    environment = OpenEnv(url=url, action="count", observation="left").prepare(None)
    with closing(EnvironmentPool(environment, num_processes=1)) as pool:
        one = replied(pool, "one", 0, ["1"])
        other = replied(pool, "other", 4, ["2"])
        assert one.reply == Reply(content="2=", reward=0.0, metrics=FINE), one.failure
        assert other.reply == Reply(content="5=", reward=0.0, metrics=FINE), other.failure
        last = replied(pool, "one", 0, ["1", "2"])
        assert last.reply == Reply(reward=1.0, done=True, metrics=FINE), last.failure
        pool.forget("one")
        assert replied(pool, "moved", 0, ["1", "2"]).reply == last.reply, "it is told all turns again"


def test_actions_and_observations_may_be_json(url):
    with closing(EnvironmentPool(OpenEnv(url=url), num_processes=1)) as pool:
        found = replied(pool, "e", 0, ['{"count": "1"}'])
        assert found.reply is not None, found.failure
        assert json.loads(str(found.reply.content)) == {"left": "2="}
        malformed = [replied(pool, "e", 0, ['{"count": "1"}', text]).reply for text in ("one", "[1]")]
    assert [each.content.partition(": ")[0] for each in malformed] == ["error"] * 2
    assert [each.content for each in malformed][1] == "error: the action is no JSON object"
    assert malformed[0].metrics == {"malformed_actions": 1.0}


def test_a_task_shows_what_resets_observe(url):
    task = OpenEnvTask(url=url, observation="left", instructions="Take one or two.", train_size=9, validation_size=5)
    train, validation = task.rows("train"), task.rows("validation")
    assert (len(train), len(validation)) == (9, 5)
    assert not {row["seed"] for row in train} & {row["seed"] for row in validation}
    for row in train:
        left = {"role": "user", "content": f"{3 + row['seed'] % 7}="}
        assert row["prompt"] == [{"role": "system", "content": "Take one or two."}, left]
    assert task.rows("train") == train
    plain = OpenEnvTask(url=url, observation="left", instructions="Now ", chat=False, train_size=1)
    assert plain.rows("train")[0]["prompt"].startswith("Now ")


def test_where_no_server_answers_is_named():
    environment: Any = OpenEnv(url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match="url='http://127.0.0.1:9': no OpenEnv server answers"):
        environment.prepare(None)
