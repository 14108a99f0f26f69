"""Settings in plain containers, in which the text `${key}` is a link: the value of another setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rhymerl.errors import ConfigError

ABSENT: Any = object()
_LINK = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
_MOST_LINKS = 32


def join(key: str, name: object) -> str:
    """Return a dotted key one level down."""
    return f"{key}.{name}" if key else str(name)


def is_component(value: object) -> bool:
    """Return whether this is a node that names its class."""
    return isinstance(value, Mapping) and "_target_" in value


def entries(node: Any) -> list[tuple[Any, Any]]:
    """Return what is in a mapping by name, what is in a list by index; nothing for a value."""
    if isinstance(node, dict):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, list) else []


def child(node: Any, name: str) -> Any:
    """Return what is below a node, unresolved; ABSENT where there is nothing."""
    if isinstance(node, dict):
        return node.get(name, ABSENT)
    is_there = isinstance(node, list) and name.isdigit() and int(name) < len(node)
    return node[int(name)] if is_there else ABSENT


def find(config: Any, key: str) -> Any:
    """Return what is at a dotted key, unresolved and without following links; ABSENT where there is nothing."""
    node = config
    for part in key.split(".") if key else []:
        node = child(node, part)
    return node


def link_of(value: Any) -> str | None:
    """Return the key that a value of the form `${key}` refers to."""
    found = _LINK.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def origin(config: Any, key: str) -> str:
    """Return the key under which the value of `key` is written.

    `module.drafter.depth` is at `drafter.depth` if the drafter is a link.
    """
    asked = key
    for _ in range(_MOST_LINKS):
        node, parts = config, key.split(".")
        for end, part in enumerate(parts, 1):
            node = child(node, part)
            link = link_of(node)
            if link is not None:
                key = ".".join([link, *parts[end:]])
                break
        else:
            return key
    raise ConfigError(f"{asked}: its references go round in a circle")


def walk(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a node and all below it, each with its key, outer ones first; what is added below meanwhile is visited."""
    yield key, node
    for name, value in entries(node):
        yield from walk(value, join(key, name))


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a node by dotted key, which begins with `above`."""
    for name, value in node.items():
        key = join(above, name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value
