"""HistoSpec by hand (arXiv 2508.18588): the settings of drafter=paper draft what the paper would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rhymerl.config import instantiate
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_prompt
from tests.drafters.requests import context, request
from tests.history.answers import answer

PROMPT = make_prompt([1])
CONFIG = Path(__file__).parents[2] / "configs" / "drafter" / "paper.yaml"
SEVEN = [11, 12, 13, 14, 15, 16, 17]
THREE = [2, 2, 2, 2, *SEVEN[4:]]  # ends as SEVEN does, in three tokens

Answers = Sequence[tuple[list[int], float]]  # tokens and reward


@pytest.fixture
def paper() -> Iterator[HistoryTreeDrafter]:
    settings = OmegaConf.to_container(OmegaConf.load(CONFIG))
    drafter = instantiate({**settings, "deterministic": True}, key="drafter")
    yield drafter
    drafter.close()


def drafted(drafter: HistoryTreeDrafter, answers: Answers, response: Sequence[int], *, epochs: int = 1) -> list[int]:
    """Return the path that is drafted behind `response`; the last answers are those of the last epoch."""
    store = HistoryStore(window=100)
    size = len(answers) // epochs
    for epoch in range(epochs):
        part = enumerate(answers[epoch * size : (epoch + 1) * size])
        store.add(PROMPT, [answer(epoch=epoch, sample=s, token_ids=ids, reward=reward) for s, (ids, reward) in part])
    drafter.follow(store.snapshot())
    new = request(PROMPT)
    draft = drafter.propose(new, context(new, response), 8)
    assert draft.parents.tolist() == list(range(-1, len(draft.token_ids) - 1))
    return draft.token_ids.tolist()


@pytest.mark.parametrize(
    ("answers", "path"),
    [
        ([([*SEVEN, 5], 0.1), ([*SEVEN, 6], 0.2)], [6]),
        # 5 has a longest match too, but 3.1 only with the rewards of shorter ones.
        ([([*SEVEN, 5], 0.1), ([*SEVEN, 6], 0.2), *[([*THREE, 5], 1.0)] * 3], [6]),
        ([([*SEVEN, 5], 0.1), ([*SEVEN, 6], 0.2), *[([*THREE, 6], -1.0)] * 3], [6]),
        # The sum decides: neither the highest reward (6) nor the mean, nor the number of answers (7).
        ([*[([*SEVEN, 5], 0.4)] * 2, ([*SEVEN, 6], 0.6), *[([*SEVEN, 7], 0.1)] * 3], [5]),
        # So it does at each token that follows.
        ([*[([*SEVEN, 5, 8], 0.4)] * 2, ([*SEVEN, 5, 9], 0.6), ([*SEVEN, 6], 1.3)], [5, 8]),
        # Seven tokens are the most that count: an eighth in common says no more.
        ([([3, *SEVEN, 5], 0.1), ([4, *SEVEN, 6], 0.2)], [6]),
        ([([*SEVEN[3:], 5], 1.0), ([2, 2, *SEVEN[2:], 6], 0.0)], [6]),  # the longer suffix, whatever the rewards
        ([([9, *SEVEN[5:], 5], 1.0)], []),  # two tokens are too few
    ],
)
def test_the_branch_of_the_highest_sum_of_rewards_below_the_longest_match(paper, answers, path):
    assert drafted(paper, answers, [3, *SEVEN]) == path


def test_answers_of_the_last_epoch_alone_are_drafted_from(paper):
    assert drafted(paper, [([*SEVEN, 5], 1.0), ([*SEVEN, 6], 0.0)], SEVEN, epochs=2) == [6]
