"""What has been drawn for a step before its turn: it outlives updates, validations and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rhymerl.rollout.plans import SharedPlan
from rhymerl.types import Completion, Generated, RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """An answer as far as it has been drawn, apart from its request."""

    generated: Generated
    finish_reason: str
    num_passes: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, completion: Completion) -> Drawn:
        return cls(
            generated=completion.generated,
            finish_reason=completion.finish_reason,
            num_passes=completion.num_passes,
            num_drafted=completion.num_drafted,
            num_accepted=completion.num_accepted,
        )

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to draw."""
        return self.finish_reason != "withdrawn"

    def before(self, completion: Completion) -> Completion:
        """The same completion with what it had cost up to here; its tokens include these already."""
        return replace(
            completion,
            num_passes=self.num_passes + completion.num_passes,
            num_drafted=self.num_drafted + completion.num_drafted,
            num_accepted=self.num_accepted + completion.num_accepted,
        )

    def completion(self, request: RolloutRequest) -> Completion:
        """Of the request as it was asked."""
        return Completion(
            request=request,
            generated=self.generated,
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            num_passes=self.num_passes,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What a rank has of `step`, by request id, and the plan that it was drawn by; `asked` is the fingerprint of the requests."""

    step: int
    asked: str
    plan: SharedPlan
    drawn: Mapping[str, Drawn]

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors."""
        return {
            "step": self.step,
            "asked": self.asked,
            "queues": [list(queue) for queue in self.plan.queues],
            "digest": self.plan.digest,
            "drawn": {name: _packed(drawn) for name, drawn in self.drawn.items()},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Ahead:
        plan = SharedPlan(queues=state["queues"], digest=state["digest"])
        drawn = {name: _unpacked(each) for name, each in state["drawn"].items()}
        return cls(step=state["step"], asked=state["asked"], plan=plan, drawn=drawn)


def fingerprint(requests: Sequence[RolloutRequest]) -> str:
    """32 hex digits that say what is asked for: which requests, of which noise, sampled how."""
    digest = hashlib.blake2b(digest_size=16)
    sampling: object = None
    for request in requests:
        if request.sampling is not sampling:
            sampling = request.sampling
            digest.update(repr(sampling).encode())
        digest.update(f"{request.id}\0{request.seed}\0".encode())
    return digest.hexdigest()


def united(each: Sequence[Ahead | None]) -> Ahead | None:
    """What all ranks have together; all or none of them have a plan."""
    known = [ahead for ahead in each if ahead is not None]
    if not known:
        return None
    return replace(known[0], drawn={name: drawn for ahead in known for name, drawn in ahead.drawn.items()})


def _packed(drawn: Drawn) -> dict[str, Any]:
    generated = drawn.generated
    return {
        "token_ids": torch.tensor(generated.token_ids),
        "logprobs": torch.tensor(generated.logprobs),
        "policy_versions": torch.tensor(generated.policy_versions),
        "finish_reason": drawn.finish_reason,
        "counts": [drawn.num_passes, drawn.num_drafted, drawn.num_accepted],
    }


def _unpacked(state: Mapping[str, Any]) -> Drawn:
    num_passes, num_drafted, num_accepted = state["counts"]
    return Drawn(
        generated=Generated(
            token_ids=state["token_ids"].numpy(),
            logprobs=state["logprobs"].numpy(),
            policy_versions=state["policy_versions"].numpy(),
        ),
        finish_reason=state["finish_reason"],
        num_passes=num_passes,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )
