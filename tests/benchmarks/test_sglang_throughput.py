"""The benchmark of drafts inside SGLang: its parts without an engine, and all of it with one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import sglang_servers, sglang_throughput
from benchmarks.gpu.peaked_policy import peaked_policy
from rhymerl.history import HistoryStore
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import ScriptedBackend, make_prompt, make_requests
from rhymerl.types import Completion, RolloutRequest


class Watched(ScriptedBackend):
    """Echoes prompts, two a pass, the later one first; `most` were in flight at a time."""

    def __init__(self, tail: Sequence[int] = ()) -> None:
        super().__init__(lambda request: [*request.prompt.token_ids.tolist(), *tail], batch=2)
        self.most = 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        super().submit(requests)
        self.most = max(self.most, len(self.progress()))

    def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
        return super().collect(timeout_s, max_passes=max_passes)[::-1]


def parsed(*words: str) -> argparse.Namespace:
    return sglang_throughput.parser_of().parse_args(["--epochs", "1", "--running", "2", "3", "--repeats", "2", *words])


def work_of(num_prompts: int = 6) -> Any:
    return sglang_throughput.Work(
        prompts=[make_prompt([2, 3 + number], id=str(number)) for number in range(num_prompts)],
        rollout=RolloutSettings(group_size=2, max_tokens=4),
        stop_token_ids=(1,),
        seed=0,
        answers_per_slot=2,
    )


def rounds_of(tails: dict[str, Sequence[int]]) -> tuple[Any, argparse.Namespace]:
    """Run rounds of modes whose answers are the prompts with these tails."""
    arguments, work, history = parsed(), work_of(), HistoryStore()
    sides = [sglang_throughput.Side(mode=mode, backend=Watched(tail)) for mode, tail in tails.items()]
    found: dict[str, Any] = {mode: {} for mode in tails}
    sglang_throughput.learn(sides, work, history, arguments)
    assert history.num_answers == work.answers_an_epoch
    sglang_throughput.run_rounds(sides, work, history, found, float("inf"), arguments)
    return found, arguments


def test_so_many_requests_are_with_the_server_at_a_time() -> None:
    backend, requests = Watched(), make_requests(9)
    answers = sglang_throughput.Side(mode="none", backend=backend).answer(requests, running=3)
    assert [each.request.id for each in answers] == [request.id for request in requests]
    assert backend.most == 3


def test_a_round_has_whole_groups_of_other_prompts_each_time() -> None:
    work = work_of()
    rounds = [work.round(number, 3) for number in range(3)]
    assert [len(requests) for requests in rounds] == [6, 6, 6]
    assert rounds == [work.round(number, 3) for number in range(3)]
    assert len({tuple(request.prompt.id for request in requests) for requests in rounds}) == 3
    assert len({request.seed for requests in rounds for request in requests}) == 18
    assert len(work.round(0, 100)) == work.answers_an_epoch == 12


def test_rows_are_ratios_to_none_of_the_rounds_that_count() -> None:
    found, arguments = rounds_of({"none": [], "ngram": [7], "history_tree": []})
    assert set(found["none"]) == {(number, running) for number in range(3) for running in (2, 3)}
    rows = sglang_throughput.table(found, arguments)
    assert [(row["running"], row["mode"]) for row in rows] == [(r, mode) for r in (2, 3) for mode in found]
    assert rows[0]["times as fast"] == {"median": 1, "min": 1, "max": 1}
    speeds = [[found[mode][number, 2].tokens_per_s for number in (1, 2)] for mode in ("ngram", "none")]
    ratios = [one / base for one, base in zip(*speeds, strict=True)]
    assert rows[1]["times as fast"]["max"] == pytest.approx(max(ratios), rel=1e-3)
    assert [row["answer_tokens"] for row in rows[:3]] == [2, 3, 2]
    assert [row["equal_answers"] for row in rows[:3]] == [1, "", 1]
    # Four answers in each of three rounds of two, six in each of three of three; the last round is not over for itself.
    assert [row["epochs"] for row in rows[3:]] == [0, round(1 + (3 * 4 + 2 * 6) / 12, 1), 1]


def test_rounds_that_a_mode_lacks_are_left_out_of_its_rows_alone() -> None:
    found, arguments = rounds_of({"none": [], "ngram": [], "history_tree": []})
    for key in [(1, 3), (2, 3)]:
        del found["history_tree"][key]
    rows = [(row["running"], row["mode"]) for row in sglang_throughput.table(found, arguments)]
    assert rows == [(2, "none"), (2, "ngram"), (2, "history_tree"), (3, "none"), (3, "ngram")]


def test_servers_in_turn_share_the_time_that_is_left_when_one_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four minutes; a start takes one of them, and two answers five seconds."""
    now, began = [0.0], []

    class Slow(Watched):
        def collect(self, timeout_s: float | None = None, *, max_passes: int | None = None) -> list[Completion]:
            now[0] += 5
            return super().collect(timeout_s, max_passes=max_passes)

    def start(mode: str, *args: Any) -> Slow:
        began.append(mode)
        now[0] += 60
        return Slow()

    monkeypatch.setattr(sglang_throughput.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sglang_throughput, "start", start)
    modes = ["--modes", "history_tree", "ours_ngram", "ngram", "--in-turns", "--minutes", "4", "--epochs", "0"]
    found = sglang_throughput.measure(None, work_of(), parsed(*modes))
    assert [len(rounds) for rounds in found.values()] == [4, 2, 0, 0]
    assert began == ["none", "history_tree", "ours_ngram"]
    assert "--minutes are over before ngram" in capsys.readouterr().err


