"""The settings of the update, and the optimizer and schedule that they make."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError, at_least, check_ranges, require
from rhymerl.models.critic import Critic
from rhymerl.models.decoder import decoder_of
from rhymerl.models.policy import is_random, named
from rhymerl.models.proof import prove_sharing, prove_update
from rhymerl.models.rope import refuse_changing_rope
from rhymerl.models.routing import has_balance_loss, routers_of

_LOG = logging.getLogger(__name__)

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(kw_only=True, eq=False)
class UpdateSettings:
    """Optimizer and batch settings.

    AdamW at `learning_rate`; after `warmup_steps` it follows `lr_schedule` down to `min_lr_ratio` of it at the run's
    last step. A step's samples make `mini_batches` optimizer steps in each of `epochs` passes over them. A backward
    takes at most `micro_batch_tokens` tokens, padding included; with `share_prefixes` only prompts are padded, and
    shared tokens count once. `chunk_tokens` bounds the logits held at a time (None: 64 MiB of them, on a GPU up to 1
    GiB). `activation_checkpointing` keeps only each layer's input for the backward and computes the rest again. With
    `offload_optimizer` the optimizer's moments are in the host's memory, not on the GPU, except while it steps.
    `max_grad_norm` 0 clips nothing; policy and critic are clipped apart. With `share_prefixes` a prompt, and the shared
    prefixes of its answers, are computed once in a micro-batch, if the model's attention allows it; the gradient is the
    same. With `router_replay` the experts that computed a token when it was sampled compute it in the update too, with
    weights that are computed anew (None: where the backend says which); without, they are only compared. With
    `router_aux_loss_coef` so many times the model's own loss that balances its experts is added.
    """

    learning_rate: float = at_least(0, 1e-6)
    lr_schedule: Schedule = "constant"
    warmup_steps: int = at_least(0, 0)
    min_lr_ratio: float = at_least(0, 0.0)
    weight_decay: float = at_least(0, 0.0)  # of AdamW
    betas: Sequence[float] = (0.9, 0.999)  # of AdamW
    max_grad_norm: float = at_least(0, 1.0)
    epochs: int = at_least(1, 1)
    mini_batches: int = at_least(1, 1)
    micro_batch_tokens: int = at_least(1, 16_384)
    chunk_tokens: int | None = at_least(1, None)
    activation_checkpointing: bool = False
    offload_optimizer: bool = False
    share_prefixes: bool = True
    router_replay: bool | None = None
    router_aux_loss_coef: float = at_least(0, 0.0)

    def __post_init__(self) -> None:
        check_ranges(self)
        is_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(is_betas, "betas", list(self.betas), "two numbers in [0, 1)")
        known = ("constant", "linear", "cosine")
        require(self.lr_schedule in known, "lr_schedule", self.lr_schedule, "constant, linear or cosine")
        self.betas = tuple(self.betas)

    @property
    def optimizer_steps(self) -> int:
        """Return the most optimizer steps of a rollout step.

        There are fewer where there are fewer samples, or where the algorithm stops early.
        """
        return self.epochs * self.mini_batches

    def check(self, model: PreTrainedModel, longest_tokens: int) -> None:
        """Raise ConfigError if the model's config rules out such training on sequences of `longest_tokens`."""
        refuse_changing_rope(model, longest_tokens)
        if self.router_replay and not routers_of(model):
            raise ConfigError(
                f"update.router_replay=true: {type(model).__name__} has no routers whose choice of experts is read; expected null or false"
            )
        if self.router_aux_loss_coef and not has_balance_loss(model):
            raise ConfigError(
                f"update.router_aux_loss_coef={self.router_aux_loss_coef}: {type(model).__name__} has no loss that balances experts; "
                "expected 0"
            )
        if self.activation_checkpointing and not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"update.activation_checkpointing=true: {type(model).__name__} does not support it; expected false"
            )

    def prove(
        self,
        model: PreTrainedModel,
        longest_tokens: int,
        *,
        critic: Critic | None = None,
        teacher: PreTrainedModel | None = None,
    ) -> bool:
        """Return whether shared prefixes are computed once; say why not, if `share_prefixes` is set.

        The model has to allow it, and so do a teacher and a critic with a backbone. A dropout would leave out the same
        of a prompt for all of its answers. Raises ConfigError if the update computes another model; a collective if
        sharded.
        """
        for each in filter(None, (model, teacher)):
            prove_update(each)
        body = critic.body if critic is not None else None
        for each in filter(None, (model, teacher, body)) if self.share_prefixes else ():
            reason = (
                "it has a dropout or a jitter"
                if is_random(each)
                else prove_sharing(decoder_of(each), longest_tokens, model=each)
            )
            if reason is not None:
                if is_first_rank():
                    _LOG.warning(
                        "update.share_prefixes: off for %s, whose prompts are computed for each answer, because %s",
                        named(each),
                        reason,
                    )
                return False
        return self.share_prefixes

    def warn(self, model: PreTrainedModel, *, says_routes: bool = True) -> None:
        """Say, on rank 0, what may surprise people in a training that begins with this model.

        `says_routes` is the backend's.
        """
        if self.router_replay is None and not says_routes and is_first_rank() and routers_of(model):
            _LOG.warning(
                "update.router_replay=null: the backend cannot say which experts of %s computed a token, so the update chooses its own, "
                "which may be others; update.router_replay=false does so with any backend",
                named(model),
            )
        if is_random(model) and is_first_rank():
            _LOG.warning(
                "%s has a dropout, or a jitter of its routers: what that draws follows from how a step is cut into micro-batches, so its "
                "gradient depends on update.micro_batch_tokens and on the number of ranks; set the dropout and the jitter of the model "
                "(config.json) or the dropout of the adapter to 0 for gradients that do not",
                named(model),
            )

    def optimizer(self, parameters: Sequence[nn.Parameter], *, critic: Critic | None = None) -> torch.optim.AdamW:
        """Return one optimizer for the policy, whose groups come first, and the critic at its own learning rate."""
        groups = self._groups(parameters, self.learning_rate)
        if critic is not None:
            groups += self._groups(critic.parameters(), critic.settings.learning_rate)
        first, second = self.betas
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(first, second), fused=True)

    @property
    def states(self) -> int:
        """Return the number of parameter-sized tensors that the optimizer keeps, found by a step on a small one."""
        parameter = nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.zeros(2, 2)
        optimizer = self.optimizer([parameter])
        optimizer.step()
        return sum(
            torch.is_tensor(each) and each.shape == parameter.shape for each in optimizer.state[parameter].values()
        )

    def _groups(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> list[dict[str, Any]]:
        """Return the parameter groups: biases and norms (one-dimensional parameters) do not decay."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kinds = (
            ([p for p in trained if p.ndim > 1], self.weight_decay),
            ([p for p in trained if p.ndim <= 1], 0.0),
        )
        return [{"params": some, "weight_decay": decay, "lr": learning_rate} for some, decay in kinds if some]

    def schedule(
        self, optimizer: torch.optim.Optimizer, total_steps: float, *, critic: Critic | None = None
    ) -> LambdaLR:
        """Return the learning-rate schedule, stepped once an optimizer step; `total_steps` may be infinite.

        The policy's begins when it begins to move: after the warm-up of the critic.
        """
        of_critic = set(map(id, critic.parameters())) if critic is not None else set()
        wait = critic.settings.warmup_steps * self.optimizer_steps if critic is not None else 0

        def factor(step: int, begin: int) -> float:
            done, total = max(0, step - begin), total_steps - begin
            if done < self.warmup_steps:
                return (done + 1) / self.warmup_steps
            if self.lr_schedule == "constant" or math.isinf(total):
                return 1.0
            share = min(1.0, (done - self.warmup_steps) / max(1.0, total - self.warmup_steps))
            left = 1 - share if self.lr_schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
            return self.min_lr_ratio + (1 - self.min_lr_ratio) * left

        begins = [0 if id(group["params"][0]) in of_critic else wait for group in optimizer.param_groups]
        return LambdaLR(optimizer, [partial(factor, begin=begin) for begin in begins])


class Rates:
    """The settings that an optimizer and its schedule were made with: learning rates, decays, betas."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the settings of an optimizer with its schedule, before a checkpoint is loaded into them."""
        self._groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]

    def put_back(self, optimizer: torch.optim.Optimizer, schedule: LambdaLR) -> None:
        """Put the settings back over those that a checkpoint has brought; the schedule stays where it is."""
        schedule.base_lrs = [group["initial_lr"] for group in self._groups]
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, mine, rate in zip(optimizer.param_groups, self._groups, rates, strict=True):
            group.update(mine, lr=rate)
        schedule._last_lr = rates
