"""The names of settings in TRL (`GRPOConfig`) and in verl. The table in docs/coming_from.md has the same ones."""

from __future__ import annotations

PROJECTS = ("TRL", "verl")
NAMES: dict[str, tuple[str | None, str | None]] = {  # by the setting here, in the order of the projects
    "data.train": ("train_dataset", "data.train_files"),
    "data.validation": ("eval_dataset", "data.val_files"),
    "rollout.group_size": ("num_generations", "actor_rollout_ref.rollout.n"),
    "update.micro_batch_tokens": ("per_device_train_batch_size", "ppo_max_token_len_per_gpu"),
    "rollout.max_tokens": ("max_completion_length", "data.max_response_length"),
    "rollout.temperature": ("temperature", "actor_rollout_ref.rollout.temperature"),
    "rollout.top_p": ("top_p", None),
    "rollout.top_k": ("top_k", None),
    "rollout.min_p": ("min_p", None),
    "data.chat_template_kwargs": ("chat_template_kwargs", "data.apply_chat_template_kwargs"),
    "update.learning_rate": ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
    "update.lr_schedule": ("lr_scheduler_type", "actor_rollout_ref.actor.optim.lr_scheduler_type"),
    "update.warmup_steps": ("warmup_steps", None),
    "update.max_grad_norm": ("max_grad_norm", "actor_rollout_ref.actor.grad_clip"),
    "update.epochs": ("num_iterations", "actor_rollout_ref.actor.ppo_epochs"),
    "update.activation_checkpointing": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "update.router_aux_loss_coef": ("router_aux_loss_coef", None),
    "algo.clip_low": ("epsilon", "clip_ratio_low"),
    "algo.clip_high": ("epsilon_high", "clip_ratio_high"),
    "algo.kl_coef": ("beta", "kl_loss_coef"),
    "algo.scale": ("scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
    "algo.loss_mean": ("loss_type", "loss_agg_mode"),
    "rewards": ("reward_funcs", "custom_reward_function.path"),
    "backend": ("use_vllm", "actor_rollout_ref.rollout.name"),
    "backend.tensor_parallel": ("vllm_tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
    "adapter": ("peft_config", "actor_rollout_ref.model.lora_rank"),
    "trainer.max_epochs": ("num_train_epochs", "trainer.total_epochs"),
    "checkpoint.every_n_steps": ("save_steps", "trainer.save_freq"),
    "checkpoint.keep": ("save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    "checkpoint.monitor": ("metric_for_best_model", None),
    "ckpt_path": ("resume_from_checkpoint", "trainer.resume_mode"),
    "evaluation.every_n_steps": ("eval_steps", "trainer.test_freq"),
    "evaluation.samples": ("num_generations_eval", "actor_rollout_ref.rollout.val_kwargs.n"),
    "logger": ("report_to", None),
    "model.path": (None, "actor_rollout_ref.model.path"),
    "data.prompts_per_step": (None, "data.train_batch_size"),
    "data.max_prompt_tokens": (None, "data.max_prompt_length"),
    "update.offload_optimizer": (None, "actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
    "rollout.dynamic_sampling": (None, "algorithm.filter_groups"),
    "trainer.max_steps": (None, "trainer.total_training_steps"),
}


def here(name: str) -> str | None:
    """Return the setting that does what one of this name does in TRL or verl; its last words are enough if unique."""
    meant = [ours for ours, names in NAMES.items() if any(f".{theirs}".endswith(f".{name}") for theirs in names)]
    return meant[0] if len(meant) == 1 else None


def elsewhere(key: str) -> list[str]:
    """Return the names of a setting in TRL and in verl."""
    return [f"{theirs} ({name})" for name, theirs in zip(PROJECTS, NAMES.get(key, ()), strict=False) if theirs]
