"""Names that the trainer and the plugin agree on."""

from __future__ import annotations

VARIABLE = "RHYMERL_SGLANG"  # the path of the engine's settings (settings.py)
ALGORITHM = "RHYMERL"  # as SGLang knows the drafting worker
WIDEST = "rhymerl_widest"  # attribute of a pass: the tokens of a request in the widest one
FOLDERS = "rhymerl-sglang-"  # how the names of a backend's own folders begin
