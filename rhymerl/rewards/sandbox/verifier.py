"""reasoning-gym's verifiers; some evaluate answers as Python, so they run in a process that answers may take over."""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer
from sympy import Basic, cbrt, root, sqrt

from .wire import decode

_PACKAGES = ("reasoning_gym", "sympy")
_FUNCTIONS = (sqrt, cbrt, root)
_NODES = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Call, ast.Load),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.unaryop, ast.operator, ast.boolop, ast.cmpop),
)


def score(completion: str, entry: str) -> float:
    """Return the verifier's score of the answer in a completion, 0 where it cannot parse it."""
    scoring = decode(json.loads(entry))
    data_set = create_dataset(scoring["dataset"], seed=0, size=1, **scoring["settings"])
    tag = scoring["answer_tag"]
    answer = completion.strip() if tag is None else extract_answer(completion, tag_name=tag)
    with _expressions_only():
        try:
            return float(data_set.score_answer(answer, scoring["entry"]))
        except ValueError:  # some verifiers parse without a guard, such as int("none") in prime_factorization
            return 0.0


@contextmanager
def _expressions_only() -> Iterator[None]:
    """Context in which the packages' own `eval` takes values and formulas only, and raises ValueError otherwise.

    Calls of other packages are not changed: the standard library makes classes that way.
    """
    evaluate_anything = eval

    def evaluate(source: Any, names: Any = None, own_names: Any = None, /) -> Any:
        caller = sys._getframe(1)
        names = caller.f_globals if names is None else names
        own_names = (caller.f_locals if names is caller.f_globals else names) if own_names is None else own_names
        if str(caller.f_globals.get("__name__")).partition(".")[0] not in _PACKAGES:
            return evaluate_anything(source, names, own_names)
        if not isinstance(source, str):
            raise ValueError("no text of an expression")
        tree = ast.parse(source.strip(), mode="eval")
        for node in ast.walk(tree):
            _check(node, ChainMap(own_names, names))
        return evaluate_anything(compile(tree, "expression", "eval"), names, own_names)

    builtins.eval = evaluate
    try:
        yield
    finally:
        builtins.eval = evaluate_anything


def _check(node: ast.AST, names: Mapping[str, Any]) -> None:
    if not isinstance(node, _NODES):
        raise ValueError(f"{type(node).__name__} in an expression")
    if isinstance(node, ast.Call) and (not isinstance(node.func, ast.Name) or node.keywords):
        raise ValueError("a call of something else than a name")
    if isinstance(node, ast.Name) and not _is_of_a_formula(names.get(node.id)):
        raise ValueError(f"the name {node.id} in an expression")


def _is_of_a_formula(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, Basic)
    return is_class or isinstance(value, Basic) or any(value is function for function in _FUNCTIONS)
