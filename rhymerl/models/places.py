"""The places of models on a disk, checked without any library that would read them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rhymerl.errors import ConfigError, require_package

_GGUF = ".gguf"


def is_gguf(path: str) -> bool:
    """Return whether the path names a GGUF file, which may not exist, and no directory."""
    return path.lower().endswith(_GGUF) and not Path(path).expanduser().is_dir()


def check_place(path: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, for a path that is neither a model nor a name of the hub's."""
    folder = Path(path).expanduser()
    if is_gguf(path):
        check_gguf(folder, where)
    elif folder.exists():
        _check_folder(folder, where)
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{where}: no such directory")


def check_gguf(path: Path, where: str) -> None:
    """Raise ConfigError for a file that is not there, or that nothing here could read."""
    if not path.is_file():
        raise ConfigError(f"{where}: no such file")
    for package in ("gguf", "accelerate"):  # both asked for by transformers' loader
        require_package(package, f"{where}: reading it")


def _check_folder(folder: Path, where: str) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{where}: {_adapter_words(folder / 'adapter_config.json')}")
    files = ", ".join(sorted(each.name for each in folder.glob("*") if is_gguf(str(each))))
    hint = f"; name a file of it: {files}" if files else ""
    raise ConfigError(f"{where}: not a model directory (it has no config.json){hint}")


def _adapter_words(path: Path) -> str:
    with suppress(OSError, ValueError, AttributeError):
        base = json.loads(path.read_text()).get("base_model_name_or_path")
        return f"a LoRA adapter of {base!r}, not a model; merge it into that (merge_and_unload of peft), and name the merged model's directory"
    return "a LoRA adapter, not a model; merge it into its base first (merge_and_unload of peft)"
