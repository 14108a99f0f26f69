"""Composition itself: files by Hydra, groups as whole nodes, then overrides, defaults and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from rhymerl.config.annotations import is_component, wants_component
from rhymerl.config.files import PACKAGE, ConfigFile, locate, options, packaged_directory, read_chain
from rhymerl.config.nodes import origin, settle
from rhymerl.config.overrides import Override, apply, parse
from rhymerl.config.packages import package_file
from rhymerl.config.schema import check, expand, kinds_by_key
from rhymerl.config.targets import did_you_mean, import_target, is_dotted_path
from rhymerl.errors import ConfigError

Choices = dict[str, str | None]

_LOADED = "_options_"  # where options are loaded to


def build(name_or_path: str | Path, overrides: Sequence[str]) -> DictConfig:
    """See `rhymerl.config.compose`."""
    chain = read_chain(locate(name_or_path))
    directory = chain[-1].path.parent
    chosen, values = _split(parse(overrides), chain)
    with _own_hydra(chain[-1]):
        config = _compose_files(chain, chosen, directory)
        _apply_all(config, values)
        settle(config)
    check(config, _root(chain))
    OmegaConf.set_struct(config, True)
    return config


def _split(overrides: Sequence[Override], chain: Sequence[ConfigFile]) -> tuple[Choices, list[Override]]:
    """Split choices of groups from values."""
    groups = {group for file in chain for group in file.choices}
    groups |= {str(name) for file in chain for name in file.body if (packaged_directory() / str(name)).is_dir()}
    chosen: Choices = {}
    values: list[Override] = []
    for override in overrides:
        if override.key in groups and isinstance(override.value, str | None) and not override.is_removal:
            chosen[override.key] = override.value
        else:
            values.append(override)
    return chosen, values


def _apply_all(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Apply the changes that name a class before all others, which are then about the new class; these keep their order."""
    named = [each for each in overrides if _names_a_class(each)]
    for override in named:
        apply(config, override)
    expand(config)
    others = [each for each in overrides if not _names_a_class(each)]
    wanted = kinds_by_key(config) if others else {}
    paths = [each for each in others if _is_class_path(each, wanted.get(origin(config, each.key), []))]
    for override in [*paths, *(each for each in others if each not in paths)]:
        apply(config, override)
        expand(config)


def _names_a_class(override: Override) -> bool:
    return override.key.endswith("._target_") or is_component(override.value)


def _is_class_path(override: Override, kinds: Sequence[Any]) -> bool:
    value = override.value
    is_path = isinstance(value, str) and is_dotted_path(value)
    return is_path and any(wants_component(value, kind) for kind in kinds)


def _root(chain: Sequence[ConfigFile]) -> DictConfig:
    """The files that build on no other one are the schema of the rest."""
    root = OmegaConf.merge(*(file.body for file in chain if not file.parents))
    assert isinstance(root, DictConfig)
    for group in {group for file in chain for group in file.choices}:
        root[group] = None
    return root


def _compose_files(chain: Sequence[ConfigFile], chosen: Choices, directory: Path) -> DictConfig:
    """Return the files' bodies, with the node of every group before them.

    A node is what the last file that chooses says, tuned by that file's body and the later ones, so nothing that was
    meant for another class is left over. A choice on the command line is not tuned at all.
    """
    choices, tuned = _choices(chain)
    choices |= chosen
    tuned |= {group: [] for group in chosen}
    _check_choices(choices, directory)
    packaged = {
        group: name for group, name in choices.items() if name is not None and name in options(group, directory)
    }
    in_files = sorted({group for file in chain for group in file.choices})
    config = _hydra(chain[-1].name, [*(f"~{group}" for group in in_files), *_placed(packaged)], directory)
    loaded = config.pop(_LOADED, {})
    nodes: dict[str, Any] = {}
    for group, choice in choices.items():
        node = loaded.get(group) if group in packaged else None if choice is None else {"_target_": choice}
        is_list = any(isinstance(each, list) for each in tuned[group])
        merged = tuned[group][0] if is_list else OmegaConf.merge(node or {}, *tuned[group])
        nodes[group] = merged if node or tuned[group] else None
    return OmegaConf.create(nodes | {name: config._get_node(name) for name in config if name not in nodes})


