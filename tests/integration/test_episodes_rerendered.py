"""Training on episodes whose thoughts the chat template drops, in parts that begin with its own rendering."""

from __future__ import annotations

import random
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from benchmarks.emulation.threads import ThreadBackend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import HistoryTreeDrafter, NGramDrafter, NoDrafter
from rhymerl.history.traces import read_trace
from rhymerl.schedulers import HistoPipeScheduler, SortedScheduler
from rhymerl.testing import RandomTreeDrafter, tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.types import Sample, Segment
from tests.environments.worlds import Counts
from tests.integration.conftest import made_once
from tests.integration.test_episodes import Saver
from tests.integration.test_resume import assert_same_runs, killed, words_for
from tests.integration.training import Run, Trained, assert_same_training, kept_of
from tests.training.updates import norm_in_double

# What stands in front of a # is a thought, which is left out of earlier turns.
TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '=' ~ m.content.split('#')[-1] ~ eos_token }}
    {%- else %}{{ ('?' if m.role == 'user' else '+') ~ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '=' }}{% endif %}"""
STOPS = (2,)
SHORT = Run(num_steps=4, prompts_per_step=3, stop_token_ids=STOPS, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def plain() -> Trained:
    return SHORT.train(environment=Counts(), drafter=NoDrafter())


def samples_of(trained: Trained) -> list[Sample]:
    return [sample for step in trained[1] for sample in step]


def test_each_turn_is_sampled_behind_the_templates_rendering(plain):
    tokenizer = tiny_policy().tokenizer
    tokenizer.chat_template = TEMPLATE
    counts = []
    for sample in samples_of(plain):
        output, messages = sample.completion.output, [*sample.prompt.messages]
        parts = sample.segments
        counts.append(len(parts))
        whole = np.concatenate([sample.prompt.token_ids, output.token_ids])
        for turn in [each for each in output.turns if each.reply is not None]:
            messages += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": turn.reply}]
            begin = max(part.start for part in parts if part.start <= turn.stop)
            prompt = next(part.prompt for part in parts if part.start == begin)
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert [*prompt, *output.token_ids[begin : turn.stop]] == expected
        assert whole[len(sample.prompt.token_ids) :].tolist() == output.token_ids.tolist()
        assert output.num_sampled == int(sample.loss_mask.sum()) <= 16
    assert {1, 2, 3} <= set(counts)
    appended = [
        turn for sample in samples_of(plain) for turn in sample.completion.output.turns if turn.stop > turn.start
    ]
    assert any(turn.rerendered is None for turn in appended), "some turns are only appended to"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"drafter": HistoryTreeDrafter()}, marks=pytest.mark.slow),
        pytest.param({"drafter": NGramDrafter()}, marks=pytest.mark.slow),
        {"drafter": RandomTreeDrafter(vocabulary=16), "budget": FixedBudget(8)},
        {"drafter": HistoryTreeDrafter(), "scheduler": HistoPipeScheduler(), "budget": FixedBudget(8)},
        pytest.param({"drafter": NoDrafter(), "scheduler": SortedScheduler()}, marks=pytest.mark.slow),
        {
            "drafter": HistoryTreeDrafter(),
            "backend": ThreadBackend(lambda number: EmbeddedBackend()),
            "workers": 2,
            "run_ahead": "draft",
        },
    ],
    ids=lambda parts: "-".join(
        str(part) if isinstance(part, str | int) else type(part).__name__ for part in parts.values()
    ),
)
def test_drafters_schedulers_and_workers_change_no_token_and_no_weight(plain, parts):
    trained = SHORT.train(**{"environment": Counts(), **parts})
    assert_same_training(trained, plain)
    for step, expected in zip(trained[1], plain[1], strict=True):
        for one, other in zip(step, expected, strict=True):
            assert [turn.rerendered for turn in one.completion.output.turns] == [
                turn.rerendered for turn in other.completion.output.turns
            ]
            assert one.text == other.text


def test_history_drafts_for_later_parts():
    """In a second pass over the prompts, behind what another part has repeated."""
    run = Run(num_steps=4, prompts_per_step=3, stop_token_ids=STOPS, chat_template=TEMPLATE, learning_rate=0.0)
    drafter = HistoryTreeDrafter(own=False, siblings=False, others=0)
    steps = run.train(environment=Counts(), drafter=drafter, budget=FixedBudget(8))[1]
    later = [
        output.sources[part.start :]
        for step in steps[2:]
        for output, parts in ((sample.completion.output, sample.segments) for sample in step)
        for part in parts[1:]
    ]
    assert sum(int((sources >= 0).sum()) for sources in later) > 5


def reference(steps: list[list[Sample]]) -> dict[str, Tensor]:
    """The weights after a plain training on these samples: each part is a row, with the advantage of its episode."""
    model = tiny_policy(dtype="float64", context=64, peaked=2.0).model.train()
    settings = UpdateSettings(learning_rate=SHORT.learning_rate)
    optimizer = settings.optimizer(list(model.parameters()))
    for samples in steps:
        groups: dict[str, list[float]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.id, []).append(sample.reward)
        count = sum(int(sample.loss_mask.sum()) for sample in samples)
        loss = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            rewards = groups[sample.prompt.id]
            advantage = (sample.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            for part in sample.segments:
                trained = sample.loss_mask[part.start : part.start + len(part.token_ids)]
                loss = loss - advantage * logprobs(model, part)[torch.from_numpy(trained)].sum() / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def logprobs(model: Any, part: Segment) -> Tensor:
    ids = torch.from_numpy(np.concatenate([part.prompt, part.token_ids])).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(part.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(part.prompt) :, None])[:, 0]


def test_the_weights_are_those_of_parts_as_rows_with_the_episodes_advantage():
    run = Run(num_steps=2, prompts_per_step=3, stop_token_ids=STOPS, chat_template=TEMPLATE)
    weights, steps = run.train(environment=Counts(), drafter=NoDrafter())
    assert max(len(sample.segments) for step in steps for sample in step) == 3
    for name, weight in reference(steps).items():
        torch.testing.assert_close(weights[f"model.{name}"], weight, rtol=0, atol=1e-7)


def test_a_run_that_is_resumed_in_the_middle_of_episodes_ends_with_the_same_weights(plain, tmp_path):
    parts = {"environment": Counts(), "drafter": NoDrafter(), "workers": 2, "run_ahead": "draft"}
    saver = Saver(tmp_path / "half.ckpt", after=2)
    SHORT.train(backend=ThreadBackend(lambda number: EmbeddedBackend()), callbacks=[saver], **parts)
    resumed = Run(
        num_steps=4, prompts_per_step=3, stop_token_ids=STOPS, chat_template=TEMPLATE, ckpt_path=str(saver.path)
    )
    again, _ = resumed.train(backend=ThreadBackend(lambda number: EmbeddedBackend()), **parts)
    for name, weight in plain[0].items():
        torch.testing.assert_close(again[name], weight, rtol=0, atol=1e-9)


class Ratios(L.Callback):
    """The smallest and the largest ratio of each step's first update."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, *rest):
        names = [f"sampling/importance_sampling_ratio/{end}" for end in ("min", "max")]
        self.found += [float(trainer.callback_metrics[name]) for name in names]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"drafter": RandomTreeDrafter(vocabulary=16), "budget": FixedBudget(8)},
        {"backend": ThreadBackend(lambda number: EmbeddedBackend()), "workers": 2, "run_ahead": "draft"},
    ],
    ids=["plain", "hostile", "threads"],
)
def test_what_truncation_left_is_replayed_in_every_part(parts, monkeypatch):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_double)
    run, ratios = replace(SHORT, sampling={"temperature": 0.9, "top_p": 0.8}), Ratios()
    plain = run.train(environment=Counts(), drafter=NoDrafter())
    trained = run.train(callbacks=[ratios], **{"environment": Counts(), "drafter": NoDrafter(), **parts})
    assert_same_training(trained, plain)
    assert np.abs(np.array(ratios.found) - 1).max() < 1e-12
    later = [
        (sample.completion.token_ids[at], kept_of(sample)[at])
        for sample in samples_of(trained)
        for part in sample.segments[1:]
        for at in range(part.start, part.start + len(part.token_ids))
        if sample.loss_mask[at]
    ]
    assert all(token in left for token, left in later)
    assert sum(len(left) < 16 for _, left in later) > 20, "truncation takes something away in later parts"


