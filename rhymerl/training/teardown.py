"""The end of a fit that fails."""

from __future__ import annotations

from typing import Any

import lightning as L

AFTER_EXCEPTION = "exception"  # the stage of a teardown that Lightning does not call itself


class TeardownOnException(L.Callback):
    """Tells the module which error ends the fit and calls its `teardown`: Lightning does not after an exception."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        module: Any = pl_module
        module.fail(exception)
        module.teardown(AFTER_EXCEPTION)
