"""Answers for people to read: a table of samples every N steps, and all answers of an evaluation."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from rich.cells import cell_len, set_cell_size

from rhymerl.folders import replacing, writing
from rhymerl.types import Output, Sample, TurnEnd

_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}  # half a character becomes what JSON says for it
_LONGEST_NAME = 64  # characters
Row = Mapping[str, Any]

COLUMNS = ("prompt", "response", "reward", "length", "finish_reason")
_CSV_FILE = "samples.csv"
_GAP = " … "


class SampleTable(L.Callback):
    """Appends `num_samples` answers to `path`, and to the loggers that show text, every `every_n_steps` rollout steps.

    Needs a module with `last_rollout`, and with `decode` for episodes. If the module has `advantages` of the step's
    samples, they are included.
    """

    def __init__(self, path: str | Path, *, every_n_steps: int = 10, num_samples: int = 4) -> None:
        self.path = Path(path)
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the rows of steps that a resumed run is about to repeat."""
        if not trainer.is_global_zero or not self.path.exists():
            return
        done = int(getattr(pl_module, "num_rollouts", 0))
        latest: list[Row] = []
        with (
            replacing(self.path) as part,
            self.path.open(encoding="utf-8") as lines,
            part.open("w", encoding="utf-8") as kept,
        ):
            for line in lines:
                row = json.loads(line) if line.endswith("\n") else {"step": done + 1}
                if row["step"] <= done:
                    kept.write(line)
                    latest += [row] if row["step"] == done else []
        self._show(trainer, latest, to=TensorBoardLogger)  # its curves are cut off before that step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = getattr(pl_module, "last_rollout", None)
        step = int(getattr(pl_module, "num_rollouts", 0))
        if rollout is None or not trainer.is_global_zero or (step - 1) % self.every_n_steps:
            return
        chosen = _spread(len(rollout.samples), self.num_samples)
        advantages = getattr(pl_module, "advantages", lambda indices: [None] * len(indices))(chosen)
        rows = [
            {"step": step, **sample_row(rollout.samples[index], pl_module), "advantage": advantage}
            for index, advantage in zip(chosen, advantages, strict=True)
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), self.path.open("a", **_TEXT) as file:
            file.write(lines_of(rows))
        self._show(trainer, rows)

    def _show(self, trainer: L.Trainer, rows: Sequence[Row], *, to: type[Logger] = Logger) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, to):
                show_samples(logger, rows, global_step=trainer.global_step)


def _spread(count: int, most: int) -> range:
    """Return a stride through so many samples, so that the chosen ones are not all of one group."""
    return range(count)[:: max(1, count // max(1, most))][:most]


def answer_lines(samples: Sequence[Sample], most: int, *, columns: int) -> list[str]:
    """Return some answers as lines for a terminal: the reward, the prompt, the answer."""
    lines = []
    for sample in (samples[index] for index in _spread(len(samples), most)):
        reward = f"{sample.reward:.2f}" if sample.has_reward else "-"
        begin = f"{reward:>6}  {shortened(sample.prompt.text, columns // 3)} → "
        lines.append(begin + shortened(sample.text, columns - cell_len(begin)))
    return lines


def shortened(text: str, columns: int) -> str:
    """Return a text in one line, without its middle where it is too long, and without what a terminal would obey."""
    line = "".join(each if each.isprintable() else "�" for each in " ".join(text.split()))
    room = columns - cell_len(_GAP)
    if cell_len(line) <= columns or room < 2:
        return line
    return set_cell_size(line, room - room // 2) + _GAP + set_cell_size(line[::-1], room // 2)[::-1]


class WriteAnswers(L.Callback):
    """Writes an evaluation's answers to `step=N.jsonl` in `folder`, else to `step=N-2.jsonl` and so on."""

    def __init__(self, folder: str | Path, *, step: int) -> None:
        names = (f"step={step}{'' if number == 1 else f'-{number}'}.jsonl" for number in count(1))
        self.path = next(path for name in names if not (path := Path(folder) / name).exists())

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Called before the module's own, which forgets them."""
        if not trainer.is_global_zero:
            return
        evaluated: Mapping[str, Sequence[Sample]] = pl_module.evaluator.answered  # type: ignore[union-attr, assignment]
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("x", **_TEXT) as file:
                for name, samples in evaluated.items():
                    file.write(lines_of({"set": name, **sample_row(sample, pl_module)} for sample in samples))


def sample_row(sample: Sample, pl_module: Any) -> dict[str, Any]:
    """Return the row of a sample for people; `columns` are the data's columns beside the prompt, such as `answer`."""
    output = sample.completion.output.conversation()
    return {
        "prompt": sample.prompt.text,
        "response": sample.text,
        "reward": round(sample.reward, 4) if sample.has_reward else None,
        "length": sample.num_sampled,
        "finish_reason": output.finish_reason,
        "prompt_id": sample.prompt.id,
        "sample": sample.completion.request.sample,
        "rewards": dict(sample.rewards),
        "columns": dict(sample.prompt.columns),
        **({"turns": turn_rows(output, pl_module.decode)} if output.turns else {}),
    }


def turn_rows(output: Output, decode: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Return each turn of an episode: its text, the reply as the policy read it, and other facts of the reply."""
    return [
        {"text": turn.text, "reply": decode(output.token_ids[turn.start : turn.stop]), **turn_facts(turn)}
        for turn in output.turns
    ]


def turn_facts(turn: TurnEnd) -> dict[str, Any]:
    """Return what there is to know of a reply beside its text; `tools` are those that replied, by name."""
    messages = [] if turn.reply is None or isinstance(turn.reply, str) else turn.reply
    tools = [str(each.get("name") or "a tool")[:_LONGEST_NAME] for each in messages if each["role"] == "tool"]
    waited_s = round(turn.waited_s, 3) if turn.replied_at else None  # nobody was asked
    return {"tools": tools, "reward": turn.reward, "waited_s": waited_s}


def lines_of(rows: Iterable[Row]) -> str:
    """Return rows as JSON lines; a column's value that JSON does not know is written as its text."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def show_samples(logger: Any, rows: Sequence[Row], *, global_step: int) -> None:
    """Show rows of `step`, COLUMNS and perhaps `turns`, on rank 0; a logger that shows no text shows nothing."""
    rows = [{**row, "response": conversation(row["turns"])} if "turns" in row else row for row in rows]
    if not rows:
        return
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("samples", markdown_table(rows), global_step)
    elif isinstance(logger, CSVLogger):
        _append(Path(logger.log_dir) / _CSV_FILE, rows)
    elif callable(log_table := getattr(logger, "log_table", None)):
        columns = ["step", *COLUMNS]
        log_table("samples", columns=columns, data=[[row[name] for name in columns] for row in rows], step=global_step)


def conversation(turns: Sequence[Row]) -> str:
    """Return an episode as text, with who says what."""
    lines = []
    for turn in turns:
        lines.append(f"policy: {turn['text']}")
        reply = turn["reply"].strip()
        if reply or turn["reward"] is not None:
            who = ", ".join(turn["tools"]) or "environment"
            reward = "" if turn["reward"] is None else f" (reward {turn['reward']:.4g})"
            lines.append(f"{who}{reward}" + (f": {reply}" if reply else ""))
    return "\n".join(lines)


def _append(path: Path, rows: Sequence[Row]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.DictWriter(file, ["step", *COLUMNS], extrasaction="ignore")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(row[name]) for name in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "⏎ ")
