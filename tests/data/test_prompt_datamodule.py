"""The data module under a real Trainer: what a run consumes, uninterrupted and resumed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rhymerl.data import PromptBatch, PromptDataModule
from rhymerl.errors import ConfigError, DataError
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.tasks import RunningSum

STEPS_PER_PASS = 3  # 7 prompts, 3 a step
ROWS = [{"prompt": f"{i}+1=?", "id": i} for i in range(7)]
TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 48,
}


@dataclass
class Rollout:
    max_tokens: int = 8


@dataclass
class Evaluation:
    longest: dict[str, int] = field(default_factory=dict)

    def max_tokens_of(self, name: str) -> int | None:
        return self.longest.get(name)


class Crash(Exception):
    pass


class Consumer(L.LightningModule):
    """Two optimizer steps a rollout step; its weight remembers every prompt and their order."""

    def __init__(self, policy: Policy, *, crash_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.environment = None
        self.rollout = Rollout()
        self.evaluation = Evaluation()
        self.crash_at = crash_at
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.consumed: list[list[str]] = []
        self.ahead: list[list[str]] = []
        self.validated: list[str] = []
        self.validated_sets: list[int] = []

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        loader = self.trainer.train_dataloader
        assert [prompt.id for prompt in loader.batch(loader.cursor)] == [prompt.id for prompt in batch]
        if loader.cursor == self.crash_at:
            raise Crash
        optimizer = self.optimizers()
        for prompt in batch.prompts[:2]:
            optimizer.zero_grad()
            self.manual_backward(((self.weight * 0.5 - float(prompt.id)) ** 2).sum())
            optimizer.step()
        self.consumed.append([prompt.id for prompt in batch])
        self.ahead.append([prompt.id for prompt in loader.peek()])
        loader.advance()

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += [prompt.id for prompt in batch]
        self.validated_sets += [dataloader_idx] * len(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saver(L.Callback):
    """Writes a checkpoint wherever Lightning's own callbacks would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: L.Trainer, name: str) -> None:
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.save(trainer, f"batch_end_{len(module.consumed)}")

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.save(trainer, f"epoch_end_{len(module.consumed)}")

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, f"validation_end_{len(module.consumed)}")

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.save(trainer, f"exception_{len(module.consumed)}")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return PolicySource(init=TINY, characters="0123456789+=?;#\n").load()


def make_trainer(folder: Path, **flags: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )


def data(**settings: Any) -> PromptDataModule:
    return PromptDataModule(**{"train": ROWS, "validation": ROWS[:4], "prompts_per_step": 3, **settings})


