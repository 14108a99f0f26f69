"""The version, which pyproject.toml alone says."""

from importlib.metadata import version

__version__ = version("rhymerl")
