"""Recurrent layers: the engine's log-probs are transformers', whatever is drafted, accepted, shared or kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rhymerl.budgets.base import Budget
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine import paths as paths_module
from rhymerl.engine.engine import Engine
from rhymerl.engine.layout import lay_out_pass
from rhymerl.engine.paths import PassPaths
from rhymerl.engine.recurrent import Accepted, ConvStates, RuleStates, Terms
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.engine.support import prove_engine, refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.testing import OracleDrafter, RandomTreeDrafter, make_requests
from rhymerl.types import Completion, RolloutRequest
from tests.engine.test_kept import asked, play
from tests.engine.test_lossless import answers, assert_same
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.windowed import InDouble
from tests.products import pairs_first, values_first


@cache
def model_of(family: str) -> PreTrainedModel:
    return hybrid_model(family)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    """Layers of these families go down to float32, in which a difference of 1e-9 would not show."""
    with InDouble():
        yield


@cache
def asked_for() -> list[RolloutRequest]:
    """Prompts of one token, of some, and of several blocks; some rows go through torch's attention."""
    made = []
    for name, tokens in {"one": (1, 1), "few": (2, 12), "long": (150, 150)}.items():
        stops = (1,) if name == "few" else ()
        some = make_requests(
            1, group_size=3, prompt_tokens=tokens, max_tokens=16, temperature=0.9, stop_token_ids=stops
        )
        made += [replace(each, id=f"{name} {each.id}") for each in some]
    return made


def answers_of(family: str, **how) -> dict[str, Completion]:
    return answers(SimpleNamespace(model=model_of(family)), asked_for(), **how)


@cache
def plain_answers(family: str) -> dict[str, Completion]:
    return answers_of(family)


class WrongFrom(Drafter):
    """Drafts the answer up to a depth, which changes from pass to pass, and nonsense beside it and behind it."""

    def __init__(self, plain: dict[str, Completion]) -> None:
        self.answers = {name: each.token_ids for name, each in plain.items()}
        self.depth = itertools.cycle(range(9))

    def propose(self, request: RolloutRequest, context, budget: int) -> Draft:
        done = len(context) - len(request.prompt.token_ids)
        right = self.answers[request.id][done : done + next(self.depth)]
        tokens, parents, last = [], [], -1
        for token in [*right.tolist(), None]:
            beside = (0 if token is None else token) + 3
            tokens += [beside % 19, *([] if token is None else [token])]
            parents += [last, *([] if token is None else [last])]
            last = len(tokens) - 1
        tokens, parents = [*tokens, 5], [*parents, last]
        return Draft(token_ids=np.array(tokens[:budget], np.int32), parents=np.array(parents[:budget], np.int32))


class ByTurns(Budget):
    """Grants so many nodes, pass by pass."""

    max_nodes = 16

    def __init__(self, nodes: Sequence[int] = (0, 8, 0, 16, 1)) -> None:
        self._nodes = itertools.cycle(nodes)

    def limits(self, requests):
        return np.full(len(requests), next(self._nodes), np.int32)


