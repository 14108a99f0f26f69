"""Configuration: YAML and overrides in, checked settings and built components out.

    compose(name_or_path, overrides) -> settings -> instantiate(settings.module) -> objects
    describe(object) -> plain containers that `instantiate` takes

A component is a class whose constructor is its schema: typed arguments, defaults that run, no `**kwargs`, each kept as
an attribute of the same name. It does not know where it stands in a config: its ValueError begins with the name of an
argument, and becomes a ConfigError that begins with the setting's path here. What needs OmegaConf is imported when
first used.
"""

from typing import TYPE_CHECKING

from rhymerl.config.components import construct, describe, instantiate, plain
from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.config.composition import compose
    from rhymerl.config.files import packaged_names
    from rhymerl.config.output import recorded, resolved, save_config, with_names

__all__ = [
    "compose",
    "construct",
    "describe",
    "instantiate",
    "packaged_names",
    "plain",
    "recorded",
    "resolved",
    "save_config",
    "with_names",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
