"""The policy's weights in an engine: which version it has, and the way of the next one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.proof import draws_by_seed, prove_server
from rhymerl.backends.remote.weight_group import WeightGroup
from rhymerl.backends.remote.weights import SharedWeightFile
from rhymerl.models.policy import DTYPES, Policy

_log = logging.getLogger(__name__)
NO_WEIGHTS = -1  # instead of a policy version


@dataclass(eq=False)
class Delivery:
    """Delivers weights to an engine of `tensor_parallel` ranks, in `dtype`.

    `way` is tensor, disk or distributed; files go to `folder`, where they may be `shared` with other engines.
    """

    engine: Client
    policy: Policy
    _: KW_ONLY
    way: str
    dtype: str
    tensor_parallel: int
    folder: Path
    shared: SharedWeightFile | None = None
    version: int = field(init=False, default=NO_WEIGHTS)
    draws_by_seed: bool = field(init=False, default=True)  # until the engine has shown otherwise
    is_asleep: bool = field(init=False, default=False)  # the engine has given its memory away, and what was in it
    _group: WeightGroup | None = field(init=False, default=None)

    def load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights; nothing may be in flight. Raises BackendError if the engine refuses or computes otherwise."""
        self.wake_up()
        dtype = DTYPES[self.dtype]
        if self.way == "tensor":
            weights.from_tensors(
                self.engine, named, dtype, device=self.policy.device, ranks=self.tensor_parallel, version=version
            )
        elif self.way == "distributed":
            if self._group is None or self._group.is_closed:
                self._group = WeightGroup(self.engine, ranks=self.tensor_parallel, device=self.policy.device)
            self._group.send(named, dtype, version=version)
        else:
            weights.from_disk(self.engine, named, dtype, self.folder, version=version, shared=self.shared)
        weights.flush(self.engine)
        if self.version == NO_WEIGHTS:
            self._prove()
        self.version = version

    def _prove(self) -> None:
        prove_server(self.engine, self.policy, self.dtype)
        self.draws_by_seed = draws_by_seed(self.engine, self.policy, self.dtype)
        if not self.draws_by_seed:
            _log.warning(
                "the SGLang engine at %s draws tokens by its own rule: they come from the policy's distribution, but do not follow "
                "from a request's seed, change with the drafter, and are not those of backend=embedded",
                self.engine.url,
            )

    def sleep(self) -> None:
        """Free the engine's memory until the next `load`. Nothing may be in flight."""
        if not self.is_asleep:
            weights.flush(self.engine)  # memory is given up only when the last pass is over
            self.engine.post("/release_memory_occupation", {})
            self.is_asleep = True

    def wake_up(self) -> None:
        """Give the engine its memory back, without contents."""
        if self.is_asleep:
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # what the update has used at most is the allocator's until then
            self.engine.post("/resume_memory_occupation", {})
            self.is_asleep = False

    def close(self) -> None:
        """Leave the group, if there is one; the engine may have gone."""
        if self._group is not None:
            self._group.close()
        self._group = None
