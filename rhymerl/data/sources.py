"""The sources of rows: JSONL, CSV and parquet files, Hugging Face data sets, lists of dicts."""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from rhymerl.data.base import LocatedRow
from rhymerl.errors import ConfigError, DataError, missing_package
from rhymerl.models.hub import look_up
from rhymerl.tasks.base import Row

DataSource = str | Path | Sequence[str | Path] | Sequence[Row]
_START_BYTES = 4096
_LONGEST_LINE_BYTES = 64 * 2**20  # far beyond any context; tokenizers take many times as much memory

Setting = str  # data.train, data.validation, data.validation.NAME or data.prompts

_LOOKS_LIKE_A_FILE = re.compile(r"^[./~]|/.*/|\.(jsonl?|ndjson|gz|parquet|csv|tsv|txt)$")

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_rows(source: DataSource, setting: Setting, *, only_first: int | None = None) -> list[LocatedRow]:
    """Read every row of `source` (or the first `only_first`), each with its place for error messages.

    `source` is one of the following, or a list of such files. It is a path to a file (`.parquet`; `.csv` or `.tsv`,
    whose first line names the columns and whose values are text; else JSON lines; all but parquet plain or `.gz`; a
    JSON array counts as its items), a directory or hub name that `datasets` reads, or the rows themselves. A directory
    or hub name may name a config and a split, as in `openai/gsm8k:main:test` or `DIR:test`; without one the split is
    `validation` for `data.validation` and its sets, else `train`. Raises DataError for what cannot be read, is empty or
    is not a table of rows, and ConfigError when it needs a package that is not installed.
    """
    rows: list[LocatedRow] = []
    for located in _located(source, setting):
        if len(rows) == only_first:
            break
        rows.append(located)
    if not rows:
        raise DataError(f"{_name(setting, source)}: the data set is empty; expected at least one row")
    return rows


def _located(source: Any, setting: Setting) -> Iterator[LocatedRow]:
    if isinstance(source, str | Path):
        return _from_path(source, setting)
    if isinstance(source, Sequence) and source and all(isinstance(each, str | Path) for each in source):
        return chain.from_iterable(_from_path(each, f"{setting}[{number}]") for number, each in enumerate(source))
    return _from_objects(source.to_dict("records") if hasattr(source, "iterrows") else source, setting)


def is_data_set(source: str | Path) -> bool:
    """Return whether the package `datasets` reads it: a directory, or a name of the hub's."""
    path = Path(source).expanduser()
    if path.exists():
        return path.is_dir()
    name = str(source).partition(":")[0]
    is_directory = bool(name) and Path(name).expanduser().is_dir()
    return is_directory or not (isinstance(source, Path) or _LOOKS_LIKE_A_FILE.search(source))


def _name(setting: str, source: DataSource) -> str:
    return f"{setting}={str(source)!r}" if isinstance(source, str | Path) else setting


def _from_path(source: str | Path, setting: Setting) -> Iterator[LocatedRow]:
    path, location = Path(source).expanduser(), _name(setting, source)
    if is_data_set(source):
        yield from _from_objects(_load_data_set(str(path if path.is_dir() else source), setting), location)
        return
    if not path.exists():
        raise DataError(f"{location}: no such file; expected a .jsonl, .csv, .tsv (each also .gz) or .parquet file")
    delimiter = _DELIMITERS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)
    try:
        if path.suffix == ".parquet":
            yield from _from_objects(_read_parquet(path, location), location)
        elif delimiter is not None:
            yield from _read_csv(path, location, delimiter)
        else:
            yield from _read_jsonl(path, location)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{location}: cannot be read: {error}") from error


