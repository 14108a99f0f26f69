"""Workers in actors of a Ray cluster, each with an engine on its own devices."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.hosted.base import Connection, HostedBackend
from rhymerl.backends.hosted.host import WorkerHost
from rhymerl.backends.hosted.loading import EngineLoader, policy_of
from rhymerl.backends.hosted.messages import Events, Message, WeightSource
from rhymerl.backends.hosted.publishing import Publisher
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.run_ahead import innermost, listens
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.history import HistoryStore

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.models.memory import EngineShape, ModelShape
    from rhymerl.models.policy import Policy

_CONNECT_S = 5.0
_BUCKET_BYTES = 2**28
_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights(WeightSource):
    """Weights in Ray's object store, once on every node, some of them in each object."""

    references: list[Any]

    def load(self) -> Mapping[str, Tensor]:
        import ray

        return {name: _tensor(*each) for bucket in ray.get(self.references) for name, each in bucket.items()}


def _buckets(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, tuple[Any, str, tuple[int, ...]]]]:
    """Yield the arrays of some tensors at a time, so that sharded ones are not all in this process's memory at once."""
    bucket, size = {}, 0
    for name, tensor in named_tensors:
        bucket[name] = _array(tensor)
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _put(named_tensors: Iterable[tuple[str, Tensor]]) -> SharedWeights:
    import ray

    return SharedWeights(references=[ray.put(bucket) for bucket in _buckets(named_tensors)])


def _array(tensor: Tensor) -> tuple[Any, str, tuple[int, ...]]:
    """Return bytes, dtype and shape: NumPy knows no bfloat16, and the store shares its arrays without a copy."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _tensor(content: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    content = content if content.flags.writeable else content.copy()
    return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecipe:
    """All that an actor needs to make its host."""

    files: Mapping[str, str]  # the policy's, without weights
    dtype: torch.dtype
    attention: str
    engine: RolloutBackend
    drafter: Drafter
    budget: Budget | None
    autocast: Callable[[], AbstractContextManager[object]]
    history: Mapping[str, Any]  # arguments of the store

    def host(self) -> WorkerHost:
        load = EngineLoader(
            make_policy=partial(
                policy_of,
                self.files,
                dtype=self.dtype,
                attention=self.attention,
                device="cuda" if torch.cuda.is_available() else "cpu",
            ),
            engine=self.engine,
            drafter=self.drafter,
            budget=self.budget,
            autocast=self.autocast,
        )
        return WorkerHost(load, history=HistoryStore(**self.history))


class RayWorker:
    """The actor: messages come in one thread, questions in another, and the engine works in a third."""

    def __init__(self, recipe: bytes, lockstep: bool) -> None:
        made: HostRecipe = pickle.loads(recipe)
        self.host = made.host()
        if not lockstep:
            threading.Thread(target=self.host.run, daemon=True).start()

    def post(self, message: Message) -> None:
        self.host.post(message)

    def poll(self, wait_s: float) -> Events:
        return self.host.poll(wait_s)

    def step(self, ticks: int) -> Events:
        return self.host.step(ticks)


class RayConnection(Connection):
    """An actor, which may not be there yet."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def post(self, message: Message) -> None:
        self._actor.post.options(concurrency_group="messages").remote(message)

    def poll(self, wait_s: float) -> Future[Events]:
        return self._told(self._actor.poll.options(concurrency_group="questions").remote(wait_s))

    def step(self, ticks: int) -> Future[Events]:
        # In one thread with the messages, which have to be there before it.
        return self._told(self._actor.step.options(concurrency_group="messages").remote(ticks))

    def _told(self, reference: Any) -> Future[Events]:
        """Return Ray's future as one that raises OSError where the actor is gone."""
        from ray.exceptions import RayActorError, RayError

        told: Future[Events] = Future()

        def finish(done: Future[Events]) -> None:
            error = done.exception()
            if error is None:
                told.set_result(done.result())
            elif isinstance(error, RayActorError):
                told.set_exception(ConnectionError("its actor has ended"))
            elif isinstance(error, RayError):
                told.set_exception(ConnectionError(str(error).splitlines()[0]))
            else:
                told.set_exception(error)

        reference.future().add_done_callback(finish)
        return told

    def kill(self) -> None:
        import ray

        try:
            ray.kill(self._actor)
        except Exception as error:  # noqa: BLE001 - it is gone already, or Ray is
            logging.getLogger(__name__).debug("an actor could not be killed: %r", error)


