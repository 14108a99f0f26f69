"""The update: a step's samples become optimizer steps. Mini-batch = one optimizer step, micro-batch = one backward."""

from rhymerl.update.batches import micro_batches, step_batch, total_tokens
from rhymerl.update.settings import Rates, UpdateSettings
from rhymerl.update.updater import Updater

__all__ = ["Rates", "UpdateSettings", "Updater", "micro_batches", "step_batch", "total_tokens"]
