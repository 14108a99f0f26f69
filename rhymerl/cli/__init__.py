"""The command line: `rhymerl COMMAND --config NAME|PATH key=value ...`."""

from rhymerl.cli.program import main

__all__ = ["main"]
