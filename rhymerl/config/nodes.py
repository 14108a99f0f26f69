"""Walking a composed config without resolving it: where a value is written, what links to what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from rhymerl.errors import ConfigError

_LINK = re.compile(r"\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*\}")
_MOST_LINKS = 32


def join(key: str, name: object) -> str:
    """A dotted key one level down."""
    return f"{key}.{name}" if key else str(name)


def entries(node: DictConfig | ListConfig) -> list[Any]:
    """Return the keys of a mapping, the indices of a list; none of a container that is null, missing or a link."""
    content = node._content
    if isinstance(content, dict):
        return list(content)
    return list(range(len(content))) if isinstance(content, list) else []


def child(node: Any, name: Any) -> Any:
    """Return the node below, unresolved; None where there is none."""
    content = node._content if isinstance(node, DictConfig | ListConfig) else None
    if isinstance(content, list):
        return content[int(name)] if str(name).isdigit() and int(name) < len(content) else None
    return content.get(name) if isinstance(content, dict) else None


def find(config: DictConfig, key: str) -> Any:
    """Return the node at a dotted key, unresolved and without following links; None where there is none."""
    node: Any = config
    for part in key.split(".") if key else []:
        node = child(node, part)
    return node


def link_of(node: Any) -> str | None:
    """Return the key that a value of the form `${key}` refers to."""
    value = node._value() if node is not None else None
    found = _LINK.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def origin(config: DictConfig, key: str, *, follow_last: bool = True) -> str:
    """Return the key under which the value of `key` is written: `module.drafter.depth` is at `drafter.depth` if the drafter is a link.

    Without `follow_last`, a link at the very end stays: an override replaces it.
    """
    asked = key
    for _ in range(_MOST_LINKS):
        parts = key.split(".")
        for end in range(1, len(parts) + (1 if follow_last else 0)):
            link = link_of(find(config, ".".join(parts[:end])))
            if link is not None:
                key = ".".join([link, *parts[end:]])
                break
        else:
            return key
    raise ConfigError(f"{asked}: its references go round in a circle")


def containers(config: DictConfig) -> Iterator[tuple[str, DictConfig | ListConfig]]:
    """Yield every mapping and list with its key, outer ones first; what is added to one meanwhile is visited too."""
    waiting: list[tuple[str, DictConfig | ListConfig]] = [("", config)]
    while waiting:
        key, node = waiting.pop(0)
        yield key, node
        for name in entries(node):
            below = child(node, name)
            if isinstance(below, DictConfig | ListConfig) and link_of(below) is None:
                waiting.append((join(key, name), below))


def components(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield every node with a `_target_`, with its key."""
    for key, node in containers(config):
        if isinstance(node, DictConfig) and "_target_" in entries(node):
            yield key, node


@contextmanager
def environment_named() -> Iterator[None]:
    """Context in which `${oc.env:NAME}` stands for itself: what an environment variable holds may be a key."""
    resolvers = dict(BaseContainer._resolvers)
    OmegaConf.register_new_resolver("oc.env", lambda *words: f"${{oc.env:{','.join(words)}}}", replace=True)
    try:
        yield
    finally:
        BaseContainer._resolvers = resolvers


def settle(config: DictConfig) -> None:
    """Replace every interpolation but the links by its value, so that nothing depends on the clock any more.

    Text out of the environment stays named, wherever it comes through; it has to be there all the same.
    """
    for key, node in containers(config):
        for name in entries(node):
            below = child(node, name)
            if below is None or not below._is_interpolation() or link_of(below) is not None:
                continue
            try:
                value = node[name]
                with environment_named():
                    is_from_environment = isinstance(value, str) and node[name] != value
            except OmegaConfBaseException as error:
                raise ConfigError(f"{join(key, name)}={below._value()!r}: {_first_line(error)}") from error
            if is_from_environment:
                continue
            node[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def value_at(config: DictConfig, key: str) -> Any:
    """Return the value in plain containers, references resolved; `???` where it is missing. Raises ConfigError."""
    node = find(config, key)
    try:
        if not isinstance(node, DictConfig | ListConfig):
            return None if node is None else node._dereference_node()._value()
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
