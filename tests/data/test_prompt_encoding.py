from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rhymerl.data import LengthLimits, LocatedRow, PromptDataModule, PromptEncoder, PromptSource, encode_rows
from rhymerl.errors import ConfigError, DataError
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.types import Prompt

Locate = Callable[[list[dict[str, Any]]], list[LocatedRow]]
MakeBpe = Callable[..., PreTrainedTokenizerBase]
CHAT = [{"role": "user", "content": "hi"}]


def encode(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **settings: Any) -> Prompt:
    return PromptEncoder(tokenizer, **settings).encode(LocatedRow(location="row 1", row=row), prompt_id="0")


def test_a_string_becomes_its_tokens(characters: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "12+3=?\n", "answer": "15", "id": 7, "weight": None}
    prompt = encode(characters, row)
    assert prompt.token_ids.tolist() == [3, 4, 12, 5, 13, 14, 15]
    assert prompt.token_ids.dtype == np.int32
    assert prompt.text == row["prompt"]
    assert prompt.columns == {"answer": "15", "weight": None}
    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 1


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_a_string_gets_the_leading_special_tokens_only(make_bpe: MakeBpe, adds_bos: bool, adds_eos: bool) -> None:
    tokenizer = make_bpe(adds_bos=adds_bos, adds_eos=adds_eos)
    plain = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert encode(tokenizer, {"prompt": "hi"}).token_ids.tolist() == [0] * adds_bos + plain


def test_special_tokens_in_the_text_itself_stay(make_bpe: MakeBpe) -> None:
    tokenizer = make_bpe(adds_eos=True)
    assert encode(tokenizer, {"prompt": "<s>hi</s>"}).token_ids.tolist()[::3] == [0, 1]
    assert encode(tokenizer, {"prompt": "h</s>"}).token_ids.tolist()[::2] == [0, 1]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_chat_goes_through_the_template_with_one_bos(make_bpe: MakeBpe, adds_bos: bool) -> None:
    tokenizer = make_bpe(adds_bos=adds_bos, adds_eos=True)
    prompt = encode(tokenizer, {"prompt": CHAT})
    assert prompt.text == "<s>[user]hi[assistant]"
    assert prompt.token_ids.tolist().count(0) == 1
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_template_arguments_reach_the_template(make_bpe: MakeBpe) -> None:
    prompt = encode(make_bpe(), {"prompt": CHAT}, chat_template_kwargs={"think": True})
    assert prompt.text == "<s>[user]hi[think][assistant]"


def test_a_template_without_bos_gets_none(make_bpe: MakeBpe) -> None:
    prompt = encode(make_bpe(template="{{ messages[0].content }}"), {"prompt": CHAT})
    assert prompt.token_ids.tolist().count(0) == 0


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt"])
def test_fixed_template_arguments_are_refused(make_bpe: MakeBpe, name: str) -> None:
    with pytest.raises(ValueError, match=f"^chat_template_kwargs.{name}: this argument is fixed"):
        PromptEncoder(make_bpe(), chat_template_kwargs={name: True})


