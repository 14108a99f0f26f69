"""What a report begins with: a header that says what ran; of several runs their curves, then their differences."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from tests.report.directories import make_run, page_of
from tests.report.test_page import Parsed


def test_the_header_says_what_ran_where_when_and_by_which_words(tmp_path: Path) -> None:
    text = Parsed(page_of(make_run(tmp_path / "mine"), out=tmp_path / "a.html")).text
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_000))
    assert f"began{began}; its last step ended about 69 s later" in re.sub(r"\s*\n\s*", "", text)
    shown = ["Tiny, 4+4=8", "rows.jsonl", "cpu", "rhymerl fit", "1234567"]
    assert [text.index(words) for words in shown] == sorted(text.index(words) for words in shown)


def test_a_comparison_begins_with_curves_then_differences(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "other"))]
    summary = {"eval_reward_before": 0.25, "eval_reward_after": 0.5, "num_tokens": 1_234_567, "steps": 6}
    (runs[1] / "summary.json").write_text(json.dumps(summary))
    page = page_of(*runs, out=tmp_path / "a.html")
    parts = ['<section id="learning">', "0.250 → 0.750", 'id="differences"', '<section id="health">']
    assert [page.index(part) for part in parts] == sorted(page.index(part) for part in parts)
    assert page.count('<section id="learning">') == 1
    row = page[page.index("Held-out reward") : page.index("</tr>", page.index("Held-out reward"))]
    assert re.findall("<td>(.*?)</td>", row) == ["0.250 → 0.750", "0.250 → 0.500", "-0.25"]