def test_no_round_begins_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    side, found = sglang_throughput.Side(mode="none", backend=Watched()), {"none": {}}
    sglang_throughput.run_rounds([side], work_of(), HistoryStore(), found, 0.0, parsed())
    assert found == {"none": {}}
    assert "--minutes are over in round 0 with 2 running" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="raise --minutes"):
        sglang_throughput.check([], parsed())


def test_other_answers_are_refused_in_float32_and_told_in_bfloat16() -> None:
    found, arguments = rounds_of({"none": [], "history_tree": [7]})
    rows = sglang_throughput.table(found, arguments)
    assert rows[1]["equal_answers"] == 0
    sglang_throughput.check(rows, parsed("--dtype", "bfloat16"))
    with pytest.raises(SystemExit, match=r"history_tree(.|\n)*not the same answers as none's"):
        sglang_throughput.check(rows, arguments)


def test_answers_of_the_stock_server_are_counted_as_ours() -> None:
    (request,) = make_requests(1, stop_token_ids=(1,))
    tokens = [5, 6, 7, 1, 9]
    meta = {"output_token_logprobs": [[-0.5, token, None] for token in tokens], "spec_verify_ct": 2}
    drafted = sglang_servers.completion(request, {"meta_info": meta}, nodes=7)
    assert (drafted.token_ids.tolist(), drafted.finish_reason) == ([5, 6, 7, 1], "stop")
    assert (drafted.num_passes, drafted.num_drafted, drafted.num_accepted) == (3, 14, 2)
    del meta["spec_verify_ct"]
    plain = sglang_servers.completion(request, {"meta_info": meta}, nodes=0)
    assert (plain.num_passes, plain.num_drafted, plain.num_accepted) == (5, 0, 0)


@torch.no_grad()
def test_a_random_policy_is_sure_of_few_tokens() -> None:
    policy, again = (peaked_policy("tiny", dtype="float32", seed=3) for _ in range(2))
    logits = policy.model(torch.arange(2, 90)[None]).logits[0]
    assert torch.equal(logits, again.model(torch.arange(2, 90)[None]).logits[0])
    probabilities = logits.softmax(-1)
    assert 0.6 < float(probabilities.max(-1).values.mean()) < 0.95
    assert float(probabilities[:, list(policy.stop_token_ids)].max()) < 1e-6


@pytest.mark.sglang
def test_every_mode_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--in-turns", "--num-prompts", "4", "--group-size", "2", "--max-tokens", "24", "--running", "2"]
    result = sglang_throughput.main([*words, "--repeats", "1", "--threads", "1"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == ["none", "ngram", "ours_ngram", "history_tree"]
    assert rows["none"]["accept_length"] == 1 < rows["history_tree"]["accept_length"]
    assert rows["ours_ngram"]["equal_answers"] == rows["history_tree"]["equal_answers"] == 1
    assert 0 < rows["history_tree"]["draft_time_frac"]["median"] < 1
    assert "times mean nothing" in result["note"]
