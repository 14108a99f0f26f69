"""The differences between the settings of a run and what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

_NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting, by its dotted key."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def changes(before: Mapping[str, Any], config: DictConfig) -> list[Change]:
    """Return the settings whose values differ from `before`, a resolved config; one that only one of them has is `nothing` in the other.

    What follows another setting (`${seed}`) is left out: that one is there itself.
    """
    from omegaconf import OmegaConf

    links: list[str] = []
    now: dict[str, Any] = {}
    for key, value in leaves(OmegaConf.to_container(config), ""):  # type: ignore[arg-type]
        if isinstance(value, str) and value.startswith("${"):
            links.append(f"{key}.")
        else:
            now[key] = value
    old = {key: value for key, value in leaves(before, "") if not f"{key}.".startswith(tuple(links))}
    return [
        Change(key=key, before=old.get(key, _NOTHING), now=now.get(key, _NOTHING))
        for key in dict.fromkeys((*old, *now))
        if key not in old or key not in now or old[key] != now[key]
    ]


def leaves(node: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a node by dotted key, which begins with `above`."""
    for name, value in node.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value
