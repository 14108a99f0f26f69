from __future__ import annotations

import datetime
import random
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rhymerl.environments.encoding import CUT_MARK, ReplyEncoder
from rhymerl.errors import DataError
from rhymerl.models.tokenizers import character_tokenizer
from tests.environments.families import FAMILIES, TOOLS, Family, encoder_of, reply_encoder

PIECES = ("yes", "12", " ", "?", "é", "你好", "🙂", "\n", "\n\n", "  ", '"', "\\", "{", "assistant", "user\n", "\u200d")
LONG = "yes 12 " * 1000
RESULT = {"role": "tool", "content": "4", "name": "tool", "tool_call_id": "abcdefghi"}


def appended(encoder: ReplyEncoder, reply: object, **settings: Any) -> str:
    return str(encoder.chat.tokenizer.decode(encoder.encode(reply, is_chat=True, **settings)[1]))


def words(noise: random.Random, *, at_least: int = 0) -> str:
    """A text without white space around it, which some templates strip."""
    return "".join(noise.choices(PIECES, k=noise.randint(at_least, 9))).strip() or "no" * at_least


def tokens(family: Family, text: str) -> list[int]:
    return list(family.tokenizer()(text, add_special_tokens=False)["input_ids"])


def rendered(family: Family, messages: list[dict[str, Any]]) -> str:
    template = re.sub(r"strftime_now\(.*?\)", "'now'", family.template)
    return str(
        family.tokenizer().apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=template
        )
    )


def made_reply(family: Family, noise: random.Random) -> list[dict[str, Any]]:
    role = noise.choice(family.roles)
    called = {"name": "tool", "tool_call_id": "abcdefghi"} if role == "tool" else {}
    count = noise.randint(1, 3) if role == "tool" else 1
    return [{"role": role, "content": words(noise, at_least=1), **called} for _ in range(count)]


def play(family: Family, encoder: ReplyEncoder, noise: random.Random) -> tuple[list[int], list[int]]:
    """An episode's tokens as they are kept turn by turn, and those of one rendering of the whole."""
    system = [{"role": "system", "content": words(noise)}] if family.has_system and noise.random() < 0.5 else []
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": words(noise, at_least=1)}]
    text = rendered(family, messages)
    kept = tokens(family, text)
    for _ in range(noise.randint(1, 4)):
        reply = made_reply(family, noise)
        answer, sampled = family.answer(words(noise), reply[0]["role"])
        is_cut = "tool_calls" not in answer and noise.random() < 0.2
        if is_cut:
            sampled = sampled.removesuffix(f"{family.closing}{family.end_before(reply[0]['role'])}")
        in_place = tokens(family, text + sampled)
        assert in_place[: len(kept)] == kept
        is_text = reply[0]["role"] == "user" and noise.random() < 0.5
        token_ids = encoder.encode(reply[0]["content"] if is_text else reply, is_chat=True, is_cut=is_cut)[1]
        kept = in_place + token_ids.tolist()
        messages += [answer, *reply]
        text = rendered(family, messages)
    return kept, tokens(family, text)


