"""What an engine is told of the update beside it."""

from __future__ import annotations

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.memory.base import Setup
from rhymerl.memory.outline import total_bytes
from rhymerl.testing import tiny_policy
from tests.integration.training import Run


class Told(EmbeddedBackend):
    setup: Setup | None = None

    def share_device(self, setup: Setup | None) -> None:
        self.setup = setup


def test_an_engine_is_told_of_the_update_before_it_starts() -> None:
    backend = Told()
    Run(num_steps=1, prompts_per_step=2).train(backend=backend)
    found = backend.setup
    assert found is not None
    model = tiny_policy(dtype="float64", context=64, peaked=2.0).model
    config = model.config
    assert (found.model.layers, found.model.hidden, found.model.intermediate) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
    )
    num_bytes = 8 * sum(each.numel() for each in model.parameters())
    assert total_bytes(found.tensors.updated) == found.trained_bytes == num_bytes
    assert (found.model.itemsize, found.model.compute_itemsize) == (8, 8)
    assert (found.has_own_critic, found.has_adapters) == (False, False)
    longest = len("0+0=?\n") + 16
    assert found.model.longest_tokens == longest
    assert found.step_tokens == found.tokens == 2 * 4 * longest  # a micro-batch has no more
    assert found.chunk_tokens == 64 * 2**20 // (4 * config.vocab_size)
