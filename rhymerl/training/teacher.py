"""The teacher: a frozen model in the place of the run's own reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rhymerl.algos.base import Algorithm
from rhymerl.errors import ConfigError
from rhymerl.models.fingerprint import fingerprint
from rhymerl.models.logits import num_tokens
from rhymerl.models.policy import Policy, PolicySource, frozen
from rhymerl.models.rope import refuse_longer


@dataclass(kw_only=True, eq=False)
class TeacherSettings:
    """The source of a teacher: a directory, GGUF file or hub name (`path`), with the policy's tokenizer.

    It takes the place of the policy that the run started from, wherever an algorithm reads a reference: in `Distill`,
    and in a divergence with `kl_coef`. It gets the policy's dtype, and is in no checkpoint.
    """

    path: str | None = None

    def reference(self, policy: Policy, algo: Algorithm) -> PreTrainedModel | None:
        """Return the frozen model that the algorithm reads: the teacher, else the policy as it is now, or None.

        Raises ConfigError for a teacher that is missing, not wanted, or of other tokens.
        """
        self._check_wanted(algo)
        if self.path is None:
            return frozen(policy.model) if algo.reads_reference else None
        with torch.device("cpu"):  # also where the policy's weights come later
            teacher = PolicySource.like(policy.model, self.path).load(setting="teacher")
        _check_tokens(teacher, policy, f"teacher.path={self.path!r}")
        vars(teacher.model)["setting"] = "teacher"
        model: PreTrainedModel = teacher.model.requires_grad_(False).eval()
        return model

    def fingerprint(self, reference: PreTrainedModel | None) -> str | None:
        """Return that of the teacher's weights, by which a resumed run knows it again; None without a teacher."""
        return None if self.path is None or reference is None else fingerprint(reference)

    def outline(self, model: PreTrainedModel, algo: Algorithm) -> PreTrainedModel | None:
        """Return it without content, for a policy without content: see `PolicySource.outline`."""
        self._check_wanted(algo)
        if self.path is None:
            return frozen(model) if algo.reads_reference else None
        return PolicySource.like(model, self.path).outline(setting="teacher")

    def check(self, reference: PreTrainedModel | None, longest_tokens: int) -> PreTrainedModel | None:
        """Return the reference if it is a teacher. Raises ConfigError where sequences are longer than its context."""
        if self.path is None or reference is None:
            return None
        refuse_longer(reference, longest_tokens, setting=f"teacher.path={self.path!r}")
        return reference

    def _check_wanted(self, algo: Algorithm) -> None:
        if self.path is None and algo.needs_teacher:
            raise ConfigError(
                f"teacher.path=null: {type(algo).__name__} learns from a teacher; expected a model directory, GGUF file or hub name"
            )
        if self.path is not None and not algo.reads_reference:
            raise ConfigError(
                f"teacher.path={self.path!r}: {type(algo).__name__} reads no teacher; expected null, algo=distill, or algo.kl_coef above 0"
            )


def _check_tokens(teacher: Policy, policy: Policy, setting: str) -> None:
    """Raise ConfigError unless each token that one may sample is the same token of the other."""
    theirs, ours = map(_sampled_tokens, (teacher, policy))
    if theirs != ours or num_tokens(teacher.model) != num_tokens(policy.model):
        number, token = min(theirs ^ ours, default=(num_tokens(policy.model), ""))
        raise ConfigError(
            f"{setting}: it has another tokenizer than the policy ({len(theirs)} and {len(ours)} tokens; {token!r}, {number}, is of one "
            "alone), so it cannot judge the policy's tokens; expected a teacher with the same tokenizer"
        )


def _sampled_tokens(policy: Policy) -> set[tuple[int, str]]:
    """Return them by id; transformers adds special tokens to tokenizers that it loads, beyond the model's."""
    last = num_tokens(policy.model)
    return {(number, token) for token, number in policy.tokenizer.get_vocab().items() if number < last}
