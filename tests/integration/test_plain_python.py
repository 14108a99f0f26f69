"""`Trainer(...).fit(RhymeModule(...), PromptDataModule(...))` with the usual flags of Lightning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.algos import GRPO
from rhymerl.callbacks import Checkpoints
from rhymerl.drafters import NoDrafter
from rhymerl.engine.engine import Engine
from rhymerl.errors import ConfigError
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import tiny_policy
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.trainer import check_trainer, warn_of_cores, with_environment
from tests.conftest import children
from tests.integration.conftest import assert_same
from tests.integration.plain import DIGITS, QUIET, num_changed, parts, weights
from tests.integration.training import PROMPTS


def test_defaults(model_dir, prompts):
    """Nothing but what nobody can choose for the user, and one epoch for the sake of time."""
    module = RhymeModule(str(model_dir), rewards=DIGITS, rollout=RolloutSettings(max_tokens=8))
    before = weights(module)
    trainer = L.Trainer(devices=1, max_epochs=1, log_every_n_steps=1)
    trainer.fit(module, PromptDataModule(str(prompts)))
    assert module.num_rollouts == trainer.global_step == 1
    assert num_changed(before, weights(module)) > 20
    assert list(Path("lightning_logs").rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"fast_dev_run": True}, 1),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2),
        ({"max_steps": 4, "val_check_interval": 1}, 4),
        ({"max_steps": 2, "limit_val_batches": 0}, 2),
        ({"max_steps": 2, "num_sanity_val_steps": 1}, 2),
    ],
    ids=str,
)
def test_flags(flags, steps, model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    L.Trainer(devices=1, **QUIET, **flags).fit(module, datamodule)
    assert module.num_rollouts == steps


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_precisions(precision, dtype, model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    before = weights(module.to(dtype))
    trainer = L.Trainer(devices=1, max_steps=2, precision=precision, **QUIET)
    trainer.fit(module, datamodule)
    assert module.model.dtype == dtype
    assert num_changed(before, weights(module)) > 10
    # One policy, two computations of the same log-probs.
    apart = float(trainer.callback_metrics["sampling/sampling_logp_difference/max"])
    assert apart <= (1e-9 if precision == "64-true" else 0.5)


def test_default_parts_are_as_deterministic_as_the_trainer(model_dir, prompts, caplog):
    """What a checkpoint holds of them leaves that to its next Trainer."""
    for wanted in (None, True):
        module, datamodule = parts(str(model_dir), prompts)
        L.Trainer(devices=1, max_steps=1, deterministic=wanted, **QUIET).fit(module, datamodule)
        assert [module.drafter.deterministic, module.budget.deterministic] == [wanted] * 2
        assert [module.hparams[name]["deterministic"] for name in ("drafter", "budget")] == [None] * 2
    assert "goes by the clock" not in caplog.text


@pytest.mark.parametrize(
    ("device", "num_ranks", "cores", "words"),
    [
        (
            "cpu",
            8,
            2,
            "trainer.devices=8: 8 ranks share 2 CPU cores, so they take turns and are slower than 2 would be",
        ),
        ("cpu", 2, 1, "trainer.devices=2: 2 ranks share 1 CPU core, so they take turns and are slower than 1 would be"),
        ("cpu", 2, 2, None),
        ("cuda", 8, 2, None),
    ],
)
def test_more_ranks_than_cores_are_said_once(device, num_ranks, cores, words, caplog, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    strategy = SimpleNamespace(root_device=torch.device(device))
    warn_of_cores(SimpleNamespace(strategy=strategy, num_devices=num_ranks))
    assert caplog.messages == ([words] if words else [])


def test_a_fit_says_so_and_an_evaluation_does_not(model_dir, prompts, caplog, monkeypatch):
    module, datamodule = parts(str(model_dir), prompts)
    monkeypatch.setattr("rhymerl.training.trainer.usable_cores", lambda: 0)
    trainer = L.Trainer(devices=1, max_steps=1, **QUIET)
    trainer.validate(module, datamodule)
    assert "trainer.devices" not in caplog.text
    trainer.fit(module, datamodule)
    assert caplog.text.count("trainer.devices=1: ") == 1


def test_gradient_checkpointing_gives_the_same_weights(model_dir, prompts):
    """Bit-equal, since what is recomputed is the same; and it takes part, which needs train mode."""
    results, calls = [], []
    for on in (False, True):
        module, datamodule = parts(str(model_dir), prompts)
        if on:
            module.model.activation_checkpointing_enable()
        # Both times, since a hook also changes by which way the engine goes through the model.
        module.model.model.layers[0].mlp.register_forward_hook(
            lambda *_, on=on: calls.append(torch.is_grad_enabled()) if on else None
        )
        L.Trainer(devices=1, max_steps=2, **QUIET).fit(module, datamodule)
        results.append(weights(module))
    assert_same(*results)
    assert (
        sum(calls) == 4 - 2
    )  # non-reentrant: the first forward has gradients off or on, the second is the recomputation


def test_loggers_and_callbacks(model_dir, prompts, tmp_path):
    module, datamodule = parts(str(model_dir), prompts)
    seen = []

    class Mine(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(float(trainer.callback_metrics["reward"]))

    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    L.Trainer(
        devices=1, max_steps=2, logger=loggers, callbacks=[Mine()], default_root_dir=tmp_path / "root", **QUIET
    ).fit(module, datamodule)
    header = next((tmp_path / "csv").rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    assert {"reward", "loss", "num_tokens", "eval/reward"} <= set(header)
    assert list((tmp_path / "board").rglob("events*"))
    assert len(seen) == 2


class GradientsByTheWay(L.Callback):
    """Whether there are gradients at the end of a step, for callbacks, and when the next one begins."""

    def __init__(self) -> None:
        self.at_end: list[bool] = []
        self.at_start: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        self.at_end.append(any(each.grad is not None for each in pl_module.parameters()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        self.at_start.append(any(each.grad is not None for each in pl_module.parameters()))


def test_gradients_hold_no_memory_while_an_engine_needs_it(model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    seen = GradientsByTheWay()
    L.Trainer(devices=1, max_steps=3, callbacks=[seen], **QUIET).fit(module, datamodule)
    assert seen.at_end == [True] * 3
    assert seen.at_start == [False] * 3


def test_two_fits_and_a_validation_on_one_module(model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    first = L.Trainer(devices=1, max_steps=2, **QUIET)
    first.fit(module, datamodule)
    between = weights(module)
    metrics = first.validate(module, datamodule, verbose=False)[0]
    assert 0 <= metrics["eval/reward"] <= 1
    assert_same(weights(module), between)
    L.Trainer(devices=1, max_steps=2, **QUIET).fit(module, datamodule)
    assert module.num_rollouts == 4
    assert num_changed(between, weights(module)) > 20


def test_a_data_module_can_be_printed(model_dir, prompts):
    """It can be printed before its prompts are read, and afterwards."""
    module, datamodule = parts(str(model_dir), prompts)
    assert str(datamodule) == "PromptDataModule: nothing has been read yet"
    datamodule.prepare_for(module)
    assert str(datamodule) == "PromptDataModule: 6 prompts to train on, 3 a step; held out: validation 6"
    assert str(PromptDataModule(PROMPTS)) == str(PromptDataModule(PROMPTS, PROMPTS))
    no_validation = PromptDataModule(PROMPTS, prompts_per_step=3)
    no_validation.prepare_for(module)
    assert str(no_validation) == "PromptDataModule: 6 prompts to train on, 3 a step; held out: none"


def test_a_fit_that_fails_leaves_nothing_running_and_the_module_usable(model_dir, prompts):
    """Not even the reward process, which another fit would take over and end."""

    class Trip(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("tripped")

    module, datamodule = parts(str(model_dir), prompts)
    before = children()
    with pytest.raises(KeyError, match="tripped"):
        L.Trainer(devices=1, max_steps=2, callbacks=[Trip()], **QUIET).fit(module, datamodule)
    assert children() == before
    L.Trainer(devices=1, max_steps=2, **QUIET).fit(module, datamodule)


def test_the_reference_is_the_policy_that_the_module_was_given(model_dir, prompts, tmp_path):
    """Also for a second module that goes on from a checkpoint."""
    kl = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            kl.append(float(trainer.callback_metrics["kl"]))

    flags = {"devices": 1, "enable_checkpointing": False, "callbacks": [Watch()], **QUIET}
    module, datamodule = parts(str(model_dir), prompts, algo=GRPO(kl_coef=0.1))
    first = L.Trainer(max_epochs=1, **flags)
    first.fit(module, datamodule)
    path = tmp_path / "end.ckpt"
    first.save_checkpoint(path, weights_only=False)
    for each in (module, RhymeModule.load_from_checkpoint(path)):
        L.Trainer(max_epochs=2, **flags).fit(each, datamodule, ckpt_path=path)
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert min(kl[1:]) > 1e-4
    assert kl[2:4] == kl[4:6]


def test_a_run_goes_on_with_the_base_model_that_it_began_with_only(model_dir, prompts, tmp_path):
    """Its weights would be the checkpoint's, but the reference would not."""
    module, datamodule = parts(str(model_dir), prompts)
    first = L.Trainer(devices=1, max_steps=1, enable_checkpointing=False, **QUIET)
    first.fit(module, datamodule)
    path = tmp_path / "end.ckpt"
    first.save_checkpoint(path, weights_only=False)
    other, datamodule = parts(tiny_policy(dtype="float32", context=128, seed=1), prompts)
    with pytest.raises(
        ConfigError, match="^the checkpoint: its run started from other weights than those of model.path"
    ):
        L.Trainer(devices=1, max_steps=2, **QUIET).fit(other, datamodule, ckpt_path=path)
    RhymeModule.load_from_checkpoint(path, model=tiny_policy(dtype="float32", context=128, seed=1))


