"""Procedural tasks: endless problems with exact rewards, and their demonstrations."""

from rhymerl.tasks.addition import Addition
from rhymerl.tasks.base import Row, Task, TaskSplit, split_of
from rhymerl.tasks.calculation import Calculation
from rhymerl.tasks.checked_sum import CheckedSum
from rhymerl.tasks.long_sum import LongSum
from rhymerl.tasks.running_sum import RunningSum

__all__ = ["Addition", "Calculation", "CheckedSum", "LongSum", "Row", "RunningSum", "Task", "TaskSplit", "split_of"]
