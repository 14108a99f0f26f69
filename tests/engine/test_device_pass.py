"""Passes as on an accelerator, counted by torch's dispatcher; on the CPU, but no compiled code reads its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rhymerl.bench.costs import PathDrafter
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.drafts import DraftBatch
from rhymerl.engine import inputs
from rhymerl.engine.engine import Engine
from rhymerl.engine.layer_steps import TorchSteps
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.types import RolloutRequest
from tests.engine.test_lossless import answers
from tests.products import values_first

# Results of a size that the host has to ask for.
_OF_ITS_OWN_SIZE = ("nonzero", "masked_select", "unique", "repeat_interleave", "_local_scalar_dense")
_ALLOCATE = ("empty", "empty_like", "new_empty")


class Calls(TorchFunctionMode):
    """Counts calls from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    """Counts operations, those for whose results the host waits, and copies between a device and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.launches = 0  # at least one each
        self.copies_in = 0
        self._calls = Calls()

    def __enter__(self) -> Self:
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)
        self.waits += Counter(tolist=self._calls.counts["tolist"])

    @property
    def copies_back(self) -> int:
        return self._calls.counts["cpu"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.operations[name] += 1
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in _OF_ITS_OWN_SIZE or any(each is not None and each.dtype == torch.bool for each in indices):
            self.waits[name] += 1
        self.copies_in += name == "copy_" and args[0].dtype == torch.uint8
        result = func(*args, **(kwargs or {}))
        self.launches += name not in _ALLOCATE and (name.endswith("_") or not _is_view(result, args))
        return result


def _is_view(result: Any, args: Any) -> bool:
    """Return whether it only looks at memory in another way."""
    places = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
    found = result[0] if isinstance(result, list) else result  # of a split
    return isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() in places


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "on_host", lambda device: False)


def seen_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Arrays become tensors in the one copy alone: any other way would be a copy of its own, and on a device wait."""
    seen = Seen()
    with engine.forward.ready(), monkeypatch.context() as patch, seen:
        for name in ("from_numpy", "tensor", "as_tensor"):
            patch.setattr(torch, name, partial(_of_nothing, getattr(torch, name)))
        engine.step()
    return seen


def _of_nothing(make: Any, values: Any, *rest: Any, **how: Any) -> Any:
    """Inputs asks which dtype an array of this kind has."""
    assert not np.size(values), f"{values} become a tensor beside the one copy"
    return make(values, *rest, **how)


@pytest.mark.parametrize("nodes", [0, 16])
@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9, "top_k": 20}], ids=["plain", "truncated"])
def test_nothing_waits_inside_a_pass_and_all_arrives_in_one_copy(device, nodes, rules, monkeypatch):
    """24 layers; the first pass computes prompts."""
    model = tiny_policy(num_layers=24, dtype="bfloat16").model
    drafter = PathDrafter(nodes, vocabulary=model.config.vocab_size)
    engine = Engine(model, drafter=drafter, budget=FixedBudget(nodes), max_running=8)
    engine.submit(make_requests(8, max_tokens=30, stop_token_ids=(), **rules))
    for number in range(4):
        seen = seen_in(engine, monkeypatch)
        assert engine.forward.kind is TorchSteps
        assert not seen.waits, f"pass {number}"
        assert (seen.copies_in, seen.copies_back) == (1, 1), f"pass {number}: {seen.operations}"
        assert seen.launches <= 24 * (54 if number else 80) + 90, f"pass {number}: {seen.launches}, {seen.operations}"


class Watched(HistoryTreeDrafter):
    """Notes what happens in a pass, in its order."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(deterministic=True)
        self.events = events

    def propose_batch(self, *args: Any) -> DraftBatch:
        self.events.append("asked")
        return super().propose_batch(*args)

    def catch_up(self) -> None:
        self.events.append("caught up")
        super().catch_up()


class Reads(TorchFunctionMode):
    """Notes when the host waits for a device."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cpu":
            self.events.append("waited")
        return func(*args, **(kwargs or {}))


def test_the_drafter_catches_up_while_the_device_computes(monkeypatch):
    policy, requests, events = tiny_policy(), make_requests(4, group_size=2, max_tokens=40), []
    here = answers(policy, requests, drafter=Watched(events))
    assert "caught up" not in events
    assert "asked" in events
    monkeypatch.setattr(inputs, "on_host", lambda device: False)
    events.clear()
    with Reads(events):
        there = answers(policy, requests, drafter=Watched(events))
    assert {name: each.token_ids.tolist() for name, each in there.items()} == {
        name: each.token_ids.tolist() for name, each in here.items()
    }
    passes = "; ".join(events).split("waited")
    assert len(passes) > 4
    assert all(each.strip("; ") in ("asked; caught up", "caught up", "") for each in passes), passes
    assert any(each.strip("; ") == "asked; caught up" for each in passes)


def test_a_drafter_that_is_left_alone_is_not_told_to_catch_up(monkeypatch):
    monkeypatch.setattr(inputs, "on_host", lambda device: False)
    events: list[str] = []
    answers(tiny_policy(), make_requests(4, max_tokens=10), drafter=Watched(events), budget=FixedBudget(0))
    assert events == []


def test_what_waits_is_counted():
    values = torch.arange(6.0)
    with Seen() as seen:
        values[values > 2]
        values[torch.tensor([0, 2])]
        (values > 2).nonzero()
        assert values[3].item() + bool(values.any()) == 4
        values.tolist()
    assert seen.waits == {"index": 1, "nonzero": 1, "_local_scalar_dense": 2, "tolist": 1}


def test_the_first_copy_has_left_before_the_next_is_written(device):
    """Tensors of one pass stay as they are while the staging memory is used for the next."""
    staging = inputs.Inputs(torch.device("cpu"))
    arrays = [np.arange(5), np.array([True, False, True]), np.empty(0), np.arange(6.0).reshape(2, 3)]
    first = staging.put(arrays)
    staging.put([each + 1 if each.dtype != np.bool_ else ~each for each in arrays])
    for there, here in zip(first, arrays, strict=True):
        assert there.numpy().dtype == here.dtype
        np.testing.assert_array_equal(there.numpy(), here)


def requests_of_all_kinds() -> list[RolloutRequest]:
    others = make_requests(3, seed=1, top_p=0.8, max_tokens=40)
    return [*make_requests(8, group_size=4), *(replace(each, id=f"other {each.id}") for each in others)]


@pytest.mark.parametrize(("model_type", "drafted"), values_first(["qwen2", "qwen3", "llama", "gpt2"], [False, True]))
def test_tokens_are_those_of_the_host(monkeypatch, model_type, drafted):
    policy, requests = tiny_policy(model_type), requests_of_all_kinds()
    here = answers(policy, requests, max_running=6)
    monkeypatch.setattr(inputs, "on_host", lambda device: False)
    there = answers(policy, requests, max_running=6, drafter=RandomTreeDrafter() if drafted else None)
    for name, completion in here.items():
        assert there[name].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(there[name].logprobs, completion.logprobs, atol=1e-9)
