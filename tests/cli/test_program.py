from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from rhymerl.cli import main
from rhymerl.cli.base import ConfiguredCommand, Result, Subcommand
from rhymerl.cli.interrupt import Interrupt
from rhymerl.cli.kinds import kind_of
from rhymerl.cli.program import COMMANDS
from rhymerl.config import compose, packaged_names, resolved
from rhymerl.config.files import locate
from rhymerl.errors import RunError

CONFIG = "seed: 0\ntask: {_target_: rhymerl.tasks.RunningSum, seed: '${seed}'}\n"


class Show(ConfiguredCommand):
    """show the settings"""

    name = "show"

    def run_config(self, config: Any, arguments: Namespace, interrupt: Interrupt) -> Result:
        print("words for people")
        return resolved(config)["task"]


class Fail(Subcommand):
    """raise what it is told to"""

    name = "fail"

    def __init__(self, error: BaseException | None = None, *, signals: int = 0) -> None:
        self.error = error
        self.signals = signals

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> None:
        interrupt.hold()
        for _ in range(self.signals):
            signal.raise_signal(signal.SIGINT)
        if self.error is not None:
            raise self.error


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG)
    return path


def test_overrides_may_stand_anywhere(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "seed=3", "--config", str(config), "task.difficulty=5", "--json"]
    assert main(words, commands=[Show()]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["seed"] == 3
    assert json.loads(out)["difficulty"] == 5
    assert "words for people" in err


def test_print_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--config", str(config), "--print-config"], commands=[Show()]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["task"]["difficulty"] == 7
    config.with_name("again.yaml").write_text(out)
    assert main(["show", "--config", str(config.with_name("again.yaml")), "--print-config"], commands=[Show()]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "error: expected a command: fit, resume, fork, evaluate, plan, rollout, replay, simulate, bench, report, watch, warmstart, export",
        ),
        (["fit"], "error: rhymerl fit needs --config: a .yaml file, or one of base"),
        (["fit", "--config", "qickstart"], "did you mean quickstart?"),
        (["evaluate", "--config", "nothing.yaml"], "error: --config nothing.yaml: expected the path of a .yaml file"),
        (
            ["fit", "quickstart"],
            "'quickstart': expected an option of rhymerl fit, or an override key=value; did you mean --config quickstart?",
        ),
        (["fit", "quikstart"], "; did you mean --config quickstart?"),
        (["evaluate", "quickstart"], "(it has no config.yaml); did you mean --config quickstart?"),
        (["fit", "--confg", "quickstart"], "; did you mean --config?"),
        (["fit", "--config=quickstart", "--trainer.max_steps=3"], "; did you mean trainer.max_steps=3?"),
        (["fit", "--config=quickstart", "--trainer.max_steps", "3"], "; did you mean trainer.max_steps=3?"),
        (["fit", "--config=quickstart", "-seed=3"], "; did you mean seed=3?"),
        (["fti"], "; did you mean fit?"),
        (["generate"], "; did you mean rollout?"),
        (["train", "--config", "quickstart"], "; did you mean fit?"),
        (["evaluate"], "error: rhymerl evaluate needs RUN or --config: a .yaml file, or one of base"),
        (
            ["simulate", "--config=simulat"],
            "expected the path of a .yaml file, or one of simulate; did you mean simulate?",
        ),
        (["resume", "run", "--config=quickstart"], "rhymerl resume takes RUN or --config, not both"),
        (["export", "run"], "the following arguments are required: OUT"),
        (["export", "run", "out", "seed=1"], "error: rhymerl export takes RUN and OUT only, not 'seed=1'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as error:  # argparse's way
        code = int(str(error.code))
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["fit", "--config=rollout", "trainer.max_steps=3"], "rollout"),
        (["evaluate", "--config=replay"], "replay"),
        (["simulate", "--config=quickstart", "workers=4"], "fit"),
        (["bench", "drafter", "--config=bench_rollout"], "bench rollout"),
    ],
)
def test_a_config_of_another_command_is_named(words: list[str], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    (config,) = (word.removeprefix("--config=") for word in words if word.startswith("--config="))
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: --config {config}: is a config of rhymerl {kind}, not of rhymerl ")
    assert f" {config}," not in err.partition("or one of")[2]


def test_a_file_that_is_no_config_of_the_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"--config={config}"]) == 2
    lacks = f"--config {config}: is no config of rhymerl simulate, as it lacks 'lengths'; build on one of simulate"
    assert capsys.readouterr().err == f"error: {lacks}\n"


