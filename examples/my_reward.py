"""Rewards of one's own: plain functions of the answer's text and of the columns of its row.

They run in processes of their own: one that raises, hangs or dies costs the one sample, and is counted as
`rewards/NAME/errors`, `timeouts` or `crashes`.
"""

import re

ADDITION = re.compile(r"(\d+)\+(\d+)=(\d+)")


def right_total(completion: str, *, answer: str) -> float:
    """1 when the text after the last `#` is the answer, which is a column of the data set."""
    return float(completion.rpartition("#")[2].strip() == answer)


def right_additions(completion: str) -> float:
    """The share of the additions written down, such as `37+85=122`, that are right."""
    found = [int(a) + int(b) == int(total) for a, b, total in ADDITION.findall(completion)]
    return sum(found) / max(len(found), 1)