def test_template_arguments_without_an_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^chat_template_kwargs=\{1: 2, 'a': 3\}: '<' not supported"):
        PromptDataModule(chat_template_kwargs={1: 2, "a": 3})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1"}, "row 1: data.prompt_column='prompt': no such column; it has 'question'"),
        ({"prompt": None}, "row 1: data.prompt_column='prompt': the prompt is null"),
        ({"prompt": float("nan")}, "row 1: data.prompt_column='prompt': the prompt is null"),
        ({"prompt": np.array([])}, "'prompt' is an empty list"),
        ({"prompt": "a\ud800b"}, "the prompt has '\\\\ud800', half of a character, which no tokenizer can read"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "the prompt has '\\\\udfff', half of a character"),
        ({}, "it has none"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "'prompt' is of type int; expected a string or a list of chat messages"),
        ({"prompt": {"role": "user"}}, "'prompt' is of type dict"),
        ({"prompt": []}, "'prompt' is an empty list"),
        ({"prompt": ["hi"]}, "message 1: expected an object"),
        ({"prompt": [*CHAT, {"role": "user"}]}, "message 2: expected an object"),
        (
            {"prompt": [*CHAT, {"role": "assistant", "content": "2"}]},
            "'prompt' ends with a turn of the assistant, which is the policy's to write; leave it out",
        ),
        ({"prompt": [{"role": "robot", "content": ""}]}, "chat template refuses these messages: no robots"),
        ({"prompt": np.array([{"role": "robot", "content": ""}])}, "chat template refuses these messages: no robots"),
    ],
)
def test_names_what_is_wrong_with_a_prompt(make_bpe: MakeBpe, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        encode(make_bpe(), row)
    assert str(caught.value).startswith("row 1: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] + 5 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[7]['content'] }}", "has no element 7"),
        ("{{ messages[0].x.y }}", "has no attribute"),
        ({"tool_use": "a", "other": "b"}, "ValueError: This model has multiple chat templates with no default"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_templates_that_fail_are_named(make_bpe: MakeBpe, template: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        encode(make_bpe(template=template), {"prompt": CHAT})
    assert str(caught.value).startswith("row 1: the tokenizer's chat template ")
    assert "\n" not in str(caught.value)


def test_rows_of_numpy_are_rows(make_bpe: MakeBpe, location: Locate, limits: LengthLimits) -> None:
    rows = [{"prompt": np.array(CHAT, object), "id": np.int64(7)}, {"prompt": np.str_("hi"), "x": np.array([1, 2])}]
    one, two = encode_rows(location(rows), PromptEncoder(make_bpe()), limits)
    assert (one.id, one.text, two.text) == ("7", "<s>[user]hi[assistant]", "hi")


def test_plain_text_for_a_chat_model_is_said_once(
    make_bpe: MakeBpe, characters: PreTrainedTokenizerBase, location: Locate, caplog: pytest.LogCaptureFixture
) -> None:
    for tokenizer, rows, count in (
        (make_bpe(), [{"prompt": CHAT}, {"prompt": "2"}, {"prompt": "3"}], 1),
        (make_bpe(), [{"prompt": CHAT}], 0),
        (make_bpe(template=None), [{"prompt": "2"}], 0),
        (characters, [{"prompt": "2"}], 0),
    ):
        caplog.clear()
        encoder = PromptEncoder(tokenizer)
        for located in location(rows):
            encoder.encode(located, prompt_id="1")
        encoder.warn()
        assert [record.getMessage()[:33] for record in caplog.records] == ["rows, row 2: 'prompt' is plain te"] * count


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "<s>[system]Be brief.[user]hi[assistant]"),
        ([{"role": "user", "content": "hi"}], "<s>[system]Be brief.[user]hi[assistant]"),
        (
            [{"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}],
            "<s>[system]Own.[user]hi[assistant]",
        ),
    ],
)
def test_a_system_prompt_goes_in_front(make_bpe: MakeBpe, prompt: object, text: str) -> None:
    encoder = PromptEncoder(make_bpe(), system_prompt="Be brief.")
    row = LocatedRow(location="row 1", row={"prompt": prompt})
    assert encoder.encode(row, prompt_id="0").text == text
    assert encoder.plain_text_at is None
    assert row.row == {"prompt": prompt}


def test_a_system_prompt_needs_a_template(characters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"^data.system_prompt='Be brief.': the tokenizer has no chat template"):
        PromptEncoder(characters, system_prompt="Be brief.")


@pytest.mark.parametrize("kind", [PromptDataModule, PromptSource])
def test_parts_with_prompts_hand_the_system_prompt_on(kind: Any, make_bpe: MakeBpe) -> None:
    policy = SimpleNamespace(tokenizer=make_bpe(), context_tokens=99)
    source = kind([{"prompt": "hi"}], system_prompt="Be brief.")
    if kind is PromptSource:
        (prompt,) = source.read(policy, max_tokens=8)
    else:
        limits = SimpleNamespace(max_tokens=8, max_tokens_of=lambda name: None)
        source.prepare_for(SimpleNamespace(policy=policy, environment=None, rollout=limits, evaluation=limits))
        (prompt,) = source.train_loader.prompts
    assert prompt.text.startswith("<s>[system]Be brief.[user]hi")


def test_chat_needs_a_template(characters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="row 1: .* has no chat template"):
        encode(characters, {"prompt": CHAT})


def test_another_prompt_column_can_be_named(characters: PreTrainedTokenizerBase) -> None:
    prompt = encode(characters, {"question": "1", "prompt": "kept"}, prompt_column="question")
    assert prompt.text == "1"
    assert prompt.columns == {"prompt": "kept"}


def test_names_a_character_that_the_tokenizer_lacks(characters: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="row 1: the prompt has 'x', which the tokenizer does not know"):
        encode(characters, {"prompt": "1+x=y"})


@pytest.mark.parametrize(
    ("num_tokens", "max_prompt_tokens", "message"),
    [
        (5, 4, r"5 tokens, more than data\.max_prompt_tokens=4"),
        (64, None, r"64 tokens: no room for an answer in the model's context of 64"),
        (
            57,
            None,
            r"57 tokens; with rollout\.max_tokens=8 .* context of 64: set rollout\.max_tokens to at most 7",
        ),
    ],
)
def test_names_a_prompt_that_is_too_long(
    characters: PreTrainedTokenizerBase,
    location: Locate,
    num_tokens: int,
    max_prompt_tokens: int | None,
    message: str,
) -> None:
    limits = LengthLimits(context_tokens=64, max_tokens=8, max_prompt_tokens=max_prompt_tokens)
    rows = location([{"prompt": "1"}, {"prompt": "1" * num_tokens}])
    with pytest.raises(DataError, match=r"^rows, row 2: the prompt has " + message):
        encode_rows(rows, PromptEncoder(characters), limits)


def test_the_longest_prompt_that_fits_is_taken(characters: PreTrainedTokenizerBase, location: Locate) -> None:
    limits = LengthLimits(context_tokens=64, max_tokens=8, max_prompt_tokens=56)
    (prompt,) = encode_rows(location([{"prompt": "1" * 56}]), PromptEncoder(characters), limits)
    assert len(prompt.token_ids) == 56


def ids_of(rows: list[LocatedRow], tokenizer: PreTrainedTokenizerBase, limits: LengthLimits) -> list[str]:
    return [prompt.id for prompt in encode_rows(rows, PromptEncoder(tokenizer), limits)]


def test_ids_are_the_rows_own_or_a_hash(
    characters: PreTrainedTokenizerBase, location: Locate, limits: LengthLimits
) -> None:
    rows = [
        {"prompt": "1", "id": "a"},
        {"prompt": "1", "id": 5},
        {"prompt": "1", "x": 2},
        {"x": 2, "prompt": "1"},
    ]
    first, second, third, again = ids_of(location(rows), characters, limits)
    assert (first, second, again) == ("a", "5", f"{third}#2")
    assert ids_of(location(rows[2:3]), characters, limits) == [third]


def test_repeated_rows_are_kept(characters: PreTrainedTokenizerBase, location: Locate, limits: LengthLimits) -> None:
    rows = location([{"prompt": "1", "id": "a"}] * 3)
    assert ids_of(rows, characters, limits) == ["a", "a#2", "a#3"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "1", "id": "a"}, {"prompt": "2", "id": "a"}],
        [{"prompt": "1", "id": "5"}, {"prompt": "1", "id": 5}],
        [{"prompt": "1", "id": "a#2"}, {"prompt": "1", "id": "a"}, {"prompt": "1", "id": "a"}],
    ],
)
def test_one_id_for_different_rows_is_refused(
    rows: list[dict[str, Any]], characters: PreTrainedTokenizerBase, location: Locate, limits: LengthLimits
) -> None:
    message = r"rows, row \d: id '.*' is already that of a different row \(rows, row 1\)"
    with pytest.raises(DataError, match=message):
        ids_of(location(rows), characters, limits)


