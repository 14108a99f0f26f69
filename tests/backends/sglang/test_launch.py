"""The command line of a server that is started by hand."""

from __future__ import annotations

import itertools
import json
import shlex

import pytest

from rhymerl.backends.sglang.launch import launch_line, shell_line
from rhymerl.backends.sglang.plugin.names import VARIABLE
from rhymerl.config import compose
from rhymerl.errors import ConfigError


def launched(tmp_path, *overrides):
    return launch_line(compose("sglang_args", ["model.path=policy", f"out={tmp_path / 'served'}", *overrides]))


@pytest.mark.parametrize(("drafter", "tokens"), [("history_tree", "5"), ("none", None)])
def test_it_drafts_as_asked_and_what_a_trainer_has_prefetched(tmp_path, drafter, tokens):
    launch = launched(tmp_path, f"drafter={drafter}", "backend.nodes=4")
    words = launch["arguments"]
    flag = "--speculative-num-draft-tokens"
    assert (words[words.index(flag) + 1] if flag in words else None) == tokens
    content = json.loads((tmp_path / "served" / "engine.json").read_text())
    assert content["has_route"], "history comes over HTTP"
    described = content["drafter"]
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


def flags(launch) -> dict[str, str | bool]:
    """Each with its value, True where it has none."""
    words = [*launch["arguments"], "--"]
    pairs = itertools.pairwise(words)
    return {word: True if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "bfloat16"),  # the trainer's default on a GPU, whatever the checkpoint is in
        (["backend.arguments.device=cpu"], "float32"),
        (["backend.arguments.device=cpu", "model.dtype=bfloat16"], "bfloat16"),
        (["backend.arguments.device=cpu", "model.dtype=float64"], "float32"),
        (["backend.dtype=bfloat16"], "bfloat16"),
        (["backend.arguments.device=cpu", "backend.dtype=float32", "model.dtype=bfloat16"], "float32"),
    ],
)
def test_it_computes_in_what_a_trainer_with_these_settings_hands_over(tmp_path, settings, expected):
    assert flags(launched(tmp_path, *settings))["--dtype"] == expected


def test_float32_on_a_gpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"backend\.dtype=float32"):
        launched(tmp_path, "backend.dtype=float32")


def test_a_dtype_that_no_trainer_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        launched(tmp_path, "model.dtype=float16")


def test_a_server_is_not_given_the_quantised_weights_of_a_gguf_file(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model.path='a.gguf': a server reads its model from a directory or hub name"
    ):
        launched(tmp_path, "model.path=a.gguf")


def test_a_model_from_scratch_is_none_that_a_server_could_read(tmp_path):
    with pytest.raises(ConfigError, match=r"^model\.path=None: expected .* a server reads its model from"):
        launched(tmp_path, "model.path=null", "model.init={model_type: qwen2}")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://node7:31000", "0.0.0.0", "31000"),
        ("http://10.1.2.3:31000", "0.0.0.0", "31000"),
        ("http://[fd00::7]:31000", "::", "31000"),
        ("http://127.0.0.1:31000", "127.0.0.1", "31000"),
        ("http://127.0.0.2:31000", "127.0.0.2", "31000"),
        ("http://[::1]:31000", "::1", "31000"),
        ("http://localhost:31000/", "localhost", "31000"),
        ("[http://node7:31000]", "0.0.0.0", "31000"),
    ],
)
def test_it_listens_where_a_trainer_will_look_for_it(tmp_path, url, host, port):
    """This also holds with arguments of its own, which no server that runs already could have."""
    found = flags(
        launched(
            tmp_path,
            f"backend.url='{url}'" if url[0] != "[" else f"backend.url={url}",
            "backend.arguments.mem_fraction_static=0.5",
        )
    )
    assert (found["--host"], found["--port"]) == (host, port)
    assert found["--mem-fraction-static"] == "0.5"


def test_without_an_address_it_listens_where_sglang_does(tmp_path):
    assert not {"--host", "--port", "--enable-memory-saver"} & flags(launched(tmp_path)).keys()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "[http://one:30000,http://two:30000]",
            r"^backend\.url=\['http://one:30000', 'http://two:30000'\]: expected one address",
        ),
        ("[]", r"^backend\.url=\[\]: expected one address"),
        ("https://one:30000", r"^backend\.url='https://one:30000': expected http://HOST:PORT of the server to start"),
        (
            "http://one:30000/behind",
            r"^backend\.url='http://one:30000/behind': expected http://HOST:PORT of the server to",
        ),
        ("http://one:port", r"^backend\.url='http://one:port': expected http://HOST:PORT"),
    ],
)
def test_it_is_the_line_of_one_server(tmp_path, url, message):
    with pytest.raises(ConfigError, match=message):
        launched(tmp_path, f"backend.url={url}")


def test_memory_that_is_to_be_given_back_is_kept_track_of(tmp_path):
    assert flags(launched(tmp_path, "backend.release_memory=true"))["--enable-memory-saver"] is True
