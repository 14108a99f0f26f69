"""The new places of modules that settings and checkpoints of earlier versions name by their former paths."""

from __future__ import annotations

_MOVED = {
    "rhymerl.callbacks.teardown": "rhymerl.training.teardown",
    "rhymerl.backends.hosted": "rhymerl.workers.remote",
    "rhymerl.budgets.costs": "rhymerl.costs",
    "rhymerl.callbacks.summary": "rhymerl.runs.summary",
    "rhymerl.checkpoint": "rhymerl.training.checkpoint",
    "rhymerl.checks": "rhymerl.training.checks",
    "rhymerl.critic": "rhymerl.models.critic",
    "rhymerl.dealing": "rhymerl.training.dealing",
    "rhymerl.earlier": "rhymerl.runs.earlier",
    "rhymerl.evaluation": "rhymerl.training.evaluation",
    "rhymerl.export": "rhymerl.runs.export",
    "rhymerl.generate": "rhymerl.runs.generate",
    "rhymerl.head": "rhymerl.models.head",
    "rhymerl.hyperparameters": "rhymerl.training.hyperparameters",
    "rhymerl.loggers": "rhymerl.training.loggers",
    "rhymerl.logprobs": "rhymerl.models.logprobs",
    "rhymerl.lora": "rhymerl.models.lora",
    "rhymerl.module": "rhymerl.training.module",
    "rhymerl.policy": "rhymerl.models.policy",
    "rhymerl.proof": "rhymerl.models.proof",
    "rhymerl.ranks": "rhymerl.distributed",
    "rhymerl.replay": "rhymerl.runs.replay",
    "rhymerl.resume": "rhymerl.runs.resume",
    "rhymerl.rope": "rhymerl.models.rope",
    "rhymerl.run": "rhymerl.runs.fit",
    "rhymerl.run_ahead": "rhymerl.rollout.base",
    "rhymerl.speculation": "rhymerl.rollout.metrics",
    "rhymerl.speedup": "rhymerl.runs.speedup",
    "rhymerl.state": "rhymerl.training.state",
    "rhymerl.traces": "rhymerl.history.traces",
    "rhymerl.trainer": "rhymerl.training.trainer",
    "rhymerl.update": "rhymerl.training.settings",
    "rhymerl.update.batches": "rhymerl.training.batches",
    "rhymerl.update.passes": "rhymerl.training.passes",
    "rhymerl.update.settings": "rhymerl.training.settings",
    "rhymerl.update.updater": "rhymerl.training.updater",
    "rhymerl.warmstart": "rhymerl.runs.warmstart",
}


def current_path(path: str) -> str:
    """Return the dotted path of what is called `path`, which is most often that itself."""
    parts = path.split(".")
    for end in range(len(parts), 1, -1):
        if new := _MOVED.get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return path
