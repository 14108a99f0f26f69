"""The suffix indexes against brute force: every position once, in order, and the longest suffixes found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.history.index import NO_TOKEN, REACH, LiveIndex, Matches, SuffixIndex

TokenPosition = tuple[int, int]  # which answer, which of its tokens

few = st.integers(0, 2)  # a small vocabulary repeats itself
prompts = st.lists(few, max_size=REACH + 8)
answers = st.lists(few, max_size=24)


def ints(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def sealed_index(prompt: np.ndarray, answers: Sequence[np.ndarray]) -> SuffixIndex:
    return SuffixIndex([prompt] * len(answers), answers)


def filled_up(tokens: Sequence[int]) -> list[int]:
    return ([NO_TOKEN] * REACH + list(tokens))[-REACH:]


def shared(one: Sequence[int], two: Sequence[int], longest: int) -> int:
    """Tokens that the ends of two contexts have in common."""
    one, two = filled_up(one), filled_up(two)
    length = 0
    while length < longest and one[-1 - length] == two[-1 - length] != NO_TOKEN:
        length += 1
    return length


def expected_lengths(
    texts: Sequence[tuple[list[int], list[int]]], query: Sequence[int], *, longest: int = REACH
) -> dict[TokenPosition, int]:
    """The shared length of every place, of texts (what stands before, tokens)."""
    return {
        (number, k): shared([*before[-REACH:], *tokens[:k]], query, longest)
        for number, (before, tokens) in enumerate(texts)
        for k in range(len(tokens))
    }


def found_lengths(index: SuffixIndex, found: Matches, r: int = 0) -> dict[TokenPosition, int]:
    count = found.counts[r]
    positions, lengths = found.positions[r, :count].tolist(), found.lengths[r, :count].tolist()
    assert lengths == sorted(lengths, reverse=True)
    numbers = [int(np.searchsorted(index.starts, position, side="right")) - 1 for position in positions]
    locations = [
        (number, position - int(index.starts[number])) for number, position in zip(numbers, positions, strict=True)
    ]
    assert len(set(locations)) == count
    return dict(zip(locations, lengths, strict=True))


def check(
    index: SuffixIndex, found: Matches, expected: dict[TokenPosition, int], *, most: int, shortest: int = 1
) -> None:
    """The longest ones, as many as fit; among equals any."""
    long_enough = {location: length for location, length in expected.items() if length >= shortest}
    got = found_lengths(index, found)
    assert sorted(got.values(), reverse=True) == sorted(long_enough.values(), reverse=True)[:most]
    assert got.items() <= long_enough.items()


def sealed_texts(prompt: list[int], listed: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    return [(prompt, tokens) for tokens in listed]


def live_texts(prompt: list[int], rows: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    return [([], prompt), *((prompt, tokens) for tokens in rows)]


def query_of(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    text = ints([*filled_up(tokens), NO_TOKEN])
    return text, np.array([REACH])


def array_bytes(index: SuffixIndex) -> int:
    held = [*vars(index).values(), *index.blocks]
    return sum(value.nbytes for value in held if isinstance(value, np.ndarray))


# -- earlier answers ---------------------------------------------------------------------------------------------


@given(
    prompt=prompts,
    listed=st.lists(answers, max_size=5),
    query=st.lists(few, max_size=REACH + 4),
    most=st.integers(1, 40),
    shortest=st.integers(1, 4),
    longest=st.sampled_from([4, 7, REACH]),
)
def test_sealed_index_finds_the_longest_suffixes(prompt, listed, query, most, shortest, longest):
    index = sealed_index(ints(prompt), [ints(tokens) for tokens in listed])
    index.check_integrity()
    found = index.matches(*query_of(query), most=most, shortest=shortest, longest=longest)
    expected = expected_lengths(sealed_texts(prompt, listed), query, longest=longest)
    check(index, found, expected, most=most, shortest=shortest)


@pytest.mark.parametrize(
    "tokens", [[0] * 700, [0, 1] * 350, [2**22 - 2, 2**22 - 1, 5] * 60, [2**31 - 2, 0, 2**22, 2**11 - 1, 2**11] * 30]
)
def test_every_vocabulary_is_sorted(tokens):
    """One token over and over, and ids of one, two and three digits."""
    prompt = tokens[:5]
    index = sealed_index(ints(prompt), [ints(tokens), ints(tokens[3:])])
    index.check_integrity()
    live = LiveIndex(ints(tokens))
    live.check_integrity()
    live.extend(np.array([live.open()]), np.array([len(tokens)]), ints(tokens))
    live.check_integrity()
    query = tokens[:50]
    found = index.matches(*query_of(query), most=9)
    check(index, found, expected_lengths(sealed_texts(prompt, [tokens, tokens[3:]]), query), most=9)


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257, 513])
def test_blocks_of_a_sealed_index_are_full(num_tokens):
    answer = np.random.default_rng(num_tokens).integers(0, 5, num_tokens).astype(np.int32)
    index = sealed_index(ints([1]), [answer])
    index.check_integrity()
    assert index.num_blocks == max(-(-num_tokens // 256), 1)


def near_copies(rng: np.random.Generator, *, count: int, length: int) -> Iterator[np.ndarray]:
    first = rng.integers(0, 50_000, length).astype(np.int32)
    for _ in range(count):
        copy = first.copy()
        copy[rng.integers(0, length, length // 20)] = rng.integers(0, 50_000, length // 20)
        yield copy


def test_bytes_are_those_of_the_arrays():
    rng = np.random.default_rng(0)
    prompt, copies = rng.integers(0, 50_000, 300).astype(np.int32), list(near_copies(rng, count=16, length=4000))
    index = sealed_index(prompt, copies)
    assert index.bytes == array_bytes(index) <= 12 * 16 * 4000
    live = LiveIndex(prompt)
    live.extend(np.array([live.open()]), np.array([4000]), copies[0])
    assert live.bytes == array_bytes(live)


# -- answers that grow -------------------------------------------------------------------------------------------


@given(
    prompt=prompts,
    steps=st.lists(st.lists(st.tuples(st.booleans(), answers), min_size=1, max_size=4), max_size=6),
    most=st.integers(1, 40),
)
def test_live_index_grows_row_by_row(prompt, steps, most):
    """Each step extends some rows, and opens those that are not there yet; the widest rows are widened on the way."""
    index, rows = LiveIndex(ints(prompt)), []
    for step in steps:
        chosen = [row for row, (is_chosen, _) in enumerate(step) if is_chosen]
        while len(rows) <= max(chosen, default=-1):
            assert index.open() == len(rows) + 1
            rows.append([])
        new = [step[row][1] for row in chosen]
        if any(new):
            counts = np.array([len(tokens) for tokens in new])
            index.extend(np.array(chosen) + 1, counts, ints(sum(new, [])))
        for row, tokens in zip(chosen, new, strict=True):
            rows[row] += tokens
        index.check_integrity()
    for row, tokens in enumerate(rows):
        assert index.text[index.starts[row + 1] : index.ends[row + 1] + 1].tolist() == [*tokens, NO_TOKEN]
        found = index.matches(index.text, index.ends[[row + 1]], most=most)
        check(index, found, expected_lengths(live_texts(prompt, rows), [*prompt, *tokens]), most=most)


@given(
    prompt=prompts,
    steps=st.lists(st.tuples(st.lists(answers, min_size=2, max_size=2), st.booleans()), max_size=6),
)
def test_what_is_appended_is_found_from_the_next_catch_up_on(prompt, steps):
    index, rows, sorted_rows = LiveIndex(ints(prompt)), [[], []], [[], []]
    numbers = np.array([index.open(), index.open()])
    for new, catches_up in steps:
        counts = np.array([len(tokens) for tokens in new])
        index.append(numbers, counts, ints(sum(new, [])))
        rows = [[*row, *tokens] for row, tokens in zip(rows, new, strict=True)]
        if catches_up:
            index.catch_up()
            sorted_rows = rows
        index.check_integrity()
        for number, row in zip(numbers, rows, strict=True):
            assert index.text[index.starts[number] : index.ends[number] + 1].tolist() == [*row, NO_TOKEN]
            found = index.matches(index.text, index.ends[[number]], most=40)
            known = live_texts(prompt, sorted_rows)
            check(index, found, expected_lengths(known, [*prompt, *row]), most=40)


def test_queries_of_several_rows_are_independent():
    rng = np.random.default_rng(3)
    index = LiveIndex(rng.integers(0, 4, 40).astype(np.int32))
    rows = np.array([index.open() for _ in range(5)])
    index.extend(rows, np.array([7, 0, 3, 64, 30]), rng.integers(0, 4, 104).astype(np.int32))
    together = index.matches(index.text, index.ends[rows], most=8)
    for r, row in enumerate(rows):
        alone = index.matches(index.text, index.ends[[row]], most=8)
        assert found_lengths(index, alone) == found_lengths(index, together, r)


@pytest.mark.parametrize(
    ("prompt_tokens", "vocabulary", "num_rows", "most_at_once"),
    [(0, 1, 3, 200), (700, 2, 4, 150), (5, 4000, 16, 12), (2000, 30, 2, 700)],
)
def test_blocks_split_as_the_answers_grow(prompt_tokens, vocabulary, num_rows, most_at_once):
    rng = np.random.default_rng(num_rows)
    index = LiveIndex(rng.integers(0, vocabulary, prompt_tokens).astype(np.int32))
    rows = np.array([index.open() for _ in range(num_rows)])
    blocks = index.num_blocks
    for _ in range(5):
        counts = rng.integers(1, most_at_once + 1, num_rows)
        index.extend(rows, counts, rng.integers(0, vocabulary, int(counts.sum())).astype(np.int32))
        index.check_integrity()
    assert index.num_blocks > blocks


@pytest.mark.parametrize("most", [40, 700])
def test_matches_are_gathered_across_blocks(most):
    """Sealed blocks, which are full, and live ones, which have been split."""
    rng = np.random.default_rng(0)
    prompt, listed = rng.integers(0, 3, 20).tolist(), [rng.integers(0, 3, 400).tolist() for _ in range(3)]
    sealed, live = sealed_index(ints(prompt), [ints(tokens) for tokens in listed]), LiveIndex(ints(prompt))
    rows = np.array([live.open() for _ in listed])
    for k in range(0, 400, 50):
        live.extend(rows, np.full(3, 50), ints(sum((tokens[k : k + 50] for tokens in listed), [])))
    assert min(sealed.num_blocks, live.num_blocks) > 4
    for query in ([*prompt, *listed[0][:9]], [0], [1, 2], [2, 2, 2]):
        expected = expected_lengths(sealed_texts(prompt, listed), query)
        check(sealed, sealed.matches(*query_of(query), most=most), expected, most=most)
        expected = expected_lengths(live_texts(prompt, listed), query)
        check(live, live.matches(*query_of(query), most=most), expected, most=most)


@pytest.mark.parametrize(("seed", "prompt_tokens"), [(14, 1627), (24, 3370)])
def test_there_is_room_when_many_blocks_fill_up_at_once(seed, prompt_tokens):
    """Tokens come evenly, so that the blocks of a long prompt split within a few passes of one another."""
    rng = np.random.default_rng(seed)
    assert int(rng.integers(500, 8000)) == prompt_tokens
    index = LiveIndex(rng.integers(0, 1000, prompt_tokens).astype(np.int32))
    rows = np.array([index.open() for _ in range(32)])
    for _ in range(26):
        counts = rng.integers(1, 9, 32)
        index.extend(rows, counts, rng.integers(0, 1000, int(counts.sum())).astype(np.int32))
        assert index.num_blocks <= len(index.blocks.fill)
    index.check_integrity()


@pytest.mark.parametrize("length", [63, 64, 65, 128, 1000])
def test_a_row_gets_wider_and_its_neighbours_stay(length):
    index = LiveIndex(ints([9, 8, 7]))
    short, long, later = index.open(), index.open(), index.open()
    index.extend(np.array([short]), np.array([3]), ints([1, 2, 3]))
    index.extend(np.array([long]), np.array([length]), np.arange(length, dtype=np.int32))
    index.extend(np.array([later, short]), np.array([1, 1]), ints([5, 4]))
    index.check_integrity()
    assert [index.text[index.starts[row] : index.ends[row]].tolist() for row in range(4)] == [
        [9, 8, 7], [1, 2, 3, 4], list(range(length)), [5]
    ]  # fmt: skip
    assert index.open() == 4
    assert (index.text[index.starts[4] - 3 : index.starts[4] + 1]).tolist() == [9, 8, 7, NO_TOKEN]


def test_answers_to_several_prompts_stand_behind_their_own():
    index = SuffixIndex([ints([7, 8]), ints([9])], [ints([1, 2]), ints([1, 3])])
    index.check_integrity()
    found = index.matches(*query_of([7, 8]), most=8)
    assert found_lengths(index, found) == {(0, 0): 2}
    found = index.matches(*query_of([9, 1]), most=8)
    assert found_lengths(index, found) == {(1, 1): 2, (0, 1): 1}


def test_an_index_over_nothing_is_not_searched(monkeypatch):
    monkeypatch.setattr("rhymerl.history.index.collect", None)
    for index in (SuffixIndex([], []), sealed_index(ints([7, 8]), [ints([])])):
        found = index.matches(*query_of([7, 8]), most=8)
        assert found.positions.shape == found.lengths.shape == (1, 0)
        assert found.counts.tolist() == [0]


def test_a_match_stays_in_one_answer():
    """The end of an answer is no context of the next one's begin, and the place after an answer is no match."""
    index = sealed_index(ints([]), [ints([1, 2]), ints([3, 1, 2]), ints([4])])
    found = index.matches(*query_of([1, 2]), most=8)
    assert found.counts[0] == 0  # both stand at an end
    found = index.matches(*query_of([1]), most=8)
    assert found_lengths(index, found) == {(0, 1): 1, (1, 2): 1}
    assert index.matches(*query_of([]), most=8).counts[0] == 0
    assert index.matches(*query_of([2]), most=8).counts[0] == 0


def test_what_follows_a_match_is_a_token():
    rng = np.random.default_rng(1)
    listed = [rng.integers(0, 3, length).astype(np.int32) for length in (0, 1, 2, 50, 300)]
    index = sealed_index(ints([0, 1]), listed)
    for _ in range(50):
        found = index.matches(*query_of(rng.integers(0, 3, 40).tolist()), most=64)
        assert (index.text[found.positions[0, : found.counts[0]]] >= 0).all()


def test_a_row_does_not_match_itself_at_its_end():
    index = LiveIndex(ints([]))
    row = index.open()
    index.extend(np.array([row]), np.array([4]), ints([1, 2, 1, 2]))
    found = index.matches(index.text, index.ends[[row]], most=8)
    assert found_lengths(index, found) == {(1, 2): 2}  # not the place 4 with all of its 4 tokens
