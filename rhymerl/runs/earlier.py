"""The answers of an earlier run: a file that every run leaves, and that the next one may start with."""

from __future__ import annotations

from pathlib import Path

from rhymerl.data import PromptDataModule
from rhymerl.data.encoding import tokenizer_fingerprint
from rhymerl.errors import DataError
from rhymerl.history import HistoryStore
from rhymerl.training.module import RhymeModule
from rhymerl.types import Split


def save_history(path: Path, module: RhymeModule, datamodule: PromptDataModule) -> None:
    """Write what the module's history holds, for `start_with`. Raises DataError when it cannot be written."""
    module.history.save(path, _fingerprint(module, datamodule))


def start_with(path: str | Path, module: RhymeModule, datamodule: PromptDataModule, *, required: bool = True) -> str:
    """Add another run's answers to the module's history, as older than all that are to come; says what came of it.

    A file that is truncated, corrupt, of a newer version or of another tokenizer is a DataError where it is `required`;
    else the run starts without it.
    """
    mine = module.history
    caps = {"window": mine.window, "max_tokens": mine.max_tokens, "max_prompts": mine.max_prompts}
    try:
        earlier = HistoryStore.load(Path(path).expanduser(), tokenizer=_fingerprint(module, datamodule), **caps)
    except DataError as error:
        if required:
            raise DataError(
                f"{error}; give another history_file, or set history_file_required=false to start without it"
            ) from error
        return f"Starting without earlier answers: {error}"
    mine.merge(earlier)
    module.first_epochs = next_epochs(mine)
    loader = datamodule.train_loader
    prompts = loader.prompts if loader is not None else []
    num_known = sum(bool(mine.answers(prompt)) for prompt in prompts)
    return f"Starting with {mine.num_answers:,} earlier answers from {path}; {num_known:,} of {len(prompts):,} prompts have some"


def next_epochs(history: HistoryStore) -> dict[Split, int]:
    """Return by split the first epoch that is newer than all there are."""
    epochs: dict[Split, int] = {"train": 0, "validation": 0}
    for change in history.snapshot():
        epochs[change.split] = max(epochs[change.split], change.added[-1].epoch + 1)
    return epochs


def _fingerprint(module: RhymeModule, datamodule: PromptDataModule) -> str:
    """Return the fingerprint of all that makes prompts into token ids."""
    return tokenizer_fingerprint(module.policy.tokenizer, datamodule.template_arguments).hex()
