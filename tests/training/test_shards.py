"""Parts of checkpoints: who answers for which file."""

from __future__ import annotations

from pathlib import Path

from rhymerl.training import shards


def test_each_file_is_in_the_record_of_the_rank_that_wrote_it(tmp_path: Path) -> None:
    names = [f"shard-{rank:05d}-model-0000{part}-of-00002.safetensors" for rank in (1, 2, 11) for part in (1, 2)]
    for name in [*names, "model.safetensors.index.json"]:
        (tmp_path / name).write_text(name)
    records = [shards.checksums(tmp_path, rank) for rank in range(12)]
    assert {rank: list(record) for rank, record in enumerate(records) if record} == {
        0: ["model.safetensors.index.json", *names[:2]],
        1: names[2:4],
        10: names[4:],
    }


def test_what_another_rank_has_written_need_not_be_seen(tmp_path: Path) -> None:
    """In a folder that several machines share, each sees its own files at once."""
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").write_text("mine")
    assert list(shards.checksums(tmp_path, 1)) == ["shard-00002-model-00001-of-00001.safetensors"]
    assert shards.checksums(tmp_path, 0) == {}
