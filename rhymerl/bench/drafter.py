"""The cost of drafting without a model: building the index, proposing from it, and the bytes of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rhymerl.bench.base import environment
from rhymerl.config import instantiate, recorded
from rhymerl.drafters.history_tree import HistoryTreeDrafter
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.history import Answer, HistoryStore
from rhymerl.history.index import SuffixIndex
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.printing import print_table
from rhymerl.testing import make_prompt
from rhymerl.types import IntArray, Prompt, RolloutRequest, SamplingParams

_PROMPT_TOKENS = 100
_STRIDE = 4  # tokens that an answer grows by from one proposal to the next


class DrafterBench:
    """Near-copies: answers that differ from one base in a share of their tokens, and queries that do so too.

    `batch` running answers to the same number of prompts / `siblings` grow side by side; each has `answers` earlier
    ones.
    """

    def __init__(self, config: DictConfig) -> None:
        sizes = ("answers", "tokens", "vocabulary", "batch", "siblings", "nodes", "repeats")
        require_at_least({name: (config[name], 1) for name in sizes}, error=ConfigError)
        if config.tokens <= 2 * _PROMPT_TOKENS:
            raise ConfigError(f"tokens={config.tokens}: expected more than {2 * _PROMPT_TOKENS}")
        self.config = config
        self._random = np.random.default_rng(config.seed)
        self._base = self._tokens(config.tokens)

    def _tokens(self, count: int) -> IntArray:
        return self._random.integers(0, self.config.vocabulary, count, dtype=np.int32)

    def copy(self) -> IntArray:
        copy = self._base.copy()
        edited = self._random.random(len(copy)) < self.config.edits
        copy[edited] = self._tokens(int(edited.sum()))
        return copy

    def run(self, progress: ProgressBar = SILENT) -> dict[str, Any]:
        """Return one row; times are medians."""
        answers = [self.copy() for _ in range(self.config.answers)]
        prompt = self._tokens(_PROMPT_TOKENS)
        index = SuffixIndex([prompt] * len(answers), answers)  # compiles
        with progress.during("indexes built", self.config.repeats):
            build = [self._build(prompt, answers, progress) for _ in range(self.config.repeats)]
        row = {
            "answers": self.config.answers,
            "tokens": self.config.tokens,
            "build_us_per_token": 1e6 * float(np.median(build)) / index.num_tokens,
            "bytes_per_token": index.bytes / index.num_tokens,
            **self._propose(prompt, answers, progress),
        }
        return {"rows": [row], "environment": environment(), "config": recorded(self.config)}

    @staticmethod
    def _build(prompt: IntArray, answers: Sequence[IntArray], progress: ProgressBar) -> float:
        started = time.perf_counter()
        SuffixIndex([prompt] * len(answers), answers)
        seconds = time.perf_counter() - started
        progress.advance()
        return seconds

    def _propose(self, prompt: IntArray, answers: Sequence[IntArray], progress: ProgressBar) -> dict[str, float]:
        drafter = instantiate(self.config.drafter, key="drafter")
        batch, siblings = self.config.batch, self.config.siblings
        history = HistoryStore()
        prompts = [make_prompt([*prompt.tolist(), number]) for number in range(-(-batch // siblings))]
        for each in prompts:
            history.add(each, _answers(answers))
        drafter.follow(history.snapshot())
        requests = [_request(prompts[i // siblings], i) for i in range(batch)]
        contexts = [np.concatenate([request.prompt.token_ids, self.copy()]) for request in requests]
        for request in requests:
            drafter.start(request)
        seconds, counts = [], []
        lengths = range(2 * _PROMPT_TOKENS, self.config.tokens, _STRIDE)
        with progress.during("proposals", len(lengths)):
            for length in lengths:
                views = [context[:length] for context in contexts]
                started = time.perf_counter()
                drafts = drafter.propose_batch(requests, views, [self.config.nodes] * batch)
                seconds.append(time.perf_counter() - started)
                counts.append(drafts.counts)
                progress.advance()
        live = {}
        if isinstance(drafter, HistoryTreeDrafter):
            live["live_bytes_per_token"] = drafter.live_bytes / (batch * self.config.tokens)
        drafter.close()
        nodes = np.concatenate(counts)
        return {
            "batch": batch,
            "siblings": siblings,
            "propose_us": 1e6 * float(np.median(seconds)) / batch,
            "nodes": float(nodes.mean()),
            "drafts_with_12_nodes": float((nodes >= 12).mean()),
            **live,
        }


def _answers(tokens: Sequence[IntArray]) -> list[Answer]:
    return [
        Answer(
            token_ids=each,
            reward=float(number % 2),
            advantage=1.0 - 2.0 * (number % 2),
            finish_reason="stop",
            policy_version=number // 8,
            epoch=number // 8,
            sample=number % 8,
        )
        for number, each in enumerate(tokens)
    ]


def _request(prompt: Prompt, number: int) -> RolloutRequest:
    sampling = SamplingParams(max_tokens=2**20)
    return RolloutRequest(id=str(number), prompt=prompt, sample=number, seed=number, sampling=sampling)


def report(result: dict[str, Any]) -> None:
    """Print the row as a table."""
    figures = result["rows"][0].items()
    rows = [
        (name.replace("_", " "), f"{value:,.3g}" if isinstance(value, float) else f"{value:,}")
        for name, value in figures
    ]
    print_table((), rows, title="Drafter")
