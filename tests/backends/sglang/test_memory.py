"""One GPU for a trainer and its engine: who gets what, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.memory import MemorySplit, engine_shape, is_given, split
from rhymerl.drafters import NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.memory.base import GIB, EngineShape, Setup
from rhymerl.memory.outline import model_shape
from rhymerl.memory.parts import rank_memory
from tests.backends.sglang.test_server import ENVIRONMENT, PATH
from tests.memory.sizes import setup_of_sizes, with_lora
from tests.training.setups import setup_for

# Of Qwen2.5: layers, hidden (and attention), intermediate, vocabulary, parameters, keys and values a token and layer.
SIZES = {
    "0.5B": (24, 896, 4864, 151_936, 494_032_768, 256),
    "1.5B": (28, 1536, 8960, 151_936, 1_543_714_304, 512),
    "3B": (36, 2048, 11_008, 151_936, 3_085_938_688, 512),
    "7B": (28, 3584, 18_944, 152_064, 7_615_616_512, 1024),
}
H100, H200 = 79 * GIB, 139 * GIB


def setup_of(size: str, itemsize: int = 4, compute_itemsize: int = 2, **more: Any) -> Setup:
    layers, hidden, intermediate, vocabulary, parameters, width = SIZES[size]
    engine = EngineShape(
        weights=2 * parameters, kv_of_token=2 * layers * width, dynamic=5 * GIB, longest_tokens=1536, context=GIB
    )
    return setup_of_sizes(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        parameters=parameters,
        itemsize=itemsize,
        compute_itemsize=compute_itemsize,
        engine=engine,
        chunk_tokens=1766,
        **more,
    )


def divided(setup: Setup, gpu: int) -> MemorySplit:
    return split(setup, free_bytes=gpu - rank_memory(setup).models, total_bytes=gpu)


def test_adapters_of_rank_16_in_float32() -> None:
    # q, k, v, o: 16 * (896 + 896) each, gate, up, down: 16 * (896 + 4864) each; 24 layers
    assert with_lora(setup_of("0.5B")).trained_bytes == 4 * 24 * 16 * (4 * 1792 + 3 * 5760)


def test_an_engine_gets_what_the_update_and_its_own_graphs_leave() -> None:
    setup = setup_of("0.5B", micro_batch_tokens=8192)
    found = divided(setup, H100)
    # gradients 1.98 GB, moments 3.95 GB, activations 8192 * 25 * 71168 + copies of weights 0.99 GB = 15.56 GB,
    # logits 4 * 1766 * 151936 * 4 + 2 * 151936 * 896 * 4 = 5.38 GB, reserve 2.15 + 1.56 GB
    assert rank_memory(setup).update == pytest.approx(30.58e9, rel=0.001)
    # free: 79 GiB - 1.98 GB = 82.85 GB; less 1 GiB of CUDA's context and 5 GiB of graphs 76.41; less the update 45.83
    assert found.static_bytes == pytest.approx(45.83e9, rel=0.001)
    # of what SGLang finds, 82.85 - 1.07 = 81.78 GB
    assert found.fraction_of(found.free_bytes) == 0.56
    assert str(found) == (
        "memory of 79 GiB: update 28.5 (gradients 1.8, moments 3.7, activations 14.5, logits 5.0, reserve 3.4), "
        "engine 42.7 (mem_fraction_static 0.56)"
    )


def test_an_engine_that_sleeps_during_updates_gets_all_but_what_they_leave_behind() -> None:
    found = divided(setup_of("0.5B", micro_batch_tokens=8192, in_turn=True), H100)
    # 76.41 GB less moments 3.95 and reserve 3.70
    assert found.static_bytes == pytest.approx(68.76e9, rel=0.001)
    assert str(found).endswith("engine 64.0 (mem_fraction_static 0.84, in turn)")


def test_a_successor_gets_the_same_bytes_of_less() -> None:
    found = divided(setup_of("0.5B"), H100)
    fewer = 60 * GIB
    assert found.fraction_of(fewer) * (fewer - GIB) == pytest.approx(found.static_bytes, rel=0.005)


FULL, LORA = (lambda each: each), with_lora
FLOAT32, MIXED, BFLOAT16 = (4, 4), (4, 2), (2, 2)


@pytest.mark.parametrize(
    ("size", "bits", "kind", "on_h100", "on_h200"),
    [  # at 8192 tokens; activations are what a layer keeps of a token, times 8192 and one more layer than there are
        ("0.5B", FLOAT32, FULL, True, True),  # weights 2 + state 6 + activations 24 GB
        ("1.5B", FLOAT32, FULL, False, True),  # 6 + 19 + 50, and 6 of logits: full, and the engine has nothing
        ("1.5B", FLOAT32, LORA, True, True),  # 6 + 0 + 50
        ("1.5B", MIXED, FULL, True, True),  # 6 + 19 + 33
        ("1.5B", BFLOAT16, FULL, True, True),  # 3 + 9 + 27
        ("3B", FLOAT32, FULL, False, False),  # 12 + 37 + 81
        ("3B", MIXED, FULL, False, True),  # 12 + 37 + 55
        ("3B", MIXED, LORA, False, True),  # 12 + 0 + 55
        ("3B", BFLOAT16, FULL, False, True),  # 6 + 19 + 43, and 10 for logits and the reserve
        ("7B", MIXED, FULL, False, False),  # 30 + 91 + 82
        ("7B", MIXED, LORA, False, False),  # 30 + 0 + 82 + 15 of the engine's weights
        ("7B", BFLOAT16, LORA, False, True),  # 15 + 0 + 82 + 15, and 22 for logits, reserve and graphs: of 149
        ("7B", BFLOAT16, FULL, False, False),  # 15 + 46 + 58 + 15
    ],
)
def test_what_fits(size, bits, kind, on_h100, on_h200) -> None:
    setup = kind(setup_of(size, *bits, micro_batch_tokens=8192))
    for gpu, fits in ((H100, on_h100), (H200, on_h200)):
        try:
            found = divided(setup, gpu)
        except ConfigError:
            assert not fits, gpu
        else:
            assert fits, (gpu, str(found))
            parts = found.memory.parts
            assert found.static_bytes >= parts["engine_weights"] + parts["keys_and_values"]


def test_a_refusal_names_settings_that_fit_and_what_they_spare() -> None:
    setup = setup_of("1.5B")
    with pytest.raises(ConfigError) as refused:
        divided(setup, H100)
    words = str(refused.value)
    assert words.startswith(
        "backend=sglang: of 73.2 GiB that are free on the GPU the update needs 90.0 (gradients 5.8, moments 11.5, "
    )
    assert "any of these fits: update.activation_checkpointing=true (" in words
    assert words.endswith("; backend.arguments.mem_fraction_static sets aside this estimate")
    assert "\n" not in words
    named = int(words.partition("update.micro_batch_tokens=")[2].split()[0])
    divided(replace(setup, micro_batch_tokens=named), H100)
    with pytest.raises(ConfigError):
        divided(replace(setup, micro_batch_tokens=named + 1024), H100)
    divided(replace(setup, activation_checkpointing=True), H100)


def test_a_refusal_names_settings_that_fit_together() -> None:
    with pytest.raises(
        ConfigError, match=r"these together fit: update\.activation_checkpointing=true, backend\.release_memory=true \("
    ):
        divided(setup_of("3B"), H100)


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(ConfigError, match="no settings fit: take a smaller model or a larger GPU"):
        divided(setup_of("7B"), 30 * GIB)


def test_an_update_has_to_fit_beside_a_sleeping_engine_too() -> None:
    with pytest.raises(ConfigError, match=r"update\.micro_batch_tokens="):
        divided(setup_of("1.5B", in_turn=True), H100)  # 90 GiB


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mem_fraction_static", True), ("mem-fraction-static", True), ("mem_fraction", True), ("max_total_tokens", False)],
)
def test_a_users_own_division_is_seen(name: str, expected: bool) -> None:
    assert is_given({name: 0.5}) == expected


@pytest.fixture
def gpu(monkeypatch, flat_policy):
    """A GPU as far as the command line of an engine goes."""
    monkeypatch.syspath_prepend(str(PATH))
    monkeypatch.setattr(type(flat_policy.model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (76 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def started(policy, setup: Setup | None, **settings) -> tuple[str, str | None]:
    """The command line of the engine, and what is told of it."""
    backend = SGLangBackend(max_running=2, environment=ENVIRONMENT, **settings)
    backend.share_device(setup)
    with backend:
        backend.start(policy, NoDrafter())
        return backend.server.server.log.read_text(), backend.words()


def test_an_engine_on_the_trainers_gpu_is_told_its_share(gpu, flat_policy):
    setup = setup_for(flat_policy.model)
    line, words = started(flat_policy, setup)
    # 75 GiB that SGLang finds, less the update, 2 GiB of graphs, a prefill of 8192 tokens and four times 2 rows of
    # logits
    config = flat_policy.model.config
    dynamic = (
        2 * GIB + 8192 * (4 * config.hidden_size + 3 * config.intermediate_size) * 2 + 4 * 2 * config.vocab_size * 4
    )
    expected = (75 * GIB - dynamic - rank_memory(setup).update) / (75 * GIB)
    told = float(line.partition("--mem-fraction-static ")[2].split()[0])
    assert expected - 0.001 < told <= expected
    assert words.startswith("memory of 80 GiB: update ")


@pytest.mark.parametrize(
    ("is_trained", "settings"),
    [(False, {}), (True, {"arguments": {"mem_fraction_static": 0.3}})],
    ids=["nothing is trained", "the user says it"],
)
def test_nothing_is_divided(is_trained, settings, gpu, flat_policy):
    line, words = started(flat_policy, setup_for(flat_policy.model) if is_trained else None, **settings)
    assert line.count("--mem-fraction-static") == len(settings)
    assert words is None


def test_nor_on_a_cpu(monkeypatch, flat_policy):
    monkeypatch.syspath_prepend(str(PATH))
    line, words = started(flat_policy, setup_for(flat_policy.model))
    assert "--mem-fraction-static" not in line
    assert words is None


@pytest.mark.parametrize(
    ("gpus", "weights", "kv_of_token"), [(1, 988_065_536, 12_288), (2, 494_032_768, 6144), (4, 247_016_384, 6144)]
)
def test_gpus_of_one_engine_divide_weights_keys_and_values(gpus, weights, kv_of_token):
    """Keys and values of two heads, 24 layers * 2 * 2 heads * 64 * 2 bytes, can be divided by two and no further."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **heads))
    found = engine_shape(model_shape(model, 1000), itemsize=2, gpus=gpus, rows=64 * 8, sizes=4)
    assert (found.weights, found.kv_of_token) == (weights, kv_of_token)
    assert found.parts["keys_and_values"] == 1000 * kv_of_token
    # passes of 3 more sizes; 8192 tokens of a prefill; 512 rows of logits, four times in float32
    assert found.dynamic == 2.75 * GIB + 8192 * (4 * 896 + 3 * 4864 // gpus) * 2 + 4 * 512 * 151_936 * 4
