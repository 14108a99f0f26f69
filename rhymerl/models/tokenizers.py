"""Tokenizers: read and checked against their model, or made with one token a character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rhymerl.errors import ConfigError
from rhymerl.models.loading import naming
from rhymerl.models.logits import num_embeddings

PAD, END = "<pad>", "<end>"


def load_tokenizer(place: Mapping[str, Any], model: PreTrainedModel, where: str) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer at transformers' `place`. Raises ConfigError that begins with `where`."""
    with naming(f"{where}: cannot be loaded: its tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
    check_tokenizer(tokenizer, model, where)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, where: str) -> None:
    """Raise ConfigError for one that transformers has made up, and for one whose tokens the model does not know.

    Special tokens beyond the embedding are common, for padding say: transformers adds some, and hardly any is ever fed.
    """
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    special = {*tokenizer.all_special_tokens, *added}
    if vocabulary.keys() <= special:
        raise ConfigError(
            f"{where}: it has no tokenizer (tokenizer.json, ...); save that of the model beside its weights"
        )
    rows = num_embeddings(model)
    unknown = [token for token, number in vocabulary.items() if number >= rows and token not in special]
    if unknown:
        raise ConfigError(
            f"{where}: its tokenizer has {len(vocabulary)} tokens, its embedding {rows}, none of them for "
            f"{min(unknown)!r}; save the tokenizer that the model was trained with, or resize the embedding"
        )


def character_tokenizer(characters: str, *, size: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a character (ASCII).

    0 is padding, 1 ends an answer, then come `characters` in order, then `<19>` and so on up to `size`. It is a
    byte-level BPE without merges, because transformers loads the tokenizers of some model types as that, whatever class
    was saved. Raises ValueError for a character that appears twice or is not ASCII.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    check_characters(characters)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    known = [PAD, END, *names]
    vocabulary = {token: index for index, token in enumerate([*known, *(f"<{i}>" for i in range(len(known), size))])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def check_characters(characters: str) -> None:
    """Raise ValueError for one that appears twice or is not ASCII."""
    if len(set(characters)) < len(characters) or not characters.isascii():
        raise ValueError(f"characters={characters!r}: expected ASCII characters, each once")
