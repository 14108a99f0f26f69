"""The policy of a checkpoint as a directory of its own: what `rhymerl export` does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors import SafetensorError

from rhymerl.errors import ConfigError
from rhymerl.folders import open_folder, unmade_if_empty
from rhymerl.models.exported import restore
from rhymerl.runs.model_card import write_model_card
from rhymerl.training.checkpoint import policy_outline, policy_reader, read_checkpoint


def export(run: str | Path, out: str | Path) -> Path:
    """Write the policy of a run's last checkpoint as a Hugging Face directory with a model card.

    `run` is a run directory or a checkpoint file. `out` must be new, or empty: what fails leaves nothing in it. Raises
    ConfigError, also for a checkpoint that is damaged.
    """
    run, out = Path(run), Path(out)
    path = run if run.is_file() else run / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ConfigError(f"RUN={str(run)!r}: neither a checkpoint nor a run directory with checkpoints/last.ckpt")
    checkpoint = read_checkpoint(path, setting="RUN")
    if out.is_dir() and (found := sorted(each.name for each in out.iterdir())):
        raise ConfigError(f"OUT={str(out)!r}: holds files already ({found[0]}); give a new directory, or an empty one")
    try:
        with unmade_if_empty(out):
            target = open_folder(out, setting="OUT").resolve()
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
                part = Path(folder) / target.name
                part.mkdir()
                files, weights = checkpoint["rhymerl"]["policy_files"], policy_outline(checkpoint)
                restore(files, weights, part, read=policy_reader(path, checkpoint))
                write_model_card(part, checkpoint, _run_of(path))
                part.replace(target)
    except (ConfigError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"RUN={str(run)!r}: its policy cannot be written to OUT={str(out)!r}: {reason}") from error
    return out


def _run_of(path: Path) -> Path | None:
    """Return the directory of the run whose checkpoint this is; None for a file somewhere else."""
    run = path.parent.parent
    return run if path.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None
