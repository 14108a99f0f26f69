"""What the first lines of a run say of its engine."""

from __future__ import annotations

import pytest

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.runs.banner import embedded_on_gpu


def test_the_embedded_engine_on_a_gpu_names_the_faster_one() -> None:
    words = embedded_on_gpu(EmbeddedBackend(), "cuda")
    assert words is not None
    assert words.startswith("embedded, a default for development")
    assert "backend=sglang is several times as fast" in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("backend", "device_type"),
    [(EmbeddedBackend(), "cpu"), (EmbeddedBackend(), "mps"), (SGLangBackend(), "cuda"), (SGLangBackend(), "cpu")],
    ids=["embedded cpu", "embedded mps", "sglang cuda", "sglang cpu"],
)
def test_no_other_engine_is_spoken_of(backend: RolloutBackend, device_type: str) -> None:
    assert embedded_on_gpu(backend, device_type) is None
