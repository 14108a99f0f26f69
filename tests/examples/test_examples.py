"""Every example does what its text says: swapped in by YAML, run by the command line or by Python."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rhymerl.cli import main
from rhymerl.drafts import Draft
from rhymerl.engine.engine import Engine
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.history.records import HistoryDelta
from rhymerl.rewards import numeric_match
from rhymerl.schedulers.base import check_plan
from rhymerl.testing import make_requests, tiny_policy
from rhymerl.types import Completion, RolloutRequest, Sample
from tests.documents import reader_in

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "task.train_size=8",
    "task.validation_size=4",
    "data.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.max_tokens=24",
    "backend.max_running=8",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
]


@pytest.fixture(autouse=True)
def in_examples() -> Iterator[None]:
    with reader_in(EXAMPLES):
        yield


def lines_of_code(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    skipped = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(path.read_text().splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in skipped for i, line in lines)


@pytest.mark.parametrize("name", ["my_drafter", "my_scheduler"])
def test_at_most_15_lines(name: str) -> None:
    assert lines_of_code(EXAMPLES / f"{name}.py") <= 15


def answers(policy, requests: Sequence[RolloutRequest], **settings) -> dict[str, Completion]:
    engine = Engine(policy.model, kv_tokens=4096, check_drafts=True, **settings)
    engine.submit(requests)
    done = []
    while engine.has_work:
        done += engine.run()
    return {completion.request.id: completion for completion in done}


def scored(completions: dict[str, Completion], requests: Sequence[RolloutRequest], *, best: int = 0) -> list[Sample]:
    """Return the samples in canonical order; of each group the sample `best` has the highest reward."""
    done = [completions[request.id] for request in requests]
    return [
        Sample(
            completion=completion,
            text="",
            reward=float(completion.request.sample == best),
            rewards={},
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
        )
        for completion in done
    ]


def history_of(samples: Sequence[Sample]) -> HistoryDelta:
    """Return what a drafter is told that follows a history with these answers."""
    history = HistoryStore()
    for prompt, group in answers_of(samples, 0):
        history.add(prompt, group)
    return history.snapshot()


def test_the_drafter_changes_no_token_and_saves_passes():
    from my_drafter import CopyEarlierAnswer

    policy = tiny_policy()
    requests = make_requests(6, group_size=2, temperature=0.5)
    plain = answers(policy, requests)
    drafter = CopyEarlierAnswer()
    drafter.follow(history_of(scored(plain, requests)))
    drafted = answers(policy, requests, drafter=drafter)
    for name, completion in plain.items():
        assert drafted[name].token_ids.tolist() == completion.token_ids.tolist(), name
    assert sum(c.num_passes for c in drafted.values()) < 0.8 * sum(c.num_passes for c in plain.values())


def test_the_drafter_copies_the_best_answer():
    from my_drafter import CopyEarlierAnswer

    policy, requests = tiny_policy(), make_requests(1, group_size=2, prompt_tokens=(6, 6), temperature=2.0)
    samples = scored(answers(policy, requests), requests, best=1)
    drafter = CopyEarlierAnswer(match=3)
    drafter.follow(history_of(samples))
    draft = drafter.propose(requests[0], requests[0].prompt.token_ids, 5)
    assert isinstance(draft, Draft)
    assert draft.token_ids.tolist() == samples[1].completion.token_ids[:5].tolist()
    assert draft.parents.tolist() == [-1, 0, 1, 2, 3]
    assert len(drafter.propose(requests[0], np.array([2, 2, 2], np.int32), 5)) == 0


def test_the_scheduler_starts_the_longest_first():
    from my_scheduler import LongestFirst

    policy, requests = tiny_policy(), make_requests(5, group_size=2)
    samples = scored(answers(policy, requests), requests)
    scheduler = LongestFirst()
    for num_workers in (1, 3):
        check_plan(scheduler.plan(requests, num_workers, 0), requests, num_workers=num_workers, scheduler="it")
    scheduler.learn(samples[2:])
    resumed = LongestFirst()
    resumed.load_state_dict(scheduler.state_dict())
    (queue,) = resumed.plan(requests, 1, 1)
    length = {sample.prompt.key: len(sample) for sample in samples[2:]}
    planned = [length[request.prompt.key] for request in queue[2:]]
    assert [request.prompt.id for request in queue[:2]] == ["0", "0"], "the new prompt goes first"
    assert planned == sorted(planned, reverse=True)
    assert len(set(planned)) > 1


@pytest.mark.parametrize(
    ("text", "total", "additions"),
    [
        ("37+85=122;122+12=134;#134", 1.0, 1.0),
        ("37+85=123;123+12=135;#135", 0.0, 0.5),
        ("#134", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_rewards(text: str, total: float, additions: float) -> None:
    from my_reward import right_additions, right_total

    assert right_total(text, answer="134") == total
    assert right_additions(text) == additions


def test_my_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(["fit", "--config", "my_run.yaml", *TINY, f"run_dir={run_dir}"]) == 0
    saved = (run_dir / "config.yaml").read_text()
    for name in ("my_drafter.CopyEarlierAnswer", "my_scheduler.LongestFirst", "my_reward.right_additions"):
        assert name in saved
    assert (run_dir / "summary.json").exists()


@pytest.mark.parametrize("swap", ["drafter=my_drafter.CopyEarlierAnswer", "scheduler=my_scheduler.LongestFirst"])
def test_swapped_on_the_command_line(swap: str, tmp_path: Path) -> None:
    assert main(["fit", "--config", "quickstart", swap, *TINY, f"run_dir={tmp_path / 'run'}"]) == 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice, which the program switches off for people
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_walkthrough(capsys: pytest.CaptureFixture[str]) -> None:
    import walkthrough

    before, after = walkthrough.main(steps=3)
    assert 0 <= before <= 1
    assert 0 <= after <= 1
    out = capsys.readouterr().out
    assert "held-out reward" in out
    assert out.count("log-prob of its first token") > 3


def test_gsm8k_as_chats_and_numbers() -> None:
    from gsm8k import line

    row = {"question": "How many eggs?", "answer": "First 1,000.\nThen 42 more.\n#### 1,042"}
    written = json.loads(line(row))
    assert written == {"prompt": [{"role": "user", "content": "How many eggs?"}], "answer": "1042"}
    assert numeric_match("So there are 1042 eggs.", answer=written["answer"]) == 1
