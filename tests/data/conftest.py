from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rhymerl.data import LengthLimits, LocatedRow
from rhymerl.models.tokenizers import character_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if think is defined and think %}[think]{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def characters() -> PreTrainedTokenizerBase:
    return character_tokenizer("0123456789+=?\n")


@pytest.fixture
def make_bpe() -> Callable[..., PreTrainedTokenizerBase]:
    """A byte-level tokenizer without merges, that can put BOS in front and EOS behind."""

    def make(
        *, adds_bos: bool = True, adds_eos: bool = False, template: str | None = CHAT_TEMPLATE
    ) -> PreTrainedTokenizerBase:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
        backend = Tokenizer(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        pattern = f"{'<s> ' * adds_bos}$A{' </s>' * adds_eos}"
        backend.post_processor = processors.TemplateProcessing(
            single=pattern, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
        )

    return make


@pytest.fixture
def limits() -> LengthLimits:
    return LengthLimits(context_tokens=64, max_tokens=8)


@pytest.fixture
def location() -> Callable[[Iterable[dict[str, Any]]], list[LocatedRow]]:
    """Rows as a reader hands them over."""
    return lambda rows: [LocatedRow(location=f"rows, row {n}", row=row) for n, row in enumerate(rows, start=1)]
