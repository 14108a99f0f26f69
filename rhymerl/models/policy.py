"""The policy: a decoder-only language model and its tokenizer, loaded from disk or made from scratch."""

from __future__ import annotations

import copy
import shutil
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rhymerl.errors import ConfigError, require
from rhymerl.models import gguf
from rhymerl.models.deferred import (
    DeferredWeights,
    FirstRankWeights,
    files_of,
    generation_config_of,
    on_cpu,
    without_content,
)
from rhymerl.models.hub import look_up
from rhymerl.models.loading import naming, read_model
from rhymerl.models.lora import LoRA, is_adapted, is_changed, save_config, with_adapters
from rhymerl.models.places import check_place, is_gguf
from rhymerl.models.sharding import GatheredTensors, is_sharded
from rhymerl.models.tokenizers import character_tokenizer, check_characters, load_tokenizer
from rhymerl.models.wrapped import auto_class, freeze_towers, language_modules, processor_files

_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".bpe", ".vocab", ".jsonl", ".md")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model with its tokenizer, as they are saved together in one Hugging Face directory."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: DeferredWeights | None = None  # of a model that has only shapes, until it is sharded
    trained_on: torch.device | None = None  # of a copy that is elsewhere than the policy which is trained

    def __post_init__(self) -> None:
        # The tokenizer's tokens alone are sampled: matrices are often padded to a round number of rows.
        vars(self.model)["num_tokens"] = 1 + max(self.tokenizer.get_vocab().values())
        freeze_towers(self.model)
        _keep_experts(self.model)

    @property
    def device(self) -> torch.device:
        """Where the policy is trained."""
        return self.trained_on or self.model.device

    @property
    def context_tokens(self) -> int:
        """The longest sequence (prompt and response) that the model's positions allow."""
        return context_tokens(self.model.config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config, the model config and the tokenizer, sorted.

        A config that names none has its class's default, which may be any token of the model: it counts only as a
        special token.
        """
        found: set[int] = set()
        generation: GenerationConfig | None = self.model.generation_config
        generated = generation.eos_token_id if generation is not None else None
        config = self.model.config.get_text_config()
        configured = getattr(config, "eos_token_id", None)
        if configured == getattr(type(config), "eos_token_id", None) and configured not in self.special_tokens:
            configured = None
        for source in (generated, configured, self.tokenizer.eos_token_id):
            found.update(source if isinstance(source, list | tuple) else [source] if source is not None else [])
        return tuple(sorted(found))

    @property
    def special_tokens(self) -> dict[int, str]:
        """The tokenizer's special tokens by id, which texts are usually shown without."""
        named = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True)
        added = self.tokenizer.added_tokens_decoder.items()
        return {**dict(named), **{number: token.content for number, token in added if token.special}}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Return the text of an answer, without special tokens, or with all but the stop token."""
        if not skip_special_tokens and len(token_ids) and int(token_ids[-1]) in self.stop_token_ids:
            token_ids = token_ids[:-1]
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters of a plain model that computes the same: adapters are merged into their weights.

        Sharded ones are always `GatheredTensors`.
        """
        named = with_adapters(self.model, self.model.named_parameters())
        return GatheredTensors(named) if is_sharded(self.model) else named

    def save(self, directory: str | Path) -> None:
        """Write a directory that plain `transformers` loads."""
        self.model.save_pretrained(
            directory, state_dict=dict(with_adapters(self.model, self.model.state_dict().items()))
        )
        self._save_others(directory)

    def files(self) -> dict[str, str]:
        """Return all files of that directory but the weights, by name, in base64: checkpoints carry them."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(folder)
            save_config(self.model, Path(folder))
            self._save_others(folder)
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return {str(path.relative_to(folder)): b64encode(path.read_bytes()).decode() for path in paths}

    def _save_others(self, directory: str | Path) -> None:
        self.tokenizer.save_pretrained(directory)
        for path in processor_files(self.model):
            shutil.copy(path, directory)


def _keep_experts(model: PreTrainedModel) -> None:
    """Let config.json say how experts are computed, which transformers leaves out, where that is not its default."""
    chosen = model.config._experts_implementation
    if chosen not in (None, model.get_correct_experts_implementation(None)):
        model.config.experts_implementation = chosen
    suit_experts(model)


def suit_experts(model: PreTrainedModel) -> None:
    """Compute experts one by one in float64, which transformers' default, torch's product of groups, does not know."""
    if model.dtype == torch.float64 and model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation("eager")


def named(model: PreTrainedModel) -> str:
    """Return how an error message names a model: by the setting that it came from, and its class."""
    path = model.name_or_path
    setting = getattr(model, "setting", "model")  # another one's says which it is
    return f"{setting}.path={path!r} ({type(model).__name__})" if path else f"{setting}.init ({type(model).__name__})"


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Context in which what a forward pass of an untried model may raise becomes a ConfigError.

    Its text begins with `message`.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{message} ({type(error).__name__}: {reason})") from error


def context_tokens(config: PretrainedConfig) -> int:
    """Return the longest sequence that the positions of a model with this config allow."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 2**31)


