"""An engine or a router over HTTP: JSON there and back, or bytes there."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rhymerl.errors import BackendError

_KINDS: Mapping[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}
_CONNECT_S = 30.0
_LONGEST_S = 600.0  # of what is not an answer to a prompt: to load weights may take minutes


class NoAnswerError(BackendError):
    """An engine cannot be reached, is dead, or says nothing for too long."""


class RefusedError(BackendError):
    """An engine answers, but not with what it was asked for."""


class Client:
    """One server or router. Each call has a connection of its own, so calls may come from many threads."""

    def __init__(self, host: str, port: int, *, path: str = "", scheme: str = "http") -> None:
        self.host = host
        self.port = port
        self.path = path.rstrip("/")
        self.scheme = scheme
        self._open: set[http.client.HTTPConnection] = set()
        self._is_over = False

    @classmethod
    def at(cls, url: str) -> Client:
        """Raises ValueError for what is no http URL."""
        try:
            parts = urlsplit(url)
            kind, port = _KINDS.get(parts.scheme), parts.port
        except ValueError:  # a port that is none
            kind, port = None, None
        if kind is None or not parts.hostname:
            raise ValueError(f"url={url!r}: expected http://HOST:PORT of a running SGLang server or router")
        return cls(parts.hostname, port or kind.default_port, path=parts.path, scheme=parts.scheme)

    def another(self) -> Client:
        """Return another client of the same server; it may `hang_up` by itself."""
        return Client(self.host, self.port, path=self.path, scheme=self.scheme)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def is_ready(self) -> bool:
        """Return whether the server is up and answers."""
        try:
            return self._call("GET", "/health", None, timeout_s=5)[0] == 200
        except BackendError:
            return False

    def get(self, path: str, *, timeout_s: float = _LONGEST_S) -> Any:
        """Return the server's answer. Raises NoAnswerError when it cannot be reached, RefusedError when it refuses."""
        status, answer = self._call("GET", path, None, timeout_s=timeout_s)
        self._check(path, status, answer)
        return answer

    def get_if_known(self, path: str, *, timeout_s: float = _LONGEST_S) -> Any:
        """Return the server's answer, or None where it does not know that path. Raises as `get` does."""
        status, answer = self._call("GET", path, None, timeout_s=timeout_s)
        if status == 404:
            return None
        self._check(path, status, answer)
        return answer

    def post(self, path: str, content: Mapping[str, Any] | bytes, *, timeout_s: float | None = _LONGEST_S) -> Any:
        """Return the server's answer. Raises NoAnswerError when it cannot be reached, RefusedError when it refuses or reports failure."""
        status, answer = self._call("POST", path, content, timeout_s=timeout_s)
        self._check(path, status, answer)
        return answer

    def post_if_known(self, path: str, *, timeout_s: float = _LONGEST_S) -> bool:
        """Return whether the server knows that path, which older versions may not. Raises as `post` does."""
        status, answer = self._call("POST", path, {}, timeout_s=timeout_s)
        if status != 404:
            self._check(path, status, answer)
        return status != 404

    def _check(self, path: str, status: int, answer: Any) -> None:
        if status != 200 or (isinstance(answer, Mapping) and answer.get("success") is False):
            raise RefusedError(f"the SGLang engine at {self.url} refused {path} (HTTP {status}): {answer}")

    def hang_up(self) -> None:
        """Close all connections: every call that waits for an answer, in any thread, raises NoAnswerError.

        Later calls raise it too.
        """
        self._is_over = True
        for connection in [*self._open]:
            if connection.sock is not None:
                with suppress(OSError):  # it is closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(
        self, method: str, path: str, content: Mapping[str, Any] | bytes | None, *, timeout_s: float | None
    ) -> tuple[int, Any]:
        connection = _KINDS[self.scheme](self.host, self.port, timeout=min(timeout_s or _CONNECT_S, _CONNECT_S))
        body = content if content is None or isinstance(content, bytes) else json.dumps(content)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            if self._is_over:
                raise ConnectionAbortedError("nobody waits for it any more")
            connection.request(method, self.path + path, body, {"Content-Type": kind})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"the SGLang engine at {self.url} did not answer {path} ({error!r})") from error
        finally:
            self._open.discard(connection)
            connection.close()
        return response.status, _parsed(text)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace").strip()
