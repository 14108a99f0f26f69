"""Interfaces of rollout backends: a run starts and closes a `Backend`; `RolloutBackend` is one worker's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.history import HistoryStore
from rhymerl.types import Autocast, Completion, RolloutRequest, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.memory.base import EngineShape, Setup
    from rhymerl.memory.outline import ModelShape
    from rhymerl.models.policy import Policy

HISTORY_TOKENS = 50_000_000  # of past answers that a worker remembers at most, unless it is told otherwise


class Backend(ABC):
    """A context manager: leaving it frees the engine, and requests still in it are lost.

    The constructor takes settings only; `start` hands over what the run has.
    """

    workers_are_remote = False  # apart from the trainer's ranks
    has_servers = False  # whether its engines run already: each of them is a worker by itself then, and no rank's
    release_memory = False  # whether its engine gives weights, keys and values back for an update
    # Whether its log-probs are the update's own but for rounding: the same weights, the same precision.
    draws_exactly = False
    keeps_sets = False  # whether it tells what truncation has left at each token, `Output.kept`
    says_routes = False  # whether it tells which experts have computed each token, `Output.routes`
    max_running: int | None = None  # requests that a worker decodes side by side, where that is known
    counts_passes = False  # whether `collect` takes `max_passes`, so that ranks in lockstep repeat bit for bit
    longest_tokens: int | None = None  # of a prompt and its answer, as `check` was told
    setup: Setup | None = None  # of the update that it leaves its memory to; None: nothing is trained

    def check(self, longest_tokens: int) -> None:
        """Raise ConfigError when no sequence (prompt and answer) of so many tokens fits; called before any compute."""
        self.longest_tokens = longest_tokens

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        """Raise ConfigError for a drafter or budget that the engine cannot use as set; called before any compute."""

    def share_device(self, setup: Setup | None) -> None:
        """Take only the memory that the update leaves free on the device; called before `start`.

        `setup` describes the update; it is None if the run trains nothing.
        """
        self.setup = setup

    def memory(self, model: ModelShape, drafter: Drafter, budget: Budget | None) -> EngineShape | None:
        """Return an engine's memory on a GPU, weights included if it `owns_policy`; None if that is unknown."""
        return None

    @abstractmethod
    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        """Bring up the engine; called once on every rank, before any request.

        `budget` None is the backend's own default; `autocast` is the update's own context for forward passes. Raises
        ConfigError for a policy that cannot be run.
        """

    def words(self) -> str | None:
        """Return one line about the started engine for the run's output, or None."""
        return None

    def least_workers(self, num_workers: int) -> int:
        """Return how many workers a run needs to begin; the others may come later."""
        return num_workers

    def release(self) -> None:
        """End the stage: `start` (same policy and drafter) or `close` follows, so slow engines may stay up."""
        self.close()

    def close(self) -> None:
        """Free the engine and `close` the drafter; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()


class RolloutBackend(Backend):
    """The engine of one worker; its owner is a rank, or a worker's process that is no rank."""

    owns_policy = False  # nobody else runs the policy while there is work; set before `start`
    tensor_parallel: int = 1  # GPUs that an engine takes, where it runs on any
    copies_weights = False  # into its own memory, so that the policy itself may be in the host's

    @abstractmethod
    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. Raises ConfigError for one that could never be answered (nothing is then queued)."""

    @abstractmethod
    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        """Return completions as they finish: at least one, unless nothing is left or `timeout_s` has passed.

        With `max_passes` it returns after exactly so many passes, whatever has finished, or earlier when nothing is
        left or the time is over. An engine whose `counts_passes` is false raises ValueError for it.
        """

    @abstractmethod
    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Take back the named requests (all by default) with the tokens they have; unknown ids are ignored."""

    def ready(self) -> AbstractContextManager[None]:
        """Context of several calls of `collect`, for what each of them would do again."""
        return nullcontext()

    def forget(self, ids: Iterable[str]) -> None:
        """Drop what is kept for the next turn of these requests, which end here; unknown ids are ignored."""

    @abstractmethod
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load new weights. Requests in flight go on; their later tokens carry the new version."""

    def progress(self) -> Mapping[str, int]:
        """Return the response tokens so far of each request in flight, by id, in the order of the queue.

        At least those that the request brought along; a backend that cannot see into its engine knows no more.
        """
        return {}

    def outputs(self) -> list[Completion]:
        """Return the tokens so far of requests in flight, which go on; a backend that cannot see them has none."""
        return []

    def learn(self, samples: Sequence[Sample]) -> None:
        """Let the drafter learn from a step's scored answers, in canonical (prompt, sample) order."""

    def follow(self, history: HistoryStore) -> None:
        """Pass what is new in `history` on to the drafter; the first call after `start` passes all of it on."""

    def sleep(self) -> None:
        """Release memory, if the settings say so: nothing is in flight; an update comes before the next `submit`."""

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call by name, and reset them.

        Over ranks, ints are summed, a `Ratio` is the ratio of the sums, and other floats are averaged, weighted by
        time.
        """
        return {}
