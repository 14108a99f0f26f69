"""Numbers in a text, exactly: as decimals, whatever their size."""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation

from rhymerl.rewards.arguments import answer_text

# Thousands are grouped or not at all; a minus directly after a digit, letter or bracket subtracts, one before a space
# does not negate unless an equals sign stands before it.
_MINUS = "[-\u2212\u2013]"
_GROUPING = r"(?:,|\{,\}|\\,|[\u00a0\u2009\u202f])"
_NUMBER = re.compile(
    rf"(?<![\w.)\]])(?P<minus>(?<!\}}){_MINUS}|(?:(?<==)|(?<== )){_MINUS} )?(?:\\?[$€£¥])?"
    rf"(?P<digits>(?:\d{{1,3}}(?:{_GROUPING}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d+)?"
)
_WIDE = Context(prec=10_000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])  # no difference of any two numbers takes longer


def last_number(text: str) -> Decimal | None:
    """Return the last number written in `text`: `-1,234.5`, `3e-2`, `.5` (a fraction is two numbers); else None."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - the last one counts
        pass
    return _value(found) if found is not None else None


def number_of(answer: object) -> Decimal:
    """Return the number that a row's answer is. Raises ValueError for any other."""
    found = _NUMBER.fullmatch(answer_text(answer).strip().removeprefix("+").removesuffix("."))
    number = _value(found) if found is not None else None
    if number is None:
        raise ValueError(f"answer={answer!r:.80}: expected a number")
    return number


def are_close(one: Decimal, other: Decimal, tolerance: float) -> bool:
    """Return whether two numbers are at most `tolerance` apart, which at 0 is exact."""
    return one == other or _WIDE.abs(_WIDE.subtract(one, other)) <= Decimal(str(tolerance))


def _value(found: re.Match[str]) -> Decimal | None:
    digits = re.sub(r"[^\d.]", "", found["digits"])
    try:
        return Decimal(f"{'-' if found['minus'] else ''}{digits}{found['exponent'] or ''}")
    except InvalidOperation:  # an exponent that nobody can compute with
        return None