def test_evaluations_in_between_are_the_modules_own_and_once_each(model_dir, prompts, tmp_path):
    """Also of a run that goes on from the checkpoint of a step at which one is due."""
    more = {"evaluation": EvaluationSettings(every_n_steps=2), "drafter": NoDrafter()}  # nothing follows the clock
    module, datamodule = parts(str(model_dir), prompts, **more)
    saver = Checkpoints(tmp_path / "saved", every_n_steps=2, keep=9)
    board = TensorBoardLogger(tmp_path, name="", version="")
    flags = {
        "devices": 1,
        "val_check_interval": 2**31,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        **QUIET,
    }
    L.Trainer(max_steps=5, callbacks=[saver], logger=board, **flags).fit(module, datamodule)
    assert (module.evaluator.num_done, module.evaluator.done_at) == (2, 4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [each.step for each in events.Scalars("eval/reward")] == [2, 4]
    path = tmp_path / "saved" / "step=2.ckpt"
    again, datamodule = parts(str(model_dir), prompts, **more)
    L.Trainer(max_steps=5, logger=False, enable_checkpointing=False, **flags).fit(again, datamodule, ckpt_path=path)
    assert again.evaluator.num_done == 2
    assert again.evaluator.metrics == module.evaluator.metrics
    assert_same(weights(again), weights(module))


@pytest.mark.parametrize(
    ("call", "flags", "message"),
    [
        ("fit", {"gradient_clip_val": 1.0}, "set update.max_grad_norm"),
        ("validate", {"accumulate_grad_batches": 2}, "update.micro_batch_tokens"),
        ("test", {"overfit_batches": 1}, "trainer.overfit_batches=1"),
    ],
)
def test_flags_that_cannot_be_honoured(call, flags, message, model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    with pytest.raises(ConfigError, match=message):
        getattr(L.Trainer(devices=1, max_steps=1, **QUIET, **flags), call)(module, datamodule)


class OwnWrapper(DDPStrategy):
    def configure_ddp(self) -> None:
        pass


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPStrategy(start_method="fork"), "with start_method='fork': the history would be lost with the processes"),
        (DDPStrategy(ddp_comm_hook=print), ": a communication hook or model averaging would never be asked"),
        (OwnWrapper(), ": its own configure_ddp would never be asked"),
        (FSDPStrategy(), ": the update knows ranks that hold whole weights"),
    ],
    ids=["fork", "hook", "wrapper", "fsdp"],
)
def test_strategies_that_cannot_be_honoured(strategy, message):
    """Lightning itself makes no Trainer with the last one where there is no GPU."""
    with pytest.raises(ConfigError, match=f"^trainer.strategy={type(strategy).__name__} ?{message}"):
        check_trainer(SimpleNamespace(strategy=strategy))


