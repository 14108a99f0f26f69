"""Workers in actors of a Ray cluster, each with an engine on its own devices."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rhymerl.backends.base import HISTORY_TOKENS, RolloutBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.backends.remote.weights import buckets
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.wrapped import innermost, listens
from rhymerl.errors import BackendError, ConfigError, at_least, check_ranges, require_package
from rhymerl.memory.base import EngineShape
from rhymerl.memory.outline import ModelShape
from rhymerl.models.policy import Policy
from rhymerl.progress import counted
from rhymerl.types import Autocast
from rhymerl.version import __version__
from rhymerl.workers.messages import Events, HostMessage, WeightSource
from rhymerl.workers.remote.actor import RayWorker, policy_here
from rhymerl.workers.remote.base import Connection, HostedBackend
from rhymerl.workers.remote.cluster import answers, places, started_here, words_of
from rhymerl.workers.remote.host import EngineLoader
from rhymerl.workers.remote.publishing import Publisher
from rhymerl.workers.remote.ray_watcher import Watcher

_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _put(named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
    """Put weights into Ray's object store, once on every node.

    Some tensors go into each object, so that sharded ones are not all in this process's memory at once.
    """
    import ray

    found = buckets(named_tensors)
    return partial(_got, [ray.put({name: _array(each) for name, each in bucket}) for bucket in found])


def _got(references: list[Any]) -> Mapping[str, Tensor]:
    import ray

    return {name: _tensor(*each) for bucket in ray.get(references) for name, each in bucket.items()}


def _array(tensor: Tensor) -> tuple[Any, str, tuple[int, ...]]:
    """Return bytes, dtype and shape: NumPy knows no bfloat16, and the store shares its arrays without a copy."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _tensor(content: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in the store's own memory, which is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)


class RayConnection(Connection):
    """An actor, which may not be there yet. One that could never work tells why, and ends the run."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Future[Events] | None = None  # the latest question
        self._refusal: Events | None = None
        # In none of the groups: where the class cannot be imported, Ray answers nothing that is asked in one.
        actor.home.remote().future().add_done_callback(self._check)

    def _check(self, home: Future[tuple[str, str]]) -> None:
        """Refuse an actor that could not be made, or that has another version."""
        from ray.exceptions import RayActorError

        error = home.exception()
        if isinstance(error, RayActorError) and not error.actor_init_failed:
            return  # it is gone, as questions tell
        if error is not None:
            words = f"cannot work: {str(error).strip().splitlines()[-1]}"
        elif home.result()[1] != __version__:
            words = f"on {home.result()[0]} has rhymerl {home.result()[1]}"
        else:
            return
        words += f"; expected rhymerl {__version__}, the model's code and your own modules on every machine"
        self._refusal = Events(error=BackendError(f"a worker {words}"))
        if self._asked is not None:
            with suppress(InvalidStateError):  # it has been answered
                self._asked.set_result(self._refusal)

    def post(self, message: HostMessage) -> None:
        self._actor.post.options(concurrency_group="messages").remote(message)

    def poll(self, wait_s: float) -> Future[Events]:
        return self._told(self._actor.poll.options(concurrency_group="questions").remote(wait_s))

    def step(self, ticks: int, *, only_evaluates: bool = False) -> Future[Events]:
        # In one thread with the messages, which have to be there before it.
        return self._told(
            self._actor.step.options(concurrency_group="messages").remote(ticks, only_evaluates=only_evaluates)
        )

    def is_alive(self, wait_s: float) -> bool:
        """Return whether the actor answers; a lost one counts as alive, since its pending calls raise."""
        import ray

        ready, _ = ray.wait([self._actor.home.remote()], timeout=wait_s)
        return bool(ready)

    def _told(self, reference: Any) -> Future[Events]:
        """Return Ray's future as one that raises OSError where the actor is gone."""
        from ray.exceptions import RayActorError, RayError

        told: Future[Events] = Future()

        def finish(done: Future[Events]) -> None:
            error = done.exception()
            if isinstance(error, RayError):
                is_gone = isinstance(error, RayActorError)
                error = ConnectionError("its actor has ended" if is_gone else str(error).splitlines()[0])
            with suppress(InvalidStateError):  # it has been refused
                if self._refusal is None and error is not None:
                    told.set_exception(error)
                else:
                    told.set_result(self._refusal or done.result())

        self._asked = told
        reference.future().add_done_callback(finish)
        return told

    def kill(self) -> None:
        import ray

        try:
            ray.kill(self._actor)
        except Exception as error:  # noqa: BLE001 - it is gone already, or Ray is
            logging.getLogger(__name__).debug("an actor could not be killed: %r", error)


