"""A policy from a GGUF file is the model that the file was made from, and what cannot be read costs one line."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymerl.errors import ConfigError
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.testing import tiny_policy
from tests.models.ggufs import MERGED, TEMPLATE, weights_of, write_gguf

TOKENS = torch.tensor([[2, 3, 12, 4, 13, 5, 19, 7]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_file_in_full_precision_the_very_logits(tied: bool, tmp_path: Path) -> None:
    made_from = write_gguf(tmp_path / "tiny.gguf", quantised=None, tied=tied)
    loaded = PolicySource(str(tmp_path / "tiny.gguf")).load()
    assert torch.equal(logits(loaded.model), logits(made_from.model))
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1], ids=lambda kind: kind.name)
def test_quantised_weights_are_unpacked(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    made_from = write_gguf(tmp_path / "tiny.gguf", quantised=kind)
    loaded = PolicySource(str(tmp_path / "tiny.gguf")).load()
    expected = {
        name: dequantize(quantize(array, kind), kind) if array.ndim > 1 else array
        for name, array in weights_of(made_from).items()
    }
    for name, array in weights_of(loaded).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert torch.equal(logits(loaded.model), logits(own))
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_in_another_precision(dtype: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    loaded = PolicySource(str(tmp_path / "tiny.gguf"), dtype=dtype).load()
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    write_gguf(tmp_path / "tiny.GGUF")
    return PolicySource(str(tmp_path / "tiny.GGUF")).load()


def test_tokenizer_and_chat_template_are_the_files(policy: Policy) -> None:
    tokenizer = policy.tokenizer
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("1+1=?\n100")["input_ids"] == [3, 12, 3, 13, 16, 18, 3, 19]
    assert tokenizer.decode([3, 12, 3, 13, 16, 18, 3, 19]) == "1+1=?\n100"
    assert tokenizer.convert_ids_to_tokens(19) == MERGED
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], add_generation_prompt=True)
    assert asked["input_ids"] == [3, 12, 3, 18, 13]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, policy.stop_token_ids) == (0, 1, (1,))
    assert policy.context_tokens == 128


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=5)
    loaded = PolicySource(str(tmp_path / "tiny.gguf")).load()
    assert loaded.stop_token_ids == tuple(sorted({*made.stop_token_ids, 5}))
    loaded.save(tmp_path / "saved")
    assert PolicySource(str(tmp_path / "saved")).load().stop_token_ids == loaded.stop_token_ids


def test_what_is_saved_is_a_plain_model(policy: Policy, tmp_path: Path) -> None:
    """In its config nothing is left of the file, which transformers would ask for."""
    policy.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert "gguf" not in (tmp_path / "saved" / "config.json").read_text()
    assert torch.equal(logits(model), logits(policy.model))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert tokenizer("1+1=?\n100")["input_ids"] == [3, 12, 3, 13, 16, 18, 3, 19]


def test_files_beside_it_are_another_models(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_policy("qwen2", dtype="float32")
    other.tokenizer.chat_template = "another"
    other.save(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    loaded = PolicySource("tiny.GGUF").load()
    assert torch.equal(logits(loaded.model), logits(policy.model))
    assert loaded.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.model.name_or_path == loaded.tokenizer.name_or_path == "tiny.GGUF"


# -- what cannot be read ---------------------------------------------------------------------------------------------


def refusal(path: Path | str) -> str:
    """The one line, without the setting."""
    with pytest.raises(ConfigError) as caught:
        PolicySource(str(path)).load()
    message = str(caught.value)
    assert "\n" not in message
    where = f"model.path={str(path)!r}: "
    assert message.startswith(where)
    return message.removeprefix(where)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.gguf") == "no such file"
    assert refusal("owner/name.gguf") == "no such file"


def test_a_directory_that_has_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    message = refusal(tmp_path)
    assert message == "not a model directory (it has no config.json); name a file of it: tiny.gguf"


def test_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refusal(tmp_path / "text.gguf") == "not a GGUF file (it does not begin with 'GGUF')"
    (tmp_path / "empty.gguf").touch()
    assert refusal(tmp_path / "empty.gguf") == "not a GGUF file (it does not begin with 'GGUF')"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file(share: float, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "part.gguf").write_bytes(whole[: max(4, int(share * len(whole)))])
    assert refusal(tmp_path / "part.gguf").startswith("broken or truncated: ")


def test_a_download_that_stopped_says_where(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[:-100])
    assert refusal(tmp_path / "tiny.gguf") == (
        f"broken or truncated: output_norm.weight ends at byte {len(content):,}, but the file has {len(content) - 100:,}"
    )


def test_damage_to_the_header_ends_soon_and_is_named_or_does_no_harm(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    source, path, loaded = random.Random(0), tmp_path / "damaged.gguf", 0
    for _ in range(60):
        place = source.randrange(4, whole.index(b"token_embd"))
        path.write_bytes(whole[:place] + source.randbytes(8) + whole[place + 8 :])
        with suppress(ConfigError):
            PolicySource(str(path)).load()
            loaded += 1
    assert loaded < 50


@pytest.mark.parametrize("alignment", [0, "wide"])
def test_an_alignment_that_is_none(alignment: int | str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", general__alignment=alignment)
    assert refusal(tmp_path / "tiny.gguf") == f"broken or truncated: general.alignment={alignment!r}"


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="rwkv7")
    assert refusal(tmp_path / "tiny.gguf") == (
        "cannot be loaded as a causal language model: GGUF model with architecture rwkv7 is not supported yet."
    )


def test_no_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", has_tokenizer=False)
    assert refusal(tmp_path / "tiny.gguf") == (
        "it has no tokenizer (tokenizer.ggml.tokens); it needs that of the model"
    )


@pytest.mark.parametrize("name", ["tokenizer.ggml.eos_token_id", "llama.context_length"])
def test_what_transformers_would_make_up(name: str, tmp_path: Path) -> None:
    """A token that ends answers, or a length of the context."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    assert name.encode() in content
    path.write_bytes(content.replace(name.encode(), name[:-1].encode() + b"x"))
    assert refusal(path) == f"it does not say {name}, which the model needs"


def test_weights_that_are_missing(tmp_path: Path) -> None:
    def without_one(weights: dict[str, Any]) -> dict[str, Any]:
        return {name: array for name, array in weights.items() if name != "blk.1.ffn_up.weight"}

    write_gguf(tmp_path / "tiny.gguf", weights=without_one)
    assert refusal(tmp_path / "tiny.gguf") == "it has no weights for model.layers.1.mlp.up_proj.weight"


def test_positions_that_transformers_would_not_scale(tmp_path: Path) -> None:
    def with_frequencies(weights: dict[str, Any]) -> dict[str, Any]:
        return {"rope_freqs.weight": np.ones(4, np.float32), **weights}

    rest = "which transformers does not read from GGUF; use the directory that the file was made from"
    write_gguf(tmp_path / "tiny.gguf", weights=with_frequencies)
    assert refusal(tmp_path / "tiny.gguf") == f"its rope is scaled (rope_freqs.weight), {rest}"
    write_gguf(tmp_path / "other.gguf", llama__rope__scaling__type="yarn")
    assert refusal(tmp_path / "other.gguf") == f"its rope is scaled (llama.rope.scaling.type=yarn), {rest}"
    write_gguf(tmp_path / "plain.gguf", llama__rope__scaling__type="none")
    assert PolicySource(str(tmp_path / "plain.gguf")).load().model.name_or_path == str(tmp_path / "plain.gguf")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refusal(tmp_path / "tiny.gguf") == "reading it needs gguf: pip install 'rhymerl[gguf]'"
