"""Config files: which one a name means, and what its `defaults` list builds on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rhymerl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent


def packaged_directory() -> Path:
    """Return the configs that come with rhymerl: beside the package once installed, beside its folder in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def packaged_names() -> list[str]:
    """Return the names that `--config` takes."""
    return sorted(path.stem for path in packaged_directory().glob("*.yaml"))


def groups() -> dict[str, list[str]]:
    """Return the packaged groups, each with the names of its options."""
    folders = sorted(path for path in packaged_directory().iterdir() if path.is_dir())
    return {path.name: options(path.name, path.parent) for path in folders if options(path.name, path.parent)}


def about(path: Path) -> str:
    """Return what a config file says of itself in the comment that it begins with, without the command that uses it."""
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    words = first.removeprefix("#").strip() if first.startswith("#") else ""
    return words.partition(": rhymerl ")[0].rstrip(":")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One primary file: `choices` are the config groups of its `defaults`, `parents` the files named there.

    `new_groups` are chosen without `override`.
    """

    path: Path
    parents: tuple[str, ...]
    choices: dict[str, str | None]
    new_groups: frozenset[str]
    body: DictConfig

    @property
    def name(self) -> str:
        return self.path.stem


def locate(name_or_path: str | Path, names: Callable[[], Sequence[str]] = packaged_names) -> Path:
    """Return the file of a packaged name or of a path. Raises ConfigError, which tells of `names`, when there is none."""
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
    """Return what `locate` would find under the nearest name: one of `names`, packaged ones, or a file in the same directory."""
    path = Path(name_or_path).expanduser()
    beside = [str(path.with_name(each.name)) for each in path.parent.glob("*.yaml")] if path.name else []
    near = get_close_matches(str(path), [*names, *beside], n=1)
    return near[0] if near else None


def read_chain(path: Path) -> list[ConfigFile]:
    """Return the file and all that it builds on, the outermost parents first."""
    return _chain(path, path.parent, ())


def _chain(path: Path, directory: Path, below: tuple[Path, ...]) -> list[ConfigFile]:
    if path in below:
        raise ConfigError(f"{path}: its defaults lead back to itself; give the file another name than {path.stem}")
    file = _read(path)
    chain: list[ConfigFile] = []
    for parent in file.parents:
        found = _beside(parent, directory)
        if found is None:
            raise ConfigError(f"{path}: defaults name {parent!r}, which is neither in {directory} nor packaged")
        chain += [each for each in _chain(found, directory, (*below, path)) if each.path not in {c.path for c in chain}]
    for again in sorted(file.new_groups & {group for each in chain for group in each.choices}):
        raise ConfigError(
            f"{path}: {again} is chosen already by what the file builds on; write 'override {again}: ...'"
        )
    return [*chain, file]


def _beside(name: str, directory: Path) -> Path | None:
    """Hydra's order: the user's directory, then the packaged one."""
    choices = [where / f"{name.removesuffix('.yaml')}.yaml" for where in (directory, packaged_directory())]
    return next((path for path in choices if path.is_file()), None)


def _read(path: Path) -> ConfigFile:
    try:
        body = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    except YAMLError as error:
        location = getattr(error, "problem_mark", None)
        line = f" line {location.line + 1}" if location else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(body, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of settings")
    defaults = OmegaConf.to_container(OmegaConf.create(body.pop("defaults", None) or []))
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list such as [base, _self_]")
    parents = tuple(each.lstrip("/") for each in defaults if isinstance(each, str) and each != "_self_")
    groups = [(str(key).split(), choice) for each in defaults if isinstance(each, dict) for key, choice in each.items()]
    return ConfigFile(
        path=path,
        parents=parents,
        choices={words[-1].lstrip("/"): None if it is None else str(it) for words, it in groups},
        new_groups=frozenset(words[-1].lstrip("/") for words, _ in groups if "override" not in words),
        body=body,
    )


def options(group: str, directory: Path) -> list[str]:
    """Return the names that a config group offers, the user's own beside its file included."""
    found = {path.stem for where in (directory, packaged_directory()) for path in (where / group).glob("*.yaml")}
    return sorted(found)