def _placed(options_by_group: Mapping[str, str]) -> list[str]:
    """Return Hydra's overrides that load an option of each group, all below one key."""
    return [f"+{group}@{_LOADED}.{group}={option}" for group, option in options_by_group.items()]


def _hydra(name: str, overrides: Sequence[str], directory: Path) -> DictConfig:
    packaged = str(packaged_directory()).replace("\\", "\\\\").replace("'", "\\'")
    search = [f"hydra.searchpath=['file://{packaged}']"] if directory != packaged_directory() else []
    try:
        with initialize_config_dir(config_dir=str(directory), version_base="1.3"):
            config = hydra_compose(name, overrides=[*search, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from error
    OmegaConf.set_struct(config, False)
    return config


def _choices(chain: Sequence[ConfigFile]) -> tuple[Choices, dict[str, list[Any]]]:
    """Return the option of each group, and what bodies say about it from there on."""
    choices: Choices = {}
    tuned: dict[str, list[Any]] = {}
    for file in chain:
        for group in [*file.choices, *(each for each in choices if each not in file.choices)]:
            if group in file.choices:
                choices[group], tuned[group] = file.choices[group], []
            if group in file.body:
                _read_body(file, group, choices, tuned)
    return choices, tuned


def _read_body(file: ConfigFile, group: str, choices: Choices, tuned: dict[str, list[Any]]) -> None:
    """A body may tune the chosen option, name a class itself (`drafter: my_module.MyDrafter` or with `_target_`), or list several."""
    body = OmegaConf.to_container(OmegaConf.create({"it": file.body._get_node(group)}))["it"]  # type: ignore[call-overload,index]
    if body is None or isinstance(body, str):
        choices[group], tuned[group] = body, []
    elif is_component(body) or isinstance(body, list):
        choices[group], tuned[group] = None, [body]
    elif any(isinstance(each, list) for each in tuned[group]):
        raise ConfigError(
            f"{file.path}: {group} is a list in what the file builds on, whose items have no settings here"
        )
    else:
        tuned[group].append(body)


def _check_choices(choices: Choices, directory: Path) -> None:
    for group, choice in choices.items():
        known = options(group, directory)
        if choice is None or choice in known:
            continue
        if is_dotted_path(choice):
            import_target(choice, setting=group)
            continue
        raise ConfigError(
            f"{group}={choice!r}: expected one of {', '.join(known)}, or a dotted class path "
            f"such as my_module.MyClass{did_you_mean(choice, known)}"
        )


@contextmanager
def _own_hydra(file: ConfigFile) -> Iterator[None]:
    """Hydra's global state and OmegaConf's resolvers are as before afterwards, whatever program calls this."""
    instances, resolvers = Singleton._instances, dict(BaseContainer._resolvers)
    Singleton._instances = {kind: it for kind, it in instances.items() if kind in (ConfigStore, Plugins)}
    try:
        OmegaConf.register_new_resolver("asset", _asset, replace=True)
        OmegaConf.register_new_resolver("package", package_file, replace=True)
        OmegaConf.register_new_resolver("config_name", lambda: file.name, replace=True)
        yield
    finally:
        Singleton._instances = instances
        BaseContainer._resolvers = resolvers


def _asset(name: str) -> str:
    """Return the path of a directory that comes with rhymerl."""
    path = PACKAGE / "assets" / name
    if not path.exists():
        known = [each.name for each in path.parent.glob("*")]
        raise ValueError(f"no asset {name!r}; there are {', '.join(sorted(known)) or 'none'}")
    return str(path)
