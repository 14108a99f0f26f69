"""A report in a browser: it draws, finds, sorts and colours, asks for nothing and runs nothing that a model said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.report import read_run, write_report
from rhymerl.report.steps import STEPS, StepFile
from tests.report.directories import make_run, step_record

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='owned'\">"
MANY = 200_000


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (chromium, chromium-browser or google-chrome on the PATH)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, what it complained of and what it asked for."""

    def __init__(self, browser, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._note(message))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")

    def _note(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def rows(self) -> list[list[str]]:
        """The cells of the rows that are in the page, from the top."""
        found = self.page.eval_on_selector_all(
            ".row", "rows => rows.map(row => [row.offsetTop, [...row.children].map(cell => cell.textContent)])"
        )
        return [cells for _, cells in sorted(found)]

    def wait_until(self, condition: str) -> None:
        """Playwright's `wait_for_function` evaluates text within the page, which its security policy forbids."""
        for _ in range(200):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {condition}")

    def sort_by(self, column: str) -> list[list[str]]:
        self.page.click(f".head button[data-column={column}]")
        return self.rows()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "mine", words=EVIL)
    write_report([run], folder / "a.html")
    return folder / "a.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_draws_all_charts_within_the_width_and_asks_for_nothing(width, scheme, browser, report: Path):
    opened = Opened(browser, report, width=width, scheme=scheme)
    opened.page.wait_for_selector("body[data-drawn]")
    plots = opened.page.eval_on_selector_all(
        ".plot", "plots => plots.map(plot => plot.querySelectorAll('.main-svg').length)"
    )
    assert len(plots) > 10
    assert all(plots), "every chart is drawn"
    assert opened.complaints == []
    assert opened.requests == [report.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    ink, page = (
        opened.page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
    )
    assert (brightness(ink) > brightness(page)) == (scheme == "dark")


def brightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_charts_follow_the_page_when_it_turns_dark(browser, report: Path):
    opened = Opened(browser, report)
    opened.page.wait_for_selector("body[data-drawn]")
    colour = "document.querySelector('[data-chart=history-tokens] .lines path').style.stroke"
    light = opened.page.evaluate(colour)
    opened.page.emulate_media(color_scheme="dark")
    opened.wait_until(f"{colour} !== '{light}'")


def test_nothing_that_a_model_said_runs(browser, report: Path):
    opened = Opened(browser, report)
    opened.page.wait_for_timeout(200)
    assert opened.page.title() == "mine · rhymerl report"
    assert opened.page.query_selector("img") is None
    assert EVIL in opened.page.inner_text("#answer")


def test_answers_are_found_and_sorted(browser, report: Path):
    opened = Opened(browser, report)
    answers = read_run(report.parent / "mine").answers
    assert answers is not None
    shown = [(float(cells[3]), float(cells[4] or "inf")) for cells in opened.rows()]
    assert shown == sorted(shown), "the worst come first, and of equal ones those that fell most"
    assert len(set(shown)) > 2
    rewards = [float(cells[3]) for cells in opened.sort_by("reward")]
    assert rewards == sorted(rewards, reverse=True)
    rewards = [float(cells[3]) for cells in opened.sort_by("reward")]
    assert rewards == sorted(rewards)
    changes = [float(cells[4]) for cells in opened.sort_by("change") if cells[4]]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] == pytest.approx(float(answers.change[answers.epoch > 0].max()), abs=0.01)
    opened.page.fill("#search", "ASKS 2")
    assert opened.page.inner_text("#num-rows") == "12 of 48 answers"
    assert {cells[2] for cells in opened.rows()} == {f"{EVIL} asks 2"}
    opened.page.fill("#search", "nobody says this")
    assert opened.rows() == []


def test_the_text_says_where_its_tokens_came_from(browser, report: Path):
    opened = Opened(browser, report)
    opened.page.click(".row.has-text >> nth=1")
    spans = opened.page.eval_on_selector_all(
        "#answer pre >> nth=1 >> span", "spans => spans.map(span => [span.textContent, span.title, span.className])"
    )
    assert [title for _, title, _ in spans] == [
        *("sampled without a draft", "own text", "sibling", "run-ahead", "history, newest epoch", "history, 2 older"),
    ]
    assert [len(text) for text, _, _ in spans[:5]] == [3, 2, 1, 2, 2]
    assert [name for _, _, name in spans] == ["", *["origin"] * 5]
    chips = opened.page.eval_on_selector_all(".epochs button", "buttons => buttons.map(button => button.textContent)")
    assert [chip.split(":")[0] for chip in chips] == ["0", "1", "2", "3", "4", "5"]
    opened.page.click(".epochs button >> nth=0")
    assert "epoch 0" in opened.page.inner_text("#answer .facts")