DRAFTERS = {
    "wrong at every depth": WrongFrom,
    "history_tree": lambda plain: HistoryTreeDrafter(),
    "hostile": lambda plain: RandomTreeDrafter(),
    "oracle": lambda plain: OracleDrafter({name: each.token_ids for name, each in plain.items()}),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_log_probs_are_transformers_own(family):
    model = model_of(family)
    for done in plain_answers(family).values():
        prompt = done.request.prompt.token_ids
        tokens = torch.from_numpy(np.concatenate([prompt, done.token_ids])).long()
        with torch.no_grad():
            logprobs = (model(tokens[None]).logits[0, len(prompt) - 1 : -1] / 0.9).log_softmax(-1)
        own = logprobs.gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(done.logprobs, own, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("family", "drafter"), values_first(HYBRIDS.keys(), DRAFTERS.keys()))
def test_drafts_change_no_token(family, drafter):
    """A pass without drafts goes on from the state after the accepted ones of the pass before."""
    plain = plain_answers(family)
    assert len({each.token_ids.tobytes() for each in plain.values()}) > 6, "the case is too easy: all answers are alike"
    budget = ByTurns() if drafter in ("hostile", "wrong at every depth") else None
    found = answers_of(family, drafter=DRAFTERS[drafter](plain), budget=budget, max_running=5)
    assert_same(plain, found)
    if drafter == "wrong at every depth":
        assert sum(each.output.num_accepted for each in found.values()) > 30


def early(of):
    """Take the state from before the last accepted node."""

    def changed(row, depth, node, device):
        found = of(row, depth, node, device)
        return replace(found, count=(found.count - 1).clamp(min=1))

    return changed


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_from_before_the_last_accepted_node_is_found_out(family, monkeypatch):
    plain = plain_answers(family)
    monkeypatch.setattr(Accepted, "of", early(Accepted.of))
    found = answers_of(family, drafter=WrongFrom(plain), budget=ByTurns())
    with pytest.raises(AssertionError):
        assert_same(plain, found)


@pytest.mark.parametrize(
    ("family", "drafts", "settings"),
    pairs_first(
        ["lfm2", "qwen3_5_text", "falcon_h1"],
        [False, True],
        [{"max_running": 3, "kv_tokens": 190}, {"max_running": 16, "max_pass_tokens": 23}],
    ),
)
def test_memory_and_pass_size_change_no_token(family, drafts, settings):
    """Requests are preempted and computed again, prompts are computed in parts and shared by a group."""
    plain = plain_answers(family)
    found = answers_of(family, drafter=WrongFrom(plain) if drafts else None, **settings)
    assert_same(plain, found)


@pytest.mark.parametrize(
    ("family", "drafter"),
    values_first(["lfm2", "qwen3_5_text", "falcon_h1"], {"plain": None, "drafts": RandomTreeDrafter(vocabulary=16)}),
)
def test_turns_that_are_kept_change_no_token(family, drafter):
    requests = asked(1)
    forgetful = play(Engine(model_of(family)), [replace(each, may_go_on=False) for each in requests])
    assert play(Engine(model_of(family), drafter=drafter), requests) == forgetful


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "falcon_h1"])
def test_new_weights_leave_nothing_of_the_old(family):
    model = hybrid_model(family)
    engine, requests = Engine(model), make_requests(3, group_size=2, max_tokens=20, stop_token_ids=())
    engine.submit(requests)
    engine.run(max_passes=6)
    begun = [replace(each.request, output=each.output) for each in engine.outputs()]
    assert {len(each.output) for each in begun} == {6}
    engine.new_weights(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    fresh, found = Engine(model), []
    fresh.new_weights(1)
    fresh.submit(begun)
    for each in (engine, fresh):
        done = []
        while each.has_work:
            done += each.run()
        found.append({each.request.id: each for each in done})
    assert_same(*found)


# -- states, compared with what they mean, token by token ------------------------------------------------------------


def random_pass(seed: int):
    """A first pass of prompts, among them a prefix with its reader, and a second one of chains and random trees."""
    source = np.random.default_rng(seed)
    rows = Rows(8, 300, SlotPool(2000))
    requests = make_requests(5, prompt_tokens=(1, 140), seed=seed)
    prefix = rows.enter_prefix(requests[0].prompt.token_ids[:-1]) if len(requests[0].prompt.token_ids) > 1 else None
    row = [rows.enter(requests[0], prefix), *(rows.enter(each, None) for each in requests[1:])]
    row = np.array(row if prefix is None else [prefix.row, *row])
    return source, rows, row


def trees(source, count: int) -> DraftBatch:
    parents = [
        np.array([source.integers(-1, node) for node in range(source.integers(0, 9))], int) for _ in range(count)
    ]
    return DraftBatch.pack([Draft(token_ids=np.arange(len(each)), parents=each) for each in parents])


def paths_of(layout, before: dict[int, list[int]], offset: int) -> list[list[int]]:
    """The numbers of the tokens on each token's path; `before` has those of rows, and learns those of the chains."""
    found: list[list[int]] = []
    emitter = {int(f): e for e, f in enumerate(layout.emits)}
    for f, (row, source, chain) in enumerate(zip(layout.row, layout.source, layout.chain, strict=True)):
        path = before.get(int(source), [])
        for _ in range(chain):
            path = [*path, offset + len(found)]
            found.append(path)
        before[int(row)] = path
        first = len(found)
        drafts = layout.drafts
        of_row = drafts.parents[slice(*drafts.starts[emitter[f] : emitter[f] + 2])] if f in emitter else []
        for parent in of_row:
            found.append([*(path if parent < 0 else found[first + parent]), offset + len(found)])
    return found


def terms_of(source, count: int, delta: bool) -> Terms:
    draw = lambda *shape: torch.from_numpy(source.normal(size=(count, 2, *shape)))  # noqa: E731
    beta = torch.from_numpy(source.uniform(0, 1, (count, 2))) if delta else None
    key = torch.nn.functional.normalize(draw(3), dim=-1)
    return Terms(draw(3), key, draw(4), -draw().abs() / 4, beta)


def outputs_one_by_one(terms: Terms, paths: list[list[int]], states: dict[int, np.ndarray]) -> np.ndarray:
    """Each token's state follows from that of the token before it on its path; `states` has those of earlier passes."""
    query, key, value, decay, beta = (None if each is None else each.numpy() for each in terms)
    outputs = []
    for path in paths:
        n = path[-1]
        state = states[path[-2]] if len(path) > 1 else np.zeros((2, 3, 4))
        state = state * np.exp(decay[n])[:, None, None]
        added = value[n]
        if beta is not None:
            added = beta[n][:, None] * (added - np.einsum("hkv,hk->hv", state, key[n]))
        states[n] = state + np.einsum("hk,hv->hkv", key[n], added)
        outputs.append(np.einsum("hkv,hk->hv", states[n], query[n]))
    return np.stack(outputs)


@pytest.mark.parametrize(("seed", "delta", "block"), pairs_first(range(3), [True, False], [4, 64]))
def test_states_over_passes_are_those_of_each_tokens_path(seed, delta, block, monkeypatch):
    """Three passes: prompts, their prefixes among them; then tokens with drafts, of which some are accepted, twice."""
    monkeypatch.setattr(paths_module, "_BLOCK", block)
    source, rows, row = random_pass(seed)
    states, convs = RuleStates(8), ConvStates(8, 4, torch.empty(0, 5, dtype=torch.float64))
    before: dict[int, list[int]] = {-1: []}
    known: dict[int, np.ndarray] = {}
    all_terms, all_inputs = [], []
    for number in range(3):
        emits = np.flatnonzero(rows.is_request[row]) if number else np.empty(0, int)
        chain = source.integers(1, 4, len(row)) if number else rows.length[row] - rows.cached[row]
        layout = lay_out_pass(rows, row, chain, emits, trees(source, len(emits)))
        found = paths_of(layout, before, sum(len(each.key) for each in all_terms))
        all_terms.append(terms_of(source, layout.num_tokens, delta))
        all_inputs.append(torch.from_numpy(source.normal(size=(layout.num_tokens, 5))))
        every, inputs = (
            Terms(*(None if each[0] is None else torch.cat(each) for each in zip(*all_terms, strict=True))),
            torch.cat(all_inputs),
        )
        paths = PassPaths(layout, torch.device("cpu"))
        expected = outputs_one_by_one(every, found, known)
        np.testing.assert_allclose(states.run(paths, all_terms[-1]).numpy(), expected, atol=1e-10, rtol=0)
        windows = convs.windows(paths, all_inputs[-1])
        for window, path in zip(windows, found, strict=True):
            np.testing.assert_array_equal(window, torch.cat([torch.zeros(4, 5), inputs[path[-4:]]])[-4:])
        accepted = some_accepted(source, layout)
        for states_of in (states, convs) if accepted else ():
            states_of.accept(Accepted.of(*map(np.array, zip(*accepted, strict=True)), torch.device("cpu")))
        for each, _, node in accepted:
            before[each] = found[layout.node_index[node]]
        rows.cached[row] += chain  # of what follows, the tokens do not matter
        row = row[rows.is_request[row]]


def some_accepted(source, layout) -> list[tuple[int, int, int]]:
    """Row, depth and number of each node on a random path of each tree."""
    accepted = []
    for e, (start, stop) in enumerate(itertools.pairwise(layout.drafts.starts.tolist())):
        here = source.integers(-1, stop - start)
        while here >= 0:
            accepted.append((int(layout.emitting[e]), int(layout.node_depth[start + here]), start + here))
            here = layout.drafts.parents[start + here]
    return sorted(accepted, key=lambda each: (each[0], each[1]))


# -- the proof -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_proof_sees_a_node_that_goes_on_from_its_neighbour(family, monkeypatch):
    model = hybrid_model(family, dtype=torch.float32)
    refuse_unsupported(model)
    prove_engine(model)

    last = PassPaths._last_tokens
    monkeypatch.setattr(PassPaths, "_last_tokens", lambda self, width: in_order_of(self, width, last))
    with pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


def in_order_of(self, width, last):
    """The windows of a pass whose nodes follow one another."""
    drafts = self._layout.drafts
    flat = replace(self._layout, drafts=replace(drafts, parents=np.arange(len(drafts.parents)) - 1))
    return last(PassPaths(flat, torch.device("cpu")), width)
