"""The page: well formed, complete in itself, with the figures of the run; and text of models is text in it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rhymerl.cli import main
from rhymerl.errors import DataError, RhymeError, UsageError
from rhymerl.report import read_run, write_report
from rhymerl.report.base import Run
from rhymerl.report.figures import key_figures
from rhymerl.report.page import finite, packed
from rhymerl.report.steps import STEPS, StepFile
from tests.bytecodes import bytecodes
from tests.report.directories import data_of, make_run, metrics, page_of, step_record

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
VOID = {"meta", "input", "link", "br", "img", "hr"}


class Parsed(HTMLParser):
    """The elements of a page, and whether they are closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_is_well_formed_and_loads_nothing(run: Path, tmp_path: Path):
    page = page_of(run, out=tmp_path / "a.html")
    parsed = Parsed(page)
    assert parsed.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert not [
        each
        for tag in ("script", "img", "link", "iframe")
        for each in parsed.named(tag)
        if "src" in each or "href" in each
    ]
    assert all((each["href"] or "").startswith("#") for each in parsed.named("a"))
    ids = {each["id"] for _, each in parsed.tags if "id" in each}
    assert {(each["href"] or "")[1:] for each in parsed.named("a")} <= ids
    outside = page.replace(packed_parts(page), "")
    assert re.findall(r"https?://|@import|url\(", outside) == []
    assert len(page) < 3_000_000
    assert "default-src 'none'" in page, "and could not, whatever got into it"


def packed_parts(page: str) -> str:
    start = page.index('id="library">') + len('id="library">')
    return page[start : page.index("</script>", start)]


def test_what_models_say_is_never_markup(tmp_path: Path):
    run = make_run(tmp_path / "mine", words=EVIL)
    config = run / "config.yaml"
    config.write_text(config.read_text() + f'task: "{EVIL}"\n')
    named = tmp_path / "<b onclick=x>"
    shutil.copytree(run, named)
    page = page_of(run, named, out=tmp_path / "a.html")
    parsed = Parsed(page)
    assert parsed.open == []
    assert len(parsed.named("script")) == 5
    assert parsed.named("img") == parsed.named("b") == []
    assert "owned" not in page.replace("&lt;script&gt;document.title=&#39;owned&#39;", "")
    assert EVIL in parsed.text
    assert data_of(page)["samples"][0]["texts"][0]["text"] == f"{EVIL} says 0"


def test_the_figures_are_those_of_the_run(run: Path, tmp_path: Path):
    page = page_of(run, out=tmp_path / "a.html")
    data = data_of(page)
    curves = data["metrics"][0]["curves"]
    for name in metrics(1):
        assert curves[name] == [list(range(1, 7)), [metrics(step)[name] for step in range(1, 7)]], name
    assert curves["eval/reward"] == [[0, 6], [0.25, 0.75]]
    text = Parsed(page).text
    assert "0.250 → 0.750" in text
    assert "1,234,567" in text
    (dots, mean, held_out) = data["charts"]["reward"]["series"]
    assert dots["y"] == [metrics(step)["reward"] for step in range(1, 7)]
    assert mean["y"][0] == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert mean["y"][3] == pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5)
    assert (held_out["x"], held_out["y"]) == ([0, 6], [0.25, 0.75])
    by_epoch = data["charts"]["acceptance-epoch"]["series"][0]
    assert by_epoch["y"] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 5 / 6])
    assert data["charts"]["similarity"]["series"][0]["y"] == [0.5]


def test_two_runs_are_compared(tmp_path: Path):
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "other"))]
    page = page_of(*runs, out=tmp_path / "a.html")
    data = data_of(page)
    assert [each["run"] for each in data["samples"]] == ["one", "other"]
    tokens = data["charts"]["rollout-spec_accept_length"]["series"]
    assert {series["name"].split(",")[0] for series in tokens} == {"one", "other"}
    assert len({series["colour"] for series in tokens}) == 2
    table = page[page.index('id="differences"') : page.index("</section>", page.index('id="differences"'))]
    assert re.findall(r"<th>([\w.]+)</th><td>([^<]*)</td><td>([^<]*)</td>", table) == [
        ("seed", "0", "1"),
        ("algo.clip_high", "0.2", "0.30000000000000004"),
    ]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path):
    runs = write_report([make_run(tmp_path / a / "run") for a in "ab"], tmp_path / "a.html")
    assert [run.name for run in runs] == [str(tmp_path / a / "run") for a in "ab"]


