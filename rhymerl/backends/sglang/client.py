"""SGLang over HTTP: token ids in, token ids and log-probs out."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rhymerl.errors import BackendError, ConfigError


class Client:
    """One server or router. Each call has a connection of its own, so calls may come from many threads."""

    def __init__(self, host: str, port: int, *, path: str = "") -> None:
        self.host = host
        self.port = port
        self.path = path.rstrip("/")

    @classmethod
    def at(cls, url: str) -> Client:
        """Raises ConfigError for what is no http URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError:  # a port that is none
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"backend.url={url!r}: expected http://HOST:PORT of a running SGLang server or router")
        return cls(parts.hostname, port, path=parts.path)

    def is_ready(self) -> bool:
        """Whether it is up and answers."""
        try:
            return self._call("GET", "/health", None, timeout_s=5)[0] == 200
        except BackendError:
            return False

    def get(self, path: str) -> Any:
        """What it answers. Raises BackendError when it cannot be reached or refuses."""
        return self._checked("GET", path, None, None)

    def post(self, path: str, content: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """What it answers. Raises BackendError when it cannot be reached, refuses, or says that it did not succeed."""
        return self._checked("POST", path, content, timeout_s)

    def post_if_known(self, path: str) -> bool:
        """Whether it knows that path, which older versions may not. Raises BackendError as `post` does."""
        status, answer = self._call("POST", path, {}, timeout_s=60)
        if status != 404:
            _check(path, status, answer)
        return status != 404

    def _checked(self, method: str, path: str, content: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        status, answer = self._call(method, path, content, timeout_s=timeout_s)
        _check(path, status, answer)
        return answer

    def _call(
        self, method: str, path: str, content: Mapping[str, Any] | None, *, timeout_s: float | None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        body = None if content is None else json.dumps(content)
        try:
            connection.request(method, self.path + path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(
                f"the SGLang engine at {self.host}:{self.port} did not answer {path} ({error!r})"
            ) from error
        finally:
            connection.close()
        return response.status, _parsed(text)


def _check(path: str, status: int, answer: Any) -> None:
    if status != 200 or (isinstance(answer, Mapping) and answer.get("success") is False):
        raise BackendError(f"the SGLang engine refused {path} (HTTP {status}): {answer}")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace").strip()
