"""An engine from its start to its end: its process, its weights, what is in flight, and the news of its drafter."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rhymerl.backends.sglang import arguments, weights
from rhymerl.backends.sglang.client import Client
from rhymerl.backends.sglang.counters import Counters
from rhymerl.backends.sglang.flights import Flight, Flights
from rhymerl.backends.sglang.group import WeightGroup
from rhymerl.backends.sglang.news import News, NewsWriter
from rhymerl.backends.sglang.place import Place
from rhymerl.backends.sglang.plugin import VARIABLE
from rhymerl.backends.sglang.proof import prove
from rhymerl.backends.sglang.server import Server, require_sglang
from rhymerl.backends.sglang.settings import COUNTERS, NEWS, EngineSettings
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.run_ahead import listens
from rhymerl.engine.support import refuse_impossible
from rhymerl.errors import BackendError, ConfigError
from rhymerl.folders import open_folder
from rhymerl.history import NO_VERSION, HistoryStore
from rhymerl.policy import DTYPES
from rhymerl.types import Completion, Ratio, RolloutRequest, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.policy import Policy

ALGORITHM = "RHYMERL"  # as the plugin registers it
_LOOK_S = 0.2  # how often to see whether the engine is alive while nothing comes back
_DYING_S = 2.0  # from a broken connection to the end of the process
_SENT = 4  # times max_running requests are with the engine, so that its own queue never runs dry
_NO_WEIGHTS = -1  # instead of a policy version


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """See SGLangBackend; `n` tokens a request and pass, its last one among them."""

    n: int
    max_running: int
    dtype: str | None
    tensor_parallel: int
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    weights: Literal["auto", "tensor", "disk", "distributed"]
    restarts: int
    release_memory: bool
    folder: str | None  # where the session makes its own
    start_timeout_s: float
    place: Place


class Session:
    """`client` is the way to a server that runs already; without one a server is started, and ended by `close`."""

    def __init__(self, settings: SessionSettings, policy: Policy, drafter: Drafter, *, client: Client | None) -> None:
        self.settings = settings
        self.policy = policy
        self.drafter = drafter
        self.folder = Path(tempfile.mkdtemp(prefix="rhymerl-sglang-", dir=_opened(settings)))
        in_memory = weights.shared_folder(self.folder, policy.model, copies=settings.place.num_here)
        self.weights_folder = self.folder / "weights" if settings.folder is not None else in_memory
        self.version = _NO_WEIGHTS  # of the weights in the engine
        self._server: Server | None = None
        self._news: NewsWriter | None = None
        self._counters: Counters | None = None
        self._history: HistoryStore | None = None
        self._followed = NO_VERSION
        self._group: WeightGroup | None = None
        self._restarts_left = settings.restarts
        self._is_resting = False
        self._landed: list[Completion] = []  # ended while they were being taken back
        self._reported_s = time.monotonic()
        try:
            weights.write_config(policy.model, self.weights_folder)
            self.client = client or self._started()
            self.client.get("/health")
            self._flights = Flights(self.client, n=settings.n, max_sent=_SENT * settings.max_running)
        except BaseException:
            self._end()
            raise

    # -- the engine's process --------------------------------------------------------------------------------------

    def _started(self) -> Client:
        require_sglang()
        file = EngineSettings.of(self.drafter, self.folder).open()
        self._counters = Counters(self.folder / COUNTERS)
        shutil.rmtree(self.folder / NEWS, ignore_errors=True)
        self._news = NewsWriter(self.folder / NEWS)
        self._followed = NO_VERSION
        words = arguments.words(
            model_path=str(self.weights_folder),
            dtype=self._dtype,
            n=self.settings.n,
            max_running=self.settings.max_running,
            tensor_parallel=self.settings.tensor_parallel,
            algorithm=ALGORITHM,
            context_tokens=weights.positions(self.policy.model),
            more={"load_format": "dummy", "sleep_on_idle": True, **self._device(), **self.settings.arguments},
        )
        environment = {VARIABLE: str(file), **self.settings.environment}
        self._server = Server(words, environment, self.folder / "engine.log")
        self._server.wait_until_ready(self.settings.start_timeout_s)
        EngineSettings.check_report(self.folder)
        return self._server.client

    @property
    def _dtype(self) -> str:
        """The engine's: it has no float64."""
        own = next(name for name, dtype in DTYPES.items() if dtype == self.policy.model.dtype)
        return self.settings.dtype or ("float32" if own == "float64" else own)

    def _device(self) -> dict[str, Any]:
        device = self.policy.model.device
        more = {"enable_memory_saver": True} if self.settings.release_memory else {}
        return {"device": "cpu"} if device.type == "cpu" else {"base_gpu_id": device.index or 0, **more}

    def _restart(self) -> None:
        """A new engine with the weights of the old one; what was in flight is sent again from where it was last sent."""
        assert self._server is not None
        self._leave_group()
        self._server.close()
        self._restarts_left -= 1
        self._flights.close()
        old = self._flights
        self.client = self._started()
        self._flights = Flights(self.client, n=self.settings.n, max_sent=_SENT * self.settings.max_running)
        version, self.version = self.version, _NO_WEIGHTS
        self._is_resting = False
        if version != _NO_WEIGHTS:
            self._load(self.policy.named_weights(), version)
        if self._history is not None:
            self.follow(self._history)
        for flight in old.flying.values():
            self._flights.send(flight.request, flight)

    def serves(self, policy: Policy, drafter: Drafter) -> bool:
        """Whether it was started for these."""
        return policy is self.policy and drafter is self.drafter

    def expect_new_weights(self) -> None:
        """Whatever version comes next is loaded, also one that the engine had before. Nothing is left in flight."""
        self.withdraw(None)
        self.version = _NO_WEIGHTS

    def close(self) -> None:
        """End the engine, whatever it is doing, and remove its files. One that was there before is only left."""
        if self._server is None:
            with suppress(BackendError):
                self.withdraw(None)
        self._leave_group()
        self._flights.close()
        self._end()
        self.drafter.close()

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.weights_folder, ignore_errors=True)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Let them go. Raises ConfigError, sending none, when one could never be answered: it might end the engine."""
        if self.version == _NO_WEIGHTS or self._is_resting:
            raise BackendError("the SGLang engine has no weights yet: sync_weights comes before submit")
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        for request in requests:
            refuse_impossible(request, self.policy.context_tokens)
            if int(request.prompt.token_ids.max()) >= vocabulary or int(request.prompt.token_ids.min()) < 0:
                raise ConfigError(
                    f"request {request.id}: the prompt has token ids beyond the vocabulary (0 to {vocabulary - 1})"
                )
        for request in requests:
            self._flights.send(request)

    def collect(self, timeout_s: float | None) -> list[Completion]:
        """At least one, unless nothing is in flight or the time is over. Raises BackendError when the engine has died."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        landed, self._landed = self._landed, []
        while self._flights.flying and not landed:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            back = self._flights.wait(max(left, 0.0))
            has_failed = any(flight.has_failed for flight in back)
            if has_failed or not back:
                self._revive(_DYING_S if has_failed else 0.0)
            landed += [self._flights.land(flight) for flight in back if self._flights.has(flight)]
            if deadline is not None and time.monotonic() >= deadline:
                break
        return landed

    def _revive(self, dying_s: float) -> None:
        """Nothing while the engine is alive; start it again while that is allowed, else raise BackendError."""
        if self._server is None or not self._server.dies_within(dying_s):
            return
        if self._restarts_left <= 0:
            self._server.check()
        self._restart()

    def progress(self) -> Mapping[str, int]:
        """Tokens that each request in flight was sent with."""
        flying = (flight.request for flight in self._flights.flying.values())
        return {request.id: len(request.generated) if request.generated else 0 for request in flying}

    def withdraw(self, ids: Iterable[str] | None) -> list[Completion]:
        """Take them back. One that ends meanwhile, or has ended and was not collected, comes back as it ended."""
        wanted = None if ids is None else set(ids)
        flights = [each for name, each in self._flights.flying.items() if wanted is None or name in wanted]
        with self._watched():
            self._give_up(flights)
            back = [self._flights.land(flight, is_withdrawn=True) for flight in flights]
        back += [each for each in self._landed if wanted is None or each.request.id in wanted]
        self._landed = [each for each in self._landed if wanted is not None and each.request.id not in wanted]
        return back

    def _give_up(self, flights: Sequence[Flight]) -> None:
        """Return when all of them are back."""
        for flight in flights:
            flight.answer.cancel()
        while any(not flight.answer.done() for flight in flights):
            # Again and again: what is on its way to the engine is not known there yet.
            for flight in flights:
                if not flight.answer.done():
                    self.client.post("/abort_request", {"rid": flight.rid})
            self._flights.settle(flights, _LOOK_S)
            if self._server is not None:
                self._server.check()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The death of an engine is told as such, and not as a connection that broke."""
        try:
            yield
        except BackendError:
            if self._server is not None and self._server.dies_within(_DYING_S):
                self._server.check()
            raise

    # -- weights -------------------------------------------------------------------------------------------------------

    def sync_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Requests in flight are taken back, and sent on with their tokens when the weights are there."""
        if version == self.version and not self._is_resting:
            return
        before = dict(self._flights.flying)
        withdrawn = self.withdraw(None)
        with self._watched():
            self._load(named, version)
        for completion in withdrawn:
            if completion.finish_reason == "withdrawn":
                self._flights.send(completion.resume(), before[completion.request.id])
            else:
                self._landed.append(completion)

    def _load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._wake()
        dtype = DTYPES[self._dtype]
        if self._way == "tensor":
            ranks = self.settings.tensor_parallel
            weights.from_tensors(self.client, named, dtype, ranks=ranks, version=version)
        elif self._way == "distributed":
            self._joined_group().send(named, dtype, version=version)
        else:
            weights.from_disk(self.client, named, dtype, self.weights_folder, version=version)
        weights.flush(self.client)
        if self.version == _NO_WEIGHTS:
            prove(self.client, self.policy, self._dtype)
        self.version = self._flights.policy_version = version

    def _joined_group(self) -> WeightGroup:
        if self._group is None:
            ranks, device = self.settings.tensor_parallel, self.policy.model.device
            self._group = WeightGroup(self.client, ranks=ranks, device=device)
        return self._group

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    @property
    def _way(self) -> str:
        if self.settings.weights != "auto":
            return self.settings.weights
        return "tensor" if self.policy.model.device.type == "cuda" and self._server is not None else "disk"

    def rest(self) -> None:
        """Give the engine's memory to the update, if that is wanted and nothing is in flight."""
        if self.settings.release_memory and not self._flights.flying and not self._is_resting:
            weights.flush(self.client)  # it gives up memory only when the last pass is over
            self.client.post("/release_memory_occupation", {})
            self._is_resting = True

    def _wake(self) -> None:
        if self._is_resting:
            self.client.post("/resume_memory_occupation", {})
            self._is_resting = False

    # -- history -------------------------------------------------------------------------------------------------------

    def follow(self, history: HistoryStore) -> None:
        """Tell the drafter, by the requests that come next. A server that was running before has a drafter of its own."""
        self._history = history
        if self._news is None or self.settings.n == 1:
            return
        delta = history.deltas(self._followed)
        self._followed = delta.version
        self._tell(News(delta=delta))

    def learn(self, samples: Sequence[Sample]) -> None:
        """Tell the drafter, if it wants to know."""
        if self._news is not None and self.settings.n > 1 and listens(self.drafter, "learn"):
            self._tell(News(samples=samples))

    def _tell(self, news: News) -> None:
        assert self._news is not None
        self._news.write(news)
        self._flights.news = self._news.version

    # -- metrics -------------------------------------------------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """What came back since the last call, and what the drafter counted."""
        totals = self._flights.totals()
        result = {
            "rollout/spec_accept_length": Ratio(totals["emitted"], totals["passes"]),
            "rollout/spec_accept_rate": Ratio(totals["accepted"], totals["drafted"]),
        }
        if self._counters is None or self.settings.n == 1:
            return result
        new, now = self._counters.since(), time.monotonic()
        seconds, self._reported_s = now - self._reported_s, now
        return {
            **result,
            "rollout/passes": int(new["passes"]),
            "spec/draft_hit_rate": Ratio(new["hits"], new["asks"]),
            "spec/bad_drafts": int(new["bad_drafts"]),
            "spec/draft_time_frac": Ratio(new["draft_s"], seconds),
        }


def _opened(settings: SessionSettings) -> Path | None:
    """Where the session's own folder is made: in `settings.folder`, of which every rank has a part."""
    if settings.folder is None:
        return None
    part = f"rank{settings.place.rank}" if settings.place.num_ranks > 1 else ""
    return open_folder(Path(settings.folder, part), setting="backend.folder").resolve()
