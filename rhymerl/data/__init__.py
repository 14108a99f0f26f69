"""Prompts: read rows, encode them once, deal them out in an order that a resumed run continues.

Names are imported when first used: rows are looked at before anything heavy is loaded.
"""

from typing import TYPE_CHECKING

from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.data.base import LocatedRow, PromptBatch
    from rhymerl.data.datamodule import PromptDataModule
    from rhymerl.data.encoding import LengthLimits, PromptEncoder, encode_rows
    from rhymerl.data.loader import PromptLoader
    from rhymerl.data.prompts import PromptSource
    from rhymerl.data.sources import read_rows

__all__ = [
    "LengthLimits",
    "LocatedRow",
    "PromptBatch",
    "PromptDataModule",
    "PromptEncoder",
    "PromptLoader",
    "PromptSource",
    "encode_rows",
    "read_rows",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
