"""The packaged configs as every machine can compose them."""

from __future__ import annotations

from omegaconf import DictConfig

from rhymerl.config import compose
from rhymerl.config.files import packaged_directory

# Whose model lies in a package that only `make pretrained` brings.
FETCHED = {path.stem for path in packaged_directory().glob("*.yaml") if "${package:" in path.read_text()}


def composed(name: str) -> DictConfig:
    """A packaged config; one that needs a fetched model without it."""
    return compose(name, ["model.path=model.gguf"] if name in FETCHED else [])
