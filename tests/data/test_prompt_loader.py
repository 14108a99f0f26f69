from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.data import PromptLoader
from rhymerl.errors import ConfigError, DataError
from rhymerl.types import Prompt


def make_prompts(number: int, prefix: str = "") -> list[Prompt]:
    token_ids = np.zeros(1, dtype=np.int32)
    return [Prompt(id=f"{prefix}{i}", key=f"k{i}", token_ids=token_ids, text="0") for i in range(number)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in batch]


loaders = st.builds(
    lambda number, per_step, seed, shuffle: PromptLoader(
        make_prompts(number), prompts_per_step=per_step, seed=seed, shuffle=shuffle
    ),
    st.integers(1, 40),
    st.integers(1, 15),
    st.integers(0, 2**40),
    st.booleans(),
)


@given(loaders, st.integers(0, 5))
def test_every_pass_visits_every_prompt_once(loader: PromptLoader, epoch: int) -> None:
    steps = range(epoch * len(loader), (epoch + 1) * len(loader))
    batches = [loader.batch(step) for step in steps]
    assert sorted(name for batch in batches for name in ids(batch)) == sorted(ids(list(loader.prompts)))
    assert all(len(batch) == loader.prompts_per_step for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= loader.prompts_per_step


@given(loaders, st.integers(0, 60), st.integers(0, 30))
def test_a_restored_loader_goes_on_where_it_stood(loader: PromptLoader, consumed: int, more: int) -> None:
    for _ in range(consumed):
        loader.advance()
    twin = PromptLoader(
        make_prompts(len(loader.prompts)),
        prompts_per_step=loader.prompts_per_step,
        seed=loader.seed,
        shuffle=loader.shuffle,
    )
    twin.load_state_dict(loader.state_dict())
    assert ids(twin.batch(twin.cursor + more)) == ids(loader.batch(consumed + more))
    rest = [ids(batch) for batch in twin]
    assert rest == [ids(loader.batch(consumed + i)) for i in range(len(loader) - consumed % len(loader))]
    assert twin.epoch == consumed // len(loader)


@given(loaders)
def test_looking_never_moves(loader: PromptLoader) -> None:
    first = [ids(batch) for batch in loader]
    next(iter(loader))
    loader.peek()
    assert [ids(batch) for batch in loader] == first
    assert len(first) == len(loader)
    assert loader.cursor == 0


def test_passes_and_seeds_differ() -> None:
    loaders = [PromptLoader(make_prompts(20), prompts_per_step=20, seed=seed) for seed in range(4)]
    assert len({tuple(ids(loader.batch(epoch))) for loader in loaders for epoch in range(4)}) == 16


def test_the_order_is_this_one_on_every_machine() -> None:
    loader = PromptLoader(make_prompts(8), prompts_per_step=8, seed=3)
    assert "".join(ids(loader.batch(0))) == "74523601"
    assert "".join(ids(loader.batch(1))) == "02753461"


def test_without_shuffling_rows_keep_their_order() -> None:
    loader = PromptLoader(make_prompts(5), prompts_per_step=2, shuffle=False)
    assert [ids(batch) for batch in loader] == [["0", "1"], ["2", "3"], ["4"]]


def test_peek_looks_into_the_next_pass() -> None:
    loader = PromptLoader(make_prompts(5), prompts_per_step=2)
    loader.advance()
    loader.advance()
    ahead = ids(loader.peek())
    loader.advance()
    assert ids(next(iter(loader))) == ahead
    assert loader.epoch == 1


@pytest.mark.parametrize("value", [0, -1])
def test_a_step_without_prompts_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"^prompts_per_step={value}: expected at least 1"):
        PromptLoader(make_prompts(1), prompts_per_step=value)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        PromptLoader([], prompts_per_step=1)


def test_going_on_with_other_answers_is_refused() -> None:
    def loader(**columns: object) -> PromptLoader:
        return PromptLoader([replace(prompt, columns=columns) for prompt in make_prompts(2)], prompts_per_step=1)

    state = loader(answer="1", level=2).state_dict()
    loader(level=2, answer="1").load_state_dict(state)
    for columns in ({"answer": "2", "level": 2}, {"answer": "1"}):
        with pytest.raises(ConfigError, match=r"data\.train: columns beside the prompt, .* have changed"):
            loader(**columns).load_state_dict(state)
    del state["columns"]  # of an earlier version
    loader(answer="2").load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (PromptLoader(make_prompts(5), prompts_per_step=2), r"data\.train: 5 prompts, but .* with 6"),
        (
            PromptLoader(make_prompts(6, "x"), prompts_per_step=2),
            r"data\.train: the prompts, .* have changed",
        ),
        (
            PromptLoader(make_prompts(6)[::-1], prompts_per_step=2),
            r"data\.train: the prompts, .* have changed",
        ),
        (PromptLoader(make_prompts(6), prompts_per_step=3), r"data\.prompts_per_step=3: .* with 2"),
        (PromptLoader(make_prompts(6), prompts_per_step=2, seed=1), r"data\.seed=1: .* with 0"),
        (
            PromptLoader(make_prompts(6), prompts_per_step=2, shuffle=False),
            r"data\.shuffle=False: .* with True",
        ),
    ],
)
def test_going_on_with_other_data_is_refused(changed: PromptLoader, message: str) -> None:
    state = PromptLoader(make_prompts(6), prompts_per_step=2).state_dict()
    with pytest.raises(ConfigError, match=message):
        changed.load_state_dict(state)
    assert changed.cursor == 0


def test_replacements_are_other_prompts_in_an_order_of_the_step() -> None:
    prompts = make_prompts(8)
    loader = PromptLoader(prompts, prompts_per_step=3, seed=4)
    here = {prompt.id for prompt in loader.batch(0).prompts}
    first = [prompt.id for prompt in loader.replacements()]
    assert first == [prompt.id for prompt in loader.replacements()]
    assert set(first) == {prompt.id for prompt in prompts} - here
    assert loader.cursor == 0
    loader.advance()
    assert [prompt.id for prompt in loader.replacements()] != first
