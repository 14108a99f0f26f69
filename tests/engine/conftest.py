"""A CPU that is taken for a GPU."""

from __future__ import annotations

import pytest

from tests.engine import torch_kernels


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines use kernels and graphs, the kernels written out in torch."""
    from rhymerl.engine import forward, inputs, triton_attention, triton_layers

    monkeypatch.setattr(triton_attention, "attend", torch_kernels.attend)
    for function in torch_kernels.STEPS:
        monkeypatch.setattr(triton_layers, function.__name__, function)
    monkeypatch.setattr(inputs, "on_host", lambda device: False)
    monkeypatch.setattr(forward, "takes_kernels", lambda device, dtype: True)