PASSES = 3
FLAGS = {
    "epochs": {"max_epochs": PASSES},
    "steps": {"max_steps": PASSES * STEPS_PER_PASS * 2},
    "validation within the epoch": {"max_epochs": PASSES, "val_check_interval": 2},
    "short epochs": {"max_steps": PASSES * STEPS_PER_PASS * 2, "limit_train_batches": 2},
    "no validation": {"max_epochs": PASSES, "limit_val_batches": 0},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_resumed_run_consumes_what_an_uninterrupted_one_does(
    policy: Policy, tmp_path: Path, flags: dict[str, Any]
) -> None:
    whole = Consumer(policy)
    make_trainer(tmp_path, **flags, callbacks=[Saver(tmp_path)]).fit(whole, datamodule=data())
    for first in range(0, PASSES * STEPS_PER_PASS, STEPS_PER_PASS):
        assert sorted(sum(whole.consumed[first : first + STEPS_PER_PASS], [])) == [str(i) for i in range(7)]
    assert whole.ahead[:-1] == whole.consumed[1:]
    locations = sorted(tmp_path.glob("*.ckpt"))
    assert len(locations) > PASSES * STEPS_PER_PASS
    for path in locations:
        done = int(path.stem.rpartition("_")[2])
        resumed = Consumer(policy)
        make_trainer(tmp_path, **flags).fit(resumed, datamodule=data(), ckpt_path=path, weights_only=True)
        assert resumed.consumed == whole.consumed[done:], path.stem
        assert torch.equal(resumed.weight, whole.weight), path.stem


@pytest.mark.parametrize("crash_at", [0, 1, 2, 3, 5])
def test_a_step_that_was_cut_short_is_repeated(policy: Policy, tmp_path: Path, crash_at: int) -> None:
    whole = Consumer(policy)
    make_trainer(tmp_path, max_epochs=2).fit(whole, datamodule=data())
    crashing = Consumer(policy, crash_at=crash_at)
    with pytest.raises(Crash):
        make_trainer(tmp_path, max_epochs=2, callbacks=[Saver(tmp_path)]).fit(crashing, datamodule=data())
    resumed = Consumer(policy)
    path = tmp_path / f"exception_{crash_at}.ckpt"
    make_trainer(tmp_path, max_epochs=2).fit(resumed, datamodule=data(), ckpt_path=path, weights_only=True)
    assert crashing.consumed + resumed.consumed == whole.consumed
    assert torch.equal(resumed.weight, whole.weight)


def test_resuming_on_changed_data_is_refused(policy: Policy, tmp_path: Path) -> None:
    make_trainer(tmp_path, max_epochs=1, callbacks=[Saver(tmp_path)]).fit(Consumer(policy), datamodule=data())
    for location in ("batch_end_1", "epoch_end_3"):
        with pytest.raises(ConfigError, match=r"data\.train: 6 prompts, but the checkpoint was written with 7"):
            make_trainer(tmp_path, max_epochs=2).fit(
                Consumer(policy),
                datamodule=data(train=ROWS[1:]),
                ckpt_path=tmp_path / f"{location}.ckpt",
                weights_only=True,
            )


DATED = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"


@pytest.mark.parametrize("template", [DATED, DATED.replace("'", '"'), DATED.replace("%d", "%H:%M:%S %d")])
def test_the_date_of_a_resumed_run_is_that_of_its_start(tmp_path: Path, template: str) -> None:
    policy = PolicySource(init=TINY, characters="".join(map(chr, range(32, 127)))).load()
    policy.tokenizer.chat_template = template
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "id": row["id"]} for row in ROWS]
    first = data(train=rows, validation=rows)
    first.begin_at("2020-02-03T23:59:59")
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[Saver(tmp_path)])
    trainer.fit(Consumer(policy), datamodule=first)
    texts = [prompt.text for prompt in first.prompts]
    assert all("03 Feb 2020: " in text for text in texts)
    resumed = data(train=rows, validation=rows)
    path = tmp_path / "batch_end_1.ckpt"
    make_trainer(tmp_path, max_epochs=1).fit(Consumer(policy), datamodule=resumed, ckpt_path=path, weights_only=True)
    assert [prompt.text for prompt in resumed.prompts] == texts
    now = data(train=rows, validation=rows)
    make_trainer(tmp_path, max_epochs=1).fit(Consumer(policy), datamodule=now)
    assert now.prompts[0].text != texts[0]


def test_long_prompts_may_be_left_out(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*ROWS, {"prompt": "1" * 40}, {"prompt": "1" * 50}]
    module = Consumer(policy)
    kept = data(train=rows, filter_overlong_prompts=True)
    kept.prepare_for(module)
    assert len(kept.prompts) == 8 + 4
    assert caplog.messages == [
        "data.filter_overlong_prompts=true: 1 of the 9 prompts is too long and left out, the first at data.train, row 9"
    ]
    assert data(train=rows[:8], filter_overlong_prompts=True, max_prompt_tokens=5).prepare_for(module) is None
    assert caplog.messages[1].startswith("data.filter_overlong_prompts=true: 1 of the 8 prompts is too long")
    with pytest.raises(DataError, match=r"data.train, row 1: .*; all 2 prompts are too long"):
        data(train=rows[7:], filter_overlong_prompts=True, max_prompt_tokens=5).prepare_for(module)
    with pytest.raises(DataError, match="data.train, row 9: the prompt has 50 tokens"):
        data(train=rows).prepare_for(module)


@pytest.mark.parametrize(("validation", "words"), [(ROWS, "7 of the 7"), ([*ROWS[:4], {"prompt": "9"}], "4 of the 5")])
def test_held_out_prompts_that_are_trained_on_are_said(
    validation: Any, words: str, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    same = data(validation=validation)
    same.prepare_for(Consumer(policy))
    same.warn()
    assert caplog.messages == [
        f"data.validation: {words} prompts are trained on, too, so evaluations do not show what the policy does with others"
    ]
    caplog.clear()
    other = data(validation=[{"prompt": "9"}, *ROWS[:1]])
    other.prepare_for(Consumer(policy))
    other.warn()
    assert caplog.messages == []


def test_every_validation_sees_all_its_rows_in_order(policy: Policy, tmp_path: Path) -> None:
    module = Consumer(policy)
    trainer = make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, datamodule=data())
    assert module.validated == ["0", "1", "2", "3"] * 3
    module.validated = []
    trainer.validate(module, datamodule=data(validation_prompts=2), verbose=False)
    assert module.validated == ["0", "1"]


