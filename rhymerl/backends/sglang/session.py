"""An engine from its start to its end: its process, its weights, what is in flight, and the news of its drafter."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rhymerl.backends.sglang import arguments, weights
from rhymerl.backends.sglang.client import Client
from rhymerl.backends.sglang.counters import Counters
from rhymerl.backends.sglang.delivery import NO_WEIGHTS, Delivery
from rhymerl.backends.sglang.fleet import Fleet
from rhymerl.backends.sglang.flights import Flight, Flights
from rhymerl.backends.sglang.news import News, NewsWriter
from rhymerl.backends.sglang.place import Place
from rhymerl.backends.sglang.plugin import VARIABLE
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
_HEALTH_S = 60.0  # for a health check, which is a token; SGLang itself gives up after 20
_ABORT_S = 5.0
_PARTING_S = 10.0  # for requests that nobody will collect
_SENT = 4  # times max_running requests are with the engine, so that its own queue never runs dry


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
    silence_timeout_s: float
    place: Place


class Session:
    """`addresses` are those of servers that run already; without them a server is started, and ended by `close`."""

    def __init__(
        self, settings: SessionSettings, policy: Policy, drafter: Drafter, *, addresses: Sequence[Client]
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.drafter = drafter
        self.folder = Path(tempfile.mkdtemp(prefix="rhymerl-sglang-", dir=_opened(settings)))
        in_memory = weights.shared_folder(self.folder, policy.model, copies=settings.place.num_here)
        self.weights_folder = self.folder / "weights" if settings.folder is not None else in_memory
        self._server: Server | None = None
        self._news: NewsWriter | None = None
        self._counters: Counters | None = None
        self._history: HistoryStore | None = None
        self._followed = NO_VERSION
        self._saves_memory = settings.release_memory and policy.model.device.type != "cpu"
        self._restarts_left = settings.restarts
        self._landed: list[Completion] = []  # ended while they were being taken back
        self._reported_s = self._heard_s = time.monotonic()
        try:
            weights.write_config(policy.model, self.weights_folder)
            place = settings.place
            self.fleet = (
                Fleet.at(addresses, rank=place.rank, num_ranks=place.num_ranks) if addresses else self._started()
            )
            self.fleet.each(lambda _, engine: engine.get("/health", timeout_s=_HEALTH_S))
            self._delivery, self._flights = self._new_delivery(), self._new_flights()
        except BaseException:
            self._end()
            raise

    def _new_delivery(self) -> Delivery:
        is_shared = self.policy.model.device.type == "cuda" and self._server is not None
        way = self.settings.weights if self.settings.weights != "auto" else "tensor" if is_shared else "disk"
        return Delivery(
            self.fleet,
            self.policy,
            way=way,
            dtype=self._dtype,
            tensor_parallel=self.settings.tensor_parallel,
            folder=self.weights_folder,
        )

    def _new_flights(self) -> Flights:
        return Flights(self.fleet, n=self.settings.n, max_sent=_SENT * self.settings.max_running)

    # -- the engine's process --------------------------------------------------------------------------------------

    def _started(self) -> Fleet:
        require_sglang(memory_saver=self._saves_memory)
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
        on_cpu = self.policy.model.device.type == "cpu"
        EngineSettings.read_report(self.folder).check(drafts=self.settings.n > 1, on_cpu=on_cpu)
        return Fleet([self._server.client])

    @property
    def _dtype(self) -> str:
        """The engine's: it has no float64."""
        own = next(name for name, dtype in DTYPES.items() if dtype == self.policy.model.dtype)
        return self.settings.dtype or ("float32" if own == "float64" else own)

    def _device(self) -> dict[str, Any]:
        device = self.policy.model.device
        if device.type == "cpu":
            return {"device": "cpu"}
        return {"base_gpu_id": device.index or 0, "enable_memory_saver": self._saves_memory}

    def _revive(self, dying_s: float, *, version: int | None = None) -> bool:
        """Whether the engine was dead and has a successor, with the policy's weights as `version`, by default that of its own.

        Raises BackendError when it is dead and may not be started again.
        """
        if not self._may_restart(dying_s):
            return False
        self._restart(self.version if version is None else version)
        return True

    def _may_restart(self, dying_s: float) -> bool:
        """Whether it is dead, or so within that time, and may be started again. Raises BackendError when it may not."""
        if self._server is None or not self._server.dies_within(dying_s):
            return False
        if self._restarts_left <= 0:
            self._server.check()
        return True

    def _restart(self, version: int) -> None:
        """A new engine with the policy's weights; what was in flight is sent again from where it was last sent."""
        assert self._server is not None
        self._delivery.close()
        self._server.close()
        self._restarts_left -= 1
        self._flights.close()
        old = self._flights
        self.fleet = self._started()
        self._delivery, self._flights = self._new_delivery(), self._new_flights()
        if version != NO_WEIGHTS:
            self._load(self.policy.named_weights(), version)
        if self._history is not None:
            self.follow(self._history)
        for flight in old.flying.values():
            self._flights.send(flight.request, flight)
        self._heard_s = time.monotonic()

    def serves(self, policy: Policy, drafter: Drafter) -> bool:
        """Whether it was started for these."""
        return policy is self.policy and drafter is self.drafter

    def expect_new_weights(self) -> None:
        """Whatever version comes next is loaded, also one that the engine had before. Nothing is left in flight."""
        self.withdraw(None)
        self._delivery.version = NO_WEIGHTS

    def close(self) -> None:
        """End the engine, whatever it is doing, and remove its files. One that was there before is only left."""
        if self._server is None:
            with suppress(BackendError):
                self._give_up([*self._flights.flying.values()], _PARTING_S)
        self._delivery.close()
        self._flights.close()
        self._end()
        self.drafter.close()

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.weights_folder, ignore_errors=True)

    @property
    def version(self) -> int:
        """Of the weights in the engines."""
        return self._delivery.version

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Let them go. Raises ConfigError, sending none, when one could never be answered: it might end the engine."""
        if self.version == NO_WEIGHTS or self._delivery.is_resting:
            raise BackendError("the SGLang engine has no weights yet: sync_weights comes before submit")
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        for request in requests:
            refuse_impossible(request, self.policy.context_tokens)
            if int(request.prompt.token_ids.max()) >= vocabulary or int(request.prompt.token_ids.min()) < 0:
                raise ConfigError(
                    f"request {request.id}: the prompt has token ids beyond the vocabulary (0 to {vocabulary - 1})"
                )
            if request.sampling.min_p and self.settings.n > 1 and not self._delivery.draws_by_seed:
                raise ConfigError(f"min_p={request.sampling.min_p}: expected 0; this SGLang verifies drafts without it")
        if not self._flights.flying:
            self._heard_s = time.monotonic()
        for request in requests:
            self._flights.send(request)

    def collect(self, timeout_s: float | None) -> list[Completion]:
        """At least one, unless nothing is in flight or the time is over. Raises BackendError when the engine has died."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._flights.flying and not self._landed:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            back = self._flights.wait(max(left, 0.0))
            has_failed = any(flight.has_failed for flight in back)
            if (has_failed or not back) and not self._revive(_DYING_S if has_failed else 0.0):
                self._mind_the_silence()
            if back:
                self._heard_s = time.monotonic()
            for flight in filter(self._flights.has, back):
                self._landed.append(self._flights.land(flight))
            if deadline is not None and time.monotonic() >= deadline:
                break
        landed, self._landed = self._landed, []
        return landed

    def _mind_the_silence(self) -> None:
        """After a long one, see whether the engines still compute: one that hangs has a successor, or is an error."""
        if time.monotonic() - self._heard_s < self.settings.silence_timeout_s:
            return
        try:
            self.fleet.each(lambda _, engine: engine.get("/health_generate", timeout_s=_HEALTH_S))
        except BackendError as error:
            self._end_hanging(f"no answer has come for so long, and an SGLang engine fails its health check ({error})")
            self._restart(self.version)
        self._heard_s = time.monotonic()

    def _end_hanging(self, what: str) -> None:
        """Make a dead engine of one that hangs. Raises BackendError, saying `what`, where it may not be started again."""
        if self._server is None or self._restarts_left <= 0:
            words = f"; {self._server.last_words()}" if self._server is not None else ""
            raise BackendError(f"backend.silence_timeout_s={self.settings.silence_timeout_s:g}: {what}{words}")
        self._server.close()

    def progress(self) -> Mapping[str, int]:
        """Tokens that each request in flight was sent with."""
        flying = (flight.request for flight in self._flights.flying.values())
        return {request.id: len(request.generated) if request.generated else 0 for request in flying}

    def withdraw(self, ids: Iterable[str] | None) -> list[Completion]:
        """Take them back. One that ends meanwhile, or has ended and was not collected, comes back as it ended."""
        wanted = None if ids is None else set(ids)
        back = [completion for _, completion in self._taken_back(wanted)]
        back += [each for each in self._landed if wanted is None or each.request.id in wanted]
        self._landed = [each for each in self._landed if wanted is not None and each.request.id not in wanted]
        return back

    def _taken_back(self, wanted: set[str] | None) -> list[tuple[Flight, Completion]]:
        """With a dead engine the tokens that it has drawn for them are lost; others are sent to its successor."""
        flights = [each for name, each in self._flights.flying.items() if wanted is None or name in wanted]
        try:
            self._give_up(flights, self.settings.silence_timeout_s)
        except BackendError:
            if not self._may_restart(_DYING_S):
                raise
            lost = [(flight, self._flights.lose(flight)) for flight in flights]
            self._restart(self.version)
            return lost
        return [(flight, self._flights.land(flight, is_withdrawn=True)) for flight in flights]

    def _give_up(self, flights: Sequence[Flight], patience_s: float) -> None:
        """Return when all of them are back. Raises BackendError when one has failed, or stays away for too long."""
        for flight in flights:
            flight.answer.cancel()
        deadline = time.monotonic() + patience_s
        while left := [flight for flight in flights if not flight.answer.done()]:
            # Again and again: what is on its way to the engine is not known there yet.
            for flight in left:
                if time.monotonic() > deadline:
                    self._end_hanging("the SGLang engine has not given requests back for so long")
                with suppress(BackendError):  # whether it is gone is seen by its answers
                    flight.line.engine.post("/abort_request", {"rid": flight.rid}, timeout_s=_ABORT_S)
            self._flights.settle(left, _LOOK_S)
            if self._server is not None:
                self._server.check()
        for flight in filter(lambda flight: flight.has_failed, flights):
            flight.answer.result()

    # -- weights -------------------------------------------------------------------------------------------------------

    def sync_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Requests in flight are taken back, and sent on with their tokens when the weights are there."""
        if version == self.version and not self._delivery.is_resting:
            return
        withdrawn = self._taken_back(None)
        try:
            self._load(named, version)
        except BackendError:
            if not self._revive(_DYING_S, version=version):
                raise
        for flight, completion in withdrawn:
            if completion.finish_reason == "withdrawn":
                self._flights.send(completion.resume(), flight)
            else:
                self._landed.append(completion)

    def _load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._delivery.load(named, version)
        self._flights.policy_version = version

    def rest(self) -> None:
        """Give the engines' memory to the update, if that is wanted and nothing is in flight."""
        if not self.settings.release_memory or self._flights.flying:
            return
        try:
            self._delivery.rest()
        except BackendError:
            if not self._revive(_DYING_S):
                raise

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
