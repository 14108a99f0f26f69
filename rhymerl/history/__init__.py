"""What the policy answered before: the store that owns it, and the records that its readers follow."""

from rhymerl.history.records import Answer, HistoryDelta, PromptChange
from rhymerl.history.store import NO_VERSION, HistoryStore

__all__ = ["NO_VERSION", "Answer", "HistoryDelta", "HistoryStore", "PromptChange"]
