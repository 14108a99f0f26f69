"""The contents of what is shipped: metadata, the wheel, pinned versions, and files that are fit to be public."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import rhymerl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAX_LINES = 400
MAX_ASSETS_BYTES = 5_000_000


def test_metadata() -> None:
    installed = metadata.metadata("rhymerl")
    assert installed["Name"] == "rhymerl"
    assert installed["License-Expression"] == "Apache-2.0"
    assert installed["Requires-Python"] == ">=3.11"
    assert (ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]


def test_version_is_written_once() -> None:
    assert rhymerl.__version__ == metadata.version("rhymerl") == PROJECT["version"]
    version = PROJECT["version"]
    assert [p.name for p in (ROOT / "rhymerl").rglob("*.py") if version in p.read_text()] == []


def test_console_script_exists() -> None:
    (script,) = (each for each in metadata.entry_points(group="console_scripts") if each.name == "rhymerl")
    assert callable(script.load())


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture
def wheel(wheel_file: Path) -> set[str]:
    """Names of the files in it."""
    return set(ZipFile(wheel_file).namelist())


def shipped(folder: str) -> set[str]:
    """Every file of a folder of this checkout, caches left out."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_holds_package_configs_and_license(wheel: set[str]) -> None:
    configs = {f"rhymerl/{name}" for name in shipped("configs")}
    assert configs, "no packaged configuration found"
    assert {"rhymerl/py.typed", *shipped("rhymerl"), *configs} <= wheel
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel)


def test_wheel_holds_nothing_else(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"rhymerl", f"rhymerl-{PROJECT['version']}.dist-info"}


COMPOSE = """
import rhymerl
from rhymerl.config import compose, packaged_names
from rhymerl.config.files import groups
compose("quickstart", ["algo=ppo"])
print(rhymerl.__file__, len(packaged_names()), sum(map(len, groups().values())))
"""


def test_configs_compose_from_the_wheel(wheel_file: Path, tmp_path: Path) -> None:
    """Outside the checkout, with nothing of the package but what the wheel holds, which are all configs."""
    ZipFile(wheel_file).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, num_configs, num_options = done.stdout.split()
    assert Path(file).parent == tmp_path / "site" / "rhymerl"
    configs = [name for name in shipped("configs") if name.endswith(".yaml")]
    assert int(num_configs) + int(num_options) == len(configs)


def test_packaged_files_are_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "rhymerl").rglob("assets/**/*") if path.is_file()]
    assert sum(sizes) <= MAX_ASSETS_BYTES


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version for name, version in pins}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["plot"]])
def test_constraints_pin_a_version_in_the_declared_range(line: str) -> None:
    requirement = Requirement(line)
    version = pinned()[canonical(requirement.name)]
    assert version in requirement.specifier
    assert "+" not in version, "a local version cannot be installed everywhere"


def test_every_pinned_version_but_torch_has_hashes_of_its_files() -> None:
    text = (ROOT / "hashes.txt").read_text()
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE
    )
    versions = {canonical(name): version for name, version, _ in entries}
    assert versions == {name: version for name, version in pinned().items() if name != "torch"}
    assert text.count("--hash") == sum(hashes.count("--hash") for *_, hashes in entries)


def test_actions_of_others_are_pinned_to_a_commit() -> None:
    used = [
        line.strip()
        for path in (ROOT / ".github").rglob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_releases_of_lightning_that_an_advisory_names_are_left_out() -> None:
    (requirement,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "lightning")
    assert not {"2.6.4", "2.6.5"} & set(requirement.specifier.filter(["2.6.4", "2.6.5", "2.6.6"]))


def public_files() -> list[Path]:
    """Return what git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if (path := ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"(?<![\w.~-])/(?:root|work|home|tmp|Users)/", id="path of a machine"),
        pytest.param(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org", id="host of a registry"),
    ],
)
def test_public_files_do_not_name(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in public_files()
        for number, line in enumerate(path.read_bytes().decode(errors="ignore").splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_no_module_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "rhymerl").rglob("*.py")}
    too_long = {path.name: length for path, length in lengths.items() if length > MAX_LINES}
    assert too_long == {}, f"above {MAX_LINES} lines, look for the missing noun"