@pytest.mark.parametrize("value", [True, 1.5, ["a"]])
def test_an_id_of_another_type_is_refused(
    value: object, characters: PreTrainedTokenizerBase, location: Locate, limits: LengthLimits
) -> None:
    with pytest.raises(DataError, match="expected a string or an integer"):
        ids_of(location([{"prompt": "1", "id": value}]), characters, limits)


def test_columns_beyond_json_have_an_id(
    characters: PreTrainedTokenizerBase, location: Locate, limits: LengthLimits
) -> None:
    plain = b"a", b"b", np.arange(3), np.float32(1), datetime.date(2026, 1, 2)
    other = Decimal("1.50"), datetime.timedelta(seconds=3), UUID(int=3), {UUID(int=3): 1}, {(1, 2): 3}
    rows = [{"prompt": "1", "x": x} for x in (*plain, *other)]
    assert len(set(ids_of(location(rows), characters, limits))) == 10
    for value in ({1}, object(), {"y": [{1}]}):
        with pytest.raises(DataError, match=r"row 1: the column 'x' has a (set|object) \(.*\), which no hash can be"):
            ids_of(location([{"prompt": "1", "y": 3, "x": value}]), characters, limits)


def test_a_key_follows_tokens_tokenizer_and_template(make_bpe: MakeBpe) -> None:
    keys = {
        "string": encode(make_bpe(), {"prompt": "hi"}).key,
        "other tokens": encode(make_bpe(), {"prompt": "ho"}).key,
        "no bos": encode(make_bpe(adds_bos=False), {"prompt": "hi"}).key,
        "template": encode(make_bpe(template="{{ bos_token }}"), {"prompt": "hi"}).key,
        "template arguments": encode(make_bpe(), {"prompt": "hi"}, chat_template_kwargs={"think": False}).key,
    }
    assert len(set(keys.values())) == len(keys)
    assert encode(make_bpe(), {"prompt": "hi", "answer": "other columns do not matter"}).key == keys["string"]


def test_a_key_survives_use_and_saving(make_bpe: MakeBpe, tmp_path: Path) -> None:
    tokenizer = make_bpe()
    before = encode(tokenizer, {"prompt": CHAT})
    tokenizer.pad_token = None
    tokenizer("hi", truncation=True, max_length=1)
    assert encode(tokenizer, {"prompt": CHAT}).key == before.key
    tokenizer.save_pretrained(tmp_path)
    loaded = encode(AutoTokenizer.from_pretrained(tmp_path), {"prompt": CHAT})
    assert loaded.key == before.key
    assert loaded.token_ids.tolist() == before.token_ids.tolist()


def test_ids_and_keys_are_these_in_every_process(location: Locate, limits: LengthLimits) -> None:
    rows = location([{"prompt": "1", "b": 1, "a": 2}])
    (prompt,) = encode_rows(rows, PromptEncoder(character_tokenizer("01")), limits)
    assert (prompt.id, prompt.key) == ("7a17820747c0fdef", "98ee89374f8f978dfd9f8700f6a02f19")
