"""The factors of whole runs, with the words of each of their values, and the pairs that are refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rhymerl.models.policy import Policy
from rhymerl.models.tokenizers import character_tokenizer
from tests.combinations.covering import Pair, Row, covering_array, pair
from tests.integration.test_episodes_rerendered import TEMPLATE
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.small import small_model
from tests.models.windowed import LATENTS, WINDOWED, windowed_model

OWN = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}
TEACHER = "{teacher}"  # in words: the folder of another model of the row's family
_TURNS = ("rollout.max_turns=3", "rollout.max_reply_tokens=8")
_COUNTS = ("environment={_target_: tests.environments.worlds.Counts}", *_TURNS)
_GOODPUT = ("budget.ask_cost=[0.1, 0.01]",)  # so that drafts are made in small batches, too

WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": dict.fromkeys(
        ("llama", "qwen3", "qwen2_moe", "deepseek_v3", "gemma3_text", "mistral", "olmo3", "gpt2", "lfm2", "falcon_h1"),
        (),
    ),
    "algo": {
        "dapo": ("algo=dapo",),
        "gspo": ("algo=gspo",),
        "cispo": ("algo=cispo",),
        "rloo": ("algo=rloo",),
        "reinforce": ("algo=reinforce_plus_plus",),
        "ppo": ("algo=ppo",),
        "distill": ("algo=distill", "algo.reward_weight=0.5", f"teacher.path={TEACHER}"),
        "distill_vocabulary": ("algo=distill", "algo.over=vocabulary", f"teacher.path={TEACHER}"),
    },
    "precision": {
        "32-true": (),
        "64-true": ("model.dtype=float64", "trainer.precision=64-true"),
        "bf16-true": ("model.dtype=bfloat16", "trainer.precision=bf16-true"),
        "bf16-mixed": ("trainer.precision=bf16-mixed",),
    },
    "adapter": {"none": (), "lora": ("adapter=lora", "adapter.rank=4")},
    "ranks": {"1": (), "2": ("trainer.devices=2", "trainer.strategy=ddp")},
    "run_ahead": {name: (f"run_ahead={name}",) for name in ("off", "draft", "keep")},
    "truncation": {
        "none": (),
        "top_k": ("rollout.top_k=5",),
        "top_p": ("rollout.top_p=0.8",),
        "min_p": ("rollout.min_p=0.05",),
    },
    "task": {
        "one_turn": (),
        "replies": ("task=checked_sum", *_TURNS),
        "environment": _COUNTS,
        "rerendered": (*_COUNTS, "data.system_prompt='0'", "rollout.history=rerender", "rollout.stop_token_ids=[2]"),
    },
    "scheduler": {name: (f"scheduler={name}",) for name in ("fifo", "sorted", "packed", "paced", "histopipe")},
    "drafter": {
        **{name: (f"drafter={name}",) for name in ("none", "ngram", "history_tree", "paper")},
        "random": ("drafter={_target_: rhymerl.testing.RandomTreeDrafter}",),
    },
    "budget": {"goodput": _GOODPUT, "fixed": ("budget=fixed",), "aimd": ("budget=aimd",)},
    "engine": {
        "roomy": ("backend.max_running=64",),
        "narrow": ("backend.max_running=5", "backend.kv_tokens=80", "backend.max_pass_tokens=24"),
    },
    "history": {"all": (), "little": ("history.max_tokens=200", "history.window=1", "history.log_size=4")},
    "clock": {"passes": (), "seconds": ("deterministic=false",)},  # by which ranks and budgets go
    "temperature": {"1": (), "0.6": ("rollout.temperature=0.6",)},
    "replay": {"default": (), "off": ("rollout.sampling_replay=false", "update.router_replay=false")},
    "critic": {"own": (), "shared": ("critic.shared=true",)},
    "correction": {
        "truncated": (),
        "masked": ("algo.correction=masked", "algo.correction_level=sequence"),
        "none": ("algo.correction=none",),
    },
    "loss": {
        "own": (),
        "entropy": ("algo.entropy_coef=0.01", "algo.loss_mean=constant"),
        "masked": ("algo.mask_truncated=true",),
        "overlong": ("algo.overlong_fraction=0.5",),
    },
    "schedule": {
        "constant": (),
        "cosine": ("update.lr_schedule=cosine", "update.warmup_steps=2", "update.weight_decay=0.1"),
    },
    "trace": {"none": (), "trace": ("profile=trace",)},
    "extra": {
        "none": (),
        "resumed": (),
        "reference": ("algo.kl_coef=0.05",),
        "dynamic_sampling": ("rollout.dynamic_sampling=2",),
        "not_shared": ("update.share_prefixes=false",),
        "checkpointing": ("update.activation_checkpointing=true",),
        "evaluations": ("evaluation.every_n_steps=1", "evaluation.samples=2"),
        "epochs": ("update.epochs=2",),
        "small_batches": ("update.micro_batch_tokens=64", "update.chunk_tokens=7"),
    },
}
FACTORS = {name: tuple(values) for name, values in WORDS.items()}


# With what is said of each.
FORBIDDEN: dict[Pair, str] = {
    pair(("algo", "distill"), ("extra", "reference")): "algo.kl_coef=0.05: expected 0 with Distill",
    pair(("algo", "distill_vocabulary"), ("extra", "reference")): "algo.kl_coef=0.05: expected 0 with Distill",
    pair(("model", "gpt2"), ("adapter", "lora")): "adapter: GPT2LMHeadModel has no linear layers of its own",
}
ROWS = covering_array(FACTORS, forbidden=FORBIDDEN)


# What changes the speed of a run, or where it is computed, and nothing else: the plainest value of each.
PLAIN = {
    "ranks": "1",
    "run_ahead": "off",
    "scheduler": "fifo",
    "drafter": "none",
    "budget": "fixed",
    "engine": "roomy",
    "history": "all",
    "clock": "passes",
    "trace": "none",
}
_CHANGES = ("reference", "dynamic_sampling", "epochs")  # the extras that change what is trained


def plainest(row: Row) -> Row:
    """The row whose run samples the same tokens and ends with the same weights up to rounding."""
    return {**row, **PLAIN, "extra": row["extra"] if row["extra"] in _CHANGES else "none"}


def words_of(row: Row) -> list[str]:
    """What a row adds to the words that all rows share."""
    return [word for name, value in row.items() for word in WORDS[name][value]]


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """A small model in float64, whose distributions are neither flat nor one-hot."""
    if family in HYBRIDS:
        model = hybrid_model(family)
    elif family in {**WINDOWED, **LATENTS}:
        model = windowed_model(family)
    else:
        torch.manual_seed(0)
        own = {"initializer_range": 0.3, "max_position_embeddings": 256, **OWN.get(family, {})}
        model = small_model(family, dtype=torch.float64, **own).eval()
    if seed:  # others, but like them
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    return model


def policy_of(family: str, *, seed: int = 0, is_chat: bool = False) -> Policy:
    """The model and a tokenizer, with a chat template if asked for."""
    tokenizer = character_tokenizer("0123456789+=;#? \n")
    if is_chat:
        tokenizer.chat_template = TEMPLATE
    return Policy(model=model_of(family, seed), tokenizer=tokenizer)
