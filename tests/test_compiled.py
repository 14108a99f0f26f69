"""Compiled functions: cached where that is possible, working where it is not, announced when the compiler runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from user_code import total
import numpy as np
print(total(np.arange(5.0)))
"""
CODE = """
from rhymerl.compiled import compiled

@compiled
def total(values):
    result = 0.0
    for value in values:
        result += value
    return result
"""


def run(folder: Path, *, code: str = CODE, program: str = PROGRAM, **variables: str) -> tuple[str, str]:
    """Return what the program prints, and what it logs."""
    (folder / "user_code.py").write_text(code)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def test_the_second_process_finds_the_cache_and_only_the_first_announces(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    first, second = run(folder), run(folder)
    assert first[0].startswith("10.0")
    assert second[0].startswith("10.0")
    assert "compiling total" in first[1]
    assert "compiling" not in second[1]


RECORD = """
from typing import NamedTuple

class Record(NamedTuple):
    values: object

from rhymerl.compiled import compiled

@compiled
def total(record: Record):
    return record.values.sum()
"""


def test_a_record_may_get_another_name(tmp_path):
    """numba's index names the types of arguments, and could not be read where one of them is gone."""
    folder = tmp_path / "package"
    folder.mkdir()
    program = (
        PROGRAM.replace("total(np", "total(user_code.Record(np")
        .replace("))", ")))")
        .replace("from user_code", "import user_code\nfrom user_code")
    )
    for name in ("Record", "Other"):
        out, _ = run(folder, code=RECORD.replace("Record", name), program=program.replace("Record", name))
        assert out.startswith("10.0")


def test_without_a_writable_folder_it_still_runs(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")  # a folder below a regular file can be made by nobody, root included
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__pycache__").write_text("")
    out, log = run(folder, NUMBA_CACHE_DIR=str(blocked / "cache"), HOME=str(blocked), XDG_CACHE_HOME=str(blocked))
    assert out.startswith("10.0")
    assert "compiling total" in log


@pytest.mark.slow
def test_a_dozen_functions_are_compiled_before_the_first_answer(tmp_path):
    """Each takes about half a second."""
    program = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from rhymerl.engine.engine import Engine
from rhymerl.testing import make_requests, tiny_policy
engine = Engine(tiny_policy(dtype="float32").model)
engine.submit(make_requests(1, max_tokens=2))
while engine.has_work:
    engine.run()
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert 1 < done.stderr.count("compiling ") <= 12, done.stderr


def test_the_process_that_compiles_gets_the_very_bits_of_those_that_load(tmp_path):
    """Also where one compiled function calls another: what is loaded has been optimized together with its callees."""
    program = """
import hashlib
import numpy as np
from rhymerl.engine.paged_attention import attend
source, rows, found = np.random.default_rng(0), np.arange(6), []
for dim in (8, 16, 24, 64):
    query, keys, values = (source.normal(size=(n, 4, dim)).astype(np.float32) for n in (6, 99, 99))
    table, out = source.permutation(99)[None, :90].repeat(6, 0), np.zeros_like(query)
    attend(query, keys, values, table, rows, rows * 13 + 9, np.full(6, -2), rows, 0.25, None, None, None, out)
    found.append(out.tobytes())
print(hashlib.sha256(b"".join(found)).hexdigest())
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", program]
    found = [
        subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert len(found[0]) == 65
    assert found[0] == found[1]