def write_files(files: Mapping[str, str], directory: str | Path) -> None:
    """Write `Policy.files`. Raises ConfigError first for a file outside the directory, or none of a model's."""
    paths = {name: _inside(Path(directory), name) for name in files}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b64decode(files[name]))


def _inside(directory: Path, name: str) -> Path:
    """Return the path of the file inside the folder. Names come out of a checkpoint, which may be anybody's."""
    if "\0" in name or ".." in Path(name).parts or directory.resolve() not in (directory / name).resolve().parents:
        raise ConfigError(f"policy file {name!r}: leads out of the directory that it belongs to")
    if Path(name).suffix not in _SUFFIXES:
        raise ConfigError(f"policy file {name!r}: no file of a config or a tokenizer ({', '.join(_SUFFIXES)})")
    return directory / name


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model; if adapters do nothing yet, the model itself, for use `without_adapters`."""
    is_itself = is_adapted(model) and not is_changed(model)
    return model if is_itself else copy.deepcopy(model).requires_grad_(False).eval()


_OF_OTHER_HEADS = ("summary_first_dropout", "classifier_dropout")  # than that of a language model


def is_random(model: PreTrainedModel) -> bool:
    """Return whether its passes in training mode follow chance: it has a dropout, or its routers have a jitter."""
    settings = model.config.get_text_config().to_dict().items()
    in_config = any(
        ("drop" in name or "jitter" in name) and name not in _OF_OTHER_HEADS and isinstance(value, float) and value > 0
        for name, value in settings
    )
    return in_config or any(isinstance(module, nn.Dropout) and module.p > 0 for module in language_modules(model))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within, as without dropout; afterwards each module is in its own mode again, a frozen one too."""
    trained = [module for module in model.modules() if module.training]
    for module in trained:  # whose own way to set an attribute, which may be a weight, takes 50 times as long
        object.__setattr__(module, "training", False)
    try:
        yield
    finally:
        for module in trained:
            object.__setattr__(module, "training", True)


