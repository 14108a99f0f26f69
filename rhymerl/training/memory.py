"""The sizes of a module's update, for an engine that shares its device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedModel

from rhymerl.models.critic import Critic
from rhymerl.models.logprobs import default_chunk_tokens
from rhymerl.models.lora import is_adapted
from rhymerl.models.memory import UpdateShape
from rhymerl.rollout import RolloutSettings
from rhymerl.training.checks import longest_tokens
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.trainer import datamodule_of


class Trained(Protocol):
    """The parts of a RhymeModule that decide what its update holds."""

    model: PreTrainedModel
    critic: Critic | None
    rollout: RolloutSettings
    update: UpdateSettings
    evaluation: EvaluationSettings

    @property
    def trainer(self) -> Any: ...


def update_shape(module: Trained) -> UpdateShape:
    """Return the sizes of what the module's update holds, once the model is on its device and in its dtype."""
    model, update = module.model, module.update
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    critic = module.critic
    parameters = [*model.parameters(), *(critic.parameters() if critic is not None else [])]
    datamodule = datamodule_of(module.trainer)
    longest = longest_tokens(datamodule, rollout=module.rollout, evaluation=module.evaluation)
    loader = datamodule.train_loader
    of_step = loader.prompts_per_step * module.rollout.group_size * longest if loader is not None else longest
    head = model.get_output_embeddings()
    assert head is not None, "prove_update has found one"
    itemsize = model.dtype.itemsize
    is_eager = config._attn_implementation == "eager"
    return UpdateShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention=heads * head_size,
        intermediate=int(np.max(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)),
        vocabulary=config.vocab_size,
        weight_bytes=sum(each.nbytes for each in parameters),
        trained_bytes=sum(each.nbytes for each in parameters if each.requires_grad),
        weight_itemsize=itemsize,
        itemsize=2 if str(module.trainer.precision).endswith("-mixed") else itemsize,
        has_adapters=is_adapted(model),
        backbones=2 if critic is not None and critic.body is not None else 1,
        score_bytes=heads * longest * (4 + itemsize) if is_eager else 0,
        micro_batch_tokens=min(update.micro_batch_tokens, of_step),
        longest_tokens=longest,
        chunk_tokens=update.chunk_tokens or default_chunk_tokens(head),
        activation_checkpointing=update.activation_checkpointing,
    )
