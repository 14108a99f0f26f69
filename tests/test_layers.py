"""The layers of the package, kept by those that claim to."""

from __future__ import annotations

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rhymerl"


def declared_names(path: Path) -> list[str] | None:
    """The value of `__all__` in a file, None when it has none."""
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[union-attr]
    return None


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if declared_names(path) is not None],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_public_names_are_sorted_and_distinct(path: Path) -> None:
    names = declared_names(path) or []
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_every_module_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    placed = {name.strip(" ()") for layer in layers for name in layer.split(":")}
    found = {
        f"rhymerl.{path.stem}"
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()
    }
    assert found <= placed, "new modules need a place in the layers of pyproject.toml"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Our modules that a file names in its imports: at its top, inside functions and under TYPE_CHECKING."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(module_name(path).split(".")[: -node.level]) if node.level else ""
            home = ".".join(filter(None, [package, node.module]))
            names += [whole if (whole := f"{home}.{alias.name}") in modules else home for alias in node.names]
    return {name for name in names if name in modules} - {module_name(path)}


def test_no_imports_go_in_a_circle() -> None:
    """Wherever they stand: one that hides in a function still ties two modules to each other."""
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    imports = {name: imports_of(path, set(paths)) for name, path in paths.items()}
    assert sum(map(len, imports.values())) > 500, "the imports have been found"
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