def test_several_validation_sets_by_name(policy: Policy, tmp_path: Path) -> None:
    """Each whole and in order; one of a name alone has the task's rows."""
    task = RunningSum(train_size=6, validation_size=2)
    sets = {"small": ROWS[:2], "all": ROWS, "task": None}
    module = Consumer(policy)
    datamodule = data(validation=sets, task=task, validation_prompts=4)
    make_trainer(tmp_path).validate(module, datamodule=datamodule, verbose=False)
    assert datamodule.validation_names == ["small", "all", "task"]
    assert module.validated[:6] == ["0", "1", "0", "1", "2", "3"]
    assert module.validated_sets == [0, 0, 1, 1, 1, 1, 2, 2]
    assert datamodule.num_validation_prompts == 8
    assert [prompt.text for prompt in datamodule.validation_loaders["task"].prompts] == [
        row["prompt"] for row in task.rows("validation")
    ]
    assert data().validation_names == ["validation"]


def test_each_validation_set_has_its_own_limit(policy: Policy) -> None:
    module = Consumer(policy)
    module.evaluation.longest = {"long": 44}
    data(validation={"short": ROWS, "b": ROWS}).prepare_for(module)
    with pytest.raises(DataError, match=r"^data\.validation\.long, row 1: .*set evaluation\.sets\.long\.max_tokens"):
        data(validation={"short": ROWS, "long": ROWS}).prepare_for(module)


def test_runs_without_validation_data(policy: Policy, tmp_path: Path) -> None:
    """And without a warning, to which end no filter of the process is touched."""
    module = Consumer(policy)
    filters = list(warnings.filters)
    trainer = make_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(module, datamodule=data(validation=None))
    assert len(module.consumed) == STEPS_PER_PASS
    assert module.validated == []
    assert [each for each in warnings.filters if each not in filters] == []


class Counted(RunningSum):
    """Counts how often it is asked for its rows."""

    def __init__(self) -> None:
        super().__init__(train_size=6, validation_size=2)
        self.asked: list[str] = []

    def rows(self, split: str) -> Any:
        self.asked.append(split)
        return super().rows(split)


def test_what_was_prepared_for_a_module_is_read_once(policy: Policy, tmp_path: Path) -> None:
    task, module = Counted(), Consumer(policy)
    datamodule = PromptDataModule(task=task, prompts_per_step=3)
    datamodule.prepare_for(module)
    assert datamodule.train_loader is not None
    ids = [[prompt.id for prompt in datamodule.train_loader.batch(step)] for step in range(2)]
    trainer = make_trainer(tmp_path, max_epochs=1, limit_val_batches=1)
    module.training_step = remembering(module)  # type: ignore[method-assign]
    trainer.validate(module, datamodule, verbose=False)
    for _ in range(2):
        make_trainer(tmp_path, max_epochs=1).fit(module, datamodule)
    trainer.validate(module, datamodule, verbose=False)
    assert module.consumed == 2 * ids, "each fit starts at the first step"
    assert len(module.validated) == 2 * 2 + 2 * (2 + 2)
    assert sorted(task.asked) == ["train", "validation"]


def remembering(module: Consumer) -> Any:
    """A training step for prompts whose ids are no numbers."""

    def training_step(batch: PromptBatch, batch_idx: int) -> None:
        module.consumed.append([prompt.id for prompt in batch])
        module.optimizers().step()
        module.trainer.train_dataloader.advance()

    return training_step


def test_what_was_not_prepared_is_read_by_each_call(policy: Policy, tmp_path: Path) -> None:
    """The file may have changed, and another module may have another tokenizer."""
    rows = list(ROWS)
    datamodule = data(train=rows, validation=None)
    for module in (Consumer(policy), Consumer(policy)):
        make_trainer(tmp_path, max_epochs=1).fit(module, datamodule)
        assert sum(map(len, module.consumed)) == len(rows)
        rows.append({"prompt": "7+1=?", "id": len(rows)})
    datamodule.prepare_for(module)
    make_trainer(tmp_path, max_epochs=1).fit(other := Consumer(policy), datamodule)
    assert sum(map(len, other.consumed)) == len(rows) == 9


def test_bad_data_stops_the_run_before_any_step(policy: Policy, tmp_path: Path) -> None:
    module = Consumer(policy)
    module.rollout.max_tokens = 44
    with pytest.raises(DataError, match=r"^data\.train, row 1: .* set rollout\.max_tokens to at most 43"):
        make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=data())
    assert module.consumed == []


def test_validating_without_data_is_refused(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation=None: expected"):
        make_trainer(tmp_path).validate(Consumer(policy), datamodule=PromptDataModule(ROWS))
