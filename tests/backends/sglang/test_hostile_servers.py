"""Servers with broken or hostile answers: the error names the server, or a worker is lost; nothing is believed."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rhymerl.backends.remote import client as clients
from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.errors import BackendError
from rhymerl.testing import make_requests
from tests.backends.sglang.fake_engine import LOGPROB
from tests.backends.sglang.test_session import connected

NAME = r"^the SGLang engine at http://127\.0\.0\.1:\d+, request \S+: "
PAIRS = "output_token_logprobs"
MANY = [[LOGPROB, 3, None]] * 5000


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({PAIRS: [[LOGPROB, -1, None]]}, r"has the token id -1, expected 0 to 18"),
        ({PAIRS: [[LOGPROB, 1_000_000, None]]}, r"has the token id 1000000, expected 0 to 18"),
        ({PAIRS: [[LOGPROB, 2**70, None]]}, r"has the token id 1180591620717411303424, expected"),
        ({PAIRS: [[3.0, 3, None]]}, r"has the log-prob 3\.0, expected at most 0"),
        ({PAIRS: [[float("inf"), 3, None]]}, r"has the log-prob inf, expected at most 0"),
        ({PAIRS: [[-1e308, 3, None]]}, r"has the log-prob -1e\+308, expected at most 0, and a number of float32"),
        ({PAIRS: [["-1", 3, None]]}, r"has \['-1', 3, None\], expected \[log-prob, token id, \.\.\.\]"),
        ({PAIRS: [[True, 3, None]]}, r"expected \[log-prob, token id"),
        ({PAIRS: [[LOGPROB, 3.5, None]]}, r"expected \[log-prob, token id"),
        ({PAIRS: [[LOGPROB, "3", None]]}, r"expected \[log-prob, token id"),
        ({PAIRS: [[LOGPROB]]}, r"expected \[log-prob, token id"),
        ({PAIRS: [3]}, r"expected \[log-prob, token id"),
        ({PAIRS: "abc"}, r"output_token_logprobs is 'abc', expected a list"),
        ({PAIRS: {"0": [LOGPROB, 3]}}, r"expected a list"),
        ({PAIRS: MANY}, r"has 5000 tokens, 9 were asked for"),
        ({"spec_verify_ct": -5}, r"spec_verify_ct is -5, expected a count of its passes"),
        ({"spec_verify_ct": 10**18}, r"spec_verify_ct is 1000000000000000000, expected a count"),
        ({"spec_verify_ct": "2"}, r"spec_verify_ct is '2', expected a count"),
        ({"spec_verify_ct": 1.5}, r"spec_verify_ct is 1\.5, expected a count"),
        ({"weight_version": None}, r"weight_version is None, expected the version of its weights"),
        ({"weight_version": 1}, r"weight_version is 1, expected the version"),
        ({"finish_reason": None}, r"finish_reason is None, expected an object"),
        ({"finish_reason": "stop"}, r"finish_reason is 'stop', expected an object"),
        ({"finish_reason": {}}, r"finish_reason\.type is None, expected a str"),
        ({"finish_reason": {"type": ["stop"]}}, r"finish_reason\.type is \['stop'\], expected a str"),
    ],
)
def test_an_answer_with_a_fault_is_an_error_that_names_it(engine, flat_policy, meta, words):
    with connected(engine, flat_policy) as backend:
        engine.meta = meta
        backend.submit(make_requests(1, max_tokens=9))
        with pytest.raises(BackendError, match=NAME + r"(meta_info\.)?.*" + words):
            backend.collect()


@pytest.mark.parametrize("page", ["<html>502 Bad Gateway</html>", "", [], 3, None, "[" * 100_000])
def test_what_is_no_object_is_a_worker_that_is_lost(engine, flat_policy, page):
    """As of a proxy that stands before a server that has gone."""
    with connected(engine, flat_policy) as backend:
        engine.answers["/generate"] = 200, page
        backend.submit(make_requests(1, max_tokens=9))
        with pytest.raises(NoAnswerError, match=NAME + "expected a JSON object, got "):
            backend.collect()


@pytest.mark.parametrize("content", [{}, {"meta_info": []}, {"meta_info": "x"}])
def test_an_object_without_what_it_should_have(engine, flat_policy, content):
    with connected(engine, flat_policy) as backend:
        engine.answers["/generate"] = 200, content
        backend.submit(make_requests(1, max_tokens=9))
        with pytest.raises(BackendError, match=NAME + "meta_info is .*, expected an object"):
            backend.collect()


# -- time and size
# -------------------------------------------------------------------------------------------------------


@contextmanager
def dripping(
    beginning: bytes, piece: bytes, *, every_s: float, sent: Callable[[int], bool] = lambda number: True
) -> Iterator[Client]:
    """Context of a server that sends a beginning, then further pieces as long as `sent` allows each."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65_536)
            try:
                connection.sendall(beginning)
                for number in itertools.count(1):
                    if over.wait(every_s):
                        return
                    connection.sendall(piece)
                    if not sent(number):
                        return
            except OSError:  # it has been hung up
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Client("127.0.0.1", listener.getsockname()[1])
    finally:
        over.set()
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Clock:
    """Stands still until it strikes: then the time of every timer that was started is up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[tuple[float, Callable[..., None], list[Any]]] = []

    def timer(self, lasts_s: float, call: Callable[..., None], args: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: self.started.append((lasts_s, call, args)), cancel=lambda: None)

    def strike(self) -> None:
        for lasts_s, call, args in self.started:
            self.now = max(self.now, lasts_s)
            call(*args)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"HTTP/1.1 200 OK\r\nX: ", HEAD + b"Content-Length: 100000\r\n\r\n[", HEAD + b"\r\n["],
    ids=["status", "header", "body", "without a length"],
)
def test_a_call_is_over_when_its_time_is_however_often_a_byte_comes(beginning, monkeypatch):
    """The time is up at the tenth byte, and the server would send two hundred."""
    clock, numbers = Clock(), list[int]()
    monkeypatch.setattr(clients, "threading", SimpleNamespace(Timer=clock.timer))
    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def sent(number: int) -> bool:
        numbers.append(number)
        if number == 10:
            clock.strike()
        return number < 200

    with (
        dripping(beginning, b"1", every_s=0.001, sent=sent) as client,
        pytest.raises(NoAnswerError, match=r"did not answer /server_info"),
    ):
        client.get("/server_info", timeout_s=60)
    assert [lasts_s for lasts_s, _, _ in clock.started] == [60]
    assert 10 <= len(numbers) < 200, "the server has ended it, not the clock"


def test_an_endless_answer_is_not_kept(monkeypatch):
    monkeypatch.setattr(clients, "_LARGEST", 2**20)
    monkeypatch.setattr(clients, "_PIECE", 2**16)
    with (
        dripping(HEAD + b"\r\n", b" " * 2**16, every_s=0.0001) as client,
        pytest.raises(NoAnswerError, match="it has more than 1048576 bytes"),
    ):
        client.get("/server_info", timeout_s=60)


def test_an_answer_that_breaks_off_is_none():
    with (
        dripping(HEAD + b"Content-Length: 12\r\n\r\n{}", b"", every_s=0.05) as client,
        pytest.raises(NoAnswerError, match="did not answer /server_info"),
    ):
        client.get("/server_info", timeout_s=0.2)


# -- keys
# ------------------------------------------------------------------------------------------------------------------


def test_a_key_goes_with_every_call(engine, flat_policy):
    with connected(engine, flat_policy, api_key="k") as backend:
        backend.submit(make_requests(1, max_tokens=9))
        backend.collect()
    assert engine.keys == {"Bearer k"}


@pytest.mark.parametrize("url", ["http://user:secret@host:1", "https://:secret@host", "http://user@host:3/path"])
def test_a_user_in_the_url_is_refused_without_repeating_a_password(url):
    with pytest.raises(ValueError, match=r"^url=https?://\.\.\.@host: a user and a password are not sent") as told:
        SGLangBackend(url=url)
    assert "secret" not in str(told.value)


def test_a_key_without_servers_is_refused():
    with pytest.raises(ValueError, match=r"^api_key: is for servers that run already"):
        SGLangBackend(api_key="secret")
