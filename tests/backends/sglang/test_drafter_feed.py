"""The trainer's messages to a drafter in another process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.backends.remote.drafter_feed import FeedMessage, FeedReader, FeedWriter
from rhymerl.drafters import Drafter
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.testing import make_prompt, make_requests
from rhymerl.types import Completion, Output, Sample
from tests.backends.sglang.batches import answer


class Listener(Drafter):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard = []

    def propose(self, request, context, budget):
        raise NotImplementedError

    def learn(self, samples):
        self.heard.append(("learn", [sample.completion.token_ids.tolist() for sample in samples]))

    def follow(self, delta):
        self.heard.append(("follow", delta.version, delta.is_snapshot, [change.key for change in delta]))


def history() -> HistoryStore:
    store = HistoryStore()
    store.add(make_prompt([1, 2]), [answer([3, 4])])
    return store


def sample(tokens) -> Sample:
    ids = np.array(tokens, np.int32)
    generated = Output(token_ids=ids, logprobs=np.zeros(len(ids)), policy_versions=np.zeros(len(ids), np.int32))
    completion = Completion(request=make_requests(1)[0], output=replace(generated, finish_reason="stop"))
    return Sample(completion=completion, text="", reward=1.0, rewards={}, loss_mask=np.ones(len(ids), np.bool_))


def test_news_are_heard_once_and_in_order_as_far_as_they_are_needed(tmp_path):
    writer, reader = FeedWriter(tmp_path / "feed"), FeedReader(tmp_path / "feed", Listener())
    store = history()
    writer.write(FeedMessage(delta=store.snapshot()))
    writer.write(FeedMessage(samples=[sample([7, 8])]))
    seen = store.snapshot().version
    store.add(make_prompt([5]), [answer([6])])
    writer.write(FeedMessage(delta=store.deltas(seen)))
    heard = reader.drafter.heard
    reader.catch_up(0)
    assert heard == []
    reader.catch_up(1)
    assert heard == [("follow", seen, True, [make_prompt([1, 2]).key])]
    reader.catch_up(3)
    reader.catch_up(2)
    assert heard[1:] == [
        ("learn", [[7, 8]]),
        ("follow", store.snapshot().version, False, [make_prompt([5]).key]),
    ]
    assert list((tmp_path / "feed").iterdir()) == []


def test_samples_come_before_the_history_that_they_are_in(tmp_path):
    writer, reader = FeedWriter(tmp_path), FeedReader(tmp_path, Listener())
    writer.write(FeedMessage(delta=history().snapshot(), samples=[sample([7])]))
    reader.catch_up(1)
    assert [kind for kind, *_ in reader.drafter.heard] == ["learn", "follow"]


def test_a_missing_file_is_named(tmp_path):
    FeedWriter(tmp_path).write(FeedMessage())
    reader = FeedReader(tmp_path, Listener())
    with pytest.raises(BackendError, match=r"000000002\.feed: what the drafter is to read next is missing"):
        reader.catch_up(2)
    assert reader.version == 1


def test_a_half_written_file_is_no_news(tmp_path):
    writer = FeedWriter(tmp_path)
    with pytest.raises((TypeError, AttributeError)):  # cannot be pickled
        writer.write(FeedMessage(samples=[lambda: None]))
    writer.write(FeedMessage(samples=[sample([1])]))
    reader = FeedReader(tmp_path, Listener())
    reader.catch_up(writer.version)
    assert reader.drafter.heard == [("learn", [[1]])]
    assert writer.version == 1


def test_the_folder_belongs_to_its_owner(tmp_path):
    FeedWriter(tmp_path / "a" / "feed")
    assert (tmp_path / "a" / "feed").stat().st_mode & 0o77 == 0


def test_another_process_reads_them(tmp_path):
    writer = FeedWriter(tmp_path)
    writer.write(FeedMessage(delta=history().snapshot()))
    code = (
        "import sys; from pathlib import Path\n"
        "from rhymerl.backends.remote.drafter_feed import FeedReader\n"
        "from rhymerl.drafters import HistoryTreeDrafter\n"
        "from rhymerl.testing import make_prompt\n"
        "FeedReader(Path(sys.argv[1]), HistoryTreeDrafter()).catch_up(1)\n"
        "print(len(list(Path(sys.argv[1]).iterdir())))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_a_message_on_which_a_drafter_fails_is_named_and_not_lost(tmp_path, caplog):
    class Failing(Listener):
        fails = True

        def follow(self, delta):
            if self.fails:
                raise ZeroDivisionError("in somebody's drafter")
            super().follow(delta)

    writer, reader = FeedWriter(tmp_path), FeedReader(tmp_path, drafter := Failing())
    writer.write(FeedMessage(delta=history().snapshot()))
    with pytest.raises(ZeroDivisionError):
        reader.catch_up(1)
    assert "rhymerl: Failing failed on what the trainer tells it (000000001.feed)" in caplog.text
    drafter.fails = False
    reader.catch_up(1)
    assert [each[0] for each in drafter.heard] == ["follow"]
    assert list(tmp_path.iterdir()) == []
