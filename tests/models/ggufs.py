"""A tiny GGUF file, made on the spot as llama.cpp's converter makes one of a Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from rhymerl.models.policy import Policy
from rhymerl.models.tokenizers import END, PAD
from rhymerl.testing import tiny_policy

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
HEADS, KV_HEADS = 4, 2
MERGED = "00"  # the one token of two characters: a byte-level tokenizer has merges
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Weights = dict[str, np.ndarray[Any, Any]]


def tiny_llama(*, tied: bool = True) -> Policy:
    """The policy that `write_gguf` writes, with one row more than it has tokens, for MERGED."""
    return tiny_policy("llama", dtype="float32", tied=tied, context=128, peaked=2.0, vocab_size=20)


def weights_of(policy: Policy) -> Weights:
    """The weights by the names in a GGUF file, with the rotary halves of each head interleaved."""
    found: Weights = {}
    for name, parameter in policy.model.named_parameters():
        array = parameter.detach().numpy()
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            heads = {"self_attn.q_proj.weight": HEADS, "self_attn.k_proj.weight": KV_HEADS}.get(rest)
            if heads is not None:
                halves = array.reshape(heads, 2, -1, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
            found[f"blk.{number}.{_NAMES[rest.removesuffix('.weight')]}.weight"] = array
        else:
            outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found[f"{outer[name.removesuffix('.weight')]}.weight"] = array
    return found


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    quantised: GGMLQuantizationType | None = GGMLQuantizationType.Q8_0,
    tied: bool = True,
    has_tokenizer: bool = True,
    template: str | None = TEMPLATE,
    weights: Callable[[Weights], Weights] = lambda weights: weights,
    **values: str | int,
) -> Policy:
    """Write the file, with extra `values` (`__` is a dot in their names), and return what it was made from."""
    policy = tiny_llama(tied=tied)
    writer = GGUFWriter(path, architecture)
    config: Any = policy.model.config
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if has_tokenizer:
        _add_tokenizer(writer, policy)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in values.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)  # type: ignore[arg-type]
    for name, array in weights(weights_of(policy)).items():
        if quantised is not None and array.ndim > 1:
            writer.add_tensor(name, quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return policy


def _add_tokenizer(writer: GGUFWriter, policy: Policy) -> None:
    vocabulary: dict[str, int] = policy.tokenizer.get_vocab()
    tokens = [
        *sorted(vocabulary, key=vocabulary.__getitem__)[:-1],
        MERGED,
    ]  # in the place of the last row's made-up token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in (PAD, END) else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["0 0"])
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_bos_token_id(tokens.index(END))
