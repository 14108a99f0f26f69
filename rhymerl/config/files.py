"""Config files: which one a name means, what its `defaults` list builds on, and what each says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rhymerl.config.interpolation import PACKAGE
from rhymerl.config.targets import import_target, is_dotted_path
from rhymerl.config.tree import is_component
from rhymerl.errors import ConfigError, did_you_mean

_SELF = "_self_"


def packaged_directory() -> Path:
    """Return the configs that come with rhymerl: beside the package once installed, beside its folder in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def packaged_names() -> list[str]:
    """Return the names that `--config` takes."""
    return sorted(path.stem for path in packaged_directory().glob("*.yaml"))


def groups() -> dict[str, list[str]]:
    """Return the packaged groups, each with the names of its options."""
    names = sorted(path.name for path in packaged_directory().iterdir() if path.is_dir())
    return {name: known for name in names if (known := options([packaged_directory() / name]))}


def options(folders: Sequence[Path]) -> list[str]:
    """Return the names that the folders of a config group offer: the user's own folder and the packaged one."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def folders_beside(path: Path, group: str = "") -> list[Path]:
    """Return where a config file finds others by their names, or the options of a group, in the order of the search."""
    return [path.parent / group, packaged_directory() / group]


def about(path: Path) -> str:
    """Return what a config file says of itself in the comment that it begins with, without the command that uses it."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    words = first.removeprefix("#").strip() if first.startswith("#") else ""
    return words.partition(": rhymerl ")[0].rstrip(":")


def locate(name_or_path: str | Path, names: Callable[[], Sequence[str]] = packaged_names) -> Path:
    """Return the file of a packaged name or a path. Raises ConfigError, listing `names`, when there is none."""
    path = Path(name_or_path).expanduser()
    if path.suffix == ".yaml" and path.is_file():
        return path.resolve()
    if path.parent == Path() and (packaged_directory() / f"{path.name}.yaml").is_file():
        return packaged_directory() / f"{path.name}.yaml"
    known = names()
    near = nearest_file(name_or_path, known)
    raise ConfigError(
        f"--config {name_or_path}: expected the path of a .yaml file, or one of {', '.join(known)}"
        + (f"; did you mean {near}?" if near else "")
    )


def nearest_file(name_or_path: str | Path, names: Sequence[str]) -> str | None:
    """Return the nearest of the packaged `names` and of the files in the same directory; None if none is near."""
    path = Path(name_or_path).expanduser()
    beside = [str(path.with_name(each.name)) for each in path.parent.glob("*.yaml")] if path.name else []
    near = get_close_matches(str(path), [*names, *beside], n=1)
    return near[0] if near else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One file, or one option of a group.

    `choices` are the groups of its `defaults`, `order` the files there and `_self_`. `new_groups` are chosen without
    `override`.
    """

    path: Path
    order: tuple[str, ...]
    choices: Mapping[str, str | None]
    new_groups: frozenset[str]
    body: dict[str, Any]

    @property
    def is_root(self) -> bool:
        return self.order == (_SELF,)


def read_chain(path: Path, folders: Sequence[Path] = ()) -> list[ConfigFile]:
    """Return the file and all that it builds on, looked up in `folders`; later ones win."""
    return _chain(path, folders or folders_beside(path), ())


def _chain(path: Path, folders: Sequence[Path], below: tuple[Path, ...]) -> list[ConfigFile]:
    if path in below:
        raise ConfigError(f"{path}: its defaults lead back to itself; give the file another name than {path.stem}")
    file = _read(path)
    chain: list[ConfigFile] = []
    for name in file.order:
        found = path if name == _SELF else _named(name.removesuffix(".yaml"), folders)
        if found is None:
            raise ConfigError(f"{path}: defaults name {name!r}, which is neither in {folders[0]} nor packaged")
        part = [file] if name == _SELF else _chain(found, folders, (*below, path))
        chain += [each for each in part if each.path not in {c.path for c in chain}]
    for again in sorted(file.new_groups & {group for each in chain if each is not file for group in each.choices}):
        raise ConfigError(
            f"{path}: {again} is chosen already by what the file builds on; write 'override {again}: ...'"
        )
    return chain


def _named(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def _read(path: Path) -> ConfigFile:
    try:
        body: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    except YAMLError as error:
        location = getattr(error, "problem_mark", None)
        line = f" line {location.line + 1}" if location else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    defaults = body.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list such as [base, _self_]")
    order = tuple(each.lstrip("/") for each in defaults if isinstance(each, str))
    chosen = [(str(key).split(), choice) for each in defaults if isinstance(each, dict) for key, choice in each.items()]
    return ConfigFile(
        path=path,
        order=order if _SELF in order else (*order, _SELF),
        choices={words[-1].lstrip("/"): None if it is None else str(it) for words, it in chosen},
        new_groups=frozenset(words[-1].lstrip("/") for words, _ in chosen if "override" not in words),
        body=body,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one place says of the settings: a file, or the command line, which is None."""

    source: Path | None
    body: dict[str, Any]


