"""The names of settings in TRL (`GRPOConfig`) and in verl. The table in docs/coming_from.md has the same ones."""

from __future__ import annotations

TRL = {
    "train_dataset": "data.train",
    "eval_dataset": "data.validation",
    "num_generations": "rollout.group_size",
    "per_device_train_batch_size": "update.micro_batch_tokens",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "learning_rate": "update.learning_rate",
    "lr_scheduler_type": "update.lr_schedule",
    "warmup_steps": "update.warmup_steps",
    "max_grad_norm": "update.max_grad_norm",
    "num_iterations": "update.epochs",
    "gradient_checkpointing": "update.activation_checkpointing",
    "router_aux_loss_coef": "update.router_aux_loss_coef",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "beta": "algo.kl_coef",
    "scale_rewards": "algo.scale",
    "loss_type": "algo.loss_mean",
    "reward_funcs": "rewards",
    "use_vllm": "backend",
    "vllm_tensor_parallel_size": "backend.tensor_parallel",
    "peft_config": "adapter",
    "num_train_epochs": "trainer.max_epochs",
    "save_steps": "checkpoint.every_n_steps",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "checkpoint.monitor",
    "resume_from_checkpoint": "ckpt_path",
    "eval_steps": "evaluation.every_n_steps",
    "num_generations_eval": "evaluation.samples",
    "report_to": "logger",
}
VERL = {
    "actor_rollout_ref.model.path": "model.path",
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "data.train_batch_size": "data.prompts_per_step",
    "data.max_response_length": "rollout.max_tokens",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "actor_rollout_ref.actor.optim.lr": "update.learning_rate",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "update.lr_schedule",
    "actor_rollout_ref.actor.grad_clip": "update.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "update.epochs",
    "ppo_max_token_len_per_gpu": "update.micro_batch_tokens",
    "enable_gradient_checkpointing": "update.activation_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "update.offload_optimizer",
    "clip_ratio_low": "algo.clip_low",
    "clip_ratio_high": "algo.clip_high",
    "kl_loss_coef": "algo.kl_coef",
    "algorithm.norm_adv_by_std_in_grpo": "algo.scale",
    "loss_agg_mode": "algo.loss_mean",
    "algorithm.filter_groups": "rollout.dynamic_sampling",
    "custom_reward_function.path": "rewards",
    "actor_rollout_ref.rollout.name": "backend",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "backend.tensor_parallel",
    "actor_rollout_ref.model.lora_rank": "adapter",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.total_epochs": "trainer.max_epochs",
    "trainer.save_freq": "checkpoint.every_n_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.resume_mode": "ckpt_path",
    "trainer.test_freq": "evaluation.every_n_steps",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples",
}
OTHER_NAMES = TRL | VERL


def here(name: str) -> str | None:
    """Return the setting that does what one of this name does in TRL or verl; its last words are enough if unique."""
    meant = {ours for theirs, ours in OTHER_NAMES.items() if f".{theirs}".endswith(f".{name}")}
    return OTHER_NAMES.get(name) or (meant.pop() if len(meant) == 1 else None)


def elsewhere(key: str) -> list[str]:
    """Return the names of a setting in TRL and in verl."""
    projects = {"TRL": TRL, "verl": VERL}
    return [f"{theirs} ({name})" for name, names in projects.items() for theirs, ours in names.items() if ours == key]