@dataclass(eq=False)
class PolicySource:
    """The source of the policy: a directory, GGUF file or hub name (`path`), or a small config to build (`init`).

    `init` holds the fields of a transformers config with its `model_type`; the tokenizer is then one token a character
    of `characters`. With an `adapter` that alone is trained. Raises ValueError when neither or both of `path` and
    `init` are given.
    """

    path: str | None = None
    _: KW_ONLY
    init: Mapping[str, Any] | None = None
    characters: str = "0123456789+=;#? \n"
    seed: int = 0  # of new weights: those of `init`, or an adapter's
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the weights in memory
    adapter: LoRA | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.init is None):
            raise ValueError(
                f"path={self.path!r} and init={self.init!r}: set exactly one "
                "(a Hugging Face directory, GGUF file or hub name, or a config to build from scratch)"
            )
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check_characters(self.characters)
        self.init = dict(self.init) if self.init is not None else None

    @classmethod
    def like(cls, model: PreTrainedModel, path: str) -> PolicySource:
        """Return the source of another model, in the dtype of this one."""
        names: dict[torch.dtype, Any] = {dtype: name for name, dtype in DTYPES.items()}
        return cls(path, dtype=names[model.dtype])

    def load(self, *, setting: str = "model") -> Policy:
        """Read or build the policy. Raises ConfigError when `path` is not a model, or the adapter does not fit it.

        `setting` is what it is loaded for, which errors name. Where torch's device is "meta", as within Lightning's
        `trainer.init_module(empty_init=True)`, the weights come later, when the model is sharded; but not those of a
        GGUF file.
        """
        is_deferred = torch.get_default_device().type == "meta"
        with torch.device("cpu") if is_deferred else nullcontext():
            policy = self._deferred(setting) if is_deferred and not self._is_gguf else self._whole(setting)
            with on_cpu(policy.model):
                if self.adapter is not None:
                    self.adapter.put_on(policy.model, seed=self.seed)
        return policy

    @property
    def _is_gguf(self) -> bool:
        return self.path is not None and is_gguf(self.path)

    def _whole(self, setting: str) -> Policy:
        if self.init is None:
            return self._read(setting)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self._new(setting)
        return Policy(model=model, tokenizer=self._made_tokenizer())

    def _deferred(self, setting: str) -> Policy:
        """Return the policy with a model of shapes alone, before it is adapted."""
        with without_content():
            model = self._new(setting)
        weights = FirstRankWeights(lambda: self._whole(setting).model)
        if self.init is not None:
            return Policy(model=model, tokenizer=self._made_tokenizer(), weights=weights)
        where = f"{setting}.path={self.path!r}"
        with self._place(setting) as place:
            name, is_here = place["pretrained_model_name_or_path"], place["local_files_only"]
            with naming(f"{where}: cannot be loaded as a causal language model"):
                files = files_of(name, model, is_here=is_here)
                model.name_or_path = name
                if model.can_generate():
                    model.generation_config = generation_config_of(name, is_here=is_here) or model.generation_config
            tokenizer = load_tokenizer(place, model, where)
        return Policy(model=model, tokenizer=tokenizer, weights=files or weights)

    def outline(self, *, setting: str = "model") -> PreTrainedModel:
        """Return the model without content, on the meta device, from its config. Raises ConfigError as `load`."""
        with torch.device("meta"):
            model = self._new(setting)
        freeze_towers(model)
        if self.adapter is not None:
            self.adapter.put_on(model, seed=self.seed)
        return model

    def _new(self, setting: str) -> PreTrainedModel:
        """Return a new model of the config; it has no content where the context says so."""
        with torch.device("cpu"):
            config = self._config(setting) if self.init is None else self._built_config(self.init, setting)
        with naming(f"{setting}: cannot be made as a causal language model"):
            model: PreTrainedModel = auto_class(config).from_config(config, dtype=DTYPES[self.dtype])
        return model

    def _config(self, setting: str) -> PretrainedConfig:
        where = f"{setting}.path={self.path!r}"
        with naming(f"{where}: its config cannot be read"), self._place(setting) as place:
            if self._is_gguf:
                gguf.read_header(Path(str(self.path)).expanduser(), where)
            config: PretrainedConfig = AutoConfig.from_pretrained(**place, trust_remote_code=False)
            return config

    def _read(self, setting: str) -> Policy:
        where, path, dtype = f"{setting}.path={self.path!r}", Path(str(self.path)).expanduser(), DTYPES[self.dtype]
        header = gguf.read_header(path, where) if self._is_gguf else None
        with self._place(setting) as place:
            with naming(f"{where}: cannot be loaded as a causal language model"):
                if header is not None:
                    model = gguf.load_model(place, dtype, header=header, where=where)
                else:
                    model = read_model(auto_class(self._config(setting)), where, **place, dtype=dtype)
                    processor_files(model, is_here=place["local_files_only"])
            tokenizer = load_tokenizer(place, model, where)
        if header is not None:
            model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = str(path)
        return Policy(model=model, tokenizer=tokenizer)

    @contextmanager
    def _place(self, setting: str) -> Iterator[dict[str, Any]]:
        """Context with transformers' arguments for a directory, hub's model or GGUF file.

        They say whether only the disk may be read.
        """
        path = str(self.path)
        folder = Path(path).expanduser()
        if self._is_gguf:
            with gguf.alone(folder) as place:
                yield place
            return
        check_place(path, f"{setting}.path={path!r}")
        name = str(folder) if folder.exists() else path
        is_here = not folder.exists() and not look_up(path, f"{setting}.path", kind="model")
        yield {"pretrained_model_name_or_path": name, "local_files_only": is_here}

    def _made_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return one that has a token for each row of the model."""
        size = (self.init or {}).get("vocab_size")
        return character_tokenizer(self.characters, size=size if isinstance(size, int) else 0)

    def _built_config(self, init: Mapping[str, Any], setting: str) -> PretrainedConfig:
        tokenizer = self._made_tokenizer()
        special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        try:
            config: PretrainedConfig = AutoConfig.for_model(**{"vocab_size": len(tokenizer), **special, **init})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{setting}.init={dict(init)!r}: {str(error).splitlines()[0]}") from error
        return config
