"""From measured passes to an emulated card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.emulation import EmulatedDevice
from benchmarks.gpu import emulated_from


def measured(file: Path, *, card: str = "NVIDIA H100 80GB HBM3", milliseconds: dict[int, float]) -> Path:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "min": value, "max": value}

    passes = [
        {"size": "7B", "tokens": tokens, "pass_ms": spread(ms), "kv_bytes_per_token": 57_344}
        for tokens, ms in milliseconds.items()
    ]
    found = [{"part": "machine", "began": "", "card": card, "digest": "a"}]
    found += [{"part": "machine", "row": {"gpu": card, "copy_tb_s": spread(2.8672)}}]
    found += [{"part": "passes", "began": "", "card": card, "digest": "b"}]
    found += [{"part": "passes", "row": {**row, "size": size}} for row in passes for size in ("7B", "0.5B")]
    with file.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in found)
    return file


def test_measured_passes_become_an_emulated_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = measured(tmp_path / "gpu.jsonl", milliseconds={1: 6.1, 64: 6.0, 256: 8.5})
    assert emulated_from.main([str(file), "--overhead-ms", "0.5"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    found = json.loads((tmp_path / "mine.json").read_text())
    assert found["costs"] == [[1, 0.0066], [64, 0.0066], [256, 0.009], [512, 0.018]], "it never falls"
    assert found["context_s_per_token"] == 2e-8  # 57 344 bytes at 2.8672 TB/s
    assert "measured on NVIDIA H100" in found["source"]
    assert "passes over more than 256 tokens, in proportion" in found["source"]
    device = EmulatedDevice.read(tmp_path / "mine.json", scale=1.0)
    assert device.curve.seconds(160, 0, 0) == pytest.approx(0.0078)
    assert device.context_s_per_token == 2e-8


def test_the_newest_row_counts_and_cards_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = measured(tmp_path / "gpu.jsonl", milliseconds={1: 6.0, 64: 7.0})
    measured(file, milliseconds={64: 8.0})
    emulated = emulated_from.emulated
    assert emulated(file, "7B")["costs"] == [[1, 0.006], [64, 0.008], [128, 0.016]]
    measured(file, card="NVIDIA H200", milliseconds={1: 4.0, 64: 5.0})
    with pytest.raises(ValueError, match="expected passes of one card"):
        emulated(file, "7B")
    assert emulated(file, "7B", card="NVIDIA H200")["costs"] == [[1, 0.004], [64, 0.005], [128, 0.01]]
    assert emulated_from.main([str(file), "--card", "NVIDIA H200", "--size", "1.5B"]) == 1
    assert "expected passes of 1.5B" in capsys.readouterr().err
