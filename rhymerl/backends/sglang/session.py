"""An engine from a session's start to its end: requests in flight, weights, and the feed of the drafter."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.addresses import engines_at
from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.remote.delivery import NO_WEIGHTS, Delivery
from rhymerl.backends.remote.drafter_feed import FeedMessage
from rhymerl.backends.remote.in_flight import InFlightRequest, InFlightRequests
from rhymerl.backends.sglang.arguments import engine_dtype
from rhymerl.backends.sglang.own import OwnEngine
from rhymerl.backends.sglang.plugin.names import FOLDERS
from rhymerl.backends.sglang.served import ServedDrafter
from rhymerl.backends.sglang.server_info import tokens_a_pass
from rhymerl.backends.sglang.session_settings import SessionSettings
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.run_ahead import listens
from rhymerl.engine.support import refuse_impossible
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import NO_VERSION, HistoryDelta, HistoryStore
from rhymerl.models.logits import num_embeddings, num_tokens
from rhymerl.models.policy import DTYPES, Policy
from rhymerl.types import Completion, Ratio, RolloutRequest, Sample

_LOOK_S = 0.2  # how often to see whether the engine is alive while nothing comes back
_HEALTH_S = 60.0  # for a health check, which is a token; SGLang itself gives up after 20
_ABORT_S = 5.0
_MESSAGE_TOKENS = 2**24  # of history in a message; servers take some eight times as many
_PARTING_S = 10.0  # for requests that nobody will collect
_SENT = 4  # times max_running requests are with an engine, so that its own queue never runs dry


class Session:
    """`addresses` lead to one server that runs already; without any an engine is started, and ended by `close`."""

    def __init__(
        self, settings: SessionSettings, policy: Policy, drafter: Drafter, *, addresses: Sequence[Client]
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.drafter = drafter
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=settings.opened_folder()))
        copies, in_memory = settings.node.num_here, settings.folder is None
        self.weights_folder = weights.make_folder(self.folder, policy.model, copies=copies, in_memory=in_memory)
        self._own: OwnEngine | None = None
        self._served: ServedDrafter | None = None  # where a server runs already and has our route
        self._history: HistoryStore | None = None
        self._followed = NO_VERSION
        self._completed: list[Completion] = []  # ended, and not collected yet
        self._reported_s = self._heard_s = time.monotonic()
        try:
            weights.write_config(policy.model, self.weights_folder)
            self._tokens_a_pass = self._found(addresses) if addresses else self._started()
            self._connect()
        except BaseException:
            self._end()
            raise

    def _found(self, addresses: Sequence[Client]) -> int:
        """Find the engine; return how many tokens a request and pass it has. Raises ConfigError for several."""
        engine, *others = engines_at(addresses)
        if others:
            raise ConfigError(
                f"backend.url={[each.url for each in addresses]}: several servers are workers, each with its own backend"
            )
        self.engine = engine.another(timeout_s=self.settings.silence_timeout_s)
        self._served = ServedDrafter.at(self.engine)
        return tokens_a_pass(self.engine, self.settings, self.drafter, takes_history=self._served is not None)

    def _started(self) -> int:
        """Start an engine of our own; return how many tokens a request and pass it has."""
        self._own = OwnEngine(
            self.settings,
            self.policy,
            self.drafter,
            dtype=self._dtype,
            folder=self.folder,
            model=self.weights_folder,
        )
        self.engine = self._own.client.another(timeout_s=self.settings.silence_timeout_s)
        return self.settings.n

    def _connect(self) -> None:
        is_shared = self.policy.device.type == "cuda" and self._own is not None
        way = self.settings.weights if self.settings.weights != "auto" else "tensor" if is_shared else "disk"
        self._delivery = Delivery(
            self.engine,
            self.policy,
            way=way,
            dtype=self._dtype,
            tensor_parallel=self.settings.tensor_parallel,
            folder=self.weights_folder,
            shared=self.settings.weight_file,
        )
        piece_s = self.settings.piece_s
        # Requests that wait in an engine would get between the pieces of an answer.
        max_sent = (_SENT if piece_s is None else 1) * self.settings.max_running
        self._in_flight = InFlightRequests(
            self.engine,
            num_tokens=num_tokens(self.policy.model),
            nodes=self._nodes_a_pass if self._tokens_a_pass > 1 else None,
            max_sent=max_sent,
            piece_s=piece_s,
        )

    def _nodes_a_pass(self) -> float:
        """Return the draft nodes per request and pass; the most of any pass if the engine has not reported."""
        counted = self._remote_drafter.counters.nodes_a_pass if self._remote_drafter is not None else None
        return self._tokens_a_pass - 1 if counted is None else counted

    @property
    def _dtype(self) -> str:
        own = next(name for name, dtype in DTYPES.items() if dtype == self.policy.model.dtype)
        return engine_dtype(self.settings.dtype, own, on_cpu=self.policy.device.type == "cpu")

    def _recover(
        self, error: BackendError, *, version: int | None = None, without: Sequence[InFlightRequest] = ()
    ) -> None:
        """Replace an engine that is dead or hangs, with the policy's weights as `version`, by default the old one's.

        What was in flight is sent again from where it was last sent, but for the requests `without`; what had come back
        before is completed. The policy has not changed since the old one's version. Raises its death, or `error`, where
        it may not be started again or is none of ours. One that fails before it has its weights has no successor.
        """
        if self._own is None:
            raise error
        self._own.renew(error)
        old, version = self._in_flight, self.version if version is None else version
        self._delivery.close()
        old.close()
        self.engine = self._own.client.another(timeout_s=self.settings.silence_timeout_s)
        self._connect()
        if version != NO_WEIGHTS:
            self._load(self.policy.named_weights(), version)
        self._followed = NO_VERSION
        if self._history is not None:
            self.follow(self._history)
        left = {sent.rid for sent in without}
        for sent in [each for each in old.requests.values() if each.rid not in left]:
            self._go_on(old.abandon(sent))
        self._heard_s = time.monotonic()

    def serves(self, policy: Policy, drafter: Drafter, longest_tokens: int | None) -> bool:
        """Return whether the engine was started for these parts and for such long sequences."""
        most = self.settings.longest_tokens
        fits = most is None or (longest_tokens is not None and longest_tokens <= most)
        return policy is self.policy and drafter is self.drafter and fits

    def expect_new_weights(self) -> None:
        """Load any next version, even one that the engine had before. Nothing is left in flight."""
        self.withdraw(None)
        self._delivery.version = NO_WEIGHTS

    def close(self) -> None:
        """End the engine, whatever it is doing, and remove its files; only leave an engine that ran before."""
        if self._own is None:
            with suppress(BackendError):
                self._give_up([*self._in_flight.requests.values()], _PARTING_S)
            with suppress(BackendError):
                self._delivery.wake_up()  # for whoever comes next
        self._delivery.close()
        self._in_flight.close()
        self._end()
        self.drafter.close()

    def _end(self) -> None:
        if self._own is not None:
            self._own.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.weights_folder, ignore_errors=True)

    @property
    def memory(self) -> str | None:
        """Return how the engine and the update share the GPU, in one line; None if they do not."""
        return str(self._own.split) if self._own is not None and self._own.split is not None else None

    @property
    def version(self) -> int:
        return self._delivery.version

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Send requests. Raises ConfigError, sending none, if one could never be answered: it might end the engine."""
        if self.version == NO_WEIGHTS or self._delivery.is_asleep:
            raise BackendError("the SGLang engine has no weights yet: sync_weights comes before submit")
        vocabulary = num_embeddings(self.policy.model)
        verifies_by_its_own_rule = self._tokens_a_pass > 1 and not self._delivery.draws_by_seed
        for request in requests:
            refuse_impossible(request, self.policy.context_tokens, vocabulary=vocabulary)
            if request.sampling.min_p and verifies_by_its_own_rule:
                raise ConfigError(
                    f"rollout.min_p={request.sampling.min_p}: expected 0; this SGLang verifies drafts without it"
                )
        if not self._in_flight.requests:
            self._heard_s = time.monotonic()
        for request in requests:
            self._in_flight.send(request)

    def collect(self, timeout_s: float | None) -> list[Completion]:
        """Return at least one completion, unless nothing is in flight or the time is over.

        Raises BackendError when the engine has died.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._in_flight.requests and not self._completed:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            back = self._in_flight.wait(max(left, 0.0))
            try:
                self._look(back)
            except NoAnswerError as error:
                self._recover(error)
            self._in_flight.complete_all(back, self._completed)
            if deadline is not None and time.monotonic() >= deadline:
                break
        completed, self._completed = self._completed, []
        return completed

    def _look(self, back: Sequence[InFlightRequest]) -> None:
        """Raise NoAnswerError when an engine is dead, or has been silent for long and is not well."""
        failures = [sent.failure for sent in back if sent.failure is not None]
        if back:
            self._heard_s = time.monotonic()
        if self._own is not None and (failures or not back):
            self._own.check(is_suspect=bool(failures))
        for failure in failures:
            if isinstance(failure, NoAnswerError):
                raise failure
        if time.monotonic() - self._heard_s < self.settings.silence_timeout_s:
            return
        try:
            self.engine.get("/health_generate", timeout_s=_HEALTH_S)
        except BackendError as error:
            raise self._silence(
                "no answer has come for so long, and an SGLang engine fails its health check", error
            ) from error
        self._heard_s = time.monotonic()

    def _silence(self, what: str, error: BackendError | None = None) -> NoAnswerError:
        why = f" ({error})" if error is not None else ""
        return NoAnswerError(f"backend.silence_timeout_s={self.settings.silence_timeout_s:g}: {what}{why}")

    def progress(self) -> Mapping[str, int]:
        """Return each request's tokens in flight: those it was sent with, and those of its pieces."""
        sent = {each.request.id: len(each.request.output or ()) for each in self._in_flight.requests.values()}
        return {**sent, **{each.request.id: len(each.output) for each in self.outputs()}}

    def outputs(self) -> list[Completion]:
        return self._in_flight.outputs()

    def withdraw(self, ids: Iterable[str] | None) -> list[Completion]:
        """Withdraw requests. Requests that have ended and were not collected come back as they ended."""
        wanted = None if ids is None else set(ids)
        back = [completion for _, completion in self._taken_back(wanted)]
        back += [each for each in self._completed if wanted is None or each.request.id in wanted]
        self._completed = [each for each in self._completed if wanted is not None and each.request.id not in wanted]
        return back

    def _taken_back(self, wanted: set[str] | None) -> list[tuple[InFlightRequest, Completion]]:
        """Take the requests back with the tokens that they have.

        The tokens that a dead engine has sampled for them are lost; other requests are sent to its successor.
        """
        requests = [each for name, each in self._in_flight.requests.items() if wanted is None or name in wanted]
        before = self._in_flight
        try:
            self._give_up(requests, self.settings.silence_timeout_s)
        except BackendError as error:
            self._recover(error, without=requests)
            return [(sent, before.abandon(sent)) for sent in requests]
        return [(sent, before.complete(sent, is_withdrawn=True)) for sent in requests]

    def _give_up(self, requests: Sequence[InFlightRequest], patience_s: float) -> None:
        """Return when all of them are back. Raises BackendError when one has failed, or stays away for too long."""
        for sent in requests:
            sent.is_given_up = True
            sent.answer.cancel()
        deadline = time.monotonic() + patience_s
        while left := [sent for sent in requests if not sent.answer.done()]:
            # Again and again: what is on its way to the engine is not known there yet.
            for sent in left:
                if time.monotonic() > deadline:
                    raise self._silence("an SGLang engine has not given requests back for so long")
                with suppress(BackendError):  # whether it is gone is seen by its answers
                    self._in_flight.engine.post("/abort_request", {"rid": sent.rid}, timeout_s=_ABORT_S)
            wait([sent.answer for sent in left], _LOOK_S)
            if self._own is not None:
                self._own.check()
        for sent in requests:
            if sent.failure is not None:
                raise sent.failure

    # -- weights -------------------------------------------------------------------------------------------------------

    def sync_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Withdraw requests in flight, load the weights, and send the requests on with their tokens."""
        if version == self.version and not self._delivery.is_asleep:
            return
        withdrawn = self._taken_back(None)
        try:
            self._load(named, version)
        except BackendError as error:
            self._recover(error, version=version)
        for _, completion in withdrawn:
            self._go_on(completion)

    def _go_on(self, completion: Completion) -> None:
        """Send the request on with the tokens that it has, unless it has ended."""
        if completion.finish_reason == "withdrawn":
            self._in_flight.send(completion.resume())
        else:
            self._completed.append(completion)

    def _load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        is_new = self.version == NO_WEIGHTS
        self._delivery.load(named, version)
        self._in_flight.policy_version = version
        if is_new and self._remote_drafter is not None:
            self._remote_drafter.counters.begin()  # the answers by which an engine is proven are none of the run's

    def sleep(self) -> None:
        """Give the engines' memory to the update, if that is wanted and nothing is in flight."""
        if not self.settings.release_memory or self._in_flight.requests:
            return
        try:
            self._delivery.sleep()
        except BackendError as error:
            self._recover(error)
            self._delivery.sleep()

    # -- history -------------------------------------------------------------------------------------------------------

    @property
    def _remote_drafter(self) -> OwnEngine | ServedDrafter | None:
        """Return the drafter's feed and counters; None without drafts, and for a server without our route."""
        return (self._own or self._served) if self._tokens_a_pass > 1 else None

    def follow(self, history: HistoryStore) -> None:
        """Send the history to the drafter, with the next requests."""
        self._history = history
        if (drafter := self._remote_drafter) is None:
            return
        delta = history.deltas(self._followed)
        if not all(self._is_told(drafter, part) for part in delta.parts(_MESSAGE_TOKENS)):
            delta = history.snapshot()
            all(self._is_told(drafter, part) for part in delta.parts(_MESSAGE_TOKENS))
        self._followed = delta.version

    def _is_told(self, drafter: OwnEngine | ServedDrafter, part: HistoryDelta) -> bool:
        """Return False if the server was restarted, or got messages from another trainer."""
        expected = drafter.feed.version + 1
        drafter.feed.write(FeedMessage(delta=part))
        self._in_flight.feed = drafter.feed.version
        return part.is_snapshot or drafter.feed.version == expected

    def learn(self, samples: Sequence[Sample]) -> None:
        """Send a step's samples to the drafter of our own engine, if it takes them."""
        if self._own is not None and self.settings.n > 1 and listens(self.drafter, "learn"):
            self._own.feed.write(FeedMessage(samples=samples))
            self._in_flight.feed = self._own.feed.version

    # -- metrics -------------------------------------------------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call, those of the drafter included."""
        totals = self._in_flight.totals()
        result = {
            "rollout/spec_accept_length": Ratio(totals["emitted"], totals["passes"]),
            "rollout/spec_accept_rate": Ratio(totals["accepted"], totals["drafted"]),
        }
        if self._remote_drafter is None:
            return result
        new, now = self._remote_drafter.counters.since(), time.monotonic()
        seconds, self._reported_s = now - self._reported_s, now
        return {
            **result,
            "rollout/spec_accept_rate": Ratio(totals["accepted"], new["nodes"]),
            "budget/nodes_per_pass": Ratio(new["nodes"], new["passes"]),
            "rollout/passes": int(new["passes"]),
            "spec/draft_hit_rate": Ratio(new["hits"], new["asks"]),
            "spec/bad_drafts": int(new["bad_drafts"]),
            "spec/draft_time_frac": Ratio(new["draft_s"], seconds),
        }
