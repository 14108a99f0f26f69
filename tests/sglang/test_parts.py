"""What of rhymerl stands in SGLang's own classes, without an engine around it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("cpu_engine"),
    pytest.mark.filterwarnings("ignore"),  # as SGLang is imported
]

N = 3


@pytest.fixture(scope="module", autouse=True)
def ngram_worker():
    before = dict(os.environ)
    from sglang.srt.speculative import ngram_worker

    os.environ.clear()  # of what SGLang sets for its own processes
    os.environ.update(before)
    return ngram_worker


@pytest.mark.parametrize("fails", [False, True])
def test_masks_are_only_ours_where_we_complete_them(ngram_worker, monkeypatch, fails):
    """A version that prepares its batches elsewhere makes whole masks, as it did before."""
    from rhymerl.backends.sglang.worker import HistoryWorker

    trees, seen = torch.eye(N, dtype=torch.bool).flatten(), []

    def prepare(self, batch):
        seen.append(ngram_worker.USE_FULL_MASK)
        if fails:
            raise RuntimeError
        batch.spec_info = SimpleNamespace(custom_mask=trees)

    monkeypatch.setattr(ngram_worker.NGRAMWorker, "_prepare_for_speculative_decoding", prepare)
    monkeypatch.setattr(ngram_worker, "_is_cpu", False)
    worker = object.__new__(HistoryWorker)
    worker.draft_token_num = N
    lengths = torch.tensor([5])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True), seq_lens=lengths, seq_lens_cpu=lengths
    )
    if fails:
        with pytest.raises(RuntimeError):
            worker._prepare_for_speculative_decoding(batch)
    else:
        worker._prepare_for_speculative_decoding(batch)
        mask = batch.spec_info.custom_mask.view(N, 5 + N)
        assert mask[:, :5].all()
        assert torch.equal(mask[:, 5:].flatten(), trees)
    assert seen == [False]
    assert ngram_worker.USE_FULL_MASK


def test_the_plugin_leaves_masks_alone(ngram_worker, monkeypatch):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from rhymerl.backends.sglang import worker

    monkeypatch.setattr(SpeculativeAlgorithm, "register", lambda *name, **settings: lambda factory: factory)
    worker.install()
    assert ngram_worker.USE_FULL_MASK
