"""The processes that train together, and how they talk."""

from rhymerl.distributed.base import Alone, Channel, Message, Ranks

__all__ = ["Alone", "Channel", "Message", "Ranks"]
