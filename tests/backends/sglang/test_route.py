"""The plugin's route: what a trainer sends reaches the drafter, and what is no message of a trainer changes nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.backends.remote.drafter_feed import COUNTS, Counters, FeedReader
from rhymerl.backends.sglang.plugin import route as plugin
from rhymerl.backends.sglang.plugin.route import FeedRoute
from rhymerl.history import NO_VERSION, HistoryDelta, HistoryStore
from rhymerl.history.files import from_bytes, to_bytes
from rhymerl.history.packing import pack_delta
from rhymerl.testing import make_prompt
from tests.backends.sglang.routes import Follower, answered, asked
from tests.backends.sglang.test_drafter_feed import answer


class Served:
    """A route with the drafter behind it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Counters(folder / "counters", new=True)
        self.route, self.drafter = FeedRoute(folder), Follower()
        self.reader = FeedReader(folder / "feed", self.drafter)

    def post(self, delta: HistoryDelta) -> tuple[int, dict]:
        return asked(self.route, "POST", [to_bytes(pack_delta(delta))])

    def known(self, version: int) -> list[list[int]]:
        """All answers that the drafter knows once it has read so far."""
        self.reader.catch_up(version)
        return [each for answers in self.drafter.known.values() for each in answers]

    def state(self) -> tuple[object, list[Path]]:
        """What must not change."""
        return asked(self.route, "GET"), sorted(self.folder.rglob("*"))


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def history(*answers: list[int]) -> HistoryStore:
    store = HistoryStore()
    for number, tokens in enumerate(answers):
        store.add(make_prompt([1, 2 + number]), [answer(tokens)])
    return store


def test_changes_get_versions_in_their_order_and_are_heard(served):
    store = history([3, 4])
    assert served.post(store.deltas(NO_VERSION)) == (200, {"version": 1})
    known = store.version
    store.add(make_prompt([5]), [answer([6, 7])])
    assert served.post(store.deltas(known)) == (200, {"version": 2})
    assert served.known(1) == [[3, 4]]
    assert served.known(2) == [[3, 4], [6, 7]]


def test_it_tells_what_the_drafter_has_counted(served):
    Counters(served.folder / "counters").add(asks=3, draft_s=0.5)
    status, answer = asked(served.route, "GET")
    assert (status, answer["version"]) == (200, 0)
    assert answer["counters"] == {**dict.fromkeys(COUNTS, 0.0), "asks": 3.0, "draft_s": 0.5}


def test_another_trainers_history_takes_the_place_of_the_former_ones(served):
    served.post(history([3], [4]).snapshot())
    assert served.post(history([8], [9]).snapshot()) == (200, {"version": 2})
    assert served.known(2) == [[8], [9]]


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


WHOLE = to_bytes(pack_delta(history([3, 4], [5]).snapshot()))


def crafted(**sections: bytes) -> bytes:
    """The whole message, but for these sections; the checksums are right."""
    return to_bytes({**{name: bytearray(each) for name, each in from_bytes(WHOLE).items()}, **sections})


HOSTILE = {
    "nothing": b"",
    "JSON": json.dumps({"delta": {"version": 1}}).encode(),
    "a pickle": pickle.dumps(Bomb()),
    "cut": WHOLE[:-1],
    "longer": WHOLE + b"\0",
    "a token changed": WHOLE.replace(np.array([3, 4], "<i4").tobytes(), np.array([3, 5], "<i4").tobytes()),
    "an answer too few": crafted(lengths=np.array([2], "<i8").tobytes()),
    "a negative token": crafted(tokens=np.array([3, -4, 5], "<i4").tobytes()),
    "a version below 0": crafted(changes=np.array([-5, 1, 0, 0, 0, 0], "<i8").tobytes()),
    "lengths without end": crafted(lengths=np.array([2**62, 2**62], "<i8").tobytes()),
    "prompts that are no list": crafted(names=b'{"train": 3}'),
    "no sections": to_bytes({}),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_message_is_told_and_changes_nothing(served, body, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = served.state()
    status, words = asked(served.route, "POST", [body])
    assert status == 400
    assert words["error"].startswith("history message: ")
    assert "\n" not in words["error"]
    assert served.state() == before


@given(data=st.data())
def test_no_changed_bit_and_no_cut_passes(data, tmp_path_factory):
    served, content = Served(tmp_path_factory.mktemp("served")), bytearray(WHOLE)
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:position]
    else:
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    before = served.state()
    assert asked(served.route, "POST", [bytes(content)])[0] == 400
    assert served.state() == before


def test_what_is_too_large_is_not_read_to_its_end(served, monkeypatch):
    monkeypatch.setattr(plugin, "LARGEST_BYTES", len(WHOLE))
    pieces = [WHOLE[:100], WHOLE[100:]]
    before = served.state()
    status, words = asked(served.route, "POST", [*pieces, b"x", b"never read"])
    assert (status, words) == (413, {"error": f"expected at most {len(WHOLE)} bytes"})
    assert served.state() == before
    assert asked(served.route, "POST", pieces) == (200, {"version": 1})


def test_a_client_that_goes_half_way_changes_nothing(served):
    before = served.state()
    events = [{"type": "http.request", "body": WHOLE[:100], "more_body": True}, {"type": "http.disconnect"}]
    assert answered(served.route, "POST", events)[0] == 400
    assert served.state() == before


def test_other_methods_are_refused(served):
    before = served.state()
    assert asked(served.route, "DELETE") == (405, {"error": "DELETE: expected GET or POST"})
    assert served.state() == before


def test_a_disk_that_takes_nothing_is_told(served):
    shutil.rmtree(served.folder / "feed")
    status, words = asked(served.route, "POST", [WHOLE])
    assert status == 507
    assert words["error"].startswith("it cannot be written: [Errno 2]")
    assert asked(served.route, "GET")[1]["version"] == 0
    (served.folder / "feed").mkdir()
    assert asked(served.route, "POST", [WHOLE]) == (200, {"version": 1})
