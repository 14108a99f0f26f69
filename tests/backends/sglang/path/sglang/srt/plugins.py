"""A stand-in for the module that loads rhymerl's plugin; here there is nothing that it could change."""

import os


def load_plugins() -> None:
    print("plugins loaded", flush=True)
    fault = os.environ.get("FAKE_FAULT")
    if "RHYMERL_SGLANG" not in os.environ or fault == "no plugin":
        return
    if fault == "other version":
        from rhymerl.backends.sglang.plugin import register

        register()
        return
    from rhymerl.backends.sglang.plugin.probe import Findings
    from rhymerl.backends.sglang.plugin.settings import EngineSettings

    EngineSettings.of_this_process().report(Findings())
