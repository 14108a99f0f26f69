"""Policy versions that may sample a step's tokens: which answers go on, and which are sampled again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rhymerl.types import Output, RolloutRequest
from rhymerl.workers.base import RunAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Policies from version `oldest` on may sample a step's tokens.

    Tokens of a policy older than `final` are a draft, along which the final policy samples the answer again. Where both
    are equal, as with `keep`, every token stays.
    """

    oldest: int
    final: int

    @classmethod
    def of(cls, target: int, run_ahead: RunAhead, max_staleness: int = 1) -> Versions:
        """Return the versions for answers that train the policy of version `target`."""
        match run_ahead:
            case "keep":
                return cls(oldest=target - max_staleness, final=target - max_staleness)
            case "draft":
                return cls(oldest=target - 1, final=target)
        return cls(oldest=target, final=target)

    def is_final(self, output: Output) -> bool:
        """Return whether the output's tokens are an answer, not a draft of one."""
        return not len(output) or int(output.policy_versions[0]) >= self.final

    def going_on(self, request: RolloutRequest, output: Output | None) -> RolloutRequest:
        """Return the request with its known tokens: the beginning of its answer, or a draft."""
        if output is None or not len(output):
            return request
        if self.is_final(output):
            return replace(request, output=output)
        return replace(request, prefetched=output.token_ids)
