"""Models read by transformers with all weights in their files: transformers fills in missing ones at random."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from rhymerl.errors import ConfigError


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Context in which whatever the parsers of model files stumble over is a ConfigError in one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers raises anything there, and tokenizers bare Exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "trust_remote_code" in str(error):
            reason = (
                "it brings Python code of its own, which is never run; expected a model that transformers has itself"
            )
        raise ConfigError(f"{setting}: {reason}") from error


def read_model(loader: Any, where: str, **source: Any) -> PreTrainedModel:
    """Return what `loader.from_pretrained` makes of `source`.

    Raises ConfigError that begins with `where` for weights that are missing, and for a head that the config ties to an
    embedding of other values: it would be trained by itself, and exported as tied.
    """
    model, found = loader.from_pretrained(**source, trust_remote_code=False, output_loading_info=True)
    refuse_missing(found["missing_keys"], where, has=found["unexpected_keys"])
    head = getattr(model.get_output_embeddings(), "weight", None)
    if model.config.tie_word_embeddings and head is not None and head is not model.get_input_embeddings().weight:
        raise ConfigError(
            f"{where}: its config ties head and embedding (tie_word_embeddings), and its files have another matrix for each; "
            "set it to false in config.json, or remove one of them"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def refuse_missing(names: Collection[str], where: str, *, has: Collection[str] = ()) -> None:
    """Raise ConfigError for the names of missing weights, of which the files may have some with a prefix."""
    if not names:
        return
    first, *others = sorted(names)
    more = f" and {len(others)} others" if others else ""
    prefixed = sorted(name for name in has if name.endswith(f".{first}"))
    hint = f"; there is {prefixed[0]}, so remove the prefix from its names" if prefixed else ""
    raise ConfigError(f"{where}: it has no weights for {first}{more}{hint}")
