"""The tokens of a batch that are sampled but not in the requests' output, with overlapping passes and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rhymerl.backends.sglang.plugin.drafting import not_yet_known


def known(prompt, output, cached, sampled):
    """A request, how many of its tokens have keys and values, and what its last pass drew."""
    return SimpleNamespace(origin_input_ids=prompt, output_ids=output), cached, [*sampled, *[0] * (4 - len(sampled))]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([known([1, 2, 3], [], 3, [4])], [[4]]),  # after its prompt
        ([known([1, 2, 3], [4], 6, [5, 6, 7])], [[5, 6, 7]]),
        ([known([1, 2, 3], [4, 5, 6, 7], 6, [5, 6, 7]), known([8], [], 1, [9])], [[], [9]]),  # a prompt came in between
    ],
)
def test_overlapping(batch, expected):
    requests, cached, sampled = zip(*batch, strict=True)
    assert [list(tokens) for tokens in not_yet_known(requests, cached, lambda: sampled)] == expected


def test_in_turn_nothing_is_copied_from_the_device():
    requests, cached, _ = zip(known([1, 2, 3], [4], 3, []), known([5], [6, 7], 2, []), strict=True)
    assert [list(tokens) for tokens in not_yet_known(requests, cached, lambda: pytest.fail("asked"))] == [[], []]
