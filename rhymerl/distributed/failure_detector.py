"""When a rank ends, all other ranks learn its number and reason, and end too.

There is no heartbeat: a process that is busy or stopped for long is not dead. Every rank holds a connection to rank 0,
which the operating system breaks when a process ends.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import cast
from weakref import WeakSet

from rhymerl.errors import RunError

_OPEN_TIMEOUT_S = 60.0
_SILENCE_S = 1.0  # in which the main thread may give the failure as its own error; launchers kill what is left after some seconds
_END = b"\0"
_MESSAGE_BYTES = 4000  # fits into any send buffer: sending never waits

# A host that is lost counts as ended after 10 + 3 * 5 s. What a platform does not name is left as it is.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class FailureDetector:
    """Opened by all ranks in one collective, with rank 0's `exchange`, which gives every rank what rank 0 gives.

    The others reach rank 0 at `host` (MASTER_ADDR), where it listens on its loopback only if that is there. Opening
    raises RunError when a rank does not arrive. A failure is final: a process that has called neither `close` nor
    `fail` within `grace_s` of one, because it hangs in a collective, say, ends with exit code 1 and the failure on
    stderr. Ending without either call is itself a failure.
    """

    def __init__(
        self, rank: int, size: int, *, exchange: Callable[[object], object], host: str, grace_s: float = 15.0
    ) -> None:
        self.rank = rank
        self._grace_s = grace_s
        self._failure: str | None = None
        self._failed = Event()
        self._closed = Event()
        self._links = _listen(size, exchange, host) if rank == 0 else [_connect(rank, exchange, host)]
        self._thread = Thread(target=self._watch, name="failure_detector", daemon=True)
        self._thread.start()
        _failure_detectors.add(self)

    def check(self, *, wait_s: float = 0.0) -> None:
        """Raise RunError when a rank has ended; `wait_s` lets the cause of a broken collective arrive."""
        if wait_s:
            self._failed.wait(wait_s)
        if self._failure is not None:
            raise RunError(self._failure)

    def fail(self, reason: str) -> None:
        """Tell the others why this rank ends, and close."""
        self._disconnect(f"rank {self.rank} failed: {reason}")

    def close(self) -> None:
        """Leave the other ranks without waiting for them; their later ends are not reported.

        May be called twice, and after `fail`. When rank 0 closes, the others do not learn of one another any more.
        """
        self._disconnect("")

    def _disconnect(self, last_message: str) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for link in self._links:
            link.send(last_message)
            link.hang_up()
        self._thread.join()
        for link in self._links:
            link.socket.close()

    def _watch(self) -> None:
        """The thread. Others are told before this rank knows: it may then close at once, with a mere shutdown."""
        failure = self._first_failure()
        if failure is None or self._closed.is_set():
            return
        for link in self._links:
            link.send(failure)
        self._failure = failure
        self._failed.set()
        if self._closed.wait(min(_SILENCE_S, self._grace_s)):
            return
        _say(f"error: {failure}")
        if not self._closed.wait(self._grace_s):
            _say(f"error: rank {self.rank} hung for {self._grace_s:g} s after that and ends too")
            os._exit(1)

    def _first_failure(self) -> str | None:
        """Wait until a link has something else than a shutdown to say; None when all have said shutdown."""
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link.socket, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    message: str | None = key.data.message()
                    if message:
                        return message
                    if message is not None:
                        selector.unregister(key.fileobj)
        return None


def _say(line: str) -> None:
    """Write a line past sys.stderr, whose lock the main thread may hold."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


class _Link:
    """A connection to `rank`: after a hello each end sends at most why a rank ends, or "" for a shutdown."""

    def __init__(self, connection: socket.socket, rank: int = 0) -> None:
        self.socket = connection
        self.rank = rank
        self._received = b""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def message(self) -> str | None:
        """Return the next message, or that the other process has ended without one; None when it is not there yet."""
        try:
            part = self.socket.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # reset, or its host is lost
            part = b""
        message, end, rest = (self._received + part).partition(_END)
        if end:
            self._received = rest  # the sender hangs up after its last message: that makes the socket ready again
            return message.decode(errors="replace")
        self._received = message
        return None if part else f"rank {self.rank} has ended (killed?)"

    def send(self, message: str) -> None:
        """A process that is gone, or does not read, is not waited for."""
        line = message.encode(errors="replace").replace(_END, b"")[:_MESSAGE_BYTES]
        with suppress(OSError):
            self.socket.send(line + _END)

    def hang_up(self) -> None:
        """Wakes the thread that waits for this link, which closing its socket would not."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def is_loopback(host: str) -> bool:
    """Return whether all who reach this host are on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _server(host: str, backlog: int) -> socket.socket:
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=backlog)
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dualstack)


def _listen(size: int, exchange: Callable[[object], object], host: str) -> list[_Link]:
    """Return rank 0's links to all others. The port is open only until they are here."""
    with _server(host, max(128, size)) as listener:
        listener.setblocking(False)
        token = secrets.token_hex(16)
        exchange((listener.getsockname()[1], token))
        return _welcome(listener, {f"{token} {rank}": rank for rank in range(1, size)})


def _welcome(listener: socket.socket, expected: dict[str, int]) -> list[_Link]:
    """Return a link for each of the `expected` hellos. A connection that says anything else, or nothing, is dropped."""
    deadline = monotonic() + _OPEN_TIMEOUT_S
    candidates: list[_Link] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while expected and monotonic() < deadline:
            for key, _ in selector.select(deadline - monotonic()):
                if key.data is None:
                    with suppress(OSError):  # it has gone again
                        candidates.append(_Link(listener.accept()[0]))
                        selector.register(candidates[-1].socket, selectors.EVENT_READ, candidates[-1])
                elif (hello := key.data.message()) is not None:
                    selector.unregister(key.fileobj)
                    key.data.rank = expected.pop(hello, 0)
    missing = f"rank {min(expected.values())} has not connected within {_OPEN_TIMEOUT_S:g} s" if expected else ""
    for candidate in candidates:
        if missing:
            candidate.send(missing)
        if missing or not candidate.rank:
            candidate.socket.close()
    if missing:
        raise RunError(missing)
    return [candidate for candidate in candidates if candidate.rank]


def _connect(rank: int, exchange: Callable[[object], object], host: str) -> _Link:
    """Return another rank's link to rank 0."""
    port, token = cast("tuple[int, str]", exchange(None))
    try:
        link = _Link(socket.create_connection((host, port), timeout=_OPEN_TIMEOUT_S))
    except OSError as error:
        raise RunError(f"rank {rank} cannot connect to rank 0 at {host}:{port}: {error}") from error
    link.send(f"{token} {rank}")
    return link


_failure_detectors: WeakSet[FailureDetector] = WeakSet()


def _forget_in_child() -> None:
    """The connections are the parent's, and must break when the parent ends."""
    for link in [link for failure_detector in _failure_detectors for link in failure_detector._links]:
        link.socket.close()


os.register_at_fork(after_in_child=_forget_in_child)
