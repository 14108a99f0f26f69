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

from rhymerl.config.dotted_names import is_dotted
from rhymerl.config.interpolation import PACKAGE
from rhymerl.config.targets import import_target
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


def read_chain(path: Path, folders: Sequence[Path] = (), above: tuple[Path, ...] = ()) -> list[ConfigFile]:
    """Return the file, which those `above` build on, and all that it builds on, looked up in `folders`; later ones win.

    Raises ConfigError.
    """
    if path in above:
        raise ConfigError(f"{path}: its defaults lead back to itself; give the file another name than {path.stem}")
    folders = folders or folders_beside(path)
    file = _read(path)
    chain: list[ConfigFile] = []
    for name in file.order:
        found = path if name == _SELF else _named(name.removesuffix(".yaml"), folders)
        if found is None:
            raise ConfigError(f"{path}: defaults name {name!r}, which is neither in {folders[0]} nor packaged")
        part = [file] if name == _SELF else read_chain(found, folders, (*above, path))
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
    groups = dict.fromkeys([*(group for file in chain for group in file.choices), *chosen])
    said = [Layer(source=file.path, body=dict(body)) for file in chain for body in (file.choices, file.body)]
    said.append(Layer(source=None, body=dict(chosen)))
    found: list[Layer] = []
    for group in groups:
        of_group = [Layer(source=each.source, body={group: each.body[group]}) for each in said if group in each.body]
        found += _of_group(group, of_group, [folder / group for folder in folders])
    for file in chain:
        rest = {name: value for name, value in file.body.items() if name not in groups}
        found.append(Layer(source=file.path, body=rest))
    return found


def _of_group(group: str, said: Sequence[Layer], folders: Sequence[Path]) -> list[Layer]:
    """Return the layers of a group's node by all that is said of it: the last choice, and what tunes that.

    A choice is the name of an option, which is a config of its own, a class, a node with its class, or a list.
    """
    bodies = [each.body[group] for each in said]
    last = max(index for index, body in enumerate(bodies) if not isinstance(body, dict) or is_component(body))
    choice, source, tuning = bodies[last], said[last].source, said[last + 1 :]
    if isinstance(choice, list) and tuning:
        raise ConfigError(
            f"{tuning[0].source}: {group} is a list in what the file builds on, whose items have no settings here"
        )
    if not isinstance(choice, str):
        return [*said[last:]]
    path = _named(choice, folders)
    if path is not None:
        of_option = layers(read_chain(path, folders), folders, {})
        empty = Layer(source=source, body={group: {} if any(each.body for each in of_option) else None})
        return [*(Layer(source=each.source, body={group: each.body}) for each in of_option), empty, *tuning]
    if is_dotted(choice):
        import_target(choice, setting=group)
        return [Layer(source=source, body={group: {"_target_": choice}}), *tuning]
    known = options(folders)
    raise ConfigError(
        f"{group}={choice!r}: expected one of {', '.join(known)}, or a dotted class path "
        f"such as my_module.MyClass{did_you_mean(choice, known)}"
    )
