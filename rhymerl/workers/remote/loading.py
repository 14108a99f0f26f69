"""An engine that begins with the first weights that its host is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from rhymerl.backends.base import RolloutBackend
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.models.copies import copy_weights
from rhymerl.models.policy import Policy
from rhymerl.types import Autocast
from rhymerl.workers.messages import WeightSource


@dataclass(slots=True, kw_only=True)
class EngineLoader:
    """Makes the policy with the first weights, starts the engine on it, and copies later weights into it."""

    make_policy: Callable[[], Policy]
    engine: RolloutBackend
    drafter: Drafter
    budget: Budget | None = None
    autocast: Autocast = nullcontext
    _policy: Policy | None = None

    def __call__(self, source: WeightSource, version: int) -> RolloutBackend:
        is_first = self._policy is None
        policy = self._policy = self._policy or self.make_policy()
        copy_weights(policy.model, source.load().items())
        if is_first:
            self.engine.owns_policy = True
            self.engine.start(policy, self.drafter, budget=self.budget, autocast=self.autocast)
        self.engine.sync_weights(policy.named_weights(), version)
        return self.engine
