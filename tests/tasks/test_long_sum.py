from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from statistics import fmean, median

import pytest

from rhymerl.tasks import LongSum
from rhymerl.tasks.running_sum import CHARACTERS, running_sum_reward


def demonstrations(task: LongSum, number: int) -> list[tuple[dict[str, str], str]]:
    source = random.Random(0)
    return [(row, task.demonstration(row, source)) for row in islice(task.stream("warmstart", seed=0), number)]


def test_demonstrations_without_errors_are_right_in_both_rounds():
    for row, text in demonstrations(LongSum(error_rate=0.0, doubt=0.5), 200):
        assert running_sum_reward(text, answer=row["answer"]) == 1.0
        steps, mark, total = text.rpartition(";#")
        assert mark
        assert all(part.split("=")[-1] == total for part in steps.split(";?"))
        assert set(text) <= set(CHARACTERS)


def test_a_second_round_is_free_of_planted_errors():
    pairs = demonstrations(LongSum(error_rate=0.5, doubt=0.5), 300)
    right = {
        twice: fmean(running_sum_reward(text, answer=row["answer"]) for row, text in pairs if ("?" in text) == twice)
        for twice in (False, True)
    }
    assert right[True] == 1.0
    assert right[False] < 0.5


def test_lengths_have_a_tail_and_come_mostly_from_the_prompt():
    task, source = LongSum(train_size=200), random.Random(1)
    rows = task.rows("train")
    lengths = [[len(task.demonstration(row, source)) for _ in range(2)] for row in rows]
    flat = [length for pair in lengths for length in pair]
    assert max(flat) > 3 * median(flat)
    assert max(len(row["prompt"]) for row in rows) + max(flat) <= 512
    first, second = zip(*lengths, strict=True)
    assert 0.6 < _correlation(first, second) < 0.9


def test_one_round_only_without_doubt():
    assert not any("?" in text for _, text in demonstrations(LongSum(doubt=0.0), 50))


def test_each_further_round_is_as_likely_as_the_one_before():
    rounds = Counter(text.count("?") for _, text in demonstrations(LongSum(doubt=0.5, rounds=4), 2000))
    shares = [rounds[number] / 2000 for number in range(5)]
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.125, 0.0], abs=0.03)


def test_the_number_of_additions_is_bounded_and_typical():
    counts = [row["prompt"].count("+") for row in LongSum(difficulty=9, typical=4, train_size=300).rows("train")]
    assert max(counts) == 9
    assert min(counts) >= 1
    assert median(counts) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": 0}, r"difficulty=0: expected 1 to 40 additions"),
        ({"typical": 0.5}, r"typical=0\.5: expected 1 to difficulty=18 additions"),
        ({"typical": 19}, r"typical=19: expected 1 to difficulty=18 additions"),
        ({"spread": -1}, r"spread=-1: expected at least 0"),
        ({"spread": float("nan")}, r"spread=nan: expected at least 0"),
        ({"rounds": 0}, r"rounds=0: expected at least 1"),
        ({"doubt": 1.0}, r"doubt=1\.0: expected a probability in \[0, 1\)"),
        ({"error_rate": 1.0}, r"error_rate=1\.0: expected a share in \[0, 1\)"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        LongSum(**arguments)


def _correlation(first, second) -> float:
    x, y = ([value - fmean(values) for value in values] for values in (first, second))
    return sum(a * b for a, b in zip(x, y, strict=True)) / (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5
