"""Runs cells of a notebook; read as text and run in a sandbox, so this file imports the standard library only."""

from __future__ import annotations

import ast
import contextlib
import io
import traceback


def run_cells(cells: list[str], max_characters: int) -> str:
    """Run cells in one namespace. Return what the last one printed, the value of its last expression, and its error."""
    names: dict[str, object] = {"__name__": "__main__"}
    output = io.StringIO()
    for cell in cells:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                _run(cell, names)
            except BaseException as error:  # noqa: BLE001 - a cell may raise anything, and the next one goes on
                print(traceback.format_exception_only(error)[-1].strip())
    return output.getvalue()[:max_characters]


def _run(cell: str, names: dict[str, object]) -> None:
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(repr(value))
