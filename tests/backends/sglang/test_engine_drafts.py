"""The drafts themselves on their way into SGLang: their limits, bad ones, contexts, feed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rhymerl.backends.remote.drafter_feed import Counters, FeedMessage, FeedReader, FeedWriter
from rhymerl.backends.remote.wire import without_logprobs
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.drafts import Draft
from rhymerl.history import HistoryStore
from rhymerl.testing import RandomTreeDrafter, make_requests
from tests.backends.sglang.batches import BEHIND, Recorder, commit, fake, propose, run, step

N = 6


class Scripted(Drafter):
    """Drafts what it is given, and keeps what it was asked."""

    def __init__(self, tokens, parents) -> None:
        self.draft = Draft(token_ids=np.array(tokens), parents=np.array(parents))
        self.contexts, self.budgets, self.requests = [], [], []

    def propose(self, request, context, budget):
        self.requests.append(request)
        self.contexts.append(context)
        self.budgets.append(budget)
        return self.draft


class Output(list):
    """Output ids that know which of them were read."""

    def __init__(self, *values) -> None:
        super().__init__(*values)
        self.read = []

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read.append(len(found) if isinstance(index, slice) else 1)
        return found

    def __iter__(self):
        self.read.append(len(self))
        return super().__iter__()


CHAIN = ([3, 4, 5, 6, 7], [-1, 0, 1, 2, 3])


def drafting_of(drafter, tmp_path=None, **more):
    counters = Counters(tmp_path / "counters", new=True) if tmp_path is not None else None
    return EngineDrafting(drafter, FixedBudget(N - 1), vocabulary=19, counters=counters, **more), counters


def one(max_tokens=20, *, answer=(2,) * 50, **params):
    request = fake(make_requests(1, max_tokens=max_tokens)[0], answer, **params)
    request.commit([answer[0]])
    return request


@pytest.mark.parametrize(("max_tokens", "depth"), [(20, 5), (7, 5), (6, 4), (4, 2), (3, 1), (2, 0)])
def test_no_node_stands_where_the_last_token_is_drawn(max_tokens, depth):
    drafting, _ = drafting_of(Scripted(*CHAIN))
    trees = propose(drafting, [one(max_tokens)], [()])
    assert trees.mask()[0].sum(-1).max() - 1 == depth


def test_a_wide_tree_is_as_wide_at_the_end():
    drafting, _ = drafting_of(Scripted([3, 4, 5, 6, 7], [-1] * 5))
    assert (propose(drafting, [one(3)], [()]).parents[0] == 0).sum() == 5


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 20])
def test_nobody_gets_more_tokens_than_asked_for(max_tokens):
    drafting, _ = drafting_of(RandomTreeDrafter())
    for seed in range(5):
        requests = [fake(each, [2] * 50) for each in make_requests(3, seed=seed, max_tokens=max_tokens)]
        run(drafting, requests)
        assert [len(each.output_ids) for each in requests] == [max_tokens] * 3


def test_behind_its_end_a_request_is_not_drafted_for():
    """While passes overlap, one more is prepared for it; the root is what the engine has sampled all the same."""
    drafter = Scripted(*CHAIN)
    drafting, _ = drafting_of(drafter)
    stopped, full = one(answer=[2, 1]), one(3, rid="full")
    sampled = step(drafting, [stopped, full], [[1, BEHIND], [2, 2]])
    assert [len(each) for each in sampled] == [1, 1]
    assert drafter.contexts == []


def test_stop_tokens_that_an_engine_ignores_are_ignored():
    drafter = Scripted(*CHAIN)
    drafting, _ = drafting_of(drafter)
    request = one(answer=[2, 1, 2], ignore_eos=True)
    propose(drafting, [request], [[1, 2]])
    assert drafter.contexts[0][-3:].tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([3, 19], [-1, 0]),
        ([3, -1], [-1, 0]),
        ([3, 4], [-1, 1]),
        ([3, 3], [-1, -1]),
        ([3, 4], [-1]),
        ([3.5], [-1]),
        (range(6), range(-1, 5)),
    ],
    ids=["unknown", "negative", "order", "twins", "lengths", "fractions", "too many"],
)
def test_bad_drafts_are_counted_and_left_out(tokens, parents, tmp_path):
    class Sometimes(Scripted):
        def propose(self, request, context, budget):
            return self.draft if len(context) % 2 else Draft(token_ids=[2], parents=[-1])

    drafting, counters = drafting_of(Sometimes(tokens, parents), tmp_path)
    batch = [one(rid="a"), one(rid="b")]
    batch[0].output_ids += [2] * (1 - (len(batch[0].origin_input_ids) + 1) % 2)  # of odd length
    batch[1].output_ids += [2] * ((len(batch[1].origin_input_ids) + 1) % 2)
    trees = propose(drafting, batch, [(), ()])
    assert trees.parents[0].tolist() == [-1] * N
    assert trees.parents[1].tolist() == [-1, 0] + [-1] * (N - 2)
    seen = counters.since()
    assert (seen["bad_drafts"], seen["asks"], seen["hits"], seen["drafted_nodes"], seen["passes"]) == (1, 2, 1, 1, 1)
    assert seen["draft_s"] > 0


def test_a_batch_of_drafts_that_is_none_is_counted_for_all(tmp_path):
    class Broken(Scripted):
        def propose_batch(self, requests, contexts, budgets):
            packed = super().propose_batch(requests, contexts, budgets)
            return SimpleNamespace(**{name: getattr(packed, name) for name in packed.__slots__} | {"starts": [0, 9]})

    drafting, counters = drafting_of(Broken(*CHAIN), tmp_path)
    trees = propose(drafting, [one(rid="a"), one(rid="b")], [(), ()])
    assert (trees.parents == -1).all()
    assert counters.since()["bad_drafts"] == 2


def test_contexts_are_views_of_one_buffer_and_only_new_tokens_are_read():
    drafter = Scripted([2, 2], [-1, 0])
    drafting, _ = drafting_of(drafter)
    request = one(50)
    request.output_ids = Output(request.output_ids)
    while not request.finished():
        request.output_ids.read.clear()
        before = len(request.output_ids)
        trees = propose(drafting, [request], [()])
        assert sum(request.output_ids.read) <= 3, "output was read again"
        request.output_ids.extend([2] * min(int(trees.mask()[0].sum(-1).max()), 50 - before))
        if len(request.output_ids) >= 50:
            request.end("length")
    starts = {context.__array_interface__["data"][0] for context in drafter.contexts}
    assert len(drafter.contexts) > 10
    assert len(starts) == 1
    assert all(context.dtype == np.int32 and not context.flags.writeable for context in drafter.contexts)
    known = [*request.origin_input_ids, *request.output_ids]
    assert all(context.tolist() == known[: len(context)] for context in drafter.contexts)


def test_how_tokens_are_sampled_is_told_as_it_was_asked_for():
    drafter = Scripted(*CHAIN)
    drafting, _ = drafting_of(drafter)
    settings = [{"temperature": 0.0}, {"top_k": 7, "top_p": 0.5}, {"min_p": 0.25, "temperature": 0.5}]
    requests = [make_requests(1, **each)[0] for each in settings]
    batch = [fake(each, [2] * 40, rid=str(i)) for i, each in enumerate(requests)]
    for request in batch:
        request.commit([2])
    propose(drafting, batch, [()] * 3)
    assert [each.sampling for each in drafter.requests] == [each.sampling for each in requests]


def test_requests_of_others_are_drafted_for_too():
    drafter = Recorder()
    drafting, _ = drafting_of(drafter)
    request = fake(make_requests(1, max_tokens=5)[0], [2] * 9, rid="theirs", custom_params=None, stop_token_ids=set())
    run(drafting, [request])
    told = drafter.told["theirs"]
    assert [what[0] for what in told] == ["start", *["accept"] * 5, "finish"]
    assert told[-1] == ("finish", [2] * 5, "length")


def test_a_name_may_be_given_again():
    """Other clients may reuse a name once its first request has ended, before a batch without it has been seen."""
    drafter = Recorder()
    drafting, _ = drafting_of(drafter)
    request = make_requests(1, max_tokens=5)[0]
    for answer in ([2] * 9, [4, 3] * 5):
        batch = [fake(request, answer, rid="theirs", custom_params=None, stop_token_ids=set())]
        tokens = [[answer[0]]]
        while batch:
            batch, _ = commit(batch, tokens)
            tokens = step(drafting, batch, [()]) if batch else []
    drafting.flush()
    finished = [what[1] for what in drafter.told["theirs"] if what[0] == "finish"]
    assert finished == [[2] * 5, [4, 3, 4, 3, 4]]


def drafting_from_history():
    """Its drafter fails where a request ends twice."""
    drafter = HistoryTreeDrafter(deterministic=True)
    return drafter, drafting_of(drafter)[0]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("names", [("a", "b", "c"), ("request", "b", "c"), ("b", "request", "request'")], ids=str)
def test_a_name_may_be_that_of_several_requests(names, overlap):
    """Two trainers, or an evaluation beside a training, name requests alike: by step, prompt and sample."""
    answers = ([2] * 9, [4, 3] * 5, [3, 4, 2] * 4)
    batches = []
    for drafter, drafting in (drafting_from_history(), (recorder := Recorder(), drafting_of(recorder)[0])):
        requests = [replace(each, id="request") for each in make_requests(3, max_tokens=9, stop_token_ids=())]
        batch = [fake(*each, rid=rid) for *each, rid in zip(requests, answers, names, strict=True)]
        for request in batch:
            if request.rid.startswith("request"):
                request.sampling_params.custom_params = None
        run(drafting, batch, overlap=overlap)
        batches.append(batch)
        drafter.close()
    for batch in batches:
        assert [each.output_ids[:9] for each in batch] == [list(each[:9]) for each in answers]
    assert len(recorder.told) == 3
    ends = [told[-1] for told in recorder.told.values()]
    assert sorted(ends) == sorted(("finish", list(answer[:9]), "length") for answer in answers)
    assert {sum(what[0] in ("start", "finish") for what in told) for told in recorder.told.values()} == {2}


@pytest.mark.parametrize("rid", ["another", "first"])
def test_who_was_taken_out_of_the_queue_may_be_sent_again(rid):
    """SGLang does not report a request that is aborted while it waits; its successor goes on from its tokens."""
    request = make_requests(1, max_tokens=20, stop_token_ids=())[0]
    for drafter, drafting in (drafting_from_history(), (recorder := Recorder(), drafting_of(recorder)[0])):
        first, beside = fake(request, [2, 3] * 10, rid="first"), one(20)
        first.commit([2])
        first.commit(step(drafting, [first, beside], [(), ()])[0])
        propose(drafting, [beside], [()])
        before = without_logprobs(np.array(first.output_ids, np.int32))
        again = fake(replace(request, output=before), [2, 3] * 10, rid=rid)
        run(drafting, [again])
        drafting.flush()
        assert first.output_ids + again.output_ids == [2, 3] * 10
        drafter.close()
    kinds = [what[0] for what in recorder.told[request.id] if what[0] != "accept"]
    assert kinds == ["start", "finish", "start", "finish"]
    ends = [what for what in recorder.told[request.id] if what[0] == "finish"]
    assert ends == [("finish", first.output_ids, "withdrawn"), ("finish", [2, 3] * 10, "length")]


@pytest.mark.parametrize("has_news", [False, True], ids=["by hand", "of a trainer"])
def test_what_is_indexed_of_answers_ends_with_their_policy(has_news, tmp_path):
    """A trainer that tells of its history says when; a server by hand is told of new weights only."""
    writer, drafter = FeedWriter(tmp_path / "feed"), HistoryTreeDrafter(deterministic=True)
    drafting, _ = drafting_of(drafter, feed=FeedReader(tmp_path / "feed", drafter))
    if has_news:
        writer.write(FeedMessage(delta=HistoryStore().snapshot()))
    sizes = []
    for epoch in range(20):
        requests = [replace(each, id=f"{epoch}/{each.id}") for each in make_requests(4, group_size=2, max_tokens=30)]
        batch = [fake(each, [2 + epoch % 7] * 40) for each in requests]
        for request in batch:
            request.sampling_params.custom_params["rhymerl"]["feed"] = writer.version
        run(drafting, batch)
        assert drafter.live_bytes > 0, "siblings that come later find nothing"
        drafting.flush()
        sizes.append(drafter.live_bytes)
    assert all(sizes) if has_news else sizes == [0] * 20
    drafter.close()


def test_news_that_a_request_needs_are_heard_before_it_starts(tmp_path):
    heard = []

    class Listener(Recorder):
        def follow(self, delta):
            heard.append(sorted(self.told))

    writer, drafter = FeedWriter(tmp_path / "feed"), Listener()
    drafting, _ = drafting_of(drafter, feed=FeedReader(tmp_path / "feed", drafter))
    for _ in range(2):
        writer.write(FeedMessage(delta=HistoryStore().snapshot()))
    old, new = one(rid="old"), one(rid="new")
    for request, feed in ((old, 1), (new, 2)):
        request.sampling_params.custom_params["rhymerl"] |= {"feed": feed, "id": request.rid}
    propose(drafting, [old], [()])
    assert heard == [[]]
    propose(drafting, [old, new], [(), ()])
    assert heard == [[], ["old"]]


@pytest.mark.parametrize(
    "own", [{"id": "x"}, {"feed": 99}, {"offset": 10**12}, {"ahead": "!"}, {"seed": {}}, None, []], ids=str
)
def test_a_malformed_parameter_costs_its_own_request_only(own, tmp_path):
    """The parameter may be that of another client, on a server that is the trainer's or not."""
    drafts = []
    for malformed in (True, False):
        drafter = Recorder()
        drafting, _ = drafting_of(drafter, feed=FeedReader(tmp_path / "feed", drafter))
        good, bad = fake(make_requests(1, max_tokens=6)[0], [2, 3] * 5), one(6, rid="bad")
        if malformed:
            whole = bad.sampling_params.custom_params["rhymerl"]
            changed = {**whole, **own} if isinstance(own, dict) and list(own) != ["id"] else own
            bad.sampling_params.custom_params = {"rhymerl": changed}
        run(drafting, [good, bad])
        drafts.append(drafter.told[good_name(drafter)])
        assert good.output_ids[:6] == [2, 3, 2, 3, 2, 3]
        assert bad.finished()
    assert drafts[0] == drafts[1]


def good_name(drafter: Recorder) -> str:
    return next(name for name, told in drafter.told.items() if ("finish", [2, 3, 2, 3, 2, 3], "length") in told)
