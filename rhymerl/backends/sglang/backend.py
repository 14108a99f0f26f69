"""The SGLang backend: a production engine in its own process, or one that runs already, with our drafters inside."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import copy
from pathlib import Path

from torch import Tensor

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.addresses import engines_at
from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.remote.delivery import NO_WEIGHTS, Delivery
from rhymerl.backends.remote.drafter_feed import FeedMessage, RemoteDrafter
from rhymerl.backends.remote.in_flight import LOOK_S, InFlightRequest, InFlightRequests
from rhymerl.backends.remote.node import NodePosition
from rhymerl.backends.remote.weights import SharedWeightFile
from rhymerl.backends.sglang.arguments import engine_dtype
from rhymerl.backends.sglang.own import OwnEngine
from rhymerl.backends.sglang.plugin.names import FOLDERS
from rhymerl.backends.sglang.served import RunningServer
from rhymerl.backends.sglang.settings import SGLangSettings
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.wrapped import listens
from rhymerl.engine.support import refuse_impossible
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import HistoryStore
from rhymerl.models.logits import num_embeddings, num_tokens
from rhymerl.models.policy import DTYPES, Policy
from rhymerl.types import Autocast, Completion, Ratio, RolloutRequest, Sample

_PARTING_S = 10.0  # for requests that nobody will collect
_SENT = 4  # times max_running requests are with an engine, so that its own queue never runs dry


class SGLangBackend(SGLangSettings):
    """Answers come from an SGLang server that starts and ends with the run, or from servers that run at `url` already.

    All requests of a pass have equally many draft nodes. With `budget=goodput` their number is chosen pass by pass,
    from 0 to `nodes`; with `budget=fixed` it is the budget's; it is never above `budget.nodes`. `nodes` null is chosen
    by `costs` (a file of `rhymerl bench costs`), for one running request whose drafts are accepted with probability
    `expected_accept_rate`; without `costs` it is 7.

    `arguments` go to the server as they are, `environment` to its process. `weights` is how new weights are sent:
    `tensor` (on the same device), `disk` (a file in `folder`, by default in shared memory if there is room),
    `distributed` (a process group with the engine's ranks), or `auto`. An engine fails when it dies, or when it is
    silent for `silence_timeout_s` and fails a health check; it is restarted up to `restarts` times. `release_memory`
    frees its memory during updates. With `piece_s` answers are requested in pieces that take about so long, so that a
    lost engine costs no more.

    `url` names one or several running servers, or routers, whose servers are then used directly; `api_key` is theirs,
    if they need one. Each server is a worker, which remembers at most `history_tokens` of past answers (null: no
    limit).
    """

    policy: Policy
    drafter: Drafter
    budget: Budget | None  # None is goodput's
    server: OwnEngine | RunningServer
    engine: Client
    own_folder: Path
    weights_folder: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        self._node: NodePosition | None = None  # of a worker apart from ranks
        self._weight_file: SharedWeightFile | None = None  # with other servers
        self._in_flight: InFlightRequests | None = None

    def servers(self) -> Sequence[SGLangBackend]:
        """Return a backend for each server that runs, whose `start` asks nothing of other ranks.

        Raises BackendError for one that does not answer.
        """
        engines, found = engines_at(self.addresses), []
        shared = SharedWeightFile(len(engines))
        for engine in engines:
            one = copy(self)
            one._weight_file = shared
            one.url, one.addresses, one._node = engine.url, [engine], NodePosition()
            found.append(one)
        return found

    def words(self) -> str | None:
        """Return how the engine and the update share the GPU, in one line; None if they do not."""
        self._check_started()
        return str(self.server.split) if self.server.split is not None else None

    # -- its start and its end ---------------------------------------------------------------------------------------

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        """Start or resume the engine; it computes in `dtype`, by default the policy's, not under `autocast`."""
        if self._in_flight is not None and self._serves(policy, drafter):
            return
        self.close()
        node = self._node or NodePosition.of_this_process()
        self.check_place(policy, node)
        self.policy, self.drafter, self.budget = policy, drafter, budget
        self._started_for = self.longest_tokens
        self._history: HistoryStore | None = None
        self._completed: list[Completion] = []  # ended, and not collected yet
        self.own_folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=self.opened_folder(node)))
        self.weights_folder = weights.make_folder(
            self.own_folder, policy.model, copies=node.num_here, in_memory=self.folder is None
        )
        with ExitStack() as made:
            made.callback(shutil.rmtree, self.own_folder, ignore_errors=True)
            made.callback(shutil.rmtree, self.weights_folder, ignore_errors=True)
            weights.write_config(policy.model, self.weights_folder)
            if self.addresses:
                self.server = RunningServer(self, drafter, budget)
            else:
                folders = {"folder": self.own_folder, "model": self.weights_folder}
                self.server = OwnEngine(self, policy, drafter, budget, dtype=self._dtype, **folders)
            made.callback(self.server.close)
            self._connect()
            self._made = made.pop_all()

    def _serves(self, policy: Policy, drafter: Drafter) -> bool:
        """Return whether the engine was started for these parts and for such long sequences."""
        most, longest = self._started_for, self.longest_tokens
        fits = most is None or (longest is not None and longest <= most)
        return policy is self.policy and drafter is self.drafter and fits

    def _connect(self) -> None:
        self.engine = self.server.client.another(timeout_s=self.silence_timeout_s)
        is_shared = self.policy.device.type == "cuda" and self.server.is_ours
        way = self.weights if self.weights != "auto" else "tensor" if is_shared else "disk"
        self._delivery = Delivery(
            self.engine,
            self.policy,
            way=way,
            dtype=self._dtype,
            tensor_parallel=self.tensor_parallel,
            folder=self.weights_folder,
            shared=self._weight_file,
        )
        piece_s = self.piece_s
        # Requests that wait in an engine would get between the pieces of an answer.
        max_sent = (_SENT if piece_s is None else 1) * self.max_running
        self._in_flight = InFlightRequests(
            self.engine,
            num_tokens=num_tokens(self.policy.model),
            nodes=self._nodes_a_pass if self.server.num_tokens > 1 else None,
            max_sent=max_sent,
            silence_timeout_s=self.silence_timeout_s,
            piece_s=piece_s,
            check=self.server.check,
        )

    def _nodes_a_pass(self) -> float:
        """Return the draft nodes per request and pass; the most of any pass if the engine has not reported."""
        counted = self._remote_drafter.counters.nodes_a_pass if self._remote_drafter is not None else None
        return self.server.num_tokens - 1 if counted is None else counted

    @property
    def _dtype(self) -> str:
        own = next(name for name, dtype in DTYPES.items() if dtype == self.policy.model.dtype)
        return engine_dtype(self.dtype, own, on_cpu=self.policy.device.type == "cpu")

    def _recover(
        self, error: BackendError, *, version: int | None = None, without: Sequence[InFlightRequest] = ()
    ) -> None:
        """Replace an engine that is dead or hangs, with the policy's weights as `version`, by default the old one's.

        What was in flight is sent again from where it was last sent, but for the requests `without`; what had come back
        before is completed. The policy has not changed since the old one's version. Raises its death, or `error`, where
        it may not be started again or is none of ours. One that fails before it has its weights has no successor.
        """
        self.server.renew(error)
        old, version = self.in_flight, self.version if version is None else version
        self._delivery.close()
        old.close()
        self._connect()
        if version != NO_WEIGHTS:
            self._load(self.policy.named_weights(), version)
        if self._history is not None:
            self.follow(self._history)
        left = {sent.rid for sent in without}
        for sent in [each for each in old.requests.values() if each.rid not in left]:
            self._go_on(old.abandon(sent))

    def release(self) -> None:
        """Expect new weights for the next stage, even of a version that the engine had; its process stays."""
        self.withdraw()
        self._delivery.version = NO_WEIGHTS

    def close(self) -> None:
        """End the engine, whatever it is doing, and remove its files; only leave an engine that ran before."""
        if self._in_flight is None:
            return
        if not self.server.is_ours:
            with suppress(BackendError):
                self._in_flight.give_up([*self._in_flight.requests.values()], _PARTING_S)
            with suppress(BackendError):
                self._delivery.wake_up()  # for whoever comes next
        self._delivery.close()
        self._in_flight.close()
        self._in_flight = None
        self._made.close()
        self.drafter.close()

    @property
    def version(self) -> int:
        return self._delivery.version

    @property
    def in_flight(self) -> InFlightRequests:
        """Return the requests in the running engine. Raises BackendError before `start` and after `close`."""
        self._check_started()
        assert self._in_flight is not None
        return self._in_flight

    def _check_started(self) -> None:
        if self._in_flight is None:
            raise BackendError("the SGLang backend has not been started")

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Send requests. Raises ConfigError, sending none, if one could never be answered: it might end the engine."""
        in_flight = self.in_flight
        if self.version == NO_WEIGHTS or self._delivery.is_asleep:
            raise BackendError("the SGLang engine has no weights yet: sync_weights comes before submit")
        vocabulary = num_embeddings(self.policy.model)
        verifies_by_its_own_rule = self.server.num_tokens > 1 and not self._delivery.draws_by_seed
        for request in requests:
            refuse_impossible(request, self.policy.context_tokens, vocabulary=vocabulary)
            if request.sampling.min_p and verifies_by_its_own_rule:
                raise ConfigError(
                    f"rollout.min_p={request.sampling.min_p}: expected 0; this SGLang verifies drafts without it"
                )
        for request in requests:
            in_flight.send(request)

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        """Return at least one completion, unless nothing is in flight or the time is over.

        Raises BackendError when the engine has died.
        """
        if max_passes is not None:
            raise ValueError(f"max_passes={max_passes}: the SGLang engine cannot be told how many passes to run")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.in_flight.requests and not self._completed:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            back = self.in_flight.wait(max(left, 0.0))
            try:
                self.in_flight.look(back)
            except NoAnswerError as error:
                self._recover(error)
            self.in_flight.complete_all(back, self._completed)
            if deadline is not None and time.monotonic() >= deadline:
                break
        completed, self._completed = self._completed, []
        return completed

    def progress(self) -> Mapping[str, int]:
        """Return each request's tokens in flight: those it was sent with, and those of its pieces.

        What the engine has sampled since is not known: it tells when an answer ends.
        """
        sent = {each.request.id: len(each.request.output or ()) for each in self.in_flight.requests.values()}
        return {**sent, **{each.request.id: len(each.output) for each in self.outputs()}}

    def outputs(self) -> list[Completion]:
        return self.in_flight.outputs()

    def withdraw(self, ids: Iterable[str] | None = None) -> list[Completion]:
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
        before = self.in_flight
        requests = [each for name, each in before.requests.items() if wanted is None or name in wanted]
        try:
            before.give_up(requests, self.silence_timeout_s)
        except BackendError as error:
            self._recover(error, without=requests)
            return [(sent, before.abandon(sent)) for sent in requests]
        return [(sent, before.complete(sent, is_withdrawn=True)) for sent in requests]

    # -- weights -------------------------------------------------------------------------------------------------------

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Withdraw requests in flight, load the weights, and send the requests on with their tokens."""
        self._check_started()
        if policy_version == self.version and not self._delivery.is_asleep:
            return
        withdrawn = self._taken_back(None)
        try:
            self._load(named_tensors, policy_version)
        except BackendError as error:
            self._recover(error, version=policy_version)
        for _, completion in withdrawn:
            self._go_on(completion)

    def _go_on(self, completion: Completion) -> None:
        """Send the request on with the tokens that it has, unless it has ended."""
        if completion.finish_reason == "withdrawn":
            self.in_flight.send(completion.resume())
        else:
            self._completed.append(completion)

    def _load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        is_new = self.version == NO_WEIGHTS
        self._delivery.load(named, version)
        self.in_flight.policy_version = version
        if is_new and self._remote_drafter is not None:
            self._remote_drafter.counters.begin()  # the answers by which an engine is proven are none of the run's

    def sleep(self) -> None:
        """Give the engines' memory to the update, if that is wanted and nothing is in flight."""
        if not self.release_memory or self.in_flight.requests:
            return
        try:
            self._delivery.sleep()
        except BackendError as error:
            self._recover(error)
            self._delivery.sleep()

    # -- history and metrics ---------------------------------------------------------------------------------------

    @property
    def _remote_drafter(self) -> RemoteDrafter | None:
        """Return the drafter in the engine; None without drafts, and for a server without our route."""
        self._check_started()
        return self.server.remote_drafter if self.server.num_tokens > 1 else None

    def follow(self, history: HistoryStore) -> None:
        """Send the history to the drafter, with the next requests."""
        self._check_started()
        self._history = history
        if (drafter := self._remote_drafter) is not None:
            drafter.follow(history)
            self.in_flight.feed = drafter.feed.version

    def learn(self, samples: Sequence[Sample]) -> None:
        """Send a step's samples to the drafter of our own engine, if it takes them."""
        drafter = self._remote_drafter
        if self.server.is_ours and drafter is not None and listens(self.drafter, "learn"):
            drafter.feed.write(FeedMessage(samples=samples))
            self.in_flight.feed = drafter.feed.version

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call, those of the drafter included."""
        totals, drafter = self.in_flight.totals(), self._remote_drafter
        return {
            "rollout/spec_accept_length": Ratio(totals["emitted"], totals["passes"]),
            "rollout/spec_accept_rate": Ratio(totals["accepted"], totals["drafted"]),
            **(drafter.metrics(totals["accepted"]) if drafter is not None else {}),
        }
