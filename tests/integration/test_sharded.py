"""`trainer.strategy=fsdp2` trains as one process does, and its checkpoints are good for any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.errors import ConfigError
from rhymerl.rollout import RolloutLoop
from rhymerl.runs.export import export
from rhymerl.training import module, shards, state
from rhymerl.training.checkpoint import damage, newest_whole, read_checkpoint
from rhymerl.training.fsdp2 import FSDP2Strategy
from tests.integration.ranked import run_ranks, said, start_ranks
from tests.integration.sharded import KINDS, STEPS, furthest, keep, kept, train

STRATEGIES = {1: ("fsdp2",), 2: ("ddp", "fsdp2"), 3: ("ddp", "fsdp2"), 4: ("ddp", "fsdp2", "hsdp")}


def train_all(folder: str, size: int) -> None:
    for strategy in STRATEGIES[size]:
        for kind in KINDS:
            keep(train(strategy, kind, size=size), f"{folder}/{strategy}.{kind}")


def train_once(folder: str, name: str, strategy: str, settings: dict[str, Any]) -> None:
    keep(train(strategy, settings.pop("kind", "ppo"), **settings), f"{folder}/{name}")


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return {kind: dict(train("alone", kind)) for kind in KINDS}


# -- the same weights --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", STRATEGIES)
def test_weights_are_those_of_one_process(size, alone, tmp_path):
    run_ranks(size, train_all, str(tmp_path), size, output=tmp_path / "output", timeout_s=800)
    for strategy in STRATEGIES[size]:
        for kind in KINDS:
            found = [kept(tmp_path / f"{strategy}.{kind}", rank) for rank in range(size)]
            assert furthest(found[0], alone[kind]) < 1e-9, (strategy, kind)
            assert all(furthest(each, found[0]) == 0.0 for each in found), (strategy, kind)


@pytest.mark.parametrize(
    ("strategy", "size"), [("fsdp2", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)], ids=["fsdp2", "hsdp"]
)
@pytest.mark.parametrize("kind", [pytest.param("grpo", marks=pytest.mark.slow), "lora"])
def test_engines_in_the_ranks_have_whole_copies(kind, strategy, size, alone, tmp_path):
    weights = on_ranks(size, tmp_path, "run", strategy, kind=kind, whole_copy=True)
    assert furthest(weights, alone[kind]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_adapters_stay_in_float32(precision, tmp_path):
    weights = on_ranks(2, tmp_path, "run", "fsdp2", kind="lora", num_steps=2, precision=precision)
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    base = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {base}
    assert all(weight.isfinite().all() for weight in weights.values())


# -- checkpoints
# ---------------------------------------------------------------------------------------------------------


def on_ranks(size: int, folder: Path, name: str, strategy: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Train to the end; returns the weights."""
    output = folder / f"output.{name}"
    run_ranks(size, train_once, str(folder), name, strategy, {"size": size, **settings}, output=output, timeout_s=400)
    return kept(folder / name)


def test_two_ranks_save_what_one_process_goes_on_from(tmp_path, alone, monkeypatch):
    """Two steps sharded, with whatever else a smoke test can look at; the rest in this process."""
    saves = tmp_path / "saves"
    sharded = on_ranks(2, tmp_path, "sharded", "fsdp2", num_steps=2, saves=saves)
    names = sorted(path.name for path in saves.iterdir())
    assert names == ["last.ckpt", "step=1.0.shards", "step=1.ckpt", "step=2.0.shards", "step=2.ckpt"]
    assert all(each.is_meta for each in torch.load(saves / "step=2.ckpt", weights_only=True)["state_dict"].values())
    out = export(saves / "last.ckpt", tmp_path / "policy")
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[name], sharded[f"model.{name}"]) for name in exported)
    whole = dict(train("alone", "ppo", ckpt_path=saves / "last.ckpt"))
    assert furthest(whole, alone["ppo"]) < 1e-9
    assert furthest(sharded, whole) > 1e-3, "it has gone on"

    part = next((saves / "step=2.0.shards").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert damage(saves / "step=2.ckpt") == f"the checksum of step=2.0.shards/{part.name} differs"
    with pytest.raises(ConfigError, match=rf"the checksum of step=2.0.shards/{part.name} differs"):
        FSDP2Strategy().load_checkpoint(saves / "step=2.ckpt")
    monkeypatch.setattr(FSDP2Strategy, "broadcast", lambda self, name: "step=1.ckpt")
    with pytest.raises(ConfigError, match="the first rank goes on from 'step=1.ckpt'"):
        FSDP2Strategy().load_checkpoint(saves / "step=2.ckpt")
    assert newest_whole(saves)[0] == saves / "step=1.ckpt"
    (saves / "step=2.0.shards").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="'step=2.0.shards', which is not beside it"):
        read_checkpoint(saves / "step=2.ckpt", is_whole=True)


