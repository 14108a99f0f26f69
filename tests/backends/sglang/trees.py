"""Random draft trees, and SGLang's links as it reads them off a mask."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rhymerl.drafts import Draft

VOCABULARY = 6  # few, so that draws and drafts often agree


@st.composite
def drafts(draw, most_nodes: int) -> Draft:
    """A tree whose siblings are distinct."""
    tokens, parents = [], []
    for node in range(draw(st.integers(0, most_nodes))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, VOCABULARY - 1))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
        else:
            break
    return Draft(token_ids=np.array(tokens, np.int32), parents=np.array(parents, np.int32))


def links_of(mask: np.ndarray) -> tuple[list[int], list[int]]:
    """Return first child and next sibling (-1 = none) by node from mask [n, n]; its last ancestor is its parent."""
    n = len(mask)
    parents = [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(n)]
    children = [[j for j in range(n) if parents[j] == i] for i in range(n)]
    siblings = [[j for j in range(i + 1, n) if parents[i] >= 0 and parents[j] == parents[i]] for i in range(n)]
    return [next(iter(each), -1) for each in children], [next(iter(each), -1) for each in siblings]


def path_of(mask: np.ndarray, tokens: np.ndarray, predictions: np.ndarray) -> list[int]:
    """The nodes that SGLang's greedy verification accepts, node 0 among them."""
    children, siblings = links_of(mask)
    path = [0]
    while True:
        node = children[path[-1]]
        while node != -1 and tokens[node] != predictions[path[-1]]:
            node = siblings[node]
        if node == -1:
            return path
        path.append(node)
