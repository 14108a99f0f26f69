from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.errors import ConfigError, DataError
from rhymerl.history import traces
from rhymerl.history.traces import TraceRecord, TraceWriter, read_trace, record_of
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output, Sample, TurnEnd
from tests.bytecodes import bytecodes

RUNNING_SUM = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"
ROW = {
    "epoch": 0,
    "prompt_id": "7",
    "sample": 1,
    "prompt_tokens": [4, 5],
    "response_tokens": [6, 1],
    "reward": 0.25,
    "finish_reason": "stop",
}
NAMES = ["trace.jsonl", "trace.jsonl.gz"]


def record(epoch: int, sample: int, **changed: Any) -> TraceRecord:
    """A record whose tokens tell which one it is."""
    fields: dict[str, Any] = {
        "prompt_id": "é",
        "prompt_tokens": np.array([4], np.int32),
        "response_tokens": np.array([epoch, sample, 2**31 - 1], np.int32),
        "reward": 0.1,
        "finish_reason": "length",
    }
    return TraceRecord(epoch=epoch, sample=sample, **{**fields, **changed})


def step(epoch: int) -> list[TraceRecord]:
    return [record(epoch, sample) for sample in range(3)]


def rows(records: Iterable[TraceRecord]) -> list[dict[str, Any]]:
    names = TraceRecord.__dataclass_fields__
    values = ({name: getattr(each, name) for name in names} for each in records)
    return [{name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()} for row in values]


def write(path: Path, epochs: Iterable[int], keep_bytes: int | None = None) -> list[int]:
    """Write one step an epoch; the lengths of the file after each."""
    with TraceWriter(path, keep_bytes=keep_bytes) as writer:
        return [writer.write(step(epoch)) or writer.num_bytes for epoch in epochs]


def test_text_travels_along_where_there_is_some(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        writer.write([record(0, 0), record(0, 1, prompt="1×1?\n", response="1 \ud800")])
    plain, told = read_trace(path)
    assert (plain.prompt, plain.response, told.prompt, told.response) == (None, None, "1×1?\n", "1 \ud800")
    assert "prompt" not in json.loads(path.read_text().splitlines()[0])


def test_a_line_that_nobody_can_have_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_LONGEST_LINE_BYTES", 300)
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "more": "x" * 300}) + "\n")
    with pytest.raises(DataError, match="line 2: longer than 0 MiB"):
        list(read_trace(path))


def test_the_sample_trace_is_read_with_little_work() -> None:
    first = islice(read_trace(RUNNING_SUM), 512)
    assert bytecodes(lambda: list(first)) < 1500 * 512
    records = list(read_trace(RUNNING_SUM))
    assert len({(each.epoch, each.prompt_id, each.sample) for each in records}) == len(records) == 16 * 64 * 8
    rewards = [np.mean([each.reward for each in records if each.epoch == epoch]) for epoch in (0, 15)]
    assert [round(float(reward), 2) for reward in rewards] == [0.13, 0.34]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    logprobs = record(5, 0, logprobs=np.array([-0.1, -2.5, 0.0]), reward=np.float32(0.1))
    with TraceWriter(tmp_path / "new" / name) as writer:
        writer.write(step(0))
        writer.write([logprobs])
        size = writer.num_bytes
    read = list(read_trace(tmp_path / "new" / name))
    assert rows(read) == rows([*step(0), record(5, 0, logprobs=logprobs.logprobs, reward=float(np.float32(0.1)))])
    assert read[0].response_tokens.dtype == np.int32
    assert size == (tmp_path / "new" / name).stat().st_size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("torn_bytes", [0, 5, 40])
def test_a_resumed_run_leaves_the_same_bytes(tmp_path: Path, name: str, torn_bytes: int) -> None:
    sizes = write(tmp_path / f"whole_{name}", range(6))
    path = tmp_path / name
    write(path, range(4))
    with path.open("ab") as file:  # killed in the middle of a step
        file.write((tmp_path / f"whole_{name}").read_bytes()[sizes[3] :][:torn_bytes])
    assert write(path, range(2, 6), keep_bytes=sizes[1]) == sizes[2:]
    assert path.read_bytes() == (tmp_path / f"whole_{name}").read_bytes()


def test_a_trace_does_not_tell_when_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", [0])
    assert (tmp_path / "a.jsonl.gz").read_bytes()[4:8] == bytes(4)  # RFC 1952: MTIME