def _from_objects(rows: Iterable[Any], location: str) -> Iterator[LocatedRow]:
    if isinstance(rows, Mapping):
        raise DataError(f"{location}: expected a path or a list of rows, got a {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        where = f"{location}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object with columns, got a {type(row).__name__}")
        yield LocatedRow(location=where, row=dict(row))


def _read_jsonl(path: Path, location: str) -> Iterator[LocatedRow]:
    """Lines are counted from 1; blank ones are passed over, as is a byte order mark."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if file.read(_START_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            file.seek(0)
            yield from _from_objects(_parse(file.read(), location), location)
            return
        file.seek(0)
        for number in count(1):
            where = f"{location}, line {number}"
            line = file.readline(_LONGEST_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > _LONGEST_LINE_BYTES:
                raise DataError(f"{where}: longer than {_LONGEST_LINE_BYTES / 2**20:.0f} MiB; expected one row a line")
            if line.strip():
                yield LocatedRow(location=where, row=_parse_line(line, where))


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except ValueError as error:  # broken JSON and broken UTF-8 alike
        raise DataError(f"{where}: not valid JSON: {error}") from error


def _parse_line(line: bytes, where: str) -> Row:
    row = _parse(line, where)
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected a JSON object such as {{"prompt": ...}}, got a {type(row).__name__}')
    return row


def _read_csv(path: Path, location: str, delimiter: str) -> Iterator[LocatedRow]:
    """Values may hold line breaks within quotes; a row is at the line where it ends. Blank lines are passed over."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            columns = next(rows, [])
            if columns and (not all(columns) or len(set(columns)) < len(columns)):
                raise DataError(f"{location}, line 1: expected the names of columns, each once, got {columns}")
            for row in rows:
                where = f"{location}, line {rows.line_num}"
                if row and len(row) != len(columns):
                    raise DataError(f"{where}: {len(row)} values for {len(columns)} columns ({', '.join(columns)})")
                if row:
                    yield LocatedRow(location=where, row=dict(zip(columns, row, strict=True)))
    except csv.Error as error:
        raise DataError(f"{location}, line {rows.line_num}: cannot be read as CSV: {error}") from error


def _read_parquet(path: Path, location: str) -> Iterator[Any]:
    parquet = _import_extra("pyarrow.parquet", location)
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{location}: cannot be read as parquet: {error}") from error


def _load_data_set(source: str, setting: Setting) -> Iterable[Any]:
    """Return one split of a saved data set (directory) or of one on the hub."""
    location = f"{setting}={source!r}"
    name, config, split = _parse_name(source, setting)
    directory = Path(name).expanduser()
    datasets = _import_extra("datasets", location)
    if not directory.is_dir():
        look_up(name, setting, kind="dataset")
    is_saved = (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()
    if is_saved and config is not None:
        raise ConfigError(f"{location}: a saved data set has no configs; expected '{name}:{split}'")
    name = str(directory) if directory.is_dir() else name
    load: Callable[[], Any] = (
        (lambda: datasets.load_from_disk(name)) if is_saved else (lambda: datasets.load_dataset(name, config))
    )
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # before version 4 it asks on stdin
    try:
        data_set = load()
    except (OSError, RuntimeError, ValueError) as error:  # the second for a data set that is a program
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{location}: neither a file nor a data set that `datasets` can load: {reason}") from error
    return _split_of(data_set, split, setting, location=location)


def _split_of(data_set: Any, split: str | None, setting: Setting, *, location: str) -> Iterable[Any]:
    if not isinstance(data_set, Mapping):
        if split is not None:
            raise DataError(f"{location}: the data set was saved without splits; leave ':{split}' out")
        return data_set  # type: ignore[no-any-return]
    wanted = split or ("validation" if setting.startswith("data.validation") else "train")
    if wanted not in data_set:
        raise DataError(
            f"{location}: the data set has no split {wanted!r}; it has {', '.join(map(repr, data_set))} "
            "(name one as in 'DIR:split', 'owner/name:split' or 'owner/name:config:split')"
        )
    return data_set[wanted]  # type: ignore[no-any-return]


def _parse_name(source: str, setting: str) -> tuple[str, str | None, str | None]:
    """Name, config and split; a directory may have colons in its own name."""
    if Path(source).is_dir():
        return source, None, None
    name, *rest = source.split(":")
    if not name or len(rest) > 2:
        raise ConfigError(
            f"{setting}={source!r}: expected 'owner/name', 'owner/name:split' or 'owner/name:config:split'"
        )
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else None


def _import_extra(module: str, location: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(module.partition(".")[0], f"{location}: reading it") from error
