"""A run that is watched in a browser: the page draws, comes again with what is new, can be held, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymerl.folders import RunFolder
from rhymerl.report.steps import STEPS, StepFile
from tests.report.directories import CONFIG
from tests.report.test_browser import browser as browser
from tests.report.test_watch import record, watching

pytestmark = pytest.mark.browser
LIVE, READY, DRAWN = "p.live", "body[data-ready]", "body[data-drawn]"
COMES_AGAIN_MS = 120_000  # after ten seconds, or later where the machine is slow


def test_the_page_follows_a_run_in_a_browser(browser, tmp_path: Path) -> None:
    run, complaints = tmp_path / "mine", []
    page = browser.new_context(viewport={"width": 400, "height": 900}).new_page()
    page.set_default_timeout(COMES_AGAIN_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    folder = RunFolder(run)
    with folder:
        folder.open()
        with watching(run) as server:
            page.goto(server.url)
            assert "mine has not ended its first step" in page.inner_text(LIVE)
            (run / "config.yaml").write_text(CONFIG.format(seed=0, clip=0.2))
            file = StepFile(run / STEPS)
            file.append(record(1))
            page.wait_for_selector(f"{LIVE} >> text=mine goes on, after 1 step.")  # by its own Refresh header
            page.wait_for_selector(DRAWN)
            assert page.query_selector("[data-chart=reward] .main-svg") is not None
            assert page.evaluate("document.documentElement.scrollWidth") == 400
            page.click(f"{LIVE} >> text=hold")
            page.wait_for_selector(READY)
            file.append(record(2))
            page.wait_for_timeout(12_000)
            assert "mine goes on, after 1 step." in page.inner_text(LIVE), "it is held"
            folder.__exit__()
            page.click(f"{LIVE} >> text=go on")
            page.wait_for_selector(f"{LIVE} >> text=mine has ended, after 2 steps.")
            assert "does not change any more" in page.inner_text(LIVE)
    assert [each for each in complaints if "favicon" not in each] == []
