from __future__ import annotations

import gzip
import importlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rhymerl.data import read_rows
from rhymerl.errors import ConfigError, DataError, UsageError

ROWS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "2+2=?", "answer": "4"}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"


def rows_of(source: Any) -> list[dict[str, Any]]:
    return [located.row for located in read_rows(source, "data.train")]


@pytest.mark.parametrize("text", [LINES, LINES.strip(), "\ufeff" + LINES, LINES.replace("\n", "\r\n\n")])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "no_suffix"])
def test_reads_json_lines(tmp_path: Path, name: str, text: str) -> None:
    data = text.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert rows_of(path) == rows_of(str(path)) == ROWS


QUOTED = [{"prompt": 'say "a, b"\nand c', "answer": ""}, {"prompt": "ß", "answer": "2"}]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_reads_csv(tmp_path: Path, name: str, start: str) -> None:
    separator = "\t" if ".tsv" in name else ","
    lines = [["prompt", "answer"], ['"say ""a, b""\nand c"', ""], [], ["ß", "2"]]
    data = (start + "\r\n".join(map(separator.join, lines)) + "\n").encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert rows_of(path) == QUOTED
    assert [located.location for located in read_rows(path, "data.train")] == [
        f"data.train={str(path)!r}, line 3",
        f"data.train={str(path)!r}, line 5",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,answer\na,1\nb\n", r"line 3: 1 values for 2 columns \(prompt, answer\)"),
        ("prompt,answer\na,1,2\n", "line 2: 3 values for 2 columns"),
        ("prompt,prompt\na,1\n", "line 1: expected the names of columns, each once"),
        ("prompt,\na,1\n", "line 1: expected the names of columns, each once"),
        ('prompt\n"a"b\n', "line 2: cannot be read as CSV"),
        ('prompt\n"a\n', "line 2: cannot be read as CSV: unexpected end of data"),
        ("prompt,answer\n", "the data set is empty"),
        ("", "the data set is empty"),
        (b"prompt\n\xff\n", "cannot be read: .*utf-8"),
    ],
)
def test_names_the_broken_line_of_csv(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        rows_of(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
def test_reads_a_json_array(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = f"\n {json.dumps(ROWS, indent=1)}\n".encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert rows_of(path) == ROWS
    assert [located.location for located in read_rows(path, "data.train")] == [
        f"data.train={str(path)!r}, row {number}" for number in (1, 2)
    ]
    path.write_bytes(gzip.compress(data[:-4]) if name.endswith(".gz") else data[:-4])
    with pytest.raises(DataError, match=r"not valid JSON: Expecting"):
        rows_of(path)


def test_reads_several_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text(LINES)
    assert rows_of([str(path) for path in paths]) == rows_of(paths) == ROWS * 2
    assert [located.location for located in read_rows(paths, "data.train", only_first=3)] == [
        f"data.train[0]={str(paths[0])!r}, line 1",
        f"data.train[0]={str(paths[0])!r}, line 2",
        f"data.train[1]={str(paths[1])!r}, line 1",
    ]
    with pytest.raises(DataError, match=r"^data.train\[1\]='.*none.jsonl': no such file"):
        rows_of([paths[0], tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match=r"^data.train: the data set is empty"):
        read_rows([], "data.train")


def test_reads_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    assert rows_of(pandas.DataFrame(ROWS)) == ROWS


def test_takes_rows_as_they_are_and_copies_them() -> None:
    source = [dict(row) for row in ROWS]
    read = rows_of(source)
    read[0]["prompt"] = "changed"
    assert source == ROWS


def test_reads_the_first_rows_only() -> None:
    assert [located.row for located in read_rows(ROWS, "data.validation", only_first=1)] == ROWS[:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINES + "{broken\n", "line 3: not valid JSON"),
        (LINES + "\n\n[1]\n", "line 5: expected a JSON object .* got a list"),
        ('"text"\n', "line 1: expected a JSON object .* got a str"),
        ("", "the data set is empty"),
        ("\n \n", "the data set is empty"),
        (b'{"prompt": "\xff"}\n', "line 1: not valid JSON"),
    ],
)
def test_names_the_broken_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        rows_of(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_a_torn_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES.encode())[:-12])
    with pytest.raises(DataError, match=r"data\.train=.*a\.jsonl\.gz.*cannot be read"):
        rows_of(path)


def test_names_an_archive_with_any_wrong_byte(tmp_path: Path) -> None:
    """The first rows may be read before; none of them is taken."""
    content = gzip.compress(LINES.encode() * 50, mtime=0)
    path = tmp_path / "a.jsonl.gz"
    for location in range(10, len(content)):
        path.write_bytes(content[:location] + bytes([content[location] ^ 0xFF]) + content[location + 1 :])
        with pytest.raises(DataError, match=r"^data\.train=.*a\.jsonl\.gz"):
            rows_of(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_that_nobody_can_have_meant_is_named_before_it_is_in_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) if name.endswith("gz") else path.open("wb") as file:
        file.write(LINES.encode())
        file.write(b'{"prompt": "')
        for _ in range(300):
            file.write(b"1" * 2**20)
        file.write(b'"}\n')
    tracemalloc.start()
    with pytest.raises(DataError, match="line 3: longer than 64 MiB; expected one row a line$"):
        rows_of(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200 * 2**20


@pytest.mark.parametrize("name", ["missing.jsonl", "data/missing.parquet", "/no/such/file", "./here", "a/b/c"])
def test_names_a_missing_file(name: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train='{name}': no such file"):
        rows_of(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "data.train: the data set is empty"),
        ([ROWS[0], "2+2=?"], "data.train, row 2: expected an object with columns, got a str"),
        ({"prompt": "1"}, "data.train: expected a path or a list of rows, got a dict"),
    ],
)
def test_refuses_what_is_not_rows(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(source)


def test_refuses_a_hub_name_with_too_many_parts() -> None:
    with pytest.raises(UsageError, match="owner/name:config:split"):
        rows_of("owner/name:a:b:c")
    with pytest.raises(UsageError, match="owner/name:config:split"):
        rows_of(":train")


@pytest.mark.parametrize(("source", "package"), [("owner/name", "datasets"), ("a.parquet", "pyarrow")])
def test_a_missing_package_says_how_to_install_it(
    source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").touch()
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'rhymerl\[data\]'"):
        rows_of(source)


def test_reads_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "messages": [{"role": "user", "content": "hi"}]} for row in ROWS]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == rows


def test_names_a_broken_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_text(LINES)
    with pytest.raises(DataError, match="cannot be read as parquet"):
        rows_of(tmp_path / "a.parquet")


def test_reads_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": datasets.Dataset.from_list(ROWS[1:])}).save_to_disk(
        tmp_path / "splits"
    )
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "splits") == ROWS
    with pytest.raises(DataError, match="no split 'validation'; it has 'train', 'test'"):
        read_rows(tmp_path / "splits", "data.validation")


def test_reads_a_split_of_a_saved_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table, rest = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[1:])
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": rest}).save_to_disk(tmp_path / "splits")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (f"{tmp_path}/splits:test", "./splits:test", "splits:test", "~/splits:test", Path("splits:test")):
        assert rows_of(source) == ROWS[1:]
        assert read_rows(source, "data.validation")[0].row == ROWS[1]
    for source, message in (
        ("./splits:tset", "no split 'tset'; it has 'train', 'test'"),
        ("./one:test", "saved without splits; leave ':test' out"),
        ("./splits:main:test", r"a saved data set has no configs; expected './splits:test'"),
        ("./nothing:test", "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            rows_of(source)


def test_reads_a_directory_whose_name_has_a_colon(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a:b")
    assert rows_of(tmp_path / "a:b") == ROWS


def test_names_a_directory_that_is_no_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="neither a file nor a data set"):
        rows_of(tmp_path)