@pytest.mark.parametrize("numbers", [range(90), pytest.param(range(90, 1000), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_are_kept_are_those_of_one_rendering(name: str, numbers: range) -> None:
    encoder = encoder_of(name)
    for number in numbers:
        kept, whole = play(FAMILIES[name], encoder, random.Random(number))
        assert kept == whole, number


@pytest.mark.parametrize(
    ("name", "to_text", "to_tools"),
    [
        (
            "qwen2.5",
            "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"4"'
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("gemma", "\n<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", None),
        ("deepseek", "<｜User｜>hi<｜Assistant｜>", "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜>\n"
            "<｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
        ("glm", "\nhi<|assistant|>\n", "\n4<|observation|>\n4<|assistant|>\n"),
        (
            "harmony",
            "<|start|>user<|message|>hi<|end|><|start|>assistant",
            '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>"4"<|end|>'
            '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant',
        ),
        ("olmo", "\n<|user|>\nhi\n<|assistant|>\n", None),
    ],
)  # fmt: skip
def test_a_reply_is_what_the_template_appends(name: str, to_text: str, to_tools: str | None) -> None:
    encoder = encoder_of(name)
    assert appended(encoder, "hi") == to_text
    assert appended(encoder, [{"role": "user", "content": "hi"}]) == to_text
    if to_tools is not None:
        assert appended(encoder, [RESULT, RESULT]) == to_tools


@pytest.mark.parametrize(
    ("name", "ended_by", "text"),
    [
        ("qwen2.5", "<|endoftext|>", "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("glm", "<|user|>", "\nhi<|assistant|>\n"),
        ("glm", "<|observation|>", "<|user|>\nhi<|assistant|>\n"),
        ("glm", "<|endoftext|>", "<|user|>\nhi<|assistant|>\n"),
        ("harmony", "<|return|>", "<|start|>user<|message|>hi<|end|><|start|>assistant"),
    ],
)
def test_another_stop_token_stands_for_the_templates_unless_that_begins_the_reply(
    name: str, ended_by: str, text: str
) -> None:
    encoder = encoder_of(name)
    token_id = encoder.chat.tokenizer.convert_tokens_to_ids(ended_by)
    assert appended(encoder, "hi", ended_by=token_id) == text


def test_a_reply_begins_with_the_end_of_a_turn_that_was_cut() -> None:
    text = "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert appended(encoder_of("qwen2.5"), "hi", is_cut=True) == text


def test_ends_of_turns_are_found_without_stop_tokens() -> None:
    for name in ("qwen2.5", "llama3", "gemma", "phi", "mistral", "harmony", "olmo"):
        encoder = reply_encoder(FAMILIES[name].tokenizer())
        assert appended(encoder, "hi") == appended(encoder_of(name), "hi")


def test_a_token_that_no_policy_samples_is_not_taken_for_its_end() -> None:
    assert appended(reply_encoder(FAMILIES["glm"].tokenizer()), "hi") == "<|user|>\nhi<|assistant|>\n"


def test_a_template_without_an_end_of_turn_appends_all_of_it() -> None:
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}{{ 'assistant: ' }}"
    encoder = reply_encoder(FAMILIES["olmo"].tokenizer(), chat_template_kwargs={"chat_template": template})
    assert appended(encoder, "hi") == "\nuser: hi\nassistant: "


def test_template_arguments_and_tools_reach_the_template() -> None:
    encoder = encoder_of("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert appended(encoder, "hi").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert appended(encoder_of("mistral", chat_template_kwargs={"tools": TOOLS}), "hi").startswith(
        '[AVAILABLE_TOOLS] [{"type"'
    )


def test_the_time_is_that_of_the_start() -> None:
    template = "{% for m in messages %}{{ strftime_now('%Y') ~ m.content ~ eos_token }}{% endfor %}"
    encoder = encoder_of(
        "olmo", chat_template_kwargs={"chat_template": template}, started=datetime.datetime(1999, 1, 1)
    )
    assert appended(encoder, "hi") == "1999hi<|endoftext|>"


@pytest.mark.parametrize("name", ["qwen2.5", "mistral"])
@pytest.mark.parametrize("text", ["higher\n", " 4", "\n\n", "é🙂"])
def test_plain_text_is_appended_as_it_is(name: str, text: str) -> None:
    encoder = encoder_of(name)
    token_ids = encoder.encode(text, is_chat=False)[1]
    end = FAMILIES[name].special[0]
    assert tokens(FAMILIES[name], end + text) == [*tokens(FAMILIES[name], end), *token_ids]
    assert token_ids.dtype == "int32"
    assert encoder.encode(text, is_chat=False, is_cut=True)[1].tolist() == token_ids.tolist()


def test_plain_text_needs_no_template() -> None:
    assert reply_encoder(character_tokenizer("0123")).encode("12", is_chat=False)[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (5, "row 1: the reply is of type int; expected a string or a list of chat messages {role, content}"),
        (b"no", "row 1: the reply is of type bytes; expected a string or"),
        ({"role": "user", "content": "no"}, "row 1: the reply is of type dict; expected a string or"),
        ("", "row 1: the reply is empty; expected a string or"),
        ([], "row 1: the reply is an empty list; expected a string or"),
        (["no"], "row 1: the reply, message 1: expected an object with the strings 'role' and 'content'"),
        ([{"role": "user"}], "row 1: the reply, message 1: expected an object with the strings"),
        ([RESULT, {"content": "no"}], "row 1: the reply, message 2: expected an object with the strings"),
        (
            [{"role": "assistant", "content": "no"}],
            "row 1: the reply, message 1: the role 'assistant' is the policy's; expected another one",
        ),
        ([{"role": "robot", "content": "no"}], "row 1: the tokenizer's chat template refuses these messages: who is robot?"),
        ("a\ud800b", r"row 1: the reply has '\ud800', half of a character, which no tokenizer can read"),
        ([{"role": "user", "content": "\udfff"}], r"row 1: the reply has '\udfff', half of a character"),
    ],
)  # fmt: skip
def test_names_what_is_wrong_with_a_reply(reply: object, message: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder_of("olmo").encode(reply, is_chat=True, location="row 1")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_message_that_the_template_leaves_out_is_named() -> None:
    reply = [{"role": "user", "content": "no"}, {"role": "critic", "content": "no"}]
    message = (
        "^environment: the tokenizer's chat template does not append message 2 of the reply, of the role 'critic'$"
    )
    with pytest.raises(DataError, match=message):
        encoder_of("phi").encode(reply, is_chat=True)


def test_replies_are_of_the_prompts_kind() -> None:
    with pytest.raises(DataError, match="the reply is chat messages, but the prompt is plain text; expected a string"):
        encoder_of("olmo").encode([{"role": "user", "content": "no"}], is_chat=False)
    for is_chat in (True, False):
        with pytest.raises(DataError, match="has no chat template; use string replies or an instruction-tuned model"):
            reply_encoder(character_tokenizer("no")).encode([{"role": "user", "content": "no"}], is_chat=is_chat)


def test_a_text_that_the_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(DataError, match="^environment: the reply has 'x', which the tokenizer does not know$"):
        reply_encoder(character_tokenizer("0123")).encode("1x", is_chat=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_reply_loses_text_and_no_scaffold(name: str) -> None:
    long = {**RESULT, "role": FAMILIES[name].roles[-1], "content": LONG}
    reply = [{**long, "content": "no"}, long, long] if long["role"] == "tool" else [long]
    short = [{**message, "content": message["content"].replace(LONG, "")} for message in reply]
    fewest = len(encoder_of(name).encode(short, is_chat=True)[1])
    limit = fewest + 60
    encoder = encoder_of(name, max_reply_tokens=limit)
    token_ids = encoder.encode(reply, is_chat=True)[1]
    assert limit - 3 * len(reply) <= len(token_ids) <= limit
    scaffold, num_cuts = re.subn(f"yes 12 [yes12 ]*{re.escape(CUT_MARK)}", "", appended(encoder, reply))
    assert scaffold == appended(encoder_of(name), short)
    assert num_cuts == sum(message is long for message in reply)
    assert appended(encoder, short) == appended(encoder_of(name), short)


def test_a_reply_that_fits_is_whole() -> None:
    whole = encoder_of("qwen2.5").encode("yes " * 50, is_chat=True)[1]
    assert (
        encoder_of("qwen2.5", max_reply_tokens=len(whole)).encode("yes " * 50, is_chat=True)[1].tolist()
        == whole.tolist()
    )
    shorter = encoder_of("qwen2.5", max_reply_tokens=len(whole) - 1).encode("yes " * 50, is_chat=True)[1]
    assert len(shorter) == len(whole) - 1


def test_plain_text_is_cut_too_without_a_mark_that_the_tokenizer_lacks() -> None:
    encoder = reply_encoder(character_tokenizer("0123"), max_reply_tokens=4)
    assert encoder.encode("012301230", is_chat=False)[1].tolist() == [2, 3, 4, 5]
    assert appended_text(FAMILIES["olmo"].tokenizer(), "no " * 99, limit=20).endswith(f"no no {CUT_MARK}")


def appended_text(tokenizer: PreTrainedTokenizerBase, reply: str, *, limit: int) -> str:
    return str(tokenizer.decode(reply_encoder(tokenizer, max_reply_tokens=limit).encode(reply, is_chat=False)[1]))


def test_a_limit_below_the_scaffold_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"the reply has \d+ tokens with all of its text cut, more than .*max_reply_tokens=8$"
    ):
        encoder_of("qwen2.5", max_reply_tokens=8).encode("yes " * 50, is_chat=True)
    with pytest.raises(ValueError, match="^max_reply_tokens=0: expected at least 1$"):
        encoder_of("qwen2.5", max_reply_tokens=0)
