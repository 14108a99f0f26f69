"""The policy's earlier answers: the store that owns them, and the records that its readers follow."""

from rhymerl.history.records import Answer, HistoryDelta, PromptChange
from rhymerl.history.store import NO_VERSION, HistoryStore

__all__ = ["NO_VERSION", "Answer", "HistoryDelta", "HistoryStore", "PromptChange"]
