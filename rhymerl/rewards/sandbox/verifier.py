"""The verifiers of reasoning-gym. Some evaluate answers as Python, so this is for a process that such an answer may have."""

from __future__ import annotations

import json

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer
from sympy import Basic, cbrt, root, sqrt

from .expressions import expressions_only
from .wire import BrokenMessageError, decode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FUNCTIONS = (sqrt, cbrt, root)


def score(completion: str, entry: str) -> float:
    """Return the verifier's score of the answer in a completion, 0 where it cannot parse it."""
    scoring = decode(json.loads(entry), _refuse)
    data_set = create_dataset(scoring["dataset"], seed=0, size=1, **scoring["settings"])
    tag = scoring["answer_tag"]
    answer = completion.strip() if tag is None else extract_answer(completion, tag_name=tag)
    with expressions_only(("reasoning_gym", "sympy"), is_harmless=_is_of_a_formula):
        try:
            return float(data_set.score_answer(answer, scoring["entry"]))
        except ValueError:  # some verifiers parse without a guard, such as int("none") in prime_factorization
            return 0.0


def _refuse(kind: str, content: Any) -> Any:
    raise BrokenMessageError(f"a row with a value of kind {kind!r}")


def _is_of_a_formula(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, Basic)
    return is_class or isinstance(value, Basic) or any(value is function for function in _FUNCTIONS)
