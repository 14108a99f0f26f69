"""What the policy answered before: the store that owns it, and the records that its readers follow."""

from rhymerl.history.records import Answer, HistoryDelta, PromptChange
from rhymerl.history.store import HistoryStore

__all__ = ["Answer", "HistoryDelta", "HistoryStore", "PromptChange"]
