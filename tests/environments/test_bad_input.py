"""What is wrong with an environment costs one line that names the setting or the row, and never an episode."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rhymerl import ConfigError
from rhymerl.cli import main
from rhymerl.drafters import NoDrafter
from rhymerl.environments import Environment
from rhymerl.environments.episodes import Episodes
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.errors import HookError
from rhymerl.testing import tiny_policy
from rhymerl.types import Prompt, RolloutRequest, SamplingParams
from rhymerl.workers.host import Host
from tests.environments.families import FAMILIES, reply_encoder, save_model
from tests.environments.test_episodes import Turns, answers
from tests.environments.worlds import Asks, Litters
from tests.integration.training import Run

TOOLS = "tests.environments.user_tools"
WORLDS = "tests.environments.worlds"

# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, `plain`, and some with the template of a family."""
    path = tmp_path_factory.mktemp("models")
    tiny_policy(dtype="float32", context=128).save(path / "plain")
    for name in ("qwen2.5", "qwen3", "gemma"):
        save_model(name, path / name)
    return path


@pytest.fixture
def fit(
    model_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`rhymerl fit` on a row of text or, with a model that has a chat template, of a message."""
    monkeypatch.chdir(tmp_path)

    def run(model: str, *words: str) -> tuple[int, str]:
        question = "1+1=?\n" if model == "plain" else [{"role": "user", "content": "12?"}]
        Path("rows.jsonl").write_text(json.dumps({"prompt": question, "answer": "2"}) + "\n")
        common = [f"model.path={model_dirs / model}", "data.train=rows.jsonl", "run_dir=run", "trainer.max_steps=1"]
        small = ["rollout.max_tokens=8", "rollout.group_size=2", "rollout.max_reply_tokens=64"]
        capfd.readouterr()
        code = main(["fit", "--config=grpo_jsonl", *common, *small, *words])
        return code, capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("plain", f"environment=tools environment.tools=[{TOOLS}.without_hints]", f"environment.tools: {TOOLS}.without_hints: Argument a is missing a type hint"),
        ("qwen2.5", f"environment=tools environment.tools=[{TOOLS}.Refuses]", "environment.tools: Refuses cannot be made: ConnectionError: nobody is there (user_tools.py:"),
        ("plain", f"environment=tools environment.tools=[{TOOLS}.ad]", f"environment.tools='{TOOLS}.ad': "),
        ("plain", f"environment={WORLDS}.NeedsAddress", "environment.address: required, but not set"),
        ("plain", f"environment={WORLDS}.Nothing", f"environment='{WORLDS}.Nothing'"),
        ("plain", f"environment={TOOLS}.Counter", f"environment='{TOOLS}.Counter': expected an Environment, which Counter is not"),
        ("plain", f"environment={WORLDS}.Counts rollout.max_turns=0", "rollout.max_turns=0: expected at least 1"),
        ("plain", f"environment={WORLDS}.Counts rollout.reply_timeout_s=0", "rollout.reply_timeout_s=0.0: expected more than 0 seconds"),
        ("plain", "environment=tools", "environment.calls=None: the chat template is missing; expected one of hermes, "),
        ("plain", "environment=tools environment.calls=hermes", "data.train='rows.jsonl', line 1: the prompt is plain text, which shows the policy no tools"),
        ("gemma", "environment=tools environment.calls=hermes", "environment: the tokenizer's chat template refuses these messages: turns have to alternate; expected a model"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_named_before_anything_is_computed(fit, model, words, message):
    code, error = fit(model, *words.split())
    assert code == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    assert message in error
    assert not Path("run").exists()


def test_a_template_that_does_more_than_append_is_said_and_the_tokens_stay(fit, caplog):
    with caplog.at_level(logging.WARNING):
        code, error = fit("qwen3", f"environment={WORLDS}.Counts", "rewards=null")
    assert code == 0, error
    (said,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("environment: ")]
    assert said.startswith(
        "environment: an episode's tokens stay as they are, where one rendering of the whole has others ("
    )


def test_an_environment_that_no_other_process_can_have_is_refused_at_the_start():
    class Local(Environment):
        def reply(self, row, turns):
            return None

    with pytest.raises(ConfigError, match=r"^environment: it cannot be sent to the processes that ask it: "):
        Run(num_steps=1, prompts_per_step=3).train(environment=Local())


# -- replies -----------------------------------------------------------------------------------------------------------


def episodes_of(tokenizer: PreTrainedTokenizerBase, **limits: Any) -> Episodes:
    return Episodes(
        EnvironmentPool(Asks(), num_processes=2),
        reply_encoder(tokenizer),
        decode=lambda ids: "".join(chr(48 + each % 10) for each in ids),
        **{"context_tokens": 100, "max_turns": 3, **limits},
    )


def asked(bad: Any, *, is_chat: bool) -> list[RolloutRequest]:
    """Three prompts with two samples each; the second one's environment returns `bad`."""
    return [
        RolloutRequest(
            id=f"0/p{number}/{sample}",
            prompt=Prompt(
                id=f"p{number}",
                key=f"p{number}",
                token_ids=[1],
                text="1",
                columns={"do": "return", "value": bad} if number == 1 else {},
                messages=[{"role": "user", "content": "1"}] if is_chat else (),
                location=f"data.train='rows.jsonl', line {number + 1}",
            ),
            sample=sample,
            seed=31 * number + sample,
            step=0,
            sampling=SamplingParams(max_tokens=50),
        )
        for number in range(3)
        for sample in range(2)
    ]


PLAIN = "plain"


@pytest.mark.parametrize(
    ("family", "bad", "reason", "words"),
    [
        (PLAIN, 3, "environment", "TypeError: it returned 3, expected text, chat messages, a Reply or None"),
        ("gemma", {"role": "tool", "content": "x"}, "environment", "the tokenizer's chat template refuses these messages: turns have to alternate"),
        ("phi", {"role": "tool", "content": "x"}, "environment", "the tokenizer's chat template does not append message 1 of the reply, of the role 'tool'"),
        (PLAIN, {"role": "user", "content": "1"}, "environment", "the reply is chat messages, but the tokenizer has no chat template; use string replies"),
        (PLAIN, "1×1", "environment", "the reply has '×', which the tokenizer does not know"),
        (PLAIN, "1" * 96, "context", "its reply of 96 tokens leaves no room for a turn in the model's context of 100"),
    ],
)  # fmt: skip
def test_a_bad_reply_ends_its_episode_in_one_line_and_no_other(caplog, family, bad, reason, words):
    tokenizer = tiny_policy().tokenizer if family == PLAIN else FAMILIES[family].tokenizer()
    made = episodes_of(tokenizer)
    requests = asked(bad, is_chat=family != PLAIN)
    try:
        found = answers(Host(Turns(), version=0, episodes=made), requests)
    finally:
        made.close()
    assert sorted(found) == [request.id for request in requests]
    assert Counter(output.finish_reason for output in found.values()) == {reason: 2, "max_turns": 4}
    assert {found[f"0/p1/{sample}"].finish_reason for sample in range(2)} == {reason}
    assert [output.num_sampled for output in found.values() if output.finish_reason == reason] == [3, 3]
    (said,) = caplog.messages
    assert said.startswith(("environment: episode 0/p1/0 (", "environment: episode 0/p1/1 ("))
    assert said.partition(" (")[2].startswith(f"data.train='rows.jsonl', line 2) ends early: {words}")
    assert said.endswith(f" (more are only counted, as episodes/{reason}_frac)")
    assert said.count("line 2") == 1


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_what_an_environment_leaves_behind_is_gone_when_the_run_has_ended(tmp_path, fails):
    log = tmp_path / "pids"
    run = Run(num_steps=1, prompts_per_step=3, stop_token_ids=tuple(range(1, 17)))
    if fails:
        with pytest.raises(HookError, match="the end"):
            run.train(environment=Litters(str(log)), drafter=FailsAtTheEnd())
    else:
        run.train(environment=Litters(str(log)), drafter=NoDrafter())
    pids = list(map(int, log.read_text().split()))
    assert len(pids) >= 2 * 2 * 12
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


class FailsAtTheEnd(NoDrafter):
    def learn(self, samples):
        raise RuntimeError("the end")


def is_running(pid: int) -> bool:
    """A zombie has ended; who is to know of it is the machine's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