EPISODES = [
    "environment={_target_: tests.environments.worlds.Ponders}",
    "data.system_prompt='0'",  # which makes messages of the task's texts
    "rollout.history=rerender",
    "rollout.stop_token_ids=[2]",
    "rollout.max_turns=3",
]


@pytest.fixture(scope="module")
def chat_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_dir, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_instant_it_resumes_bit_for_bit(seed, settings, chat_model, whole_dir, tmp_path, rhymerl):
    settings = [*settings, *EPISODES, f"model.path={chat_model}"]
    whole = made_once(whole_dir, words_for(settings, whole_dir), rhymerl)
    words = words_for(settings, tmp_path / "run")
    after_s = random.Random(seed).uniform(0, 1.0)
    killed(words, tmp_path, when=tmp_path / "run" / "checkpoints" / "last.ckpt", after_s=after_s)
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)
    records = list(read_trace(whole / "rollouts.jsonl.gz"))
    assert {len(record.parts) for record in records if record.parts is not None} == {1, 2}
    replayed = rhymerl("replay", str(whole / "rollouts.jsonl.gz"))
    assert replayed.code == 0, replayed.err


def test_another_word_is_refused(rhymerl, settings):
    done = rhymerl(*settings, "rollout.history=something")
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith("rollout.history='something': expected one of keep, rerender")