def layers(chain: Sequence[ConfigFile], folders: Sequence[Path], chosen: Mapping[str, str | None]) -> list[Layer]:
    """Return the layers of settings, each to be merged into the earlier ones.

    `chosen` is the command line's choice. The node of a group is what the last file that chooses it says, tuned by that
    file's body and the later ones, so nothing is left over that was meant for another class. A choice on the command
    line is not tuned at all. Raises ConfigError.
    """
    of_groups: dict[str, list[Layer]] = {}
    for file in chain:
        for group, choice in file.choices.items():
            of_groups[group] = [Layer(source=file.path, body={group: choice})]
        for group in of_groups.keys() & file.body.keys():
            of_groups[group] = _tuned(group, of_groups[group], Layer(source=file.path, body={group: file.body[group]}))
    for group, choice in chosen.items():
        of_groups[group] = [Layer(source=None, body={group: choice})]
    found: list[Layer] = []
    for group, (first, *tuning) in of_groups.items():
        found += [*_of_choice(group, first, [folder / group for folder in folders]), *tuning]
    for file in chain:
        rest = {name: value for name, value in file.body.items() if name not in of_groups}
        found.append(Layer(source=file.path, body=rest))
    return found


def _tuned(group: str, present: list[Layer], layer: Layer) -> list[Layer]:
    """Return the layers with a body's changes to a group.

    A body may tune the chosen option, name a class itself (`drafter: my_module.MyDrafter` or with `_target_`), or list
    several.
    """
    value = layer.body[group]
    if not isinstance(value, dict) or is_component(value):
        return [layer]
    if isinstance(present[0].body[group], list):
        raise ConfigError(
            f"{layer.source}: {group} is a list in what the file builds on, whose items have no settings here"
        )
    return [*present, layer]


def _of_choice(group: str, layer: Layer, folders: Sequence[Path]) -> list[Layer]:
    """Return what a choice of a group stands for: the layers of an option, which is a config of its own, or a class."""
    choice = layer.body[group]
    if not isinstance(choice, str):
        return [layer]
    path = _named(choice, folders)
    if path is not None:
        of_option = layers(read_chain(path, folders), folders, {})
        empty = Layer(source=layer.source, body={group: {} if any(each.body for each in of_option) else None})
        return [*(Layer(source=each.source, body={group: each.body}) for each in of_option), empty]
    if is_dotted_path(choice):
        import_target(choice, setting=group)
        return [Layer(source=layer.source, body={group: {"_target_": choice}})]
    known = options(folders)
    raise ConfigError(
        f"{group}={choice!r}: expected one of {', '.join(known)}, or a dotted class path "
        f"such as my_module.MyClass{did_you_mean(choice, known)}"
    )