@dataclass(kw_only=True, eq=False, repr=False)
class RayBackend(HostedBackend):
    """Workers as Ray actors, with engines of their own: `engine` is `embedded`, `sglang`, or such a backend's settings.

    `address` is the cluster to join; null joins this machine's cluster, or starts one here. Each worker takes
    `cpus_per_worker` and `gpus_per_worker` of it. A run begins when there is room for `min_workers` (null: all of
    them); the others come when there is room for them too. A worker remembers at most `history_tokens` of past answers
    (null: no limit). It has to be up after `start_timeout_s`, and counts as lost without an answer for
    `hang_timeout_s`.
    """

    goes_on_short = True  # Ray finds another place for an actor when there is one

    engine: RolloutBackend | str = "embedded"
    address: str | None = None
    cpus_per_worker: int = at_least(1, 1)
    gpus_per_worker: int = at_least(0, 0)
    min_workers: int | None = at_least(1, None)
    history_tokens: int | None = HISTORY_TOKENS
    start_timeout_s: float = at_least(1, 180.0)
    hang_timeout_s: float = at_least(1, 60.0)

    def __post_init__(self) -> None:
        check_ranges(self)
        self.engine = self._engine = _engine_named(self.engine) if isinstance(self.engine, str) else self.engine
        self.draws_exactly = self._engine.draws_exactly
        self.keeps_sets = self._engine.keeps_sets
        self.says_routes = self._engine.says_routes
        self.counts_passes = self._engine.counts_passes
        self.max_running = self._engine.max_running
        self._load: EngineLoader | None = None
        self._connections: list[RayConnection] = []
        self._joined_ray = False
        self._watcher: Watcher | None = None  # of a cluster that was started here
        self._publisher: Publisher | None = None
        self._published: WeightSource | None = None  # held until there are newer ones, so that late workers find it

    def check(self, longest_tokens: int) -> None:
        if 0 < self.gpus_per_worker < self._engine.tensor_parallel:
            raise ConfigError(
                f"backend.gpus_per_worker={self.gpus_per_worker}: an engine of backend.engine.tensor_parallel={self._engine.tensor_parallel} takes as "
                f"many GPUs; expected at least {self._engine.tensor_parallel}"
            )
        require_package("ray", "backend=ray")
        if self._engine.has_servers:
            raise ConfigError(
                "backend.engine.url: servers that run already are workers without Ray; expected backend=sglang with backend.url"
            )
        self._engine.check(longest_tokens)

    def check_drafting(self, drafter: Drafter, budget: Budget | None) -> None:
        self._engine.check_drafting(drafter, budget)

    def memory(self, model: ModelShape, drafter: Drafter, budget: Budget | None) -> EngineShape | None:
        engine = copy(self._engine)
        engine.owns_policy = True
        return engine.memory(model, drafter, budget)

    def start(
        self, policy: Policy, drafter: Drafter, *, budget: Budget | None = None, autocast: Autocast = nullcontext
    ) -> None:
        self.remembers = not isinstance(innermost(drafter), NoDrafter)
        self.learns = listens(drafter, "learn")
        self._publisher = Publisher(policy.model, _put)
        self._load = EngineLoader(
            make_policy=partial(
                policy_here,
                policy.files(),
                dtype=policy.model.dtype,
                attention=policy.model.config._attn_implementation,
                in_host=self._engine.copies_weights,
            ),
            engine=self._engine,
            drafter=drafter,
            budget=budget,
            autocast=autocast,
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
        made = actor.remote(ray.cloudpickle.dumps(self._load), self.history_tokens, lockstep)
        connection = RayConnection(made)
        self._connections.append(connection)
        return connection

    def least_workers(self, num_workers: int) -> int:
        return num_workers if self.min_workers is None else min(self.min_workers, num_workers)

    def reserve(self, num_workers: int) -> None:
        """Raise ConfigError if the cluster is too small for so many workers, which would wait for ever."""
        import ray

        self._join(num_workers)
        least, nodes = self.least_workers(num_workers), ray.nodes()
        if (room := places(nodes, self._each)) < least:
            raise ConfigError(
                f"{'workers' if least == num_workers else 'backend.min_workers'}={least}: each takes {words_of(self._each)} of a node, and the cluster "
                f"({words_of(self._of(ray.cluster_resources()))} on {counted(sum(node['Alive'] for node in nodes), 'node')}) has room for {room}; expected fewer workers, or a smaller "
                f"backend.cpus_per_worker or backend.gpus_per_worker"
            )

    def why_absent(self) -> str:
        import ray

        total, free = self._of(ray.cluster_resources()), self._of(ray.available_resources())
        return (
            f"its machine is slow, or it has no place: each takes {words_of(self._each)}, and of the cluster's {words_of(total)} "
            f"{words_of(free)} are free"
        )

    @property
    def _each(self) -> dict[str, float]:
        amounts = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        return {name: amount for name, amount in amounts.items() if amount}

    def _of(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the amounts of the resources that a worker takes."""
        return {name: found.get(name, 0.0) for name in self._each}

    def _join(self, num_workers: int = 1) -> None:
        """Join the cluster, or start one here with enough CPUs for the engines, which share the machine."""
        import ray

        if ray.is_initialized():
            return
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address is not None and not answers(address):
            raise _no_cluster(address)
        address = address or started_here()
        self._joined_ray = True  # in part, where it fails
        try:
            where = self._new_cluster(num_workers) if address is None else {"address": address}
            ray.init(**where, log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises anything there, and bare Exceptions
            self.close()
            raise _not_joined(address, error) from error

    def _new_cluster(self, num_workers: int) -> dict[str, Any]:
        """Return Ray's settings for a cluster in a folder of its own, which is watched from now on."""
        folder = tempfile.mkdtemp(prefix="ray-")
        self._watcher = Watcher(folder)
        cpus = max(os.cpu_count() or 1, num_workers * self.cpus_per_worker)
        return {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": folder}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]]) -> WeightSource:
        assert self._publisher is not None, "start comes first"
        self._published = self._publisher.publish(named_tensors)
        return self._published

    def words(self) -> str | None:
        import ray

        if not ray.is_initialized():
            return None
        found = ray.cluster_resources()
        return f"Ray with {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs; engine {type(self._engine).__name__}"

    def close(self) -> None:
        for connection in self._connections:
            connection.kill()
        self._connections, self._publisher, self._published = [], None, None
        if self._joined_ray:
            import ray

            ray.shutdown()
        if self._watcher is not None:
            self._watcher.close()
        self._joined_ray, self._watcher = False, None


def _no_cluster(address: str) -> ConfigError:
    return ConfigError(f"backend.address={address!r}: no Ray cluster answers there; expected one that is up, or null")


def _not_joined(address: str | None, error: Exception) -> ConfigError | BackendError:
    if address is not None and isinstance(error, ConnectionError):
        return _no_cluster(address)
    reason = " ".join(str(error).split()) or type(error).__name__
    if address is not None:
        return BackendError(f"backend=ray: Ray cannot join the cluster at {address} ({reason})")
    return BackendError(
        f"backend=ray: Ray cannot start a cluster here ({reason}); expected a TMPDIR with a short name and enough room, free memory, "
        "or backend.address of a cluster that is up"
    )


def _engine_named(name: str) -> RolloutBackend:
    if name == "embedded":
        return EmbeddedBackend()
    if name == "sglang":
        from rhymerl.backends.sglang.backend import SGLangBackend

        return SGLangBackend()
    raise ValueError(f"engine={name!r}: expected embedded, sglang, or the settings of such a backend")