def note_what_is_taken_up(folder: str) -> None:
    train("fsdp2", "ppo", num_steps=1, saves=Path(folder) / "saves")
    found: list[str] = []
    load_loop, load_budget, step = RolloutLoop.load_state_dict, state.load_budget, module.RhymeModule.training_step

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (found.append(name), call(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutLoop, "load_state_dict", noted("loop", load_loop))
        patch.setattr(state, "load_budget", noted("budget", load_budget))
        patch.setattr(module.RhymeModule, "training_step", noted("step", step))
        train("fsdp2", "ppo", num_steps=2, ckpt_path=Path(folder) / "saves" / "last.ckpt")
    (Path(folder) / "found").write_text(json.dumps(found))


def test_the_loop_and_the_budget_go_on_before_the_first_step(tmp_path):
    """Lightning reads a checkpoint after `on_fit_start` here; the loop would restart and forget answers begun."""
    run_ranks(1, note_what_is_taken_up, str(tmp_path), output=tmp_path / "output", timeout_s=200)
    assert json.loads((tmp_path / "found").read_text()) == ["loop", "budget", "step"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_other_ranks_and_under_another_strategy(kind, tmp_path, alone):
    steps = [("hsdp", 4), ("fsdp2", 2), ("ddp", 2), ("fsdp2", 3), ("fsdp2", 1)]
    before = None
    for number, (strategy, size) in enumerate(steps, start=1):
        saves = tmp_path / str(number)
        last = before / "last.ckpt" if before is not None else None
        weights = on_ranks(
            size, tmp_path, f"run{number}", strategy, kind=kind, num_steps=number, saves=saves, ckpt_path=last
        )
        before = saves
    assert number == STEPS
    assert furthest(weights, alone[kind]) < 1e-9


class KilledSoon(L.Callback):
    """Kills its rank some time after a step has begun."""

    def __init__(self, rank: int, step: int, delay_s: float) -> None:
        self.rank, self.step, self.delay_s = rank, step, delay_s

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if trainer.global_rank == self.rank and pl_module.num_rollouts == self.step:
            signal.signal(signal.SIGALRM, lambda *ignored: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, self.delay_s)


def train_until_killed(rank: int, step: int, delay_s: float, settings: dict[str, Any]) -> None:
    train("fsdp2", "ppo", size=2, callbacks=[KilledSoon(rank, step, delay_s)], num_steps=500, **settings)


@pytest.mark.slow
def test_killed_at_any_instant_it_resumes_to_the_last_bit(tmp_path):
    """Without drafts: a worker's budget begins anew, and the last bits of log-probs follow the shapes of passes."""
    settings: dict[str, Any] = {"deterministic": True, "drafts": False}
    whole = on_ranks(2, tmp_path, "whole", "fsdp2", **settings, saves=tmp_path / "whole.saves")
    settings["saves"] = tmp_path / "saves"
    kills = [(0, 2, 0.01), (1, 3, 0.1), (0, 3, 0.2), (1, 3, 0.3), (0, 4, 0.15)]
    for number, (rank, step, delay_s) in enumerate(kills):
        processes = start_ranks(2, train_until_killed, rank, step, delay_s, settings, output=tmp_path / "output")
        for process in processes:
            process.join(600)
        assert processes[rank].exitcode == -signal.SIGKILL, said(tmp_path / "output", rank)
        assert processes[1 - rank].exitcode == 1, said(tmp_path / "output", 1 - rank)
        newest, damaged = newest_whole(tmp_path / "saves")
        assert newest is not None
        assert not damaged, number
        settings["ckpt_path"] = newest
    assert furthest(on_ranks(2, tmp_path, "resumed", "fsdp2", **settings), whole) == 0.0


# -- killed while a checkpoint is written
# --------------------------------------------------------------------------------


def kill_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank die at a place of the third checkpoint that it writes."""
    owner, name, is_after = {
        "among the parts": (HuggingFaceStorageWriter, "write_data", False),
        "behind the parts": (shards, "checksums", False),
        "in front of the file": (AtomicCheckpointIO, "save_checkpoint", False),
        "behind the file": (AtomicCheckpointIO, "save_checkpoint", True),
        "within what is removed": (shards, "remove_others", False),
    }[place]
    whole, calls = getattr(owner, name), iter(range(1000))

    def dying(*arguments: Any, **named: Any) -> Any:
        is_third = next(calls) == 2
        if is_third and not is_after:
            if place == "among the parts":
                time.sleep(0.5)  # for the other rank's
            os.kill(os.getpid(), signal.SIGKILL)
        found = whole(*arguments, **named)
        if is_third:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    monkeypatch.setattr(owner, name, dying)


def train_until_dying(rank: int, place: str, settings: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["LOCAL_RANK"]) == rank:
            kill_at(place, patch)
        train("fsdp2", "ppo", size=2, **settings)


PLACES = [
    (1, "among the parts"),
    (0, "among the parts"),
    (1, "behind the parts"),
    (0, "in front of the file"),
    (0, "behind the file"),
    (0, "within what is removed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "place"), PLACES)
def test_killed_while_a_checkpoint_is_written_it_goes_on_with_other_ranks(rank, place, tmp_path, alone):
    saves = tmp_path / "saves"
    output = tmp_path / "output"
    processes = start_ranks(2, train_until_dying, rank, place, {"saves": saves}, output=output)
    for process in processes:
        process.join(600)
    assert processes[rank].exitcode == -signal.SIGKILL, said(output, rank)
    before = sorted(path.name for path in saves.iterdir())
    newest, damaged = newest_whole(saves)
    assert newest is not None, before
    assert not damaged, before
    assert newest.resolve().name == "step=2.ckpt", (
        "`last.ckpt` names it, until the next one is there with all its parts"
    )
    export(newest, tmp_path / "policy")
    weights = on_ranks(3, tmp_path, "resumed", "fsdp2", saves=saves, ckpt_path=newest)
    assert furthest(weights, alone["ppo"]) < 1e-9
    left = sorted(path.name for path in saves.iterdir())
    kept_steps = {name.partition(".")[0] for name in left} - {"last"}
    assert kept_steps == {"step=4", "step=5"}, left
    assert len([name for name in left if name.endswith(".shards")]) == 2, left
