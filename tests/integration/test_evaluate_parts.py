"""`rhymerl evaluate` of a checkpoint in parts: a tensor at a time, whatever becomes of the files meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.training import shards
from tests.integration.conftest import Run, checkpoint
from tests.integration.test_sharded_loading import bytes_held


def put_in_parts(path: Path) -> Path:
    """Write a checkpoint again, as ranks do who have parts of it; returns the folder of the parts."""
    rest, tensors = shards.split(torch.load(path, weights_only=True))
    folder = path.parent / shards.free_folder(path)
    shards.write(tensors, folder)
    record = {"folder": folder.name, "files": shards.checksums(folder, 0)}
    AtomicCheckpointIO().save_checkpoint({**rest, shards.KEY: record}, path)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_tensor_at_a_time_is_there_besides_the_model(settings, tmp_path, monkeypatch, rhymerl: Run):
    run_dir = tmp_path / "run"
    assert rhymerl(*settings, "trainer.max_steps=2", f"run_dir={run_dir}").code == 0
    whole = json.loads(rhymerl("evaluate", str(run_dir), "--json").out)
    weights = checkpoint(run_dir)["state_dict"].values()
    path = (run_dir / "checkpoints" / "last.ckpt").resolve()
    folder = put_in_parts(path)
    read, held = shards.StoredWeights._whole, []

    def watched(stored: shards.StoredWeights, name: str) -> torch.Tensor:
        shutil.rmtree(folder, ignore_errors=True)  # as a run does that goes on
        path.unlink(missing_ok=True)
        found = read(stored, name)
        held.append(bytes_held())
        return found

    monkeypatch.setattr(shards.StoredWeights, "_whole", watched)
    done = rhymerl("evaluate", str(run_dir), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == whole
    assert len(held) == len(weights)
    largest = max(each.nbytes for each in weights)
    assert max(held) - min(held) <= largest < sum(each.nbytes for each in weights) / 4