def test_a_run_may_start_anew_by_its_own_state(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", range(3))
    write(tmp_path / "a.jsonl", range(2), keep_bytes=0)
    write(tmp_path / "b.jsonl", range(2), keep_bytes=0)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_another_trace_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    (size,) = write(path, [0])
    with pytest.raises(ConfigError, match=rf"^trace '{path}': exists already; give another file, or remove it$"):
        TraceWriter(path)
    with pytest.raises(DataError, match=rf"^trace '{path}': has {size} bytes, but {size + 1} when the run was saved"):
        TraceWriter(path, keep_bytes=size + 1)
    assert path.stat().st_size == size


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_leaves_whole_lines_and_a_part_of_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    first, _ = write(path, [0, 1])
    path.write_bytes(path.read_bytes()[: first + 70])
    read = read_trace(path)
    assert rows(next(read) for _ in range(3)) == rows(step(0))
    with pytest.raises(DataError, match=r"line [45]: the (line|file) is cut off"):
        list(read)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"epoch": None}, "epoch=null: expected an integer of 0 or more"),
    ({"epoch": -1}, "epoch=-1: expected an integer of 0 or more"),
    ({"epoch": True}, "epoch=true: expected an integer of 0 or more"),
    ({"sample": 1.0}, "sample=1.0: expected an integer of 0 or more"),
    ({"prompt_id": 7}, "prompt_id=7: expected a string"),
    ({"prompt_tokens": "4 5"}, 'prompt_tokens="4 5": expected a list of token ids'),
    ({"prompt_tokens": [4, "5"]}, 'prompt_tokens: expected a list of token ids, got "5" in it'),
    ({"response_tokens": [6, 1.5]}, "response_tokens: expected a list of token ids, got 1.5 in it"),
    ({"response_tokens": [6, True]}, "response_tokens: expected a list of token ids, got true in it"),
    ({"response_tokens": [6, -1]}, "response_tokens: -1 is no token id; expected 0 to 2147483647"),
    ({"response_tokens": [2**31]}, "response_tokens: 2147483648 is no token id"),
    ({"reward": "1"}, 'reward="1": expected a number'),
    ({"finish_reason": "withdrawn"}, "finish_reason='withdrawn': expected one of stop, length"),
    ({"finish_reason": ["stop"]}, r'finish_reason=\["stop"\]: expected a string'),
    ({"logprobs": [-1, "x"]}, 'logprobs: expected a list of numbers, got "x" in it'),
    ({"logprobs": [-1.0]}, "logprobs: expected one a response token, 2, got 1"),
    ({"waits": 1.0}, "waits=1.0: expected a list of numbers"),
    ({"waits": []}, "waits: expected the seconds that each turn waited, 0 or more"),
    ({"waits": [0.5, -0.1]}, "waits: expected the seconds that each turn waited, 0 or more"),
]


@pytest.mark.parametrize(("changed", "message"), BROKEN)
def test_names_the_broken_field(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    check_line(tmp_path, json.dumps({**ROW, **changed}).encode() + b"\n", message)


@pytest.mark.parametrize("name", ROW)
def test_names_the_missing_field(tmp_path: Path, name: str) -> None:
    line = json.dumps({field: value for field, value in ROW.items() if field != name})
    check_line(tmp_path, line.encode() + b"\n", f"{name} is missing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken\n", "not valid JSON"),
        (b"\n", "not valid JSON"),
        (b'"\xff"\n', "not valid JSON"),
        (b"[1, 2]\n", r"expected a JSON object, got \[1, 2\]"),
        (json.dumps(ROW).encode(), "the line is cut off"),
    ],
)
def test_names_the_broken_line(tmp_path: Path, line: bytes, message: str) -> None:
    check_line(tmp_path, line, message)


def check_line(tmp_path: Path, line: bytes, message: str) -> None:
    """The third line of a file is refused, whatever the compression."""
    content = 2 * (json.dumps({**ROW, "more": "is passed over"}).encode() + b"\n") + line
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    for path in (tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"):
        with pytest.raises(DataError, match=rf"^trace '{path}', line 3: {message}") as caught:
            list(read_trace(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "no such file$"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl.gz", b"", "the file is empty"),
        ("a.jsonl.gz", b"{}\n", "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "cannot be read: Error -3"),
    ],
    ids=["missing", "empty", "empty archive", "no archive", "torn archive"],
)
def test_names_a_file_that_is_no_trace(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^trace '{tmp_path / name}': {message}"):
        list(read_trace(tmp_path / name))


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_sample_becomes_a_record(with_logprobs: bool) -> None:
    given = sample_of("stop")
    made = record_of(given, 4, with_logprobs=with_logprobs)
    assert (made.epoch, made.prompt_id, made.sample, made.reward, made.finish_reason) == (4, "0", 1, 0.5, "stop")
    assert made.prompt_tokens is given.prompt.token_ids
    assert made.response_tokens.tolist() == [3, 1]
    assert (made.prompt, made.response) == (given.prompt.text, given.text)
    assert (made.logprobs is not None) == with_logprobs


def test_waits_of_an_episode_are_recorded_where_the_file_need_not_repeat(tmp_path: Path) -> None:
    plain = sample_of("stop")
    turns = TurnEnd(start=1, stop=1, text="", waited_s=0.25), TurnEnd(start=2, stop=2, text="", waited_s=1.5)
    output = replace(plain.completion.output, turns=turns)
    episode = replace(plain, completion=replace(plain.completion, output=output))
    assert record_of(plain, 0, with_waits=True).waits is None
    assert record_of(episode, 0).waits is None
    with TraceWriter(tmp_path / "a.jsonl") as writer:
        writer.write([record_of(episode, 0, with_waits=True)])
    (found,) = read_trace(tmp_path / "a.jsonl")
    assert found.waits is not None
    assert found.waits.tolist() == [0.25, 1.5]


def test_a_withdrawn_answer_is_not_recorded() -> None:
    with pytest.raises(ValueError, match="request 0/1 was withdrawn: only whole answers are recorded"):
        record_of(sample_of("withdrawn"), 0)


def sample_of(finish_reason: Any) -> Sample:
    tokens = np.array([3, 1], np.int32)
    generated = Output(token_ids=tokens, logprobs=np.array([-1.0, -2.0]), policy_versions=np.zeros(2, np.int32))
    completion = Completion(
        request=make_requests(1, group_size=2)[1], output=replace(generated, finish_reason=finish_reason)
    )
    return Sample(completion=completion, text="", reward=0.5, rewards={}, loss_mask=np.ones(2, np.bool_))
