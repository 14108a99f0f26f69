"""Objects by their dotted names: what is found, and what is said where an import fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymerl.config.dotted_names import find
from rhymerl.config.targets import import_target
from rhymerl.errors import ConfigError


def test_modules_are_imported_as_deep_as_they_go() -> None:
    found = find("os.path.join.__name__", where="it")
    assert (found.module, found.qualname, found.target) == ("os.path", "join.__name__", "join")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there' (__init__.py:1)"),
        ("1 / 0", "ZeroDivisionError: division by zero (__init__.py:1)"),
        ("raise SystemExit(3)", "SystemExit: 3 (__init__.py:1)"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_the_first_package_on_the_way_that_cannot_be_imported_is_named(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "outer" / "failing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    (package / "inner.py").write_text("class Mine: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "outer.failing.inner.Mine"
    with pytest.raises(ConfigError) as caught:
        import_target(name, setting="drafter")
    assert str(caught.value) == f"drafter={name!r}: importing 'outer.failing' failed: {message}"
    with pytest.raises(ValueError, match=r"^function: importing 'outer\.failing' failed: "):
        find(name, where="function")


def test_ctrl_c_is_no_error_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        find("interrupted.It", where="function")