def test_an_episode_is_a_conversation(browser, tmp_path: Path):
    run = make_run(tmp_path / "mine", num_steps=0)
    record = step_record(1, prompts=1, group=2, words="🙂")
    facts = {"tools": [EVIL, "add"], "reward": 0.25, "waited_s": 1.5}
    turns = [
        {"start": 4, "stop": 4 + len(EVIL), **facts},
        {"start": 9 + len(EVIL), "stop": 9 + len(EVIL), **facts, "tools": [], "reward": None},
    ]
    text = f"🙂abc{EVIL}drawn"
    runs = [[2, DraftSource.OWN], [2, NOT_DRAFTED], [len(EVIL), NOT_DRAFTED], [5, DraftSource.HISTORY]]
    record["texts"][0] |= {"text": text, "runs": runs, "turns": turns, "finish_reason": "max_turns"}
    huge = text + "…" * 100_000
    cut = {"start": len(huge), "stop": len(huge), "tools": [], "reward": None, "waited_s": None}
    record["texts"][1] |= {"text": huge, "runs": None, "turns": [*turns, cut], "finish_reason": "length"}
    StepFile(run / STEPS).append(record)
    write_report([run], tmp_path / "a.html")
    opened = Opened(browser, tmp_path / "a.html")
    shown = opened.page.eval_on_selector_all("#answer h4, #answer pre", "found => found.map(each => each.textContent)")
    assert shown == [
        "🙂 asks 0",
        *(f"Turn 1 · calls {EVIL}, add", "🙂abc", "Tools · 1.500 s · reward 0.250", EVIL),
        *("Turn 2", "drawn", "Environment · 1.500 s"),
    ]
    spans = opened.page.eval_on_selector_all(
        "#answer .origin", "spans => spans.map(span => [span.textContent, span.title])"
    )
    assert spans == [["🙂a", "own text"], ["drawn", "history, newest epoch"]]
    assert "finish_reason max_turns" in opened.page.inner_text("#answer .facts")
    opened.page.click(".row.has-text >> nth=1")
    assert opened.page.eval_on_selector_all("#answer h4", "found => found.at(-1).textContent") == "Turn 3"
    assert opened.page.query_selector("img") is None
    assert opened.complaints == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 1280


def test_the_arrow_keys_walk_through_the_rows(browser, report: Path):
    opened = Opened(browser, report)
    opened.page.click(".row >> nth=0")
    for _ in range(20):
        opened.page.focus("#rows")
        opened.page.keyboard.press("ArrowDown")
    chosen = opened.page.eval_on_selector(".row.is-chosen", "row => Number(row.dataset.place)")
    assert chosen == 20
    top, height = opened.page.eval_on_selector("#rows", "rows => [rows.scrollTop, rows.clientHeight]")
    assert top <= 20 * 32 <= top + height


def test_two_runs_have_samples_of_their_own(browser, tmp_path: Path):
    runs = [make_run(tmp_path / name, words=name, seed=seed) for seed, name in enumerate(("one", "other"))]
    write_report(runs, tmp_path / "a.html")
    opened = Opened(browser, tmp_path / "a.html")
    assert {cells[2].split()[0] for cells in opened.rows()} == {"one"}
    opened.page.select_option("#sample-run", "1")
    assert {cells[2].split()[0] for cells in opened.rows()} == {"other"}
    opened.page.select_option("#metric", "reward")
    opened.page.wait_for_selector("#metric-plot .main-svg")
    assert opened.complaints == []


def test_of_200_000_answers_those_in_view_are_in_the_page(browser, tmp_path: Path):
    run = make_run(tmp_path / "mine", num_steps=0)
    file = StepFile(run / STEPS)
    for step in range(1, 401):
        file.append(step_record(step, prompts=125, group=4, words="What is 4 + 4? " * 20, num_texts=5))
    write_report([run], tmp_path / "a.html")
    opened = Opened(browser, tmp_path / "a.html")
    opened.page.uncheck("#with-text")
    assert opened.page.inner_text("#num-rows") == f"{MANY:,} of {MANY:,} answers"
    assert len(opened.rows()) < 50, "only those in view are in the page"
    opened.page.eval_on_selector("#rows", "rows => { rows.scrollTop = rows.scrollHeight; }")
    opened.wait_until(f"[...document.querySelectorAll('.row')].some(row => row.dataset.place === '{MANY - 1}')")
    assert len(opened.rows()) < 50