def test_slurm_does_not_save_in_the_middle_of_a_step(model_dir, prompts, monkeypatch):
    assert with_environment(None) == []
    for name, value in {"NTASKS": 1, "JOB_NAME": "job", "JOB_ID": 7, "NODEID": 0, "PROCID": 0, "LOCALID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    module, datamodule = parts(str(model_dir), prompts)
    with pytest.raises(ConfigError, match=r"^trainer.plugins: .* pass SLURMEnvironment\(auto_requeue=False\)"):
        L.Trainer(devices=1, max_steps=1, **QUIET).fit(module, datamodule)
    trainer = L.Trainer(devices=1, max_steps=1, plugins=with_environment(None), **QUIET)
    trainer.fit(module, datamodule)
    assert trainer.global_step == 1
    other = {"_target_": "lightning.fabric.plugins.environments.LightningEnvironment"}
    assert with_environment([other]) == [other]
    assert len(with_environment([{"_target_": "lightning.pytorch.plugins.AsyncCheckpointIO"}])) == 2


def test_no_test_loop(model_dir, prompts):
    module, datamodule = parts(str(model_dir), prompts)
    with pytest.raises(L.fabric.utilities.exceptions.MisconfigurationException, match="No `test_step"):
        L.Trainer(devices=1, **QUIET).test(module, datamodule)


class Sized(NoDrafter):
    """A drafter that has a length, and nothing in it yet."""

    def __len__(self) -> int:
        return 0


def test_an_empty_sized_part_is_not_taken_for_none(model_dir):
    module = RhymeModule(str(model_dir), drafter=Sized())
    assert isinstance(module.drafter, Sized)
    assert isinstance(Engine(module.model, drafter=module.drafter).protocol.drafter, Sized)
