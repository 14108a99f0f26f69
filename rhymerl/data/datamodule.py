"""The data module: what a run trains and is validated on."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol, cast

import lightning as L
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from rhymerl.data.base import ONLY_SET, PROMPT_COLUMN, LocatedRow
from rhymerl.data.encoding import LengthLimits, PromptEncoder, check_template_arguments, encode_rows, with_tools
from rhymerl.data.loader import PromptLoader
from rhymerl.data.sources import DataSource, Setting, read_rows
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError, at_least, check_ranges
from rhymerl.models.chat import ChatTokenizer
from rhymerl.models.policy import Policy
from rhymerl.progress import counted
from rhymerl.rollout.base import RolloutSettings
from rhymerl.tasks.base import Task
from rhymerl.types import Prompt

_LOG = logging.getLogger(__name__)
_VALIDATION_STEP = 1024  # prompts at a time: the more, the fuller the engine


class _Module(Protocol):
    """The part of the LightningModule that the data module reads; all of it must be there before `setup`."""

    policy: Policy
    environment: Any
    rollout: RolloutSettings
    evaluation: Any


class _NoLoaders(CombinedLoader):
    """Lightning's own takes an empty list for one empty loader, and warns of it."""

    @property
    def flattened(self) -> list[Any]:
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        assert not flattened


