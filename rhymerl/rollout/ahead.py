"""The scoring of answers to the next step, which end while the policy is trained."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rhymerl.rewards import RewardScorer
from rhymerl.types import Completion, IntArray, Output
from rhymerl.workers import Workers

_LOOK_S = 0.05  # between two looks at what has ended


class ScoringAhead:
    """Lets reward processes begin with answers to the next step, in a thread of its own.

    From `start` to `stop` the scorer is the thread's alone. There is no thread where workers do not work ahead, or no
    reward has a process.
    """

    def __init__(self, workers: Workers, scorer: RewardScorer, decode: Callable[[IntArray], str]) -> None:
        self._workers = workers
        self._scorer = scorer
        self._decode = decode
        self._texts: dict[str, tuple[Output, str]] = {}  # by request id
        self._error: Exception | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, or go on after an evaluation."""
        if self._workers.works_ahead and self._scorer.begins:
            self._over.clear()
            self._thread = threading.Thread(target=self._run, name="scoring-ahead", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Leave the scorer to the caller. Raises what has ended the thread before."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Leave the scorer to the caller, whatever has happened; may be called twice."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def text(self, completion: Completion) -> str:
        """Return an answer's text, which may be known already."""
        output, text = self._texts.pop(completion.request.id, (None, ""))
        return text if output is completion.output else self._decode(completion.output.conversation().token_ids)

    def forget(self) -> None:
        """Forget what has begun for another step: this one has its answers."""
        self._texts.clear()
        self._scorer.forget()

    def _run(self) -> None:
        try:
            while not self._over.wait(_LOOK_S):
                for completion in self._workers.ended_ahead():
                    text = self._decode(completion.output.conversation().token_ids)
                    self._texts[completion.request.id] = completion.output, text
                    request = completion.request
                    self._scorer.begin(request.id, text, request.prompt.columns, completion)
                self._scorer.poll()
        except Exception as error:  # noqa: BLE001 - `stop` raises it
            self._error = error
