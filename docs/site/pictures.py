"""Makes the pictures of docs/concepts.md: python docs/site/pictures.py [FOLDER]. A test remakes committed ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rhymerl import Completion, RolloutRequest, SamplingParams
from rhymerl.budgets import FixedBudget, PassOutcome
from rhymerl.config import compose
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.drafts import depths
from rhymerl.engine.engine import Engine
from rhymerl.history import HistoryStore
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.models.policy import PolicySource
from rhymerl.runs.replay import Replay
from rhymerl.simulation.comparison import compare
from rhymerl.testing import make_answer, make_prompt

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
TRACE = ROOT / "benchmarks" / "traces" / "running_sum.jsonl.gz"
POLICY = ROOT / "rhymerl" / "assets" / "quickstart_policy"
CHARACTERS = "0123456789+=;#? \n"  # the tokens of both, from id 2 on; 1 ends an answer
BLUE, GREEN, LIGHT_GREEN, GREY = "#3b6fb6", "#4c9f70", "#cfe8d8", "#c9ccd3"
NODES = 12

rcParams.update({"svg.hashsalt": "rhymerl", "font.size": 10})  # the same file from the same data


def main(folder: Path) -> None:
    """Make all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(passes(), folder / "passes.svg")
    _save(draft_tree(), folder / "draft_tree.svg")
    workers(folder / "workers.png")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11, height))
    axis = figure.add_axes((0.01, 0.02, 0.98, 0.85))
    axis.axis("off")
    return figure, axis


def letter(token: int) -> str:
    """A token of the running sums as one sees it."""
    return {0: "", 1: "end"}.get(token) or {" ": "␣", "\n": "⏎"}.get(CHARACTERS[token - 2], CHARACTERS[token - 2])


# -- one answer with and without drafts --------------------------------------------------------------------------------


class PassCounter(HistoryTreeDrafter):
    """Notes how many tokens each pass brought to a request, and how many of them were drafted."""

    def __init__(self) -> None:
        super().__init__(deterministic=True)
        self.passes: list[tuple[int, int]] = []

    def accept(self, request: RolloutRequest, token_ids: Any, num_accepted: int) -> None:
        super().accept(request, token_ids, num_accepted)
        self.passes.append((len(token_ids), num_accepted))


def passes() -> Figure:
    """Draw one prompt answered twice with the same seeds, the second time with drafts from other seeds' answers."""
    prompt = make_prompt([CHARACTERS.index(each) + 2 for each in "17+25+48+36=?\n"])
    policy, drafter, history = PolicySource(str(POLICY), dtype="float64").load(), PassCounter(), HistoryStore()
    earlier = _answers(Engine(policy.model), _requests(prompt, range(8)))
    plain = _answers(Engine(policy.model), _requests(prompt, [100]))[0]
    history.add(
        prompt,
        [
            make_answer(each.token_ids, finish_reason=each.finish_reason, sample=sample)
            for sample, each in enumerate(earlier)
        ],
    )
    engine = Engine(policy.model, drafter=drafter, budget=FixedBudget(NODES))
    engine.protocol.follow(history.snapshot())
    drafted = _answers(engine, _requests(prompt, [100]))[0]
    drafter.close()
    assert plain.token_ids.tolist() == drafted.token_ids.tolist(), "a draft has changed a token"
    tokens = drafted.token_ids.tolist()
    figure, axis = _canvas(2.1)
    _strip(axis, 1, tokens, [(1, 0)] * len(tokens), "no drafts")
    _strip(axis, 0, tokens, drafter.passes, "drafts from earlier answers")
    axis.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(-0.4, 1.6))
    axis.set_title(f"{len(tokens)} tokens of one answer: a box is a pass, in green what was drafted", loc="left")
    return figure


def _requests(prompt: Any, seeds: Sequence[int] | range) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=128, stop_token_ids=(1,))
    return [RolloutRequest(id=str(seed), prompt=prompt, sample=0, seed=seed, sampling=sampling) for seed in seeds]


def _answers(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Completion]:
    engine.submit(requests)
    done: list[Completion] = []
    while engine.has_work:
        done += engine.run()
    return sorted(done, key=lambda completion: completion.request.seed)


def _strip(axis: Axes, y: float, tokens: Sequence[int], sizes: Sequence[tuple[int, int]], title: str) -> None:
    """Draw tokens in a row, in boxes of one pass each: its size, and how many at its beginning were drafted."""
    begin = 0
    for size, num_accepted in sizes:
        axis.barh(y, num_accepted, left=begin - 0.5, height=0.5, color=LIGHT_GREEN)
        for x in range(begin, begin + size):
            axis.text(x, y, letter(tokens[x]), ha="center", va="center", family="monospace")
        axis.barh(y, size, left=begin - 0.5, height=0.5, facecolor="none", edgecolor=BLUE, lw=1.2)
        begin += size
    axis.text(-0.5, y + 0.3, f"{title}: {len(sizes)} passes", va="bottom")