class RayBackend(HostedBackend):
    """Workers as Ray actors, with engines of their own: `engine` is `embedded`, `sglang`, or such a backend's settings.

    `address` is the cluster to join; null joins the one that this machine belongs to, or starts one here. Each worker takes
    `cpus_per_worker` and `gpus_per_worker` of it; a run begins where there is room for `min_workers` (null: all of them), and the others
    come when there is room for them too. A worker remembers at most `history_tokens` of past answers (null: no limit). It
    has to be up after `start_timeout_s`, and counts as lost without an answer for `hang_timeout_s`.
    """

    goes_on_short = True  # Ray finds another place for an actor when there is one

    def __init__(
        self,
        *,
        engine: RolloutBackend | str = "embedded",
        address: str | None = None,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 0,
        min_workers: int | None = None,
        history_tokens: int | None = 50_000_000,
        start_timeout_s: float = 180.0,
        hang_timeout_s: float = 60.0,
    ) -> None:
        require_at_least({"min_workers": (1 if min_workers is None else min_workers, 1)})
        require_at_least({"cpus_per_worker": (cpus_per_worker, 1), "gpus_per_worker": (gpus_per_worker, 0)})
        require_at_least({"start_timeout_s": (start_timeout_s, 1), "hang_timeout_s": (hang_timeout_s, 1)})
        self.engine = _engine(engine) if isinstance(engine, str) else engine
        self.address = address
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker
        self.min_workers = min_workers
        self.history_tokens = history_tokens
        self.start_timeout_s = start_timeout_s
        self.hang_timeout_s = hang_timeout_s
        self.draws_exactly = self.engine.draws_exactly
        self.counts_passes = self.engine.counts_passes
        self.max_running = self.engine.max_running
        self._recipe: HostRecipe | None = None
        self._connections: list[RayConnection] = []
        self._joined_ray = False
        self._folder: str | None = None  # of a cluster that was started here
        self._publisher: Publisher | None = None
        self._published: WeightSource | None = None  # held until there are newer ones, so that late workers find it

    def check(self, longest_tokens: int) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("backend=ray: needs Ray: pip install 'rhymerl[ray]'")
        if self.engine.apart() is not self.engine:
            raise ConfigError(
                "backend.engine.url: servers that run already are workers without Ray; expected backend=sglang with backend.url"
            )
        self.engine.check(longest_tokens)

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        self.engine.check_drafting(drafter, budget)

    def memory(self, model: ModelShape, drafter: Drafter, budget: Budget | None) -> EngineShape | None:
        engine = copy(self.engine)
        engine.owns_policy = True
        return engine.memory(model, drafter, budget)

    def start(
        self,
        policy: Policy,
        drafter: Drafter,
        *,
        budget: Budget | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.remembers = not isinstance(innermost(drafter), NoDrafter)
        self.learns = listens(drafter, "learn")
        self._publisher = Publisher(policy.model, _put)
        self._recipe = HostRecipe(
            files=policy.files(),
            dtype=policy.model.dtype,
            attention=policy.model.config._attn_implementation,
            engine=self.engine,
            drafter=drafter,
            budget=budget,
            autocast=autocast,
            history={"max_tokens": self.history_tokens},
        )

    def connect(self, number: int, *, lockstep: bool) -> Connection:
        import ray

        self._join()
        actor = ray.remote(
            num_cpus=self.cpus_per_worker,
            num_gpus=self.gpus_per_worker,
            concurrency_groups={"messages": 1, "questions": 1},
        )(RayWorker)
        # As bytes: arrays that Ray hands over cannot be written to.
        connection = RayConnection(actor.remote(ray.cloudpickle.dumps(self._recipe), lockstep))
        self._connections.append(connection)
        return connection

    def least_workers(self, num_workers: int) -> int:
        return num_workers if self.min_workers is None else min(self.min_workers, num_workers)

    def reserve(self, num_workers: int) -> None:
        """Raise ConfigError where the cluster is too small for so many workers: they would wait for ever."""
        import ray

        self._join(num_workers)
        least = self.least_workers(num_workers)
        wanted = {"CPU": least * self.cpus_per_worker, "GPU": least * self.gpus_per_worker}
        found = ray.cluster_resources()
        for name, amount in wanted.items():
            if amount > found.get(name, 0):
                raise ConfigError(
                    f"{'workers' if least == num_workers else 'backend.min_workers'}={least}: they need {amount} {name}, and the cluster has {found.get(name, 0):g}; expected fewer "
                    f"workers, or a smaller backend.{name.lower()}s_per_worker"
                )

    def _join(self, num_workers: int = 1) -> None:
        """Join the cluster, or start one here that is large enough for the CPUs asked for: engines share what there is."""
        import ray

        if ray.is_initialized():
            return
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        settings = {"log_to_driver": False, "configure_logging": False}
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address is not None and not _listens(address):
            raise _no_cluster(address)
        address = address or _started_here()
        if address is not None:
            try:
                ray.init(address=address, **settings)
            except ConnectionError as error:
                raise _no_cluster(address) from error
        else:
            cpus = max(os.cpu_count() or 1, num_workers * self.cpus_per_worker)
            self._folder = tempfile.mkdtemp(prefix="ray-")
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=self._folder, **settings)
        self._joined_ray = True

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        assert self._publisher is not None, "start comes first"
        self._published = self._publisher.publish(named_tensors)
        return self._published

    def words(self) -> str | None:
        import ray

        if not ray.is_initialized():
            return None
        found = ray.cluster_resources()
        return f"Ray with {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs; engine {type(self.engine).__name__}"

    def close(self) -> None:
        for connection in self._connections:
            connection.kill()
        self._connections, self._publisher, self._published = [], None, None
        if self._joined_ray:
            import ray

            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._joined_ray, self._folder = False, None


def _started_here() -> str | None:
    """Return the address of the cluster that `ray start` has made this machine a part of, None where there is none.

    Ray's own `auto` would take any cluster that runs here too, such as another run's, which ends with it.
    """
    file = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    if not file.is_file():
        return None
    address = file.read_text().strip()
    return address if _listens(address) else None


def _listens(address: str) -> bool:
    """Return whether somebody listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # `auto`, or a name that Ray knows
        return True
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _no_cluster(address: str) -> ConfigError:
    return ConfigError(f"backend.address={address!r}: no Ray cluster answers there; expected one that is up, or null")


def _engine(name: str) -> RolloutBackend:
    if name == "embedded":
        return EmbeddedBackend()
    if name == "sglang":
        from rhymerl.backends.sglang.backend import SGLangBackend

        return SGLangBackend()
    raise ValueError(f"engine={name!r}: expected embedded, sglang, or the settings of such a backend")