def test_every_packaged_config_is_of_one_command() -> None:
    commands = {"fit", "rollout", "replay", "simulate", "warmstart", "sglang-args"}
    benches = {f"bench {what}" for what in ("rollout", "drafter", "costs")}
    assert {kind_of(locate(name)) for name in packaged_names()} == commands | benches


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_help_says_what_has_to_be_given(command: Subcommand, capsys: pytest.CaptureFixture[str]) -> None:
    """A config is asked for where there is no default, and settings that the default config leaves open are shown."""
    with pytest.raises(SystemExit):
        main([command.name, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    if not isinstance(command, ConfiguredCommand):
        return
    assert ("[--config NAME|PATH]" in usage) == (command.default_config is not None or command.name == "bench")
    assert "--config" in usage or command.name in ("resume", "fork")
    if command.default_config is not None:
        settings = resolved(compose(command.default_config))
        asked = {word.partition("=")[0] for word in re.findall(r"[\w.]+=[A-Z]+", usage)}
        required = {"model.path" for _ in "x" if settings.get("model", {}).get("path") == "???"}
        required |= {"out" for _ in "x" if settings.get("out", "") in (None, "???")}
        assert required <= asked <= required | {"data.prompts"}


def test_resume_does_not_offer_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    assert "--config " not in capsys.readouterr().out


def test_files_nearby_are_hinted_at(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(config.parent)
    (config.parent / "run").mkdir()
    (config.parent / "run" / "config.yaml").write_text(CONFIG)
    for words, near in (
        (["fit", "mine.yaml"], "--config mine.yaml?"),
        (["fit", "--config", "mime.yaml"], "mine.yaml?"),
        (["fit", "--config", str(config.with_name("mime.yaml"))], f"{config}?"),
        (["fit", "run"], "rhymerl resume run?"),
    ):
        with suppress(SystemExit):  # argparse's way
            main(words)
        assert capsys.readouterr().err.endswith(f"; did you mean {near}\n")


def test_unknown_settings_are_bad_usage(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--config", str(config), "task.dificulty=1"], commands=[Show()]) == 2
    assert capsys.readouterr().err == "error: unknown setting task.dificulty; did you mean task.difficulty?\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunError("the engine\nstopped"), 1, "error: the engine stopped\n"),
        (KeyError("x"), 1, "error: KeyError: 'x' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(3), 3, ""),
        (None, 0, ""),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail"], commands=[Fail(error)]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "--debug"], commands=[Fail(RunError("no"))]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c(signals: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    command = Fail(signals=signals)
    assert main(["fail"], commands=[command]) == 130
    assert ("interrupted" in capsys.readouterr().err) == (signals == 2)
    assert signal.getsignal(signal.SIGINT) is before


class Import(Subcommand):
    """be interrupted in a library that takes it for something else"""

    name = "import"

    def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError("maximum recursion depth exceeded")


def test_ctrl_c_while_libraries_are_imported_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """They are then imported by half, and fail in ways of their own."""
    assert main(["import"], commands=[Import()]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert main(["import", "--debug"], commands=[Import()]) == 130
    assert "RecursionError" in capsys.readouterr().err


def test_an_error_in_the_step_after_ctrl_c_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail"], commands=[Fail(RunError("no space left"), signals=1)]) == 130
    assert capsys.readouterr().err.endswith("error: no space left\n")


@pytest.mark.parametrize("released", [False, True])
def test_ctrl_c_outside_training_is_as_usual(released: bool) -> None:
    with Interrupt() as interrupt:
        if released:
            interrupt.hold()
            interrupt.release()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interrupt.requested


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        *((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)),
        *((signal.SIGUSR1, 138), (signal.SIGUSR2, 140)),
    ],
    ids=lambda each: str(each),
)
def test_every_signal_that_ends_a_program_has_its_exit_code(
    sent: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Send(Fail):
        """send a signal"""

        def run(self, arguments: Namespace, overrides: Sequence[str], interrupt: Interrupt) -> None:
            signal.raise_signal(sent)

    before = signal.getsignal(sent)
    assert main(["fail"], commands=[Send()]) == code
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(sent) == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """This is what nohup relies on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            interrupt.hold()
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGINT, 1)])
def test_a_forked_child_is_ended_as_usual(sent: signal.Signals, code: int) -> None:
    """The child may belong to a user's pool, say, that is shut down in the middle of a run."""
    with Interrupt() as interrupt:
        interrupt.hold()
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=lambda: (begun.set(), time.sleep(1000)))
        child.start()
        assert begun.wait(100)
        os.kill(child.pid or 0, sent)
        child.join(100)
        assert child.exitcode == code
        assert not interrupt.requested


def test_the_program_from_outside() -> None:
    words = [sys.executable, "-m", "rhymerl"]
    bad = subprocess.run([*words, "fit", "--config", "nothing"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: --config nothing: expected")
    version = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("rhymerl 0.")


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.name in shown and command.help for command in COMMANDS)