def test_a_run_that_is_named_twice_is_one(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other")
    found = write_report([run, other, run.parent / "other" / ".." / run.name], tmp_path / "a.html")
    assert [each.name for each in found] == ["mine", "other"]


# -- what is missing -------------------------------------------------------------------------------------------------


def test_a_run_without_its_steps_has_the_curves_of_tensorboard(run: Path, tmp_path: Path):
    from torch.utils.tensorboard import SummaryWriter

    (run / STEPS).unlink()
    with SummaryWriter(run / "tensorboard") as writer:
        for step in (1, 2):
            writer.add_scalar("reward", step / 4, step)
            writer.add_scalar("eval/reward", step / 8, step)
    page = page_of(run, out=tmp_path / "a.html")
    data = data_of(page)
    assert data["charts"]["reward"]["series"][0]["y"] == [0.25, 0.5]
    assert data["charts"]["reward"]["x_title"] == "optimizer step"
    assert (data["samples"], data["timelines"]) == ([], [])
    assert 'id="samples"' not in page
    assert "There is no steps.jsonl.gz" in Parsed(page).text


def test_a_run_that_left_nothing_but_its_settings_has_a_page(run: Path, tmp_path: Path):
    for path in run.iterdir():
        if path.name != "config.yaml":
            path.unlink()
    page = page_of(run, out=tmp_path / "a.html")
    assert Parsed(page).open == []
    assert data_of(page)["charts"] == {}
    assert "algo.clip_high" in Parsed(page).text


def test_parts_that_nothing_is_known_of_are_left_out(tmp_path: Path):
    run = make_run(tmp_path / "mine", with_history=False, num_workers=1)
    (run / "summary.json").unlink()
    data = data_of(page_of(run, out=tmp_path / "a.html"))
    assert "similarity" not in data["charts"]
    assert "off_policy-staleness-mean" not in data["charts"], "0 throughout"
    assert "completions-clipped_ratio" not in data["charts"], "0 throughout"


def test_what_has_diverged_is_no_number_in_the_page():
    assert finite({"a": [float("nan"), 1.0, (float("inf"), "x")]}) == {"a": [None, 1.0, [None, "x"]]}
    assert re.fullmatch(r"[\w+/=]+", packed("</script>\ud800"))


def test_a_run_whose_loss_is_no_number_has_a_page(run: Path, tmp_path: Path):
    from rhymerl.report.steps import StepFile, read_steps

    records = list(read_steps(run / STEPS))
    records[1]["metrics"]["loss"] = float("nan")
    file = StepFile(run / STEPS)
    for record in records:
        file.append(record)
    assert data_of(page_of(run, out=tmp_path / "a.html"))["metrics"][0]["curves"]["loss"] == [[1], [None]]


# -- what is broken --------------------------------------------------------------------------------------------------

BROKEN = {
    "config.yaml": "seed: [1",
    "summary.json": "{",
    STEPS: "no gzip",
    "history.rhyme": "no history",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_nothing_is_written(name, run: Path, tmp_path: Path):
    (run / name).write_text(BROKEN[name])
    with pytest.raises(RhymeError, match=re.escape(str(run / name))):
        write_report([run], tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()


def test_steps_of_another_kind_are_an_error_that_names_the_file(run: Path, tmp_path: Path):
    from rhymerl.report.steps import StepFile

    StepFile(run / STEPS).append({"step": 1, "something": "else"})
    with pytest.raises(DataError, match=r"steps\.jsonl\.gz: is not what a run writes there"):
        read_run(run)


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_what_is_no_run_is_named(make, tmp_path: Path):
    make(tmp_path / "no run")
    with pytest.raises(UsageError, match=r"RUN='.*no run': not the directory of a run"):
        read_run(tmp_path / "no run")


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_into_the_run_directory(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(run / "report.html"), "pictures": []}
    assert "rhymerl report" in (run / "report.html").read_text()


def test_the_command_takes_several_runs_and_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(make_run(tmp_path / name)) for name in "ab"]
    assert main(["report", *runs]) == 0
    assert main(["report", runs[0], "out=there/one.html", runs[1]]) == 0
    assert (tmp_path / "report.html").read_text() == (tmp_path / "there" / "one.html").read_text()
    assert not (tmp_path / "a" / "report.html").exists()


def test_pictures_of_all_charts(tmp_path: Path):
    """A dollar in a name is a dollar."""
    run = make_run(tmp_path / "$\\frac{$")
    assert main(["report", str(run), f"pictures={tmp_path / 'png'}", f"out={tmp_path / 'a.html'}"]) == 0
    charts = data_of((tmp_path / "a.html").read_text())["charts"]
    assert {path.stem for path in (tmp_path / "png").iterdir()} == {*charts, "timeline-0"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "png").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report"], "needs RUN"),
        (["report", "nowhere"], "RUN='nowhere': not the directory of a run"),
        (["report", "nowhere", "--colour"], "--colour"),
    ],
)
def test_wrong_words_cost_one_line(words, message, capsys: pytest.CaptureFixture[str]):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_warnings_are_on_the_page(run: Path, tmp_path: Path):
    assert "Warning" not in page_of(run, out=tmp_path / "a.html")
    file = StepFile(run / STEPS, num_bytes=(run / STEPS).stat().st_size)
    words = f"25% of the answers are {EVIL}"
    record = {**step_record(7, prompts=4, group=2, words="4+4=8"), "warnings": [words, "kl is 3"]}
    file.append({**record, "holding": [words, "kl is 3"]})
    page = page_of(run, out=tmp_path / "a.html")
    assert Parsed(page).open == []
    assert f"Warning, to the last step: {words}." in Parsed(page).text
    assert "no longer hold" not in page
    file.append({**step_record(8, prompts=4, group=2, words="4+4=8"), "holding": ["kl is 3"]})
    text = Parsed(page_of(run, out=tmp_path / "a.html")).text
    assert "Warning, to the last step: kl is 3." in text
    assert text.index("Warnings that no longer hold: 1") < text.index(f"Step 7: {words}.")


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"rollout_speedup": 1.234, "rollout_speedup_low": 1.1, "rollout_speedup_high": 1.38}, ["1.23 (95 % interval 1.10 to 1.38)"]),
        ({"rollout_speedup": None, "rollout_speedup_low": 0.9, "rollout_speedup_high": 1.4}, ["too short to tell (95 % interval 0.90 to 1.40)"]),
        ({"rollout_speedup": None}, []),
    ],
)  # fmt: skip
def test_what_drafts_were_worth_comes_with_how_sure_it_is(summary, expected):
    run = Run(path=Path("a"), name="a", settings={}, summary=summary, curves={}, evaluations={})
    assert [value for figure in key_figures([run]) for value in figure.values] == expected


def test_an_answer_takes_little_work_and_few_bytes(tmp_path: Path) -> None:
    """A page has up to 200 000."""

    def page(num_steps: int) -> tuple[int, int]:
        run, out = make_run(tmp_path / str(num_steps), num_steps=0), tmp_path / f"{num_steps}.html"
        file = StepFile(run / STEPS)
        for step in range(1, num_steps + 1):
            file.append(step_record(step, prompts=125, group=4, words="What is 4 + 4? " * 20, num_texts=5))
        work = bytecodes(lambda: write_report([run], out))
        return work, out.stat().st_size

    (less_work, smaller), (more_work, larger) = page(2), page(8)
    num_more = 6 * 125 * 4
    assert more_work - less_work < 300 * num_more
    assert larger - smaller < 20 * num_more


def test_evaluations_have_a_table_of_their_first_and_last_values(run: Path, tmp_path: Path):
    page = page_of(run, out=tmp_path / "a.html")
    assert "<thead><tr><th>metric</th><th>mine</th></tr></thead>" in page
    assert "<tr><th>eval/set/mean@1</th><td>0.25 → 0.75</td></tr>" in page
