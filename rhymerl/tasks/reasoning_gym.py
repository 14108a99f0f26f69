"""Problems of the `reasoning-gym` package. `rhymerl.rewards.reasoning_gym_reward` has its verifiers score answers."""

from __future__ import annotations

import difflib
import importlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, ClassVar

from rhymerl.errors import require_package
from rhymerl.tasks.base import Row, Task, TaskSplit, split_of

_CHUNK = 500  # problems made from one seed: some data sets are costly to set up, and none has fewer


@dataclass(eq=False)
class ReasoningGym(Task):
    """One data set of reasoning-gym, such as `ReasoningGym("chain_sum", settings={"max_terms": 4})`.

    `settings` are the data set's own, but for `seed` and `size`. `system_prompt` is the name of one of
    reasoning-gym's, a text of one's own, or None. With `chat` the prompt is chat messages, else system prompt
    and question in one string. The answer is what stands in the last `<answer>` tags (`answer_tag`; None =
    the whole completion).

    Problems split by their question alone, so a question of one split can never turn up in another: four tenths are for
    training, as many for validation, the rest for the warm start, whose demonstration is the bare answer, in its tags.
    Raises ValueError for an unknown data set or settings that it refuses, and ConfigError without the package.
    """

    reward = "rhymerl.rewards.reasoning_gym_reward"
    tenths: ClassVar[tuple[TaskSplit, ...]] = ("validation",) * 4 + ("train",) * 4 + ("warmstart",) * 2
    patience: ClassVar[int] = 10 * _CHUNK

    dataset: str
    _: KW_ONLY
    settings: Mapping[str, Any] | None = None
    system_prompt: str | None = "default"
    chat: bool = True
    answer_tag: str | None = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settings = dict(self.settings or {})
        for name in ("seed", "size"):
            if name in self._settings:
                raise ValueError(f"settings.{name}: set seed, train_size and validation_size instead")
        _make_data_set(self.dataset, self._settings, seed=self.seed, size=1)
        known: Mapping[str, str] = _package("utils").SYSTEM_PROMPTS
        prompt = self.system_prompt
        self._system_text = None if prompt is None else known.get(prompt, prompt).strip()

    def problem(self, random_source: random.Random) -> Row:
        return self._row(_make_data_set(self.dataset, self._settings, seed=random_source.getrandbits(31), size=1)[0])

    def demonstration(self, row: Row, random_source: random.Random) -> str:
        """Raises TypeError for a data set that verifies answers and gives none."""
        if row["answer"] is None:
            raise TypeError(f"{self.dataset} gives no answers, so it cannot warm-start a policy")
        return row["answer"] if self.answer_tag is None else f"<{self.answer_tag}>{row['answer']}</{self.answer_tag}>"

    def _too_few(self, count: int) -> str:
        return f"expected at most {count}, about as many distinct problems as {self.dataset} has for this split"

    def stream(self, split: TaskSplit, *, seed: int) -> Iterator[Row]:
        """Raises ValueError when 20 000 draws in a row give nothing for the split."""
        random_source = random.Random(f"{type(self).__name__}/{self.dataset}/{split}/{seed}")
        while True:
            found = 0
            for problem in islice(self._problems(random_source), 40 * _CHUNK):
                if split_of(problem["question"], self.tenths) == split:
                    found += 1
                    yield self._row(problem)
            if not found:
                raise ValueError(f"task.dataset={self.dataset!r}: no problems for the split {split!r}")

    def _problems(self, random_source: random.Random) -> Iterator[dict[str, Any]]:
        while True:
            data_set = _make_data_set(self.dataset, self._settings, seed=random_source.getrandbits(31), size=_CHUNK)
            for index in range(_CHUNK):
                yield data_set[index]

    def _row(self, problem: Mapping[str, Any]) -> Row:
        scoring = {"dataset": self.dataset, "settings": self._settings, "answer_tag": self.answer_tag}
        return {
            "prompt": self._prompt(problem["question"]),
            "question": problem["question"],
            "answer": problem["answer"],  # None where reasoning-gym only verifies
            "entry": json.dumps(_pack({**scoring, "entry": dict(problem)})),
        }

    def _prompt(self, question: str) -> str | list[dict[str, str]]:
        if not self.chat:
            return f"{self._system_text}\n\n{question}\n" if self._system_text else f"{question}\n"
        system = [{"role": "system", "content": self._system_text}] if self._system_text else []
        return [*system, {"role": "user", "content": question}]


def _make_data_set(name: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    factory = _package("factory")
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=5, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"dataset={name!r}: expected one of reasoning-gym's {len(factory.DATASETS)} data sets{hint}")
    try:
        return factory.create_dataset(name, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:  # how its config classes refuse a value
        raise ValueError(f"settings={dict(settings)!r}: {name} refuses them: {error}") from error


def _package(module: str) -> Any:
    require_package("reasoning_gym", "task=reasoning_gym")
    importlib.import_module("reasoning_gym")  # fills the registry
    return importlib.import_module(f"reasoning_gym.{module}")


def _pack(value: Any) -> Any:
    """Return JSON that keeps tuples and keys of dicts, as in `rhymerl.rewards.sandbox.wire`: verifiers compare them."""
    if isinstance(value, tuple):
        return {"tuple": [_pack(item) for item in value]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_pack(key), _pack(item)] for key, item in value.items()]}
    return value
