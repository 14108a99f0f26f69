"""The lengths of accepted runs are those that one counts token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.callbacks.histograms import accept_rates, accepted_in_a_row
from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output, Sample

SOURCES = st.lists(st.sampled_from([NOT_DRAFTED, DraftSource.OWN, DraftSource.HISTORY, DraftSource.HISTORY + 2]))


def answer(sources: list[int] | None, *, drafted: int = 0, accepted: int = 0) -> Sample:
    length = len(sources or ())
    output = replace(
        Output.of(np.zeros(length)),
        num_drafted=drafted,
        num_accepted=accepted,
        sources=np.array(sources, np.int8) if sources is not None else None,
    )
    completion = Completion(request=make_requests(1)[0], output=output)
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=np.ones(length, np.bool_))


@given(st.lists(SOURCES | st.none()))
def test_runs_are_counted_as_token_by_token(answers: list[list[int] | None]) -> None:
    expected = []
    for sources in answers:
        count = 0
        for source in sources if sources is not None else []:
            if source == NOT_DRAFTED:
                expected.append(count)
                count = 0
            else:
                count += 1
        if sources is not None:
            expected.append(count)  # of the end, where no token is sampled alone
    assert accepted_in_a_row([answer(sources) for sources in answers]).tolist() == expected


def test_an_answer_without_drafts_has_no_rate() -> None:
    answers = [answer([], drafted=4, accepted=1), answer([]), answer(None, drafted=2, accepted=2)]
    assert accept_rates(answers).tolist() == [0.25, 1.0]
