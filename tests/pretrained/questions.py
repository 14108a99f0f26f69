"""Questions for SmolLM2, as its chat template puts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhymerl.models.policy import Policy
from rhymerl.testing import make_prompt
from rhymerl.types import RolloutRequest, SamplingParams

QUESTIONS = ("What is the capital of France?", "What is 2 + 2?")


def asked(policy: Policy, question: str) -> list[int]:
    """The prompt that the chat template makes."""
    messages = [{"role": "user", "content": question}]
    ids: list[int] = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return ids


def requests(
    policy: Policy, questions: Sequence[str] = QUESTIONS, *, samples: int = 2, max_tokens: int = 24, **sampling: Any
) -> list[RolloutRequest]:
    """So many samples of each question."""
    settings = SamplingParams(max_tokens=max_tokens, stop_token_ids=policy.stop_token_ids, **sampling)
    return [
        RolloutRequest(
            id=f"{number}/{sample}",
            prompt=make_prompt(asked(policy, question), id=str(number)),
            sample=sample,
            seed=100 * number + sample,
            sampling=settings,
        )
        for number, question in enumerate(questions)
        for sample in range(samples)
    ]
