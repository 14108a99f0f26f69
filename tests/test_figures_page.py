"""Every figure in the table of docs/figures.md is in the file that its row names, or follows from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import RESULTS, theme_of
from benchmarks.record import ROOT, git
from benchmarks.update.shared_prefixes import RANDOM
from tests.benchmarks.test_result_files import has_history
from tests.documents import PAGES

PAGE = ROOT / "docs" / "figures.md"
NUMBER = re.compile(  # and the unit behind it, or behind the list that it is in
    r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.]*[A-Za-z\d])"
    r"(?=(?: instead of [\d.]+)?( GB)|(?:(?:, | and |, and | to |-)[\d.]+)*( %| ms)|)"
)
UNITS: Mapping[str, Sequence[Callable[[float], float]]] = {
    "": [lambda value: value],
    " %": [lambda value: 100 * abs(value), lambda value: 100 * abs(1 - value)],
    " GB": [lambda megabytes: megabytes / 1000],
    " ms": [lambda value: value, lambda seconds: 1000 * seconds],
}
Result = Mapping[str, Any]


def said_of_files() -> dict[Path, str]:
    """What the rows of the table say of each JSON file, beside the one that they name."""
    found: dict[Path, str] = {}
    path = Path()
    table = PAGE.read_text().partition("<!-- figures")[2].partition("<!-- end of figures")[0]
    for line in [line for line in table.splitlines() if line.startswith("| ")][1:]:
        _, said, named = line.strip("| ").split(" | ")
        if named != "same file":
            path = (ROOT / named.strip("`")).with_suffix(".json")
        found[path] = f"{found[path]}; {said}" if path in found else said
    return found


SAID = said_of_files()


def values_of(node: Any) -> Iterator[float]:
    """All numbers of a file, those in its texts too."""
    if isinstance(node, Mapping):
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from values_of(each)
    elif isinstance(node, str):
        yield from map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?", node))
    elif isinstance(node, int | float):
        yield float(node)


# -- what follows from a file ------------------------------------------------------------------------------------------


def of_both_sides(result: Result) -> Iterator[str]:
    ours, theirs = result["rows"]
    rollout, update = (theirs[name]["median"] / ours[name]["median"] for name in ("rollout_s", "update_s"))
    yield f"rollouts {rollout:.1f} times, the update {update:.1f} times"


def of_shared_prefixes(result: Result) -> Iterator[str]:
    """The sizes of random answers, which the script has."""
    for case in [row["case"] for row in result["rows"]]:
        if case in RANDOM and case != "long answers":  # which its row names in its first cell
            _, answers, tokens, shortest, longest = RANDOM[case]
            yield f"prompts of {tokens} tokens, {answers} answers of {shortest} to {longest}"


def of_schedulers(result: Result) -> Iterator[str]:
    """Speed-ups over FIFO behind a barrier, of the rows of the reference workload."""
    found = {(row["scheduler"], row["run_ahead"]): row for row in reversed(result["rows"])}
    tiers = {"histopipe, tier 1": "tier 1 of `histopipe`", "histopipe, tier 2": "tier 2"}
    for name in ("histopipe, tier 1", "histopipe, tier 2", "paced", "packed"):
        row = found[name, "keep"]
        yield f"{tiers.get(name, f'`{name}`')} {two(row['speedup']['median'])} ({100 * row['bubble_frac']:.0f} %"
    for name in ("sorted", "paced", "histopipe, tier 2", "packed"):
        yield f"{two(found[name, 'draft']['speedup']['median'])} with `{name.partition(',')[0]}`"


def of_emulation(result: Result) -> Iterator[str]:
    none, paper, tree = result["rows"]
    yield " / ".join(with_range(row["emulated_over_real"]) for row in (none, paper, tree))
    real, emulated = ([row[name]["median"] for row in (paper, tree)] for name in ("over_none", "emulated_over_none"))
    yield f"`paper` has {two(real[0])}, emulated {two(emulated[0])}"
    low_to_high = with_range(tree["flattered"]).replace(" (", " of it (")
    yield f"`history_tree` {two(real[1])}, emulated {two(emulated[1])}: {low_to_high}"


def with_range(spread: Mapping[str, float]) -> str:
    return "{median} ({min}-{max})".format(**{name: two(value) for name, value in spread.items()})


def two(value: float) -> str:
    """Two decimals; a half goes up."""
    return f"{value + 1e-9:.2f}"


def of_tournament(result: Result) -> Iterator[str]:
    """The least and the most of each rule over all workloads."""

    def span(rule: str, steps: str, column: str = "tokens") -> str:
        rows = [row for row in result["rows"] if (row["rule"], row["steps"]) == (rule, steps)]
        low, high = (choose(row[column]["median"] for row in rows) for choose in (min, max))
        return f"{low:.2f} to {high:.2f}"

    for rule in ("longest first", "Seer"):
        yield f"{rule} {span(rule, 'on-policy')}"
    most = span("sorted, groups apart", "on-policy").rpartition(" ")[2]
    yield f"`sorted` {span('sorted', 'on-policy')} (with `keep_groups=false` {most})"
    yield f"`packed` {span('packed', 'on-policy')}"
    ahead, early = "one step off", "ends early"
    yield f"`paced` {span('paced', ahead)}, `histopipe` {span('HistoPipe, tier 2', ahead)}"
    rule = "Laminar's repack"
    yield f"{rule} {span(rule, ahead)}"
    slots = {
        row["rule"]: row for row in result["rows"] if row["steps"] == ahead and row["workload"].endswith("24 slots")
    }
    paced, apart = (slots[rule]["tokens"]["median"] for rule in ("paced", "sorted, groups apart"))
    yield f"with 24 slots `paced` {paced:.2f} behind `sorted` with `keep_groups=false`, {apart:.2f}"
    yield f"RollPacker {span('RollPacker', early)} with {span('RollPacker', early, 'bias')} of the mean length"
    oldest = max(row["oldest"] for row in result["rows"] if row["rule"] == "APRIL")
    yield f"APRIL {span('APRIL', early)} with tokens up to {oldest} steps old"
    rule = "APRIL, dropping"
    yield f"dropping {span(rule, early)} with {span(rule, early, 'bias')} of the length"


def of_rules(result: Result) -> Iterator[str]:
    """Ratios of our acceptance length to another rule's, and an oracle's to the longest match."""
    found = {(row["trace"], row["rule"], row["nodes"]): row for row in result["rows"]}

    def over(trace: str, above: str, below: str, column: str = "later epochs") -> list[str]:
        nodes = result["config"]["nodes"]
        pairs = ((found[trace, above, count], found[trace, below, count]) for count in nodes)
        return [f"{one[column] / other[column]:.2f}" for one, other in pairs if column in one]

    names = {
        "running_sum": "running sums",
        "smollm2_long_sum": "SmolLM2's sums",
        "smollm2_harder_sums": "its harder sums",
        "smollm2_addition": "its additions",
        "smollm2_numbers": "its sorted numbers",
    }
    for trace, name in names.items():
        suffix, longest = (" / ".join(over(trace, "rhymerl", rule)) for rule in ("suffix decoding", "longest match"))
        yield f"{name} {suffix} and {longest}"
    for trace in ("smollm2_addition", "smollm2_numbers"):
        yield f"oracle {'of one path ' if 'addition' in trace else ''}has {' / '.join(over(trace, 'oracle', 'longest match'))}"
    epochs = [str(epoch) for epoch in range(2, 17)]
    last = over("smollm2_addition", "rhymerl", "longest match", "6")
    yield f"additions with 4 and 8 nodes ({last[0]} and {last[1]} in the last epoch)"
    by_epoch = [over("smollm2_numbers", "rhymerl", "longest match", epoch) for epoch in epochs]
    few, more = (sorted(ratios[place] for ratios in by_epoch if ratios) for place in (0, 1))
    yield f"numbers ({few[0]} to {few[-1]} with 4, {more[0]} to {more[-1]} with 8)"
    others = [
        over(trace, "rhymerl", rule, epoch)
        for trace, rule, epoch in product(names, ("suffix decoding", "longest match"), epochs)
        if rule == "suffix decoding" or trace not in ("smollm2_addition", "smollm2_numbers")
    ]
    yield f"In each single epoch at least {min(ratio for ratios in others for ratio in ratios)}"


DERIVED: Mapping[str, Callable[[Result], Iterator[str]]] = {
    "draft_rules": of_rules,
    "emulation_check": of_emulation,
    "schedule": of_schedulers,
    "tournament": of_tournament,
    "shared_prefixes": of_shared_prefixes,
    "trl_running_sum": of_both_sides,
    "trl_pretrained": of_both_sides,
}


@pytest.mark.parametrize("path", SAID, ids=lambda path: path.stem)
def test_every_figure_of_a_row_is_in_its_file(path: Path) -> None:
    result, plain = json.loads(path.read_text()), SAID[path].replace("**", "")
    for phrase in DERIVED[theme_of(path)](result) if theme_of(path) in DERIVED else ():
        assert phrase in plain
        plain = plain.replace(phrase, "")
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", plain)
    for earlier in re.findall(r"\(in the file as of (\w+)\)", plain):
        if not has_history():
            pytest.skip("needs a repository with all of its commits")
        result["earlier"] = json.loads(git("show", f"{earlier}:{path.relative_to(ROOT)}"))["rows"]
    values = set(values_of({name: each for name, each in result.items() if name != "environment"}))
    assert strangers(plain, values) == []


def strangers(said: str, values: set[float]) -> list[str]:
    """Return the numbers of a text that no value, in their unit, is rounded to."""
    found = [(number, size or share) for number, size, share in NUMBER.findall(said)]
    return [number + unit for number, unit in found if not is_among(number, unit, values)]


def is_among(number: str, unit: str, values: set[float]) -> bool:
    tolerance = 0.5001 * 10 ** -len(number.partition(".")[2])
    found = (convert(value) for value in values for convert in UNITS[unit])
    return any(abs(value - float(number)) <= tolerance for value in found)


def test_a_figure_that_is_in_no_file_is_noticed() -> None:
    values = {0.0678, 1.574, 0.154, 2832.0, -0.019}
    said = "68 ms, 1.57 times; reward 0.154; 1.8 instead of 2.8 GB; 2 % too low; 1.58; 69 ms; 3 %"
    assert strangers(said, values) == ["1.8 GB", "1.58", "69 ms", "3 %"]


def test_the_table_names_every_file_that_a_page_quotes() -> None:
    named = {path.stem for path in SAID}
    quoted = {
        found
        for page in PAGES
        for found in re.findall(r"benchmarks/results/(\w[\w-]*)\.(?:md|json)\b", page.read_text())
    }
    assert quoted <= named
    assert [name for name in sorted(quoted | named) if not (RESULTS / f"{name}.json").is_file()] == []
