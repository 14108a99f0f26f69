"""Attention without cuDNN."""

from __future__ import annotations

import pytest
import torch

from rhymerl.models.cudnn import without_cudnn_attention


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_before_afterwards(before):
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    usual = enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        with without_cudnn_attention():
            assert not enabled()
        assert enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(usual)
