"""The host of a worker's backend: the life of a request, from its arrival at the worker to its answer.

It is the same on a trainer's rank, which steps its host itself (`ranks`), and in a worker apart from it, which is told
by messages (`remote/host`). A request is `submit`ted and waits. `decode` hands the backend those that go first, and
takes what has ended. Others wait with what they have: behind earlier steps, for an environment's reply, or, as a draft,
for the policy that is to sample them. `withdraw` gives them back.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import Activity, SpanLog
from rhymerl.environments.episodes import Episodes
from rhymerl.errors import BackendError
from rhymerl.types import Completion, Output, Ratio, RolloutRequest
from rhymerl.workers.versions import Versions

_LOOK_S = 0.02  # between two looks at replies, while the backend works


@dataclass(slots=True, kw_only=True)
class HostJob:
    """A request that is not answered yet."""

    request: RolloutRequest
    priority: int  # the lowest goes first
    versions: Versions
    is_running: bool = False  # in the backend
    output: Output | None = None  # of one that is not
    reported: int = 0  # tokens

    def known(self) -> Output:
        """Return the tokens of one that is not in the backend."""
        return self.output or self.request.output or Output.of()

    def going_on(self) -> RolloutRequest:
        return replace(self.request, output=self.output) if self.output else self.request

    @property
    def awaits_reply(self) -> bool:
        """Return whether a turn of it has ended, whose environment has not replied."""
        return self.output is not None and self.output.finish_reason == "turn"


class Host:
    """Answers requests in the order of their priorities: steps of training by number, evaluations before them.

    `beside` is how many requests of later steps run beside those of an earlier one, None: those that run already. With
    `episodes` an answer goes on behind an environment's reply. Whoever has a host takes what has `finished` and what
    was `released` from these lists.
    """

    def __init__(
        self,
        backend: RolloutBackend | None = None,
        *,
        version: int | None = None,
        number: int = 0,
        beside: int | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.version = version  # of the policy that samples
        self.finished: list[Completion] = []
        self.released: list[Completion] = []
        self.number = number
        self.spans = SpanLog(number)
        self.busy_s = 0.0
        self._seconds: dict[Activity, float] = defaultdict(float)  # since the last `metrics`
        self._backend = backend
        self._beside = beside
        self._episodes = episodes
        self._jobs: dict[str, HostJob] = {}
        self._num_running: Counter[int] = Counter()  # in the backend, by priority
        self._is_up_to_date = True  # the backend has what is to be sampled now

    @property
    def backend(self) -> RolloutBackend:
        if self._backend is None:
            raise BackendError("a worker has been asked before it had weights")
        return self._backend

    @property
    def is_running(self) -> bool:
        return bool(self._num_running)

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to decode, or an environment may reply."""
        return self.is_running or self.num_waiting > 0 or any(map(self._may_run, self._jobs.values()))

    @property
    def num_waiting(self) -> int:
        """Return how many episodes wait for a reply of their environment."""
        return self._episodes.num_waiting if self._episodes is not None else 0

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call, and reset them."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        if self._episodes is None:
            return self.backend.metrics()
        idle_frac = Ratio(seconds["environment"], seconds["environment"] + seconds["decode"])
        return {**self.backend.metrics(), "environment/idle_frac": idle_frac}

    def _note(self, activity: Activity, number: int, started: float) -> float:
        """Note what has just ended; returns how long it took."""
        seconds = time.perf_counter() - started
        self._seconds[activity] += seconds
        self.spans.note(activity, number, seconds=seconds)
        return seconds

    # -- what it is told ---------------------------------------------------------------------------------------------

    def renew(self, version: int, load: Callable[[], RolloutBackend]) -> None:
        """Go on under a new policy, which `load` brings to the backend.

        Answers that are to be its own alone begin again, along what they have as drafts.
        """
        redone = [job for job in self._jobs.values() if job.versions.final <= version and self._is_draft(job)]
        self._take_out([job for job in redone if job.is_running])
        self._end_sessions(redone)
        for job in redone:
            if job.output:
                job.request = replace(job.request, prefetched=job.output.token_ids, output=None)
            job.output, job.reported = None, 0
        started = time.perf_counter()
        self._backend = load()
        self.version, self._is_up_to_date = version, False
        self._note("weights", version, started)

    def submit(self, requests: Iterable[RolloutRequest], *, priority: int, versions: Versions) -> None:
        """Take requests on, in this order and behind all of a lower priority; one that has its whole answer is done."""
        for request in requests:
            if request.id in self._jobs:
                raise BackendError(f"a worker has been given {request.id} twice")
            self._is_up_to_date = False
            job = self._jobs[request.id] = HostJob(request=request, priority=priority, versions=versions)
            if request.output is not None and request.output.finish_reason != "withdrawn":
                self._leave(job, request.output)

    def withdraw(self, names: Iterable[str]) -> None:
        """Give these requests back, if they are here and not answered: `released` has them, with their tokens."""
        jobs = [self._jobs[name] for name in names if name in self._jobs]
        self._take_out([job for job in jobs if job.is_running])
        self._end_sessions(jobs)
        for job in jobs:
            if self._jobs.pop(job.request.id, None) is not None:  # else it has ended meanwhile
                self._is_up_to_date = False
                self.released.append(Completion(request=job.request, output=job.known()))

    # -- decoding ----------------------------------------------------------------------------------------------------

    def decode(self, timeout_s: float | None = None, max_passes: int | None = None) -> None:
        """Let the backend work for a while on what goes first: without limits until a request has ended for good."""
        until = inf if timeout_s is None else time.perf_counter() + timeout_s
        if not self._has_next(timeout_s):
            return
        with self.backend.ready():
            self._collect(timeout_s, max_passes)
            while max_passes is None and not self.finished and (left := until - time.perf_counter()) > 0:
                left_s = None if timeout_s is None else left
                if not self._has_next(left_s):
                    return
                self._collect(left_s)

    def _has_next(self, timeout_s: float | None) -> bool:
        """Return whether the backend has something to decode, once replies that are there are behind their turns."""
        self._take_replies(timeout_s)
        self.submit_waiting()
        return self.is_running

    def _collect(self, timeout_s: float | None, max_passes: int | None = None) -> None:
        """Let the backend work until a request has ended, or a turn of one, and keep that."""
        if self.num_waiting:
            timeout_s = _LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)
        priority, started = min(self._num_running), time.perf_counter()
        found = self.backend.collect(timeout_s, max_passes=max_passes)
        seconds = self._note("decode", priority, started)
        self.busy_s += seconds
        is_over = timeout_s is not None and seconds >= timeout_s
        if not found and not is_over and self._are_lost(is_limited=timeout_s is not None or max_passes is not None):
            raise BackendError(f"{type(self.backend).__name__} lost {self._num_running.total()} requests")
        for completion in found:
            self._take(completion)

    def _are_lost(self, *, is_limited: bool) -> bool:
        """Return whether the backend has nothing left, though nothing has ended; False if it does not tell."""
        sees = type(self.backend).progress is not RolloutBackend.progress
        return not is_limited or (sees and not self.backend.progress())

    def submit_waiting(self) -> None:
        """Submit to the backend what is to be sampled now, after earlier requests and ahead of later ones."""
        if self._is_up_to_date:
            return
        self._is_up_to_date = True
        if len(self._jobs) == self._num_running.total():
            return
        ready = [job for job in self._jobs.values() if job.is_running or self._may_run(job)]
        if not ready:
            return
        ready.sort(key=lambda job: job.priority)
        num_first = sum(job.priority == ready[0].priority for job in ready)
        beside = sum(job.is_running for job in ready[num_first:]) if self._beside is None else self._beside
        chosen = ready[: num_first + beside]
        fresh = [job for job in chosen if not job.is_running]
        if not fresh:
            return
        self._take_out([job for job in ready if job.is_running and job.priority > fresh[0].priority])
        jobs = [job for job in chosen if not job.is_running and self._may_run(job)]
        requests = [job.going_on() for job in jobs]
        self.backend.submit(requests if self._episodes is None else list(map(self._episodes.next_turn, requests)))
        for job in jobs:
            job.is_running = True
            self._num_running[job.priority] += 1

    def _may_run(self, job: HostJob) -> bool:
        # An answer that awaits a reply waits, and a whole draft does, for its policy.
        waits = job.output is not None and job.output.finish_reason != "withdrawn"
        return self.version is not None and job.versions.oldest <= self.version and not waits

    def _is_draft(self, job: HostJob) -> bool:
        """Return whether what the present policy samples of this job is a draft, along which the final one samples."""
        return self.version is not None and self.version < job.versions.final

    def _take_out(self, jobs: Sequence[HostJob]) -> None:
        """Withdraw running requests from the backend; those that have ended are done."""
        names = [job.request.id for job in jobs]
        for completion in self.backend.withdraw(names) if names else []:
            self._take(completion)

    def _take(self, completion: Completion) -> None:
        """Keep what there is of a request that has left the backend."""
        job = self._jobs.get(completion.request.id)
        if job is None or not job.is_running:
            name = type(self.backend).__name__
            raise BackendError(f"{name} gave the answer to {completion.request.id} twice, or unasked")
        job.is_running, self._is_up_to_date = False, False
        self._num_running[job.priority] -= 1
        if not self._num_running[job.priority]:
            del self._num_running[job.priority]
        output = self.whole(job, completion.output)
        self._leave(job, output if self._episodes is None else self._episodes.after_turn(job.request, output))

    def _leave(self, job: HostJob, output: Output) -> None:
        """An answer has finished, or waits for its environment, and a draft of one waits for its policy."""
        job.output = output
        if self._episodes is not None and job.awaits_reply:
            self._episodes.ask(job.request, output)
        if output.is_finished and not self._is_draft(job):
            del self._jobs[job.request.id]
            self._end_sessions([job])
            self.finished.append(Completion(request=job.request, output=output))

    # -- environments ------------------------------------------------------------------------------------------------

    @staticmethod
    def whole(job: HostJob, output: Output) -> Output:
        """Return what the backend has of a request, with what only the host knows of it: turns, and parts before."""
        known = job.output or job.request.output
        if known is None or not known.turns:
            return output
        start = Host._begun(job)
        return replace(known[:start].followed_by(output) if start else output, turns=known.turns)

    @staticmethod
    def _begun(job: HostJob) -> int:
        """Return where the segment begins that the backend has of an answer."""
        return job.known().segments(job.request.prompt.token_ids)[-1].start

    def progress(self) -> dict[str, int]:
        """Return how many tokens there are of the answers in the backend, by request id."""
        return {name: tokens + self._begun(self._jobs[name]) for name, tokens in self.backend.progress().items()}

    def _take_replies(self, timeout_s: float | None) -> None:
        """Let answers go on to which there is a reply; wait for one only where there is nothing else to do."""
        if self._episodes is None or not self.num_waiting:
            return
        is_idle = not self.is_running and not any(map(self._may_run, self._jobs.values()))
        started = time.perf_counter()
        replied = self._episodes.replied(timeout_s if is_idle else 0.0)
        if is_idle or self._episodes.lockstep:
            self._note("environment", min(job.priority for job in self._jobs.values() if job.awaits_reply), started)
        for name, output in replied:
            self._is_up_to_date = False
            self._leave(self._jobs[name], output)

    def _end_sessions(self, jobs: Iterable[HostJob]) -> None:
        """These episodes are over, or go on elsewhere: neither environment nor backend keeps anything of them."""
        if self._episodes is not None:
            names = [job.request.id for job in jobs if job.known().turns or job.awaits_reply]
            self._episodes.forget(names)
            if self._backend is not None:
                self._backend.forget(names)