@dataclass(eq=False, repr=False)
class PromptDataModule(L.LightningDataModule):
    """Prompts for training and validation, from files, data sets or a task.

    `train` and `validation` are sources that `rhymerl.data.read_rows` takes; with a `task`, a missing one comes from
    the task. Several validation sets are a mapping by name, in which None stands for the task's rows. Everything is
    read, encoded and checked in `setup`, before any compute, on every rank alike. Validation uses the first
    `validation_prompts` rows of a set (default: all), in their order. `system_prompt` goes before every prompt, through
    the tokenizer's chat template, which then takes text as the user's message; a row with a system message of its own
    keeps that one. `filter_overlong_prompts` leaves out prompts that are longer than `max_prompt_tokens`, or leave no
    room for an answer.

    The place in the training data is part of the checkpoint (see PromptLoader): the module that trains calls
    `trainer.datamodule.train_loader.advance()` at the end of each `training_step`. Every `Trainer.fit` starts
    at the first step unless `ckpt_path` is given.
    """

    train: DataSource | None = None
    validation: DataSource | Mapping[str, DataSource | None] | None = None
    _: KW_ONLY
    task: Task | None = None
    prompts_per_step: int = at_least(1, 32)  # of a rollout; each is answered rollout.group_size times
    validation_prompts: int | None = at_least(1, None)
    shuffle: bool = True  # prompts of an epoch in random order
    seed: int = 0  # of that order
    prompt_column: str = PROMPT_COLUMN  # text, or a list of chat messages
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None  # such as enable_thinking
    max_prompt_tokens: int | None = at_least(1, None)
    filter_overlong_prompts: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        check_ranges(self)
        check_template_arguments(self.chat_template_kwargs)
        _check_names(self.validation)
        self._tools: Sequence[Mapping[str, Any]] = ()  # the environment's, as JSON schemas
        self.started = datetime.now().replace(microsecond=0)  # of the run, which chat templates take for now
        self.train_loader: PromptLoader | None = None
        # By the name of the set, in the order in which Lightning numbers them.
        self.validation_loaders: dict[str, PromptLoader] = {}
        self._prepared_for: _Module | None = None
        self._encoder: PromptEncoder | None = None
        self._prepare_again: Callable[[], None] | None = None

    def __str__(self) -> str:
        """Lightning's own knows torch's loaders only."""
        if self.train_loader is None and not self.validation_loaders:
            return f"{type(self).__name__}: nothing has been read yet"
        loader = self.train_loader
        train = (
            f"{counted(len(loader.prompts), 'prompt')} to train on, {self.prompts_per_step:,} a step"
            if loader is not None
            else "none to train on"
        )
        held_out = ", ".join(f"{name} {len(each.prompts):,}" for name, each in self.validation_loaders.items())
        return f"{type(self).__name__}: {train}; held out: {held_out or 'none'}"

    def setup(self, stage: str) -> None:
        """Read, encode and check the data; called by the Trainer on every rank, `stage` is fit or validate.

        Raises DataError and ConfigError for everything that is wrong with it.
        """
        assert self.trainer is not None, "setup() is called by the Trainer; without one, call prepare()"
        module, with_train = cast(_Module, self.trainer.lightning_module), stage == "fit"
        is_there = self.train_loader is not None if with_train else bool(self.validation_loaders)
        if self._prepared_for is not module or not is_there:
            self.prepare_for(module, with_train=with_train)
            self._prepared_for = None  # the next call reads anew
        elif self.train_loader is not None and with_train:
            self.train_loader.cursor = 0

    def prepare_for(self, module: _Module, *, with_train: bool = True) -> None:
        """Do the work of `setup` before it, once for all that a Trainer does with this module afterwards.

        Without `with_train` there must be validation data.
        """
        self._tools = module.environment.tool_schemas if module.environment is not None else ()
        encoder = PromptEncoder(
            module.policy.tokenizer,
            prompt_column=self.prompt_column,
            system_prompt=self.system_prompt,
            chat_template_kwargs=self.template_arguments,
            started=self.started,
        )
        limits = LengthLimits(
            context_tokens=module.policy.context_tokens,
            max_tokens=module.rollout.max_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            drops_longer=self.filter_overlong_prompts,
        )
        in_validation = {name: _limits_of(name, limits, module.evaluation) for name in self.validation_names}
        self.prepare(encoder, limits, with_train=with_train, in_validation=in_validation)
        self._prepared_for = module

    def prepare(
        self,
        encoder: PromptEncoder,
        limits: LengthLimits,
        *,
        with_train: bool = True,
        in_validation: Mapping[str, LengthLimits] | None = None,
    ) -> None:
        """Read, encode and check; `in_validation` are the limits there, by the set's name, when they are others."""
        self._encoder = encoder
        self._prepare_again = partial(self.prepare, encoder, limits, with_train=with_train, in_validation=in_validation)
        if with_train:
            prompts = encode_rows(self._rows("data.train", self.train), encoder, limits)
            self.train_loader = PromptLoader(
                prompts, prompts_per_step=self.prompts_per_step, shuffle=self.shuffle, seed=self.seed
            )
        self.validation_loaders = {}
        for name in self.validation_names if self.has_validation or not with_train else ():
            prompts = encode_rows(self._validation_rows(name), encoder, (in_validation or {}).get(name, limits))
            self.validation_loaders[name] = PromptLoader(prompts, prompts_per_step=_VALIDATION_STEP, shuffle=False)

    def begin_at(self, started: str | None) -> None:
        """Take the time at which a run was started, in ISO form, from its checkpoint, before the data is prepared."""
        if started is not None:  # prompts do not tell it
            self.started = datetime.fromisoformat(started)

    def warn(self) -> None:
        """Say, on rank 0, what may surprise people in a training on this data, which has been prepared."""
        if self._encoder is not None:
            self._encoder.warn()
        for words in self._shared_prompts() if is_first_rank() else ():
            _LOG.warning("%s", words)
        num_prompts = len(self.train_loader.prompts) if self.train_loader is not None else self.prompts_per_step
        if num_prompts < self.prompts_per_step and is_first_rank():
            _LOG.warning(
                "data.prompts_per_step=%d: the training data has only %s, so each step has %d",
                self.prompts_per_step,
                counted(num_prompts, "prompt"),
                num_prompts,
            )

    def _shared_prompts(self) -> Iterator[str]:
        """Yield a sentence for each validation set of which most prompts are trained on."""
        trained = {prompt.key for prompt in self.train_loader.prompts} if self.train_loader is not None else set[str]()
        for name, loader in self.validation_loaders.items():
            shared = sum(prompt.key in trained for prompt in loader.prompts)
            if 2 * shared > len(loader.prompts):
                setting = "data.validation" if name == ONLY_SET else f"data.validation.{name}"
                yield (
                    f"{setting}: {shared:,} of the {len(loader.prompts):,} prompts are trained on, too, so evaluations do not show what the "
                    "policy does with others"
                )

    def train_dataloader(self) -> PromptLoader:
        if self.train_loader is None:
            raise RuntimeError("train_dataloader() before setup('fit')")
        return self.train_loader

    def val_dataloader(self) -> PromptLoader | list[PromptLoader] | CombinedLoader:
        """Return the validation loaders; without validation data there are none, and Lightning skips validation."""
        loaders = list(self.validation_loaders.values())
        if not loaders:
            return _NoLoaders([], "sequential")
        return loaders[0] if len(loaders) == 1 else loaders

    def state_dict(self) -> dict[str, Any]:
        """Return the training loader's state, and the run's start if prompts depend on it.

        Lightning itself restores only a loader that stopped within an epoch.
        """
        started = {"started": self.started.isoformat()} if self._tells_time else {}
        return {**self.train_loader.state_dict(), **started} if self.train_loader else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = self.started
        self.begin_at(state_dict.get("started"))
        if self.started != before and self._tells_time and self._encoder is not None and self._prepare_again:
            self._encoder.chat.started = self.started
            self._prepare_again()
        if self.train_loader is not None:
            self.train_loader.load_state_dict(state_dict)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the user's arguments of the chat template, with the environment's tools, if it has any."""
        return with_tools(self.chat_template_kwargs, self._tools)

    @property
    def chat(self) -> ChatTokenizer:
        """Return what has rendered the prompts; known after `setup`."""
        assert self._encoder is not None, "setup() comes before"
        return self._encoder.chat

    @property
    def _tells_time(self) -> bool:
        return self._encoder is not None and self._encoder.chat.uses_time

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.task is not None

    @property
    def validation_names(self) -> list[str]:
        """Return the names of the validation sets, in order; a set without a name is `validation`."""
        return list(self.validation) if isinstance(self.validation, Mapping) else [ONLY_SET]

    @property
    def num_validation_prompts(self) -> int:
        """Return the number of prompts in all validation sets; known after `setup`."""
        return sum(len(loader.prompts) for loader in self.validation_loaders.values())

    @property
    def prompts(self) -> list[Prompt]:
        """Return all prompts, for training and validation; known after `setup`."""
        loaders = (self.train_loader, *self.validation_loaders.values())
        return [prompt for loader in loaders if loader for prompt in loader.prompts]

    def _validation_rows(self, name: str) -> list[LocatedRow]:
        if not isinstance(self.validation, Mapping):
            rows = self._rows("data.validation", self.validation, only_first=self.validation_prompts)
            if self.validation_prompts is not None and len(rows) < self.validation_prompts:
                raise ConfigError(
                    f"data.validation_prompts={self.validation_prompts}: expected at most {len(rows)}, "
                    "the number of validation rows"
                )
            return rows
        return self._rows(f"data.validation.{name}", self.validation[name], only_first=self.validation_prompts)

    def _rows(self, setting: Setting, source: DataSource | None, *, only_first: int | None = None) -> list[LocatedRow]:
        if source is not None:
            return read_rows(source, setting, only_first=only_first)
        if self.task is None:
            raise ConfigError(
                f"{setting}=None: expected a .jsonl, .csv or .parquet file, a data set, a list of rows, or a task (data.task)"
            )
        rows = self.task.rows("train" if setting == "data.train" else "validation")
        return read_rows(rows, setting, only_first=only_first)


def _limits_of(name: str, limits: LengthLimits, evaluation: Any) -> LengthLimits:
    longest = evaluation.max_tokens_of(name)
    setting = "evaluation.max_tokens" if name == ONLY_SET else f"evaluation.sets.{name}.max_tokens"
    return replace(limits, max_tokens=longest, setting=setting) if longest else limits


def _check_names(validation: object) -> None:
    """Check the names of validation sets, which are parts of metrics' names."""
    if isinstance(validation, Mapping):
        if not validation:
            raise ValueError("validation={}: expected at least one data set, or null")
        for name in validation:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"validation: {name!r}: expected a name of letters, digits and . _ -")
