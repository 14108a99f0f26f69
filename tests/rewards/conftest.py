"""Lets the tests, and the reward processes that they start, import the reward functions next to this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
