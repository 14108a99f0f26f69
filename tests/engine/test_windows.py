"""Windows, chunks, soft caps, sinks, latents: log-probs are transformers', whatever is drafted, shared or kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine import attention as attention_module
from rhymerl.engine.attention import AttentionPlan, Bucket
from rhymerl.engine.engine import Engine
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layout import PassLayout, lay_out_pass
from rhymerl.engine.rows import Rows, SlotPool
from rhymerl.engine.support import prove_engine, refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.models.attention import FULL, LayerAttention, last_seen, narrowed
from rhymerl.testing import OracleDrafter, RandomTreeDrafter, make_requests
from rhymerl.types import Completion, RolloutRequest
from tests.engine.test_kept import asked, play
from tests.engine.test_lossless import answers, assert_same
from tests.models.windowed import CHUNKED, FAMILIES, LATENTS, WINDOWED, InDouble, windowed_model
from tests.products import pairs_first, values_first


@cache
def model_of(family: str) -> PreTrainedModel:
    return windowed_model(family)


def asked_for() -> list[RolloutRequest]:
    """Rows of the compiled loop, and of torch's attention too."""
    short, long = (
        make_requests(3, group_size=3, prompt_tokens=n, max_tokens=20, temperature=0.9) for n in ((9, 9), (80, 80))
    )
    return [*short, *(replace(each, id=f"long {each.id}") for each in long)]


@cache
def plain_answers(family: str) -> dict[str, Completion]:
    with InDouble():
        return answers(SimpleNamespace(model=model_of(family)), asked_for())


# -- what is visible -----------------------------------------------------------------------------------------------


def random_pass(seed: int, *, compiled: bool) -> tuple[PassLayout, dict[int, list[tuple[int, int]]]]:
    """Return a pass of a prefix and of rows with trees, and every (position, slot) that each token sees."""
    source = np.random.default_rng(seed)
    rows = Rows(8, 200, SlotPool(900))
    rows.pool.give(source.permutation(rows.pool.take(900)))
    prefix = rows.enter_prefix(source.integers(0, 9, 30, dtype=np.int32))
    row = np.array([prefix.row, *(rows.enter(request, None) for request in make_requests(4, prompt_tokens=(1, 40)))])
    parents = [np.array([source.integers(-1, node) for node in range(size)], int) for size in (0, 5, 17, 12)]
    drafts = DraftBatch.pack([Draft(token_ids=np.zeros(len(each), int), parents=each) for each in parents])
    layout = lay_out_pass(rows, row, rows.length[row], np.arange(1, 5), drafts, compiled=compiled)
    sees: dict[int, list[tuple[int, int]]] = {}
    n = 0
    for f, count in enumerate(layout.chain.tolist()):
        path: list[tuple[int, int]] = []
        for position in range(count):
            path = [*path, (position, int(layout.slots[n]))]
            sees[n], n = path, n + 1
        first = n
        for above in parents[f - 1].tolist() if f else []:
            before = sees[first + above] if above >= 0 else sees[first - 1]
            sees[n] = [*before, (before[-1][0] + 1, int(layout.slots[n]))]
            n += 1
    assert [sees[n][-1][0] for n in range(layout.num_tokens)] == layout.positions.tolist()
    return layout, sees


def plan_of(layout: PassLayout) -> AttentionPlan:
    arrays = [
        {name: torch.from_numpy(getattr(each, name)) for name in ("mask", "queries", "real", "tokens")}
        | {"kv_slots": torch.from_numpy(each.kv_slots.ravel())}
        for each in layout.buckets
    ]
    return AttentionPlan([Bucket(**each) for each in arrays], layout.paged)


