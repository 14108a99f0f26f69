"""An engine or a router over HTTP: JSON there and back, or bytes there."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from rhymerl.errors import BackendError

_KINDS: Mapping[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}
_CONNECT_S = 30.0
LONGEST_S = 600.0  # of what is not an answer to a prompt: to load weights may take minutes
_LARGEST = 2**28  # bytes of an answer
_PIECE = 2**20


class NoAnswerError(BackendError):
    """An engine cannot be reached, is dead, or says nothing for too long."""


class RefusedError(BackendError):
    """An engine answered, but refused the request or failed."""


class UnknownPathError(RefusedError):
    """An engine does not know that path, which older versions may not."""


@dataclass(eq=False)
class Client:
    """One server or router. Each call has a connection of its own, so calls may come from many threads.

    A call takes `timeout_s` at most, unless it says otherwise. `get` and `post` return the server's answer; they raise
    NoAnswerError when it cannot be reached, RefusedError when it refuses or fails.
    """

    host: str
    port: int
    _: KW_ONLY
    path: str = ""
    scheme: str = "http"
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = LONGEST_S

    def __post_init__(self) -> None:
        self.path = self.path.rstrip("/")
        self._open: set[socket.socket] = set()
        self._is_over = False

    @classmethod
    def at(cls, url: str, *, api_key: str | None = None) -> Client:
        """Raises ValueError for what is no http URL, and for one with a user or a password, which is not repeated."""
        try:
            parts = urlsplit(url)
            kind, port = _KINDS.get(parts.scheme), parts.port
        except ValueError:  # a port that is none
            kind, port = None, None
        if kind is None or not parts.hostname:
            raise ValueError(f"url={url!r}: expected http://HOST:PORT of a running SGLang server or router")
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                f"url={parts.scheme}://...@{parts.hostname}: a user and a password are not sent; expected none, and "
                "backend.api_key for a server with an --api-key"
            )
        return cls(parts.hostname, port or kind.default_port, path=parts.path, scheme=parts.scheme, api_key=api_key)

    def another(self, *, timeout_s: float | None = None) -> Client:
        """Return another client of the same server, with this limit if any; it may `hang_up` by itself."""
        return replace(self, timeout_s=timeout_s or self.timeout_s)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def is_ready(self) -> bool:
        try:
            self.get("/health", timeout_s=5)
        except BackendError:
            return False
        return True

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return self._call("GET", path, None, timeout_s)

    def get_if_known(self, path: str) -> Any:
        """Return the server's answer, or None where it does not know that path."""
        try:
            return self.get(path)
        except UnknownPathError:
            return None

    def post(self, path: str, content: Mapping[str, Any] | bytes, *, timeout_s: float | None = None) -> Any:
        return self._call("POST", path, content, timeout_s)

    def hang_up(self) -> None:
        """Close all connections: every call that waits for an answer, in any thread, raises NoAnswerError.

        Later calls raise it too.
        """
        self._is_over = True
        for each in [*self._open]:
            _shut(each)

    def _call(self, method: str, path: str, content: Mapping[str, Any] | bytes | None, timeout_s: float | None) -> Any:
        body = content if content is None or isinstance(content, bytes) else json.dumps(content)
        headers = {"Content-Type": "application/octet-stream" if isinstance(content, bytes) else "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            with self._connected(self.timeout_s if timeout_s is None else timeout_s) as connection:
                connection.request(method, self.path + path, body, headers)
                response = connection.getresponse()
                text = _read(response)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"the SGLang engine at {self.url} did not answer {path} ({error!r})") from error
        answer = _parsed(text)
        if response.status != 200 or (isinstance(answer, Mapping) and answer.get("success") is False):
            kind = UnknownPathError if response.status == 404 else RefusedError
            raise kind(f"the SGLang engine at {self.url} refused {path} (HTTP {response.status}): {answer}")
        return answer

    @contextmanager
    def _connected(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection that `hang_up` closes, and that the time limit closes too.

        A server that sends a byte now and then never runs into the socket's own limit.
        """
        connection = _KINDS[self.scheme](self.host, self.port, timeout=min(timeout_s, _CONNECT_S))
        connection.connect()
        there = connection.sock  # which the connection lets go of where an answer has no length
        is_limited = timeout_s < math.inf
        there.settimeout(timeout_s if is_limited else None)
        late = threading.Timer(timeout_s, _shut, [there])
        ends = time.monotonic() + timeout_s
        self._open.add(there)
        try:
            if self._is_over:
                raise ConnectionAbortedError("nobody waits for it any more")
            if is_limited:
                late.start()
            yield connection
            if time.monotonic() >= ends:
                raise TimeoutError(f"it has not ended after {timeout_s:g} s")
        finally:
            late.cancel()
            self._open.discard(there)
            connection.close()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the body. Raises OSError for one that is too large, or ends before it should."""
    pieces, size = list[bytes](), 0
    while piece := response.read(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > _LARGEST:
            raise OSError(f"it has more than {_LARGEST} bytes")
    if response.length:
        raise OSError(f"{response.length} bytes are missing")
    return b"".join(pieces)


def _shut(connected: socket.socket) -> None:
    """Close a socket for its readers too."""
    with suppress(OSError):  # it is closed already
        connected.shutdown(socket.SHUT_RDWR)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace").strip()
