"""SGLang's needs for each pass size: buffers, attention metadata, CUDA graphs. n = tokens of a request in a pass.

SGLang's own adaptive speculation keeps such a set for each number of steps, because CUDA graphs and attention are made
for one number of tokens a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context

from rhymerl.errors import BackendError


class PassSizes:
    """The sets of an n-gram worker, which is made for its most tokens; `sized` swaps in another set for one pass."""

    def __init__(self, worker: Any, sizes: Sequence[int]) -> None:
        self._worker = worker
        self._most = int(worker.draft_token_num)
        self._others = [n for n in sizes if n != self._most]
        self._of_worker: dict[int, dict[str, Any]] = {self._most: {}}  # attributes, by n
        self._of_runner: dict[int, dict[str, Any]] = {self._most: {}}

    def make_buffers(self) -> None:
        """Make the worker's own buffers; called once the largest size has some."""
        most = dict(vars(self._worker))
        for n in self._others:
            self._worker.draft_token_num = n
            self._worker._init_preallocated_tensors()
            own = {name: value for name, value in vars(self._worker).items() if most.get(name) is not value}
            self._of_worker[n] = own
            self._of_worker[self._most] |= {name: most[name] for name in own}
        vars(self._worker).update(self._of_worker[self._most])

    def make_runners(self) -> None:
        """Make attention metadata, and graphs if the engine has some.

        Called on all ranks once the largest size has them. Raises BackendError where attention is wrapped for other
        features, which would be lost.
        """
        runner = self._worker.model_runner
        attention, graphs = runner.attn_backend, runner.decode_cuda_graph_runner
        self._of_runner[self._most] = {"attn_backend": attention, "decode_cuda_graph_runner": graphs}
        for n in self._others:
            with self._built_for(n):
                own = runner._get_attention_backend(init_new_workspace=True)
                if type(own) is not type(attention):
                    raise BackendError(
                        f"SGLang's attention ({type(attention).__name__}) is made for passes of one size: expected budget=fixed, or no "
                        "backend.arguments that wrap it, such as enable_two_batch_overlap"
                    )
                own_graphs = graphs
                if isinstance(graphs, DecodeCudaGraphRunner):
                    own_graphs = type(graphs)(runner, attn_backend=own, speculative_num_draft_tokens=n)
            self._of_runner[n] = {"attn_backend": own, "decode_cuda_graph_runner": own_graphs}

    @contextmanager
    def _built_for(self, n: int) -> Iterator[None]:
        """Context in which SGLang's settings say `n` tokens, as its attention reads them when it is made."""
        runner = self._worker.model_runner
        new_workspace = runner.init_new_workspace
        get_context().override("rhymerl.pass_sizes", speculative_num_draft_tokens=n)
        try:
            yield
        finally:
            get_context().override("rhymerl.pass_sizes", speculative_num_draft_tokens=self._most)
            runner.init_new_workspace = new_workspace

    @contextmanager
    def sized(self, n: int) -> Iterator[None]:
        """Context of a pass of `n` tokens a request."""
        if n == self._most:
            yield
            return
        self._take(n)
        try:
            yield
        finally:
            self._take(self._most)

    def _take(self, n: int) -> None:
        vars(self._worker).update(self._of_worker[n])
        vars(self._worker.model_runner).update(self._of_runner[n])