def attended(query, keys, values, sees, layer: LayerAttention) -> np.ndarray:
    """Attention written out: a token sees those whose position is above its own minus the window."""
    out = np.empty(query.shape)
    for n, path in sees.items():
        last = path[-1][0]
        window = layer.window or len(path)
        window = last % -window + 1 if window < 0 else window
        slots = [slot for position, slot in path if position > last - window]
        for head in range(query.shape[1]):
            scores = 0.3 * keys[slots, head // 2] @ query[n, head]
            scores = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
            sinks = [] if layer.sinks is None else [float(layer.sinks[head])]
            weights = np.exp(np.append(scores, sinks) - max([*scores, *sinks]))
            out[n, head] = (weights / weights.sum())[: len(slots)] @ values[slots, head // 2]
    return out


@pytest.mark.parametrize(
    ("compiled", "window", "more", "dtype"),
    pairs_first(
        [True, False],
        [None, 1, 3, 16, -1, -4, -7],
        [{}, {"softcap": 1.5}, {"sinks": True}, {"softcap": 0.7, "sinks": True}],
        ["float64", "float32"],
    ),
)
def test_a_window_counts_positions(compiled, window, more, dtype):
    """Slots are in no order, and a draft's nodes, which stand side by side, share positions."""
    layout, sees = random_pass(3, compiled=compiled)
    assert (layout.paged is not None) == compiled
    source = np.random.default_rng(0)
    query, keys, values = (source.normal(size=shape) for shape in ((layout.num_tokens, 4, 8), (901, 2, 8), (901, 2, 8)))
    sinks = torch.from_numpy(source.normal(size=4)) if "sinks" in more else None
    layer = LayerAttention(window=window, softcap=more.get("softcap"), sinks=sinks)
    found = plan_of(layout).attend(
        *(torch.from_numpy(each.astype(dtype)) for each in (query, keys, values)), 0.3, layer
    )
    expected = attended(query, keys, values, sees, layer)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12 if dtype == "float64" else 2e-5, rtol=0)


def test_one_mask_serves_all_layers_of_a_window():
    layout, _ = random_pass(4, compiled=False)
    plan, calls = plan_of(layout), []
    query, keys = torch.randn(layout.num_tokens, 4, 8), torch.randn(901, 2, 8)
    for window in (5, None, 5, None, 7):
        plan.attend(query, keys, keys, 0.3, LayerAttention.of(window, None, None))
        calls.append(plan._additive[window])
    assert calls[0] is calls[2]
    assert calls[1] is calls[3]
    assert set(plan._additive) == {None, 5, 7}


def test_full_layers_are_given_the_one_that_says_so():
    assert LayerAttention.of(None, None, None) is FULL
    assert not LayerAttention.of(5, None, None).needs_scores


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_transformers_own(family):
    model = model_of(family)
    for done in plain_answers(family).values():
        prompt = done.request.prompt.token_ids
        tokens = torch.from_numpy(np.concatenate([prompt, done.token_ids])).long()
        with torch.no_grad(), InDouble():
            logprobs = (model(tokens[None]).logits[0, len(prompt) - 1 : -1] / 0.9).log_softmax(-1)
        own = logprobs.gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(done.logprobs, own, atol=1e-9, rtol=0)


DRAFTERS = {
    "hostile": lambda plain: RandomTreeDrafter(),
    "history_tree": lambda plain: HistoryTreeDrafter(),
    "oracle": lambda plain: OracleDrafter({name: each.token_ids for name, each in plain.items()}),
}


@pytest.mark.parametrize(("family", "drafter"), values_first(FAMILIES.keys(), DRAFTERS))
def test_drafts_change_no_token(family, drafter):
    """Those of the oracle are longer than the window, and all of them are accepted."""
    plain = plain_answers(family)
    assert len({each.token_ids.tobytes() for each in plain.values()}) > 3, "the case is too easy: all answers are alike"
    how = {"drafter": drafter(plain), "max_running": 5, "max_pass_tokens": 90}
    with InDouble():
        assert_same(plain, answers(SimpleNamespace(model=model_of(family)), asked_for(), **how))


@pytest.mark.parametrize(
    ("family", "drafter"),
    values_first(
        ["mistral", "gemma3_text", "deepseek_v2", "deepseek_v3", "llama4_text"],
        {"plain": None, "drafts": RandomTreeDrafter(vocabulary=16)},
    ),
)
def test_turns_that_are_kept_change_no_token(family, drafter):
    requests = asked(2)
    forgetful = play(Engine(model_of(family)), [replace(each, may_go_on=False) for each in requests])
    assert play(Engine(model_of(family), drafter=drafter), requests) == forgetful


@pytest.mark.parametrize("family", ["mistral", "ministral", "qwen2"])
def test_the_direct_forward_has_windows(family):
    engine = Engine(model_of(family))
    with engine.forward.ready():
        assert engine.forward.kind is not None


# -- the proof -------------------------------------------------------------------------------------------------------


def by_columns(visible: torch.Tensor, window: int) -> torch.Tensor:
    """A window of the places in which keys stand, where a node's siblings count."""
    last = visible.shape[-1] - visible.flip(-1).int().argmax(-1, keepdim=True)
    return visible & (torch.arange(visible.shape[-1]) >= last - window)


WRONG = {
    "by columns": by_columns,
    "one more": lambda visible, window: last_seen(visible, window + 1),
    "one less": lambda visible, window: last_seen(visible, window - 1),
    "none": lambda visible, window: visible,
}


@pytest.mark.parametrize(("family", "wrong"), values_first(WINDOWED.keys(), WRONG))
def test_the_proof_sees_a_window_that_is_none_of_the_models(family, wrong, monkeypatch):
    model = windowed_model(family, dtype=torch.float32, sliding_window=64)
    refuse_unsupported(model)
    prove_engine(model)
    assert model.config.sliding_window == 64
    monkeypatch.setattr(attention_module, "last_seen", wrong)
    with pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


def test_a_window_below_one_is_no_chunk():
    model = windowed_model("mistral", dtype=torch.float32, sliding_window=-8)
    with pytest.raises(ConfigError, match="sliding_window=-8 in its config.json; expected at least 1"):
        prove_engine(model)


WRONG_CHUNKS = {
    "one more": ("last_seen", lambda visible, window: last_seen(visible, window - 1)),
    "a window": ("last_seen", lambda visible, window: last_seen(visible, -window)),
    "none": ("last_seen", lambda visible, window: visible),
    "by places": ("at_positions", lambda layer, query, positions: query),
}


@pytest.mark.parametrize("wrong", WRONG_CHUNKS)
@pytest.mark.parametrize("family", CHUNKED)
def test_the_proof_sees_chunks_that_are_none_of_the_models(family, wrong, monkeypatch):
    """They are long, and so are the steps by which queries grow."""
    model = windowed_model(family, dtype=torch.float32, attention_chunk_size=64, floor_scale=64)
    refuse_unsupported(model)
    prove_engine(model)
    assert model.config.attention_chunk_size == model.model.layers[1].self_attn.floor_scale == 64
    monkeypatch.setattr(attention_module, *WRONG_CHUNKS[wrong])
    with pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


@pytest.mark.parametrize("family", LATENTS)
def test_latents_pass_the_proof(family):
    model = windowed_model(family, dtype=torch.float32)
    refuse_unsupported(model)
    prove_engine(model)


def test_a_window_that_no_sequence_reaches_is_not_narrowed():
    model = windowed_model("mistral", sliding_window=64)
    for longest, window in ((64, 64), (65, 3)):
        with narrowed(model, longest):
            assert model.config.sliding_window == window
    assert model.config.sliding_window == 64


# -- what no token sees any more ---------------------------------------------------------------------------------------

_WINDOW = 8
_LATE = 16  # tokens, of a row, that are freed together


def long_requests() -> list[RolloutRequest]:
    return make_requests(4, group_size=2, prompt_tokens=(30, 60), max_tokens=60, temperature=0.9)


def play_in(kv_tokens: int, drafter, family: str = "mistral", *, window: int = _WINDOW, requests=None):
    """Return completions by id, the most slots held after a pass, and the engine; slots are used again at once."""
    name = "sliding_window" if family in WINDOWED else "attention_chunk_size"
    engine = Engine(windowed_model(family, **{name: window}), drafter=drafter, kv_tokens=kv_tokens, max_running=4)
    engine.submit(requests or long_requests())
    found, most = {}, 0
    with InDouble(), engine.forward.ready():
        while engine.has_work:
            found |= {each.request.id: each for each in engine.step()}
            engine.check_integrity()
            most = max(most, kv_tokens - engine.kv.pool.num_free)
    return found, most, engine


@pytest.mark.parametrize("drafter", [None, RandomTreeDrafter(seed=1)], ids=["none", "tree"])
@pytest.mark.parametrize(
    ("family", "window"), [("mistral", _WINDOW), ("mistral", 1), ("ministral", 30), ("gemma3_text", 8)]
)
def test_keys_that_nobody_sees_are_free_and_change_no_token(family, window, drafter, monkeypatch):
    found, most, engine = play_in(700, drafter, family, window=window)
    reach = engine.kv.reach
    assert reach == (None if family == "gemma3_text" else window)  # which has full attention too
    monkeypatch.setattr(KVStore, "reach", None)
    expected, all_of_them, _ = play_in(700, drafter, family, window=window)
    assert_same(found, expected)
    rows = 4 + 4  # and prefixes of as many prompts
    print(f"{family}, window {window}: {most} slots held at most, {all_of_them} if nothing is freed")
    if reach is not None:
        assert most <= rows * (reach + _LATE)
        assert most < all_of_them


def test_requests_run_side_by_side_in_the_slots_that_windows_leave_free(monkeypatch):
    """Admission counts slots that are free, whatever a request has had before."""
    found, _, engine = play_in(190, None)
    assert engine.admission.num_preemptions == 0
    monkeypatch.setattr(KVStore, "reach", None)
    expected, _, whole = play_in(190, None)
    assert whole.admission.num_preemptions > 0, "the case is too easy"
    assert_same(found, expected)
