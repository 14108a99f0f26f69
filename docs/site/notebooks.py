"""Runs notebooks in plain Python: python docs/site/notebooks.py FILE... saves what their cells print and draw now."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def run(path: Path) -> list[list[dict[str, Any]]]:
    """Run a notebook in its own folder; return each code cell's outputs: what it prints, and its last expression."""
    names: dict[str, Any] = {"__name__": path.stem}
    cells = _code(json.loads(path.read_text()))
    with contextlib.chdir(path.parent):
        return [_run_cell("".join(cell["source"]), names) for cell in cells]


def save(path: Path) -> None:
    """Run a notebook and write its outputs into it."""
    notebook = json.loads(path.read_text())
    for number, (cell, outputs) in enumerate(zip(_code(notebook), run(path), strict=True), start=1):
        cell.update(execution_count=number, outputs=outputs)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval", dont_inherit=True), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        outputs.append({"output_type": "display_data", "metadata": {}, "data": _data(value)})
    return outputs


def _data(value: object) -> dict[str, str]:
    if not isinstance(value, Figure):
        return {"text/plain": repr(value)}
    picture = io.BytesIO()
    value.savefig(picture, format="png", dpi=90, facecolor="white")
    return {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "<Figure>"}


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in sys.argv[1:]:
        save(Path(name))
