"""Objects of another process: called through a pipe, given and giving plain values.

Plain values cross as copies, so the receiver compares with Python's own operators. Any other object stays where it is,
and a `Remote` stands for it.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any, Self

from . import handover
from .wire import BrokenMessageError, decode, encode, read_message, refuse, write_message

_MAX_MESSAGE_BYTES = 2**26
_CHANGEABLE = (list, dict, set, bytearray)

# What can be done with an object from afar. Neither comparing with a plain value nor arithmetic is among it: an object
# that is equal to anything, or whose difference to anything is 0, would pass every test.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__call__": lambda target, *args, **named: target(*args, **named),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__eq__": operator.eq,  # of two such objects
}
# Of Python's own attributes, those to be had from afar.
_OF_PYTHON = ("__name__", "__qualname__", "__annotations__", "__wrapped__")
EVERYTHING = frozenset(_OPERATIONS)
CALLS = frozenset({"__call__"})


class Caught:
    """Runs what may raise anything: `with Caught() as caught: …` keeps it."""

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


class Peer:
    """One end of a pair of pipes. `operations` are those that the other end may ask for on objects of this one.

    An end that waits for a result serves the other end's calls meanwhile, so that functions can be passed as arguments.
    An end that does not allow everything trusts nothing: it hands over only objects that `handover` allows, and `unfit`
    is the first object that was not allowed. It takes no names from the other end.
    """

    def __init__(self, read_fd: int, write_fd: int, *, operations: frozenset[str]) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.operations = operations
        self.unfit: handover.UnfitError | None = None
        self._objects: list[Any] = []  # of this end, by handle
        self._handles: dict[int, int] = {}  # by id

    def export(self, target: Any) -> int:
        """Return the handle of an object, which lives from now on as long as this end."""
        if id(target) not in self._handles:
            self._handles[id(target)] = len(self._objects)
            self._objects.append(target)
        return self._handles[id(target)]

    def serve(self) -> None:
        """Answer calls until the other end is gone."""
        while True:
            try:
                message = read_message(self.read_fd, max_bytes=_MAX_MESSAGE_BYTES)
            except EOFError:
                return
            self._serve(message)

    def request(self, handle: int, operation: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Do it there. Raises what was raised there, if it is one of Python's own errors, else RuntimeError."""
        call: dict[str, Any] = {"call": handle, "operation": operation, "args": [self._encode(arg) for arg in args]}
        call["named"] = {name: self._encode(arg) for name, arg in named.items()}
        write_message(self.write_fd, call)
        while True:
            message = read_message(self.read_fd, max_bytes=_MAX_MESSAGE_BYTES)
            if not isinstance(message, dict):
                raise BrokenMessageError("not a call and not a result")
            if "call" in message:
                self._serve(message)
            elif "error" in message:
                raise _error(message, operation)
            else:
                self._write_back(args, message.get("args"))
                return self._decode(message.get("result"))

    def _serve(self, message: dict[str, Any]) -> None:
        with Caught() as caught:
            reply = self._perform(message)
        if caught.error is not None:
            kinds = [kind.__name__ for kind in type(caught.error).__mro__]
            reply = {"error": kinds, "args": [str(arg) for arg in caught.error.args]}
        write_message(self.write_fd, reply)

    def _perform(self, message: dict[str, Any]) -> dict[str, Any]:
        operation = message["operation"]
        if operation not in self.operations:
            raise TypeError(f"{operation} is not allowed")
        target = self._own(message["call"])
        args = [self._decode(arg) for arg in message["args"]]
        named = {name: self._decode(arg) for name, arg in message["named"].items()}
        result = _OPERATIONS[operation](target, *args, **named)
        after = [self._encode(arg) if isinstance(arg, _CHANGEABLE) else None for arg in args]
        changed = [None if new == old else new for new, old in zip(after, message["args"], strict=True)]
        return {"result": self._encode(result), "args": changed}

    def _write_back(self, args: tuple[Any, ...], after: Any) -> None:
        """Write back what the call has done to the lists, dicts and sets that it was given."""
        for arg, data in zip(args, after, strict=True) if isinstance(after, list) and len(after) == len(args) else ():
            new = self._decode(data)
            if type(new) is not type(arg) or not isinstance(arg, _CHANGEABLE):
                continue
            if isinstance(arg, list | bytearray):
                arg[:] = new
            else:
                arg.clear()
                arg.update(new)

    def _own(self, handle: Any) -> Any:
        if not isinstance(handle, int) or not 0 <= handle < len(self._objects):
            raise BrokenMessageError(f"there is no object {handle!r}")
        return self._objects[handle]

    def _encode(self, value: Any) -> Any:
        def refer(target: Any) -> dict[str, Any]:
            if isinstance(target, Remote) and object.__getattribute__(target, "_peer") is self:
                return {"yours": _handle_of(target)}
            return {"mine": self.export(target)} if self.operations == EVERYTHING else self._hand_over(target)

        return encode(value, refer)

    def _hand_over(self, target: Any) -> dict[str, Any]:
        if name := handover.name_of(target):
            return {"name": name}
        try:
            handover.check(target)
        except handover.UnfitError as error:
            self.unfit = self.unfit or error
            raise
        return {"mine": self.export(target)}

    def _decode(self, data: Any) -> Any:
        def resolve(kind: str, content: Any) -> Any:
            if kind == "mine" and isinstance(content, int):
                return Remote(self, content)
            if kind == "yours":
                return self._own(content)
            if kind == "name" and self.operations == EVERYTHING:
                return handover.by_name(*content)
            return refuse(kind, content)

        return decode(data, resolve)


class Remote:
    """Stands for an object of the other process. Only to another of these can it be equal."""

    def __init__(self, peer: Peer, handle: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_handle", handle)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(_forward("__eq__")(self, other))

    def __hash__(self) -> int:
        return hash((Remote, _handle_of(self)))

    def __getattr__(self, name: str) -> Any:
        """Refuse `__array_interface__` and its like: libraries believe them, even addresses in our own memory."""
        if name.startswith("__") and name.endswith("__") and name not in _OF_PYTHON:
            raise AttributeError(f"{name} of another process's object is not to be had")
        return _forward("__getattr__")(self, name)


def _handle_of(remote: Any) -> int:
    handle: int = object.__getattribute__(remote, "_handle")
    return handle


def _forward(operation: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **named: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.request(_handle_of(self), operation, args, named)

    return method


for _name in EVERYTHING - {*vars(Remote)}:
    setattr(Remote, _name, _forward(_name))


def _error(message: dict[str, Any], operation: str) -> Exception:
    """Return the nearest builtin exception; those that end loops only for iteration, lest they end a test's loop."""
    kinds, args = message["error"], message.get("args")
    texts = [str(arg) for arg in args] if isinstance(args, list) else []
    for name in kinds if isinstance(kinds, list) else ():
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            if kind is StopAsyncIteration or (kind is StopIteration and operation != "__next__"):
                break
            with Caught() as caught:
                return kind(*texts)
            assert caught.error is not None  # such as UnicodeDecodeError, which wants arguments of its own
    return RuntimeError(*texts)
