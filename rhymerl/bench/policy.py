"""A policy and its requests, for benches that run one."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from rhymerl.config import instantiate
from rhymerl.data.base import LocatedRow
from rhymerl.data.encoding import LengthLimits, PromptEncoder, encode_rows
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings, requests_of
from rhymerl.types import Prompt, RolloutRequest


class PolicyBench:
    """The policy of a config, on the GPU where there is one, and requests for answers to the prompts of its task."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.policy: Policy = instantiate(config.model, key="model").load()
        self.policy.model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.rollout: RolloutSettings = instantiate(config.rollout, key="rollout")
        self.prompts = self._prompts()

    def _prompts(self) -> list[Prompt]:
        task = instantiate(self.config.task, key="task")
        encoder = PromptEncoder(self.policy.tokenizer)
        limits = LengthLimits(context_tokens=self.policy.context_tokens, max_tokens=self.rollout.max_tokens)
        return encode_rows([LocatedRow(location="task", row=row) for row in task.rows("train")], encoder, limits)

    def requests(self, step: str) -> list[RolloutRequest]:
        """Return requests for all prompts, with the noise of that step."""
        stop_token_ids = self.policy.stop_token_ids
        return requests_of(self.prompts, step, self.rollout, seed=self.config.seed, stop_token_ids=stop_token_ids)
