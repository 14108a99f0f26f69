"""Small tokenizers with the structure of public chat templates, each in words of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rhymerl.environments.encoding import ReplyEncoder
from rhymerl.models.chat import ChatTokenizer

TOOLS = [{"type": "function", "function": {"name": "tool", "description": "", "parameters": {}}}]
LETTERS = 'the answer is 12 and no other\n\n  yes? {"text": "no"} user\n assistant\n system: naïve 你好 🙂\n\n\n'
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The system's turn, by itself where none is given; tools are listed in it, and what they return is the user's to say.
CHATML = r"""
{%- set given = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\n' + given }}
{%- if tools %}{{ '\n\n<tools>' + (tools | tojson) + '</tools>' }}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# What was thought before the latest question is left out, and the last answer always has a place for thoughts.
QWEN3 = r"""
{%- set found = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- set said = m.content %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > found.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# Today's date is in front; a turn ends with another token than a text; tools answer in JSON.
LLAMA3 = r"""
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y %H:%M:%S.%f') + '\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.role != 'system' %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Turns have to alternate; tools are listed at the latest question; there is no generation prompt.
MISTRAL = r"""
{{- bos_token }}
{%- set state = namespace(asked=0, count=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set state.asked = loop.index0 %}{% endif %}
    {%- if m.role in ('user', 'assistant') and not m.tool_calls %}
        {%- if (m.role == 'user') != (state.count % 2 == 0) %}{{ raise_exception('turns have to alternate') }}{% endif %}
        {%- set state.count = state.count + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == state.asked %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS] [' + (m.tool_calls[0].function | tojson) + ']' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + (m.content | trim) + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if (m.tool_call_id or '') | length != 9 %}{{ raise_exception('an id of a call has 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}"""

# Turns alternate strictly, the policy is called the model, and there are no tools.
GEMMA = r"""
{{- bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns have to alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# The tokenizer takes away the white space behind these tokens. A role that is none vanishes.
PHI = r"""
{%- for m in messages %}
    {%- if m.role in ('system', 'user', 'assistant') %}
        {{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Thoughts of earlier turns are left out; a turn ends like a text; behind a tool's result the same turn goes on.
DEEPSEEK = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<｜User｜>' + m.content }}
        {%- if not loop.last or add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- m.content.split('</think>')[-1].lstrip() + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% else %}{{ '\n' }}{% endif %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
    {%- endif %}
{%- endfor %}"""

# Nothing ends a turn but the token of whoever speaks next.
GLM = r"""
{{- '[gMASK]<sop>' }}
{%- for m in messages %}
    {{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# A system's turn with the date, which takes what the system says; the end is missing behind a last turn.
SMOLLM = r"""
{{- '<|im_start|>system\nToday: ' + strftime_now("%d %B %Y") + '\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role != 'system' %}
        {{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content }}
        {%- if not loop.last or m.role != 'assistant' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Channels; the last answer and an earlier one end differently; a tool answers only where it was called.
HARMONY = r"""
{{- '<|start|>system<|message|>Be helpful.<|end|>' }}
{%- set state = namespace(called=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set state.called = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' + state.called + '<|message|>' }}
        {{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if state.called is none %}{{ raise_exception('no tool was called') }}{% endif %}
        {{- '<|start|>functions.' + state.called + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# A word for whose turn it is, after a token for the turn's beginning; what an answer says has an end of its own.
COMMAND_R = r"""
{{- bos_token }}
{%- for m in messages %}
    {{- '<|START_OF_TURN_TOKEN|>' }}
    {%- if m.role == 'assistant' %}
        {{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}
    {%- else %}
        {{- ('<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>') + m.content }}
    {%- endif %}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# Roles are plain text, and the new line behind an answer comes only where something follows.
OLMO = r"""
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\n' + m.content + eos_token + ('' if loop.last else '\n') }}
    {%- elif m.role in ('user', 'system', 'environment') %}
        {{- '<|' + m.role + '|>\n' + m.content + '\n' }}
    {%- else %}
        {{- raise_exception('who is ' + m.role + '?') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, and how a policy that was trained on it speaks."""

    template: str
    special: tuple[str, ...]  # the first one is EOS
    end: str  # of a turn
    lead: str = ""  # what the policy samples in front of its words
    closing: str = ""  # and behind them
    roles: tuple[str, ...] = ("user", "tool")  # of replies that the template takes
    has_system: bool = True
    call: str = ""  # what it samples where a tool has to be called before it answers
    ends: tuple[str, ...] = ()  # further stop tokens of the policy
    plain: tuple[str, ...] = ()  # added tokens that are not special
    strips: bool = False  # tokens take the white space behind them away
    is_metaspace: bool = False  # as SentencePiece has it

    @cache  # noqa: B019
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return make_tokenizer(self)

    def stop_token_ids(self) -> list[int]:
        return [self.tokenizer().convert_tokens_to_ids(end) for end in (self.end, *self.ends)]

    def end_before(self, role: str) -> str:
        """GLM's turns end with the token of who speaks next."""
        return "<|observation|>" if "<|observation|>" in self.ends and role == "tool" else self.end

    def answer(self, content: str, role: str) -> tuple[dict[str, Any], str]:
        """An answer before replies of a role, as a message and as what the policy samples."""
        if not (self.call and role == "tool"):
            sampled = f"{self.lead}{content}{self.closing}{self.end_before(role)}"
            return {"role": "assistant", "content": content}, sampled
        function = {"name": "tool", "arguments": {"text": content}}
        sampled = self.call.replace("ARGUMENTS", json.dumps({"text": content}, ensure_ascii=False))
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}, sampled


def make_tokenizer(family: Family) -> PreTrainedTokenizerBase:
    """A byte-level BPE with some merges, or one that marks spaces."""
    backend = Tokenizer(models.BPE(byte_fallback=family.is_metaspace))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family.is_metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        alphabet = [chr(code) for code in range(32, 127)]
    else:
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if family.is_metaspace else []
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(bytes_), special_tokens=bytes_, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([LETTERS] * 3, trainer)
    special = [
        AddedToken(token, special=token not in family.plain, normalized=False, rstrip=family.strips and token[0] == "<")
        for token in ("<bos>", *family.special, *family.plain)
    ]
    backend.add_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=family.special[0], chat_template=family.template
    )


FAMILIES = {
    "qwen2.5": Family(
        template=CHATML,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>"),
        end="<|im_end|>",
    ),
    "qwen3": Family(
        template=QWEN3,
        special=("<|im_end|>", "<|im_start|>"),
        plain=("<think>", "</think>", "<tool_response>", "</tool_response>"),
        end="<|im_end|>",
    ),
    "llama3": Family(
        template=LLAMA3,
        special=("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        end="<|eot_id|>",
        ends=("<|eom_id|>",),
    ),
    "mistral": Family(
        template=MISTRAL,
        special=(
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
        ),
        end="</s>",
        lead=" ",
        call='[TOOL_CALLS] [{"name": "tool", "arguments": ARGUMENTS}]</s>',
        has_system=False,
        is_metaspace=True,
    ),
    "gemma": Family(
        template=GEMMA,
        special=("<eos>",),
        plain=("<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        roles=("user",),
        has_system=False,
        is_metaspace=True,
    ),
    "phi": Family(
        template=PHI,
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        end="<|end|>",
        roles=("user",),
        strips=True,
        is_metaspace=True,
    ),
    "deepseek": Family(
        template=DEEPSEEK,
        special=("<｜end▁of▁sentence｜>",),
        plain=(
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        end="<｜end▁of▁sentence｜>",
    ),
    "glm": Family(
        template=GLM,
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        end="<|user|>",
        ends=("<|observation|>",),
    ),
    "smollm": Family(template=SMOLLM, special=("<|im_end|>", "<|im_start|>"), end="<|im_end|>"),
    "harmony": Family(
        template=HARMONY,
        special=("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        end="<|end|>",
        ends=("<|call|>",),
        lead="<|channel|>final<|message|>",
        call="<|channel|>commentary to=functions.tool<|message|>ARGUMENTS<|call|>",
    ),
    "command-r": Family(
        template=COMMAND_R,
        special=(
            *("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        end="<|END_OF_TURN_TOKEN|>",
        lead="<|START_RESPONSE|>",
        closing="<|END_RESPONSE|>",
    ),
    "olmo": Family(template=OLMO, special=("<|endoftext|>",), end="<|endoftext|>", roles=("user", "environment")),
}


def encoder_of(name: str, **settings: Any) -> ReplyEncoder:
    return reply_encoder(FAMILIES[name].tokenizer(), stop_token_ids=FAMILIES[name].stop_token_ids(), **settings)


def reply_encoder(
    tokenizer: Any, *, stop_token_ids: Sequence[int] = (), max_reply_tokens: int | None = None, **settings: Any
) -> ReplyEncoder:
    chat = ChatTokenizer(tokenizer, **settings)
    return ReplyEncoder(chat, stop_token_ids=stop_token_ids, max_reply_tokens=max_reply_tokens)


def save_model(name: str, path: Path) -> None:
    """Write a directory with a tiny model of the family's tokenizer."""
    tokenizer = FAMILIES[name].tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
