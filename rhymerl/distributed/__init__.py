"""The processes that train together, and how they talk."""

from rhymerl.distributed.base import Alone, Line, Parcel, Ranks

__all__ = ["Alone", "Line", "Parcel", "Ranks"]
