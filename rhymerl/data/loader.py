"""The order of prompts: steps of a pass, from (seed, epoch, cursor) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.data.base import PromptBatch
from rhymerl.data.encoding import canonical_json
from rhymerl.errors import ConfigError, DataError, require_at_least
from rhymerl.types import Prompt


@dataclass(eq=False)
class PromptLoader:
    """Deals the prompts of one rollout step after another; sized, and exact about where it stands.

    `cursor` counts the steps that are *consumed*: trained on to the end. Iterating never moves it; the training loop
    calls `advance()` once a step, when the step's last update is done. So during step s the cursor is s. A checkpoint
    written in the middle of step s (an exception, Ctrl-C) repeats step s, and one written after it
    (`on_train_batch_end`, the end of an epoch) goes on with step s + 1. Step s belongs to pass `s // len(loader)`; a
    pass visits every prompt once, and its last step may be smaller. `iter` goes from the cursor to the end of its pass,
    so a resumed epoch finishes where it left off.

    Every rank holds the same loader and sees the same steps. Raises ValueError for `prompts_per_step` < 1
    and DataError when there are no prompts.
    """

    prompts: Sequence[Prompt]
    _: KW_ONLY
    prompts_per_step: int
    shuffle: bool = True
    seed: int = 0
    cursor: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        require_at_least({"prompts_per_step": (self.prompts_per_step, 1)})
        if not self.prompts:
            raise DataError("the data set is empty; expected at least one prompt")
        self._latest_order: tuple[int, npt.NDArray[np.intp]] | None = None  # of one epoch: saves sorting

    def __len__(self) -> int:
        """Return the number of steps in a pass."""
        return -(-len(self.prompts) // self.prompts_per_step)

    def __iter__(self) -> Iterator[PromptBatch]:
        first = self.cursor
        for step in range(first, first - first % len(self) + len(self)):
            yield self.batch(step)

    @property
    def epoch(self) -> int:
        """Return the epoch of the current step, from 0."""
        return self.cursor // len(self)

    def batch(self, step: int) -> PromptBatch:
        """Return the prompts of any step, counted from the start of the run."""
        epoch, position = divmod(step, len(self))
        first = position * self.prompts_per_step
        order = self._order(epoch)[first : first + self.prompts_per_step]
        return PromptBatch([self.prompts[index] for index in order])

    def peek(self) -> PromptBatch:
        """Return the prompts of the next step, without moving; it may lie in the next pass."""
        return self.batch(self.cursor + 1)

    def replacements(self) -> Iterator[Prompt]:
        """Yield prompts that are not in the current step, in an order of the step's own; the cursor stays."""
        here = {prompt.id for prompt in self.batch(self.cursor).prompts}
        for index in _permutation(f"{self.seed}/replacements/{self.cursor}", len(self.prompts)):
            if self.prompts[index].id not in here:
                yield self.prompts[index]

    def advance(self) -> None:
        """Count the current step as consumed. Called on every rank at the end of `training_step`."""
        self.cursor += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the settings and data that it is valid for."""
        return {"cursor": self.cursor, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved cursor. Raises ConfigError when the data or a setting of the order has changed."""
        for name, value in self._identity().items():
            if state.get(name, value) != value:  # earlier versions knew nothing of columns
                raise ConfigError(_CHANGED[name].format(now=value, saved=state[name]))
        self.cursor = state["cursor"]

    def _order(self, epoch: int) -> npt.NDArray[np.intp]:
        if self._latest_order is None or self._latest_order[0] != epoch:
            count = len(self.prompts)
            self._latest_order = (
                epoch,
                _permutation(f"{self.seed}/{epoch}", count) if self.shuffle else np.arange(count),
            )
        return self._latest_order[1]

    @cached_property
    def _fingerprint(self) -> str:
        return _digest(f"{prompt.id}\0{prompt.key}" for prompt in self.prompts)

    @cached_property
    def _columns(self) -> str:
        return _digest(canonical_json(prompt.columns, prompt.location) for prompt in self.prompts)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "columns": self._columns,
            "prompts_per_step": self.prompts_per_step,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()


def _permutation(name: str, count: int) -> npt.NDArray[np.intp]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    # Sort raw draws: unlike `permutation`, they are promised to stay the same in later numpy versions.
    draws = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return np.argsort(draws, kind="stable")


_SETTING = "data.{name}={{now!r}}: the checkpoint was written with {{saved!r}}; a resumed run keeps its data order"
_CHANGED = {
    "num_prompts": "data.train: {now} prompts, but the checkpoint was written with {saved}; "
    "resume on the same data set, or start a new run",
    "fingerprint": "data.train: the prompts, their order, the tokenizer or the chat template have changed "
    "since the checkpoint was written; resume on the same data set, or start a new run",
    "columns": "data.train: columns beside the prompt, such as the answers, have changed since the checkpoint was written; "
    "resume on the same data set, or start a new run",
    **{name: _SETTING.format(name=name) for name in ("prompts_per_step", "shuffle", "seed")},
}
