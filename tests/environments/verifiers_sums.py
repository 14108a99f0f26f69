"""A taskset for verifiers: sums, with a tool that adds."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.messages[-1].content or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(40):
            prompt = f"What is {number} + 5?"
            yield Sum(SumData(prompt=prompt, system_prompt="Be brief.", answer=str(number + 5)), self.config.task)


if __name__ == "__main__":
    Adder.run()
