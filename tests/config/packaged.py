"""The packaged configs as every machine can compose them."""

from __future__ import annotations

from omegaconf import DictConfig

from rhymerl.config import compose

FETCHED = {"smollm2"}  # whose model lies in a package that only `make pretrained` brings


def composed(name: str) -> DictConfig:
    """A packaged config; one that needs a fetched model without it."""
    return compose(name, ["model.path=model.gguf"] if name in FETCHED else [])
