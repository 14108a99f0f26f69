"""The command line of a server that is started by hand."""

from __future__ import annotations

import json
import shlex

import pytest

from rhymerl.backends.sglang.launch import launch_line, shell_line
from rhymerl.backends.sglang.plugin import VARIABLE
from rhymerl.config import compose
from rhymerl.errors import ConfigError


def launched(tmp_path, *overrides):
    return launch_line(compose("sglang_args", ["model.path=policy", f"out={tmp_path / 'served'}", *overrides]))


@pytest.mark.parametrize(("drafter", "tokens"), [("history_tree", "5"), ("none", None)])
def test_it_drafts_as_asked_and_what_a_trainer_has_drawn_ahead(tmp_path, drafter, tokens):
    launch = launched(tmp_path, f"drafter={drafter}", "backend.nodes=4")
    words = launch["arguments"]
    flag = "--speculative-num-draft-tokens"
    assert (words[words.index(flag) + 1] if flag in words else None) == tokens
    described = json.loads((tmp_path / "served" / "engine.json").read_text())["drafter"]
    assert described["_target_"].endswith("RunAheadDrafter")
    assert drafter.replace("_", "") in described["inner"]["_target_"].lower()


def test_the_line_is_one_for_a_shell(tmp_path):
    launch = launched(tmp_path / "a place", "backend.environment.NAME='two words'")
    line = shlex.split(shell_line(launch))
    assert f"{VARIABLE}={tmp_path / 'a place' / 'served' / 'engine.json'}" in line
    assert "NAME=two words" in line
    assert line[line.index("--model-path") + 1] == "policy"


def test_another_backend_has_no_server(tmp_path):
    with pytest.raises(ConfigError, match=r"backend=EmbeddedBackend: expected backend=sglang"):
        launched(tmp_path, "backend=embedded")