# -- a draft tree ------------------------------------------------------------------------------------------------------


class OutcomeNotes(FixedBudget):
    """Keeps what came of every pass."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.outcomes: list[PassOutcome] = []

    def learn(self, outcome: PassOutcome) -> None:
        self.outcomes.append(outcome)


def draft_tree() -> Figure:
    """Draw the first draft of a recorded run's fifth epoch that forks twice and is right for six tokens."""
    records = [record for record in read_trace(TRACE) if record.epoch <= 4]
    drafter, budget = HistoryTreeDrafter(siblings=False, deterministic=True), OutcomeNotes(NODES)
    Replay(drafter, budget, max_running=1, from_epoch=4).run(records)
    drafter.close()
    answers = [record for record in records if record.epoch == 4]
    outcome, record, done = next(each for each in _each_pass(budget.outcomes, answers) if _is_telling(each[0]))
    figure, axis = _canvas(3.2)
    _tree(axis, outcome, [*record.prompt_tokens, *record.response_tokens[:done]][-12:])
    right = int(outcome.num_accepted[0])
    axis.set_title(
        f"One draft of {NODES} nodes: the policy sampled the {right} in green, and one token more in the same pass",
        loc="left",
    )
    return figure


def _each_pass(
    outcomes: Sequence[PassOutcome], answers: Sequence[TraceRecord]
) -> Iterator[tuple[PassOutcome, TraceRecord, int]]:
    """Yield each outcome with the answer it is of, and how many of its tokens were there before."""
    done: dict[str, int] = {}
    for outcome in outcomes:
        (request,) = outcome.requests
        yield outcome, answers[int(request.id.rpartition("/")[2])], done.get(request.id, 0)
        done[request.id] = done.get(request.id, 0) + int(outcome.num_accepted[0]) + 1


def _is_telling(outcome: PassOutcome) -> bool:
    parents = outcome.drafts.parents.tolist()
    forks = sum(parents.count(parent) > 1 for parent in set(parents))
    return len(parents) == NODES and forks >= 2 and outcome.num_accepted[0] == 6


def _tree(axis: Axes, outcome: PassOutcome, context: Sequence[int]) -> None:
    """Draw the tree right of its context's end; leaves are spread evenly, parents are amid their children."""
    parents, tokens = outcome.drafts.parents.tolist(), outcome.drafts.token_ids.tolist()
    columns = depths(outcome.drafts).tolist()
    children = {
        parent: [node for node, above in enumerate(parents) if above == parent] for parent in (-1, *range(len(parents)))
    }
    rows: dict[int, float] = {}

    def place(node: int) -> float:
        below = sorted(children[node], key=lambda child: not outcome.accepted[child])
        if below:
            rows[node] = float(np.mean([place(child) for child in below]))
        else:
            rows[node] = -float(sum(not children[each] for each in rows))
        return rows[node]

    place(-1)
    for node, parent in enumerate(parents):
        colour = GREEN if outcome.accepted[node] else GREY
        axis.plot(
            [columns[parent] if parent >= 0 else 0.2, columns[node]],
            [rows[parent], rows[node]],
            color=colour,
            lw=2,
            zorder=1,
        )
    for node, token in enumerate(tokens):
        _node(axis, columns[node], rows[node], token, LIGHT_GREEN if outcome.accepted[node] else "#eef0f3")
    for back, token in enumerate(reversed(context)):
        axis.text(-back / 3, rows[-1], letter(int(token)), ha="center", va="center", family="monospace")
    axis.set(xlim=(-len(context) / 3, max(columns) + 0.3), ylim=(min(rows.values()) - 0.7, max(rows.values()) + 0.7))


def _node(axis: Axes, x: float, y: float, token: int, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "#8a8f99", "lw": 0.8}
    axis.text(x, y, letter(token), ha="center", va="center", family="monospace", bbox=box, zorder=2)


# -- workers -----------------------------------------------------------------------------------------------------------


def workers(path: Path) -> None:
    """`rhymerl simulate` with eight workers: the paper's scheduler with run-ahead below FIFO behind a barrier."""
    sizes = ["workers=8", "steps=24", "seeds=1", "warm_up=9", "gantt_steps=4", "lengths.prompts_per_step=64"]
    compare(compose("simulate", ["scheduler=histopipe", "run_ahead=keep", *sizes, f"gantt='{path}'"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
