"""Recorded episodes are replayed turn by turn: replies are context, and what an engine counted is counted again."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.budgets import FixedBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.drafts import Draft
from rhymerl.errors import DataError
from rhymerl.history import HistoryStore
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.runs.replay import Replay


def episode(epoch: int, response: list[int], sampled: list[int] | None, *, reason="stop") -> TraceRecord:
    return TraceRecord(
        epoch=epoch,
        prompt_id="p",
        sample=0,
        prompt_tokens=np.array([1, 2, 3], np.int32),
        response_tokens=np.array(response, np.int32),
        reward=0.0,
        finish_reason=reason,
        sampled=None if sampled is None else np.array(sampled, np.bool_),
    )


RESPONSE, SAMPLED = [5, 6, 7, 20, 21, 8, 9, 22, 10], [1, 1, 1, 0, 0, 1, 1, 0, 1]


def totals(records, nodes=8):
    with closing(HistoryTreeDrafter(deterministic=True)) as drafter:
        return Replay(drafter, FixedBudget(nodes), history=HistoryStore()).run(records)


def test_only_sampled_tokens_take_passes():
    of_turns = totals([episode(0, RESPONSE, SAMPLED)], nodes=0)[0]
    assert of_turns.tokens == 6
    assert totals([episode(0, RESPONSE, None)], nodes=0)[0].tokens == 9


def test_what_repeats_takes_a_pass_a_turn():
    again = totals([episode(epoch, RESPONSE, SAMPLED) for epoch in range(3)])[2]
    assert again.tokens == 6
    assert again.request_passes == 3, "one a turn"


def test_a_trace_keeps_which_tokens_were_sampled(tmp_path):
    row = {"epoch": 0, "prompt_id": "p", "sample": 0, "prompt_tokens": [1], "response_tokens": [5, 6], "reward": 0.0}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**row, "finish_reason": "max_turns", "sampled": [1, 0]}) + "\n")
    (record,) = read_trace(path)
    assert record.sampled.tolist() == [True, False]
    assert record.num_sampled == 1
    path.write_text(json.dumps({**row, "finish_reason": "max_turns", "sampled": [1, 2]}) + "\n")
    with pytest.raises(DataError, match="line 1: sampled: expected 0 or 1 for each response token, 2 of them"):
        list(read_trace(path))


class Reads(Drafter):
    """Notes what it is asked about: how long the prompt is, and the context."""

    def __init__(self):
        self.seen = []

    def propose(self, request, context, budget):
        self.seen.append((len(request.prompt.token_ids), context.tolist()))
        return Draft(token_ids=np.empty(0, np.int32), parents=np.empty(0, np.int32))


def test_a_later_part_is_read_from_its_own_prompt_on():
    record = replace(episode(0, RESPONSE, SAMPLED), parts=np.array([3], np.int32))
    drafter = Reads()
    Replay(drafter, FixedBudget(8), history=HistoryStore()).run([record])
    assert {tuple(context[:2]) for _, context in drafter.seen} == {(1, 2), (20, 21)}
    assert drafter.seen[-1] == (2, [20, 21, 8, 9, 22])


@pytest.mark.parametrize("parts", [[2], [4], [7], []])
def test_a_part_begins_with_tokens_that_were_not_sampled(tmp_path, parts):
    row = {"epoch": 0, "prompt_id": "p", "sample": 0, "prompt_tokens": [1], "response_tokens": RESPONSE, "reward": 0.0}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**row, "finish_reason": "stop", "sampled": SAMPLED, "parts": parts}) + "\n")
    if parts in ([7], []):
        assert [each.parts.tolist() for each in read_trace(path)] == [parts]
        return
    with pytest.raises(DataError, match="line 1: parts: expected places of response tokens at which replies begin"):
        list(read_trace(path))
