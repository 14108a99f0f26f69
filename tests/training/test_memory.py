"""What an engine is told of the update beside it."""

from __future__ import annotations

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.models.memory import UpdateShape
from rhymerl.testing import tiny_policy
from tests.integration.training import Run


class Told(EmbeddedBackend):
    update: UpdateShape | None = None

    def share(self, update: UpdateShape | None) -> None:
        self.update = update


def test_an_engine_is_told_of_the_update_before_it_starts() -> None:
    backend = Told()
    Run(num_steps=1, prompts_per_step=2).train(backend=backend)
    found = backend.update
    assert found is not None
    model = tiny_policy(dtype="float64", context=64, peaked=2.0).model
    config = model.config
    assert (found.layers, found.hidden, found.intermediate) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
    )
    assert found.weight_bytes == found.trained_bytes == 8 * sum(each.numel() for each in model.parameters())
    assert (found.weight_itemsize, found.itemsize, found.backbones, found.has_adapters) == (8, 8, 1, False)
    assert found.longest_tokens == len("0+0=?\n") + 16
    assert found.micro_batch_tokens == 2 * 4 * found.longest_tokens  # a step has no more
    assert found.chunk_tokens == 64 * 2**20 // (4 * config.vocab_size)
