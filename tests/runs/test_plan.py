"""`rhymerl plan`: what it reads, what it says, and which settings it names."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rhymerl.cli import main
from rhymerl.config import compose
from rhymerl.errors import ConfigError
from rhymerl.memory.base import GIB, Layout
from rhymerl.memory.fitting import missing_bytes, nearest
from rhymerl.memory.outline import outline
from rhymerl.memory.parts import rank_memory
from rhymerl.models.critic import CriticSettings
from rhymerl.models.lora import LoRA
from rhymerl.models.policy import PolicySource, frozen
from rhymerl.models.sharding import BLOCK_BYTES
from rhymerl.runs.plan import in_gib, setup_from
from rhymerl.testing import tiny_policy
from rhymerl.training.memory import refuse_too_large, too_small
from rhymerl.training.settings import UpdateSettings
from tests.training.setups import setup_for

EIGHT_BILLION: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
PARAMETERS = 8_190_735_360


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model of which there is a config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, LoRA(rank=3)], ids=["all", "adapters"])
@pytest.mark.parametrize("critic", [None, "copy", "path", "shared"])
def test_a_config_says_what_the_model_has(adapter, critic, tmp_path):
    tiny_policy("llama", tied=True, dtype="float32").save(tmp_path)
    source = PolicySource(str(tmp_path), adapter=adapter)
    loaded, made = source.load(), source.outline()
    settings = CriticSettings(shared=critic == "shared", path=str(tmp_path) if critic == "path" else None)
    critics = (settings.build(loaded, seed=0), settings.outline(made)) if critic else (None, None)
    real = outline(loaded.model, reference=frozen(loaded.model), critic=critics[0])
    assert outline(made, reference=frozen(made), critic=critics[1]) == real
    assert all(each.is_meta for each in made.parameters())
    assert bool(real.reference) == (adapter is None), "with adapters the policy is its own reference"
    if critic == "path":
        assert all(each.is_trained for each in real.critic), "a critic of its own is trained whole beside adapters"


def test_the_config_of_a_gguf_file_says_it_too(tmp_path):
    pytest.importorskip("gguf")
    from tests.models.ggufs import write_gguf

    write_gguf(tmp_path / "tiny.gguf")
    source = PolicySource(str(tmp_path / "tiny.gguf"))
    found = outline(source.outline(), reference=None, critic=None)
    assert found == outline(source.load().model, reference=None, critic=None)


def test_a_built_model_needs_no_files(capsys):
    words = ["model.init={model_type: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}"]
    found = planned(capsys, *words)
    assert found["bytes_per_rank"]["weights"] > 0
    assert "fits" not in found


def test_one_rank_of_eight(large, capsys):
    sharded = ["trainer.devices=8", "trainer.strategy=fsdp2", "backend=ray"]
    words = [f"model.path={large}", *sharded, "--device-gib", "80", "trainer.precision=bf16-mixed"]
    found = planned(capsys, *words)
    memory = found["bytes_per_rank"]
    assert memory["weights"] == memory["gradients"] == 4 * PARAMETERS // 8
    assert memory["moments"] == PARAMETERS
    assert memory["weight_buffers"] == 2 * BLOCK_BYTES, "of the largest tensor"
    assert memory["keys_and_values"] == 0
    assert found["bytes_per_worker"]["engine_weights"] == (4 + 2) * PARAMETERS, "and copies in bfloat16"
    assert found["fits"] is False
    assert found["nearest"] == ["update.activation_checkpointing=true"]
    assert planned(capsys, *words, "update.activation_checkpointing=true")["fits"] is True
    # Each backward gathers all weights twice in bfloat16 and scatters sums in float32; rank 0 gets the parts for
    # workers in float32.
    sent, each = found["sent_bytes_per_step"], 7 * PARAMETERS // 8
    backwards = found["backwards_per_step"]
    assert sent == {"gathers": backwards * 4 * each, "gradients": backwards * 4 * each, "weights": 4 * PARAMETERS // 8}


def test_a_worker_that_fits_no_device_is_told(large, capsys):
    words = [f"model.path={large}", "trainer.devices=8", "trainer.strategy=fsdp2", "backend=ray"]
    assert planned(capsys, *words, "--device-gib", "80")["worker_fits"] is True
    assert planned(capsys, *words, "--device-gib", "30")["worker_fits"] is False
    assert main(["plan", *words, "--device-gib", "30"]) == 0
    assert "A worker does not fit one of that size, by " in capsys.readouterr().out


def test_without_sharding_gradients_are_summed_everywhere(large, capsys):
    found = planned(capsys, f"model.path={large}", "trainer.devices=8")
    sent = found["sent_bytes_per_step"]
    assert sent == {"gathers": 0, "gradients": 2 * 7 * 4 * PARAMETERS // 8, "weights": 0}


def test_an_engine_in_the_rank_has_weights_keys_and_a_process_of_its_own(large, capsys):
    words = [f"model.path={large}", "backend=sglang", "adapter=lora", "--device-gib", "141"]
    memory = planned(capsys, *words)["bytes_per_rank"]
    assert memory["engine_weights"] == 2 * PARAMETERS
    assert memory["keys_and_values"] > 0
    assert memory["engine_rest"] > 2 * GIB
    asleep = planned(capsys, *words, "backend.release_memory=true")
    assert asleep["total_bytes"] < planned(capsys, *words)["total_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.devices=none"], "trainer.devices='none': expected a number above 0, a list of devices, or auto"),
        (["trainer.devices=8", "trainer.strategy=fsdp2"], "trainer.strategy=fsdp2 with EmbeddedBackend"),
        (["--device-gib", "-3"], "--device-gib -3.0: expected a number above 0"),
        (["trainer.precision=16-mixed"], "trainer.precision='16-mixed': float16 needs loss scaling"),
        (["model.path=/nowhere"], "model.path='/nowhere': no such directory"),
        (
            ["trainer.devices=3", "trainer.strategy._target_=rhymerl.FSDP2Strategy", "trainer.strategy.num_replicas=2"],
            "trainer.strategy.num_replicas=2: so many groups",
        ),
    ],
)
def test_what_cannot_be_planned(words, message, large, capsys):
    assert main(["plan", f"model.path={large}", "backend=embedded", *words]) == 2
    assert message in capsys.readouterr().err


def test_words_for_people(large, capsys):
    assert main(["plan", f"model.path={large}", "--device-gib", "80"]) == 0
    said = capsys.readouterr().out
    assert "moments" in said
    assert "It does not fit a device of 80.0 GiB, by " in said
    assert "data.max_prompt_tokens is not set" in said


# -- the nearest settings
# ------------------------------------------------------------------------------------------------

STRATEGIES = {
    "ddp": [],
    "fsdp2": ["trainer.strategy=fsdp2", "backend=ray"],
    "hsdp": ["trainer.strategy._target_=rhymerl.FSDP2Strategy", "trainer.strategy.num_replicas=4", "backend=ray"],
}


@pytest.mark.parametrize(("strategy", "devices"), [*((name, 8) for name in STRATEGIES), ("ddp", 1)])
def test_settings_that_fit_are_as_few_as_can_be(strategy, devices, large, capsys):
    words = [f"model.path={large}", f"trainer.devices={devices}", *STRATEGIES[strategy]]
    numbers = []
    for device in (20, 40, 80, 141):
        named = planned(capsys, *words, "--device-gib", str(device))["nearest"]
        if named is None:
            continue
        settings = [setting for each in named for setting in each.split()]
        overridden = {each.partition("=")[0] for each in settings}
        rest = [each for each in words if each.partition("=")[0] not in overridden]
        if "trainer.strategy=fsdp2" in settings or any("num_replicas" in each for each in settings):
            rest = [each for each in rest if not each.startswith(("trainer.strategy", "backend"))]
            settings = [each for each in settings if "num_replicas" not in each] + [
                "trainer.strategy=fsdp2",
                "backend=ray",
            ]
        fitting = planned(capsys, *rest, *dict.fromkeys(settings), "--device-gib", str(device))
        assert fitting["fits"], (device, named)
        numbers.append(len(named))
    assert numbers, "for some device there is a way"
    assert numbers == sorted(numbers, reverse=True), "a larger device needs no more"


def test_a_single_device_is_told_how_many_would_do(large, capsys):
    words = [f"model.path={large}", "trainer.devices=1", "--device-gib", "80"]
    devices = "trainer.devices=4 trainer.strategy=fsdp2 backend=ray"
    assert planned(capsys, *words)["nearest"] == ["update.activation_checkpointing=true", devices]


def test_no_change_is_named_that_is_not_needed():
    setup = setup_for(
        tiny_policy(dtype="float32").model, update=UpdateSettings(micro_batch_tokens=8192), step_tokens=65_536
    )
    total = rank_memory(setup).total
    assert nearest(setup, total) == []
    assert nearest(setup, total - 1) == ["update.activation_checkpointing=true"]
    assert nearest(setup, GIB) is None


def test_memory_that_is_too_small_for_certain_is_refused():
    setup = setup_for(tiny_policy(dtype="float32").model)
    memory = rank_memory(setup)
    certain = memory.models + memory.parts["gradients"] + memory.parts["moments"]
    for case in (setup, replace(setup, offloads_optimizer=True)):  # whose moments are there while it steps
        refuse_too_large(case, UpdateSettings(), certain)
        with pytest.raises(ConfigError, match="weights, gradients and moments of a rank take"):
            refuse_too_large(case, UpdateSettings(), certain - 1)
    assert missing_bytes(setup, certain) > 0, "an estimate refuses nothing"
    assert str(too_small(setup, certain)).startswith(
        "memory   may be 3.0 GiB too small\n         no settings are known to fit"
    )
    assert too_small(setup, memory.total) is None
    assert too_small(setup, None) is None


def test_nobody_knows_what_another_optimizer_keeps():
    class Elsewhere(UpdateSettings):
        def optimizer(self, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("it is not asked for")

    setup = setup_for(tiny_policy(dtype="float32").model)
    memory = rank_memory(setup)
    refuse_too_large(setup, Elsewhere(), memory.models)
    with pytest.raises(ConfigError, match="model: weights of a rank take"):
        refuse_too_large(setup, Elsewhere(), memory.models - 1)


def test_moments_are_those_of_the_optimizer():
    assert UpdateSettings().states == 2
    setup = setup_for(tiny_policy(dtype="float32").model)
    assert rank_memory(replace(setup, states=1)).parts["moments"] == rank_memory(setup).parts["gradients"]


def test_a_whole_copy_in_a_sharded_rank_is_counted(large, capsys):
    words = [f"model.path={large}", "trainer.devices=8", "trainer.strategy=fsdp2", "data.max_prompt_tokens=100"]
    found = planned(capsys, *words, "backend.whole_copy=true")
    apart = planned(capsys, *words, "backend=ray")
    rank = found["bytes_per_rank"]
    assert rank["engine_weights"] == 4 * PARAMETERS
    assert rank["weight_buffers"] == 4 * 151_936 * 4096
    assert found["total_bytes"] - apart["total_bytes"] >= 4 * PARAMETERS


def test_offloaded_moments_take_turns_with_activations(large, capsys):
    words = [f"model.path={large}", "trainer.devices=8", *STRATEGIES["fsdp2"], "data.max_prompt_tokens=100"]
    kept = planned(capsys, *words)
    found = planned(capsys, *words, "update.offload_optimizer=true")
    of_kept, of_found = kept["bytes_per_rank"], found["bytes_per_rank"]
    passing = sum(of_kept[name] for name in ("activations", "head_chunks", "gathered"))
    assert of_found == {**of_kept, "moments": max(0, of_kept["moments"] - passing)}
    assert kept["total_bytes"] - found["total_bytes"] == of_kept["moments"] - of_found["moments"] > 0


def test_settings_and_a_run_say_the_same(tmp_path):
    tiny_policy(dtype="float32").save(tmp_path)
    words = [f"model.path={tmp_path}", "task=running_sum", "trainer.accelerator=cpu", "update.chunk_tokens=8"]
    found = setup_from(compose("base", words), device_bytes=None)
    assert found.tensors == setup_for(PolicySource(str(tmp_path)).load().model).tensors
    assert (found.layout, found.chunk_tokens, found.is_mixed) == (Layout(num_replicas=1), 8, False)


def test_the_table_of_the_documentation_is_what_its_commands_say(capsys):
    page = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("rhymerl plan ")]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d+B \|", line)]
    cases = [(words, nodes) for words in commands for nodes in (1, 8)]
    assert len(rows) == len(cases) == 4
    for cells, (words, nodes) in zip(rows, cases, strict=True):
        found = planned(capsys, *words, f"trainer.num_nodes={nodes}")
        memory, sent = found["bytes_per_rank"], found["sent_bytes_per_step"]
        parts = ("weights", "gradients", "moments", "activations", "head_chunks", "gathered")
        held = [*(memory[part] for part in parts), memory["reserve"] + memory["context"], found["total_bytes"]]
        fits = "yes" if found["fits"] else " ".join(f"`{each}`" for each in found["nearest"])
        said = [*map(in_gib, held), fits, *map(in_gib, sent.values())]
        assert cells[1:] == [str(8 * nodes), *said]
