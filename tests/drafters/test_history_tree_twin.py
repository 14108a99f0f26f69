"""Trees from the index against trees from a plain look at every place in every text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymerl.drafters import HistoryTreeDrafter, history_tree
from rhymerl.drafts import Draft, DraftSource
from rhymerl.history import Answer, HistoryStore
from tests.drafters.requests import context, requests
from tests.history.answers import answer

Path = tuple[int, ...]


@pytest.fixture(autouse=True)
def all_of_the_pool(monkeypatch):
    monkeypatch.setattr(history_tree, "_POOL_MATCHES", 64)


few = st.integers(0, 2)
tokens = st.lists(few, max_size=8)


@dataclass
class Scene:
    """A prompt, its earlier answers, and those that are running."""

    prompt: list[int]
    history: list[Answer]
    rows: list[list[int]]
    others: list[tuple[list[int], list[Answer]]] = field(default_factory=list)  # other prompts, with earlier answers
    settings: dict[str, Any] = field(default_factory=dict)

    def drafts(self, budget: int) -> list[Draft]:
        drafter = HistoryTreeDrafter(deterministic=True, **self.settings)
        running, store = requests(self.prompt, len(self.rows)), HistoryStore()
        for number, (prompt, answers) in enumerate(self.others):
            store.add(replace(running[0].prompt, key=f"other {number}", token_ids=np.array(prompt, np.int32)), answers)
        store.add(running[0].prompt, self.history)
        drafter.follow(store.snapshot())
        for each in running:
            drafter.start(each)
        contexts = [context(each, row) for each, row in zip(running, self.rows, strict=True)]
        batch = drafter.propose_batch(running, contexts, [budget] * len(running))
        drafter.close()
        return [batch.draft(r) for r in range(len(running))]

    def occurrences(self, r: int) -> Iterator[Occurrence]:
        """All that votes on row r, with its tokens and what stands before."""
        setting = {
            "min_match": 1,
            "max_match": 32,
            "recency": 0.8,
            "advantage_tilt": 0.0,
            "others": 0.1,
            **self.settings,
        }
        now = [*self.prompt, *self.rows[r]]
        texts = [([], self.prompt, 1.0, DraftSource.OWN)]
        for number, row in enumerate(self.rows):
            texts.append((self.prompt, row, 1.0, DraftSource.OWN if number == r else DraftSource.SIBLING))
        newest = max((each.epoch for each in self.history), default=0)
        for each in self.history:
            age = newest - each.epoch
            weight = setting["recency"] ** age * np.exp(setting["advantage_tilt"] * each.advantage)
            texts.append((self.prompt, each.token_ids.tolist(), weight, DraftSource.HISTORY + age))
        for prompt, answers in [(self.prompt, self.history), *self.others] if setting["others"] else []:
            texts += [(prompt, each.token_ids.tolist(), setting["others"], DraftSource.OTHER) for each in answers]
        for before, text, weight, source in texts:
            for k in range(len(text)):
                length = shared([*before, *text[:k]], now, setting["max_match"])
                if length >= setting["min_match"]:
                    yield Occurrence(rest=text[k:], shared=length, weight=weight, source=int(source))


@dataclass
class Occurrence:
    rest: list[int]
    shared: int
    weight: float
    source: int


def shared(one: Sequence[int], two: Sequence[int], longest: int) -> int:
    length = 0
    while length < min(len(one), len(two), longest) and one[-1 - length] == two[-1 - length]:
        length += 1
    return length


def grown(
    occurrences: Sequence[Occurrence], escape: float, path: Path = (), probability: float = 1.0
) -> Iterator[tuple[Path, float, set[int]]]:
    """Every node below `path` with its score and where it may say that it comes from."""
    total = escape + sum(each.weight for each in occurrences)
    for token in sorted({each.rest[0] for each in occurrences if each.rest}):
        agreeing = [each for each in occurrences if each.rest[:1] == [token]]
        votes, heaviest = sum(each.weight for each in agreeing), max(each.weight for each in agreeing)
        if votes > 0:
            score = probability * votes / total
            yield (*path, token), score, {each.source for each in agreeing if each.weight > 0.999999 * heaviest}
            further = [
                Occurrence(each.rest[1:], each.shared, each.weight, each.source) for each in agreeing if each.weight > 0
            ]
            yield from grown(further, escape, (*path, token), score)


def expected(scene: Scene, r: int) -> tuple[int, dict[Path, tuple[float, set[int]]]]:
    listed = list(scene.occurrences(r))
    top = max((each.shared for each in listed), default=0)
    for each in listed:
        each.weight *= scene.settings.get("length_weight", 5.0) ** (each.shared - top)
    nodes = grown(listed, scene.settings.get("escape", 0.3))
    return top, {path: (score, sources) for path, score, sources in nodes}


def paths_of(draft: Draft) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        assert -1 <= parent < len(paths)
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    assert len(set(paths)) == len(paths)  # siblings are distinct
    return paths


scenes = st.builds(
    Scene,
    prompt=st.lists(few, min_size=1, max_size=5),
    history=st.lists(
        st.builds(
            answer,
            epoch=st.integers(0, 2),
            sample=st.integers(0, 1),
            token_ids=tokens,
            advantage=st.sampled_from([-1.0, 0.0, 1.5]),
        ),
        max_size=4,
        unique_by=lambda each: (each.epoch, each.sample),
    ),
    rows=st.lists(tokens, min_size=1, max_size=3),
    others=st.lists(
        st.tuples(st.lists(few, max_size=3), st.lists(st.builds(answer, token_ids=tokens), min_size=1, max_size=1)),
        max_size=2,
    ),
    settings=st.fixed_dictionaries(
        {
            "length_weight": st.sampled_from([1.0, 5.0, np.inf]),
            "recency": st.sampled_from([1.0, 0.5]),
            "advantage_tilt": st.sampled_from([0.0, 0.7]),
            "escape": st.sampled_from([0.0, 0.1, 2.0]),
            "min_match": st.sampled_from([1, 2]),
            "max_match": st.sampled_from([2, 32]),
            "others": st.sampled_from([0.0, 0.1, 3.0]),
        }
    ),
)


@settings(max_examples=150)
@given(scene=scenes, budget=st.sampled_from([1, 3, 8, 40]))
def test_the_most_probable_nodes_are_drafted(scene, budget):
    for r, draft in enumerate(scene.drafts(budget)):
        top, nodes = expected(scene, r)
        paths = paths_of(draft)
        assert draft.match_length == top
        assert len(paths) == min(budget, len(nodes))
        if not paths:
            continue
        scores = draft.scores.tolist()
        assert scores == pytest.approx([nodes[path][0] for path in paths], rel=1e-9)
        assert sorted(scores, reverse=True) == pytest.approx(
            sorted((score for score, _ in nodes.values()), reverse=True)[: len(paths)], rel=1e-9
        )
        assert all(0 < score <= 1 for score in scores)
        assert all(score <= scores[parent] for score, parent in zip(scores, draft.parents, strict=True) if parent >= 0)
        assert all(source in nodes[path][1] for source, path in zip(draft.sources.tolist(), paths, strict=True))


@settings(max_examples=60)
@given(scene=scenes, max_branches=st.integers(1, 2), priority=st.sampled_from(["probability", "reward"]))
def test_few_branches_are_a_part_of_the_whole_tree(scene, max_branches, priority):
    scene.settings |= {"max_branches": max_branches, "priority": priority}
    for r, draft in enumerate(scene.drafts(40)):
        _, nodes = expected(scene, r)
        paths = paths_of(draft)
        assert draft.scores is None or draft.scores.tolist() == pytest.approx([nodes[each][0] for each in paths])
        below = draft.parents.tolist()
        for parent in {-1, *range(len(paths))}:
            above = paths[parent] if parent >= 0 else ()
            possible = {path for path in nodes if path[:-1] == above}
            assert below.count(parent) == min(max_branches, len(possible))
