from __future__ import annotations

from typing import Any

import pytest

from rhymerl.environments.proof import prove
from rhymerl.errors import ConfigError
from rhymerl.models.tokenizers import character_tokenizer
from tests.environments.families import FAMILIES, TOOLS, encoder_of, reply_encoder

DROPPED = {
    ("qwen3", "user"): r"thinking in an earlier turn: 'Yes.<|im_end|>",
    ("deepseek", "user"): r"thinking in an earlier turn: 'Yes.<",
    ("deepseek", "tool"): r"thinking in an earlier turn: 'Yes.<",
    ("harmony", "user"): "thinking beside an answer: 'final<|message|>Yes.",
}


@pytest.mark.parametrize(("name", "role"), [(name, role) for name in FAMILIES for role in FAMILIES[name].roles])
def test_a_template_only_appends_unless_it_drops_thoughts(name: str, role: str) -> None:
    difference = prove(encoder_of(name), [role])
    if (name, role) not in DROPPED:
        assert difference is None
    else:
        assert difference is not None
        said = "an episode's tokens stay as they are, where one rendering of the whole has others"
        assert difference.startswith(f"{said} ({DROPPED[name, role]}")
        assert "Why?" in difference.split(" in place of ")[1]
        assert "\n" not in difference


@pytest.mark.parametrize(
    ("name", "settings", "difference"),
    [
        (
            "mistral",
            {"chat_template_kwargs": {"tools": TOOLS}},
            "one turn: '[INST] Is it so?[/INST]' in place of '[AVAILABLE_TOOLS] [",
        ),
        (
            "qwen3",
            {"chat_template_kwargs": {"enable_thinking": False}},
            r"one turn: 'Yes.<|im_end|>\n<|im_start|>user\nIs i' in place of '<think>",
        ),
        (
            "glm",
            {"stop_token_ids": ()},
            "one turn: '<|user|>\\nIs it so?<|assistant|>' in place of '<|endoftext|><|user|>",
        ),
    ],
)
def test_settings_count(name: str, settings: dict[str, Any], difference: str) -> None:
    encoder = reply_encoder(FAMILIES[name].tokenizer(), **settings)
    assert f"({difference}" in str(prove(encoder, ["user"]))


def test_a_generation_prompt_may_begin_the_thoughts() -> None:
    opened = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    encoder = encoder_of("qwen3", chat_template_kwargs={"chat_template": FAMILIES["qwen3"].template + opened})
    assert prove(encoder, ["tool"]) is None
    assert "(one turn: 'Yes.<|im_end|>" in str(prove(encoder, ["user"]))


def test_other_tokens_for_the_same_text_are_said() -> None:
    spaced = "{% for m in messages %}{{ m.role ~ '\\n\\n' ~ m.content ~ eos_token }}{% endfor %}{{ 'assistant\\n' }}"
    encoder = encoder_of("olmo", chat_template_kwargs={"chat_template": spaced})
    assert "(one turn: other tokens for the same text, from '\\n\\nYes." in str(prove(encoder, ["user"]))


def test_a_template_that_takes_an_answer_alone_is_said_to_refuse_the_whole() -> None:
    refusing = "{% for m in messages %}{% if not m.content %}{{ raise_exception('no words') }}{% endif %}{% endfor %}"
    template = refusing + FAMILIES["olmo"].template
    encoder = encoder_of("olmo", chat_template_kwargs={"chat_template": template})
    assert "(an empty answer: it refuses the whole)" in str(prove(encoder, ["user"]))


@pytest.mark.parametrize(
    ("name", "role", "reason"),
    [
        ("gemma", "tool", "refuses these messages: turns have to alternate"),
        ("olmo", "tool", "refuses these messages: who is tool?"),
        ("phi", "tool", "does not append message 1 of the reply, of the role 'tool'"),
        ("once", "user", "refuses these messages: one question"),
    ],
)
def test_a_reply_that_the_template_cannot_carry_ends_the_run(name: str, role: str, reason: str) -> None:
    once = "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}" + FAMILIES["olmo"].template
    arguments = {"chat_template_kwargs": {"chat_template": once}} if name == "once" else {}
    with pytest.raises(ConfigError) as caught:
        prove(encoder_of("olmo" if name == "once" else name, **arguments), [role])
    assert str(caught.value) == (
        f"environment: the tokenizer's chat template {reason}; expected a model (model.path) whose template takes replies of "
        f"the role {role!r}"
    )


def test_there_is_nothing_to_prove_of_plain_text() -> None:
    assert prove(reply_encoder(character_tokenizer("01")), ["user"]) is None
