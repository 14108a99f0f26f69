"""The embedded backend's drafter hears of history and samples from the backend."""

from __future__ import annotations

import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import Drafter
from rhymerl.drafts import Draft
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.testing import make_answer, make_prompt, tiny_policy


class Listener(Drafter):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.deltas, self.samples = [], []

    def propose(self, request, context, budget):
        return Draft(token_ids=[], parents=[])

    def learn(self, samples):
        self.samples.append(samples)

    def follow(self, delta):
        self.deltas.append(delta)


def add(history: HistoryStore, number: int) -> None:
    history.add(make_prompt([number], id=str(number)), [make_answer([number])])


def keys(delta) -> list[list[int]]:
    return [change.prompt_token_ids.tolist() for change in delta]


def test_all_of_the_history_comes_first_and_then_what_is_new():
    policy, history, drafter = tiny_policy(), HistoryStore(), Listener()
    add(history, 3)
    with EmbeddedBackend() as backend:
        backend.start(policy, drafter)
        backend.follow(history)
        add(history, 4)
        backend.follow(history)
        backend.follow(history)
        assert [each.is_snapshot for each in drafter.deltas] == [True, False, False]
        assert [keys(each) for each in drafter.deltas] == [[[3]], [[4]], []]
        again = Listener()
        backend.start(policy, again)
        backend.follow(history)
        assert again.deltas[0].is_snapshot
        assert keys(again.deltas[0]) == [[3], [4]]


def test_samples_go_on_as_they_are():
    drafter, samples = Listener(), [object()]
    with EmbeddedBackend() as backend:
        backend.start(tiny_policy(), drafter)
        backend.learn(samples)
    assert drafter.samples == [samples]


@pytest.mark.parametrize("what", ["follow", "learn"])
def test_nobody_listens_before_the_start(what):
    backend = EmbeddedBackend()
    with pytest.raises(BackendError, match="has not been started"):
        backend.follow(HistoryStore()) if what == "follow" else backend.learn([])
