"""Router replay: the experts that computed a token when it was sampled compute it in the update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rhymerl.algos import GRPO
from rhymerl.distributed.wire import Wire
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.engine.engine import Engine
from rhymerl.errors import ConfigError
from rhymerl.models.logprobs import policy_output, token_batch
from rhymerl.models.routing import routed, routers_of
from rhymerl.models.shared_prefixes import sharing
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import RandomTreeDrafter, ScriptedBackend, make_requests, tiny_policy
from rhymerl.training.checks import check_algorithm
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from rhymerl.types import Completion, Output, RolloutRequest, Sample, TurnEnd
from rhymerl.workers import RECORDS
from rhymerl.workers.coordinator import SharedPlan
from rhymerl.workers.run_ahead_state import RunAheadState
from tests.engine.test_grid import sample
from tests.engine.test_lossless import assert_same
from tests.models.small import small_model

_EXPERTS = {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4}
_GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}
FAMILIES: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {}, "mixtral": {}, "glm4_moe": _GROUPS}
DRAFTERS: Mapping[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "history_tree": HistoryTreeDrafter,
    "hostile": RandomTreeDrafter,
}


def experts_model(family: str = "qwen3_moe", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {**_EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 16, "experts_implementation": "eager"}
    more = {"initializer_range": 0.3, "max_position_embeddings": 256, **settings, **FAMILIES[family]}
    return small_model(family, dtype=dtype, **more).eval()


def asked(count: int = 4, group_size: int = 3, **sampling: Any) -> list[RolloutRequest]:
    """Requests of a training step, whose routes are told."""
    return [replace(each, step=0) for each in make_requests(count, group_size=group_size, **sampling)]


def answers(
    model: PreTrainedModel, requests: Sequence[RolloutRequest], drafter: Drafter | None = None, **settings: Any
) -> dict[str, Completion]:
    engine = Engine(model, drafter=drafter, **{"kv_tokens": 4096, "max_running": 5, "check_drafts": True, **settings})
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done.update({completion.request.id: completion for completion in engine.run()})
    return done


@contextmanager
def taken(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """What the experts themselves get, [N, k] for each layer of a pass."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for module in model.modules():
            if hasattr(module, "experts") and hasattr(module, "gate"):
                hook = module.experts.register_forward_pre_hook(lambda _, inputs: found.append(inputs[1]))
                hooks.callback(hook.remove)
        yield found


def in_update(
    model: PreTrainedModel, samples: Sequence[Sample], *, replays: bool = True, shares: bool = False
) -> tuple[np.ndarray, float, float]:
    """The update's log-probs, and the shares of tokens that took other experts, and whose routers wanted others."""
    tokens = token_batch(samples, "cpu", shares=shares)
    assert tokens.routes is not None
    with (
        torch.no_grad(),
        sharing([model]) if shares else nullcontext(),
        taken(model) as experts,
        routed(routers_of(model), tokens.routes, replays=replays) as routing,
    ):
        output = policy_output(model, tokens, temperature=1.0)
    assert routing.differs is not None
    known, took = tokens.routes.long() - 1, torch.stack(experts, 1)
    others = (known.sort(-1).values != took.sort(-1).values).flatten(1).any(1)
    found = [each[tokens.indices].double().mean().item() for each in (others, routing.differs)]
    return output.logprobs[tokens.response].double().numpy(), found[0], found[1]


def behaviour(samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate([each.completion.logprobs for each in samples])


def tampered(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """The samples as if other experts had computed their tokens, in answers, each its own."""
    source, changed = np.random.default_rng(seed), []
    for each in samples:
        output = each.completion.output
        assert output.routes is not None
        shape = output.routes.shape
        routes = 1 + source.permuted(np.tile(np.arange(16), (*shape[:2], 1)), axis=2)[:, :, : shape[2]]
        routes[: len(output.routes) - len(output)] = output.routes[: len(output.routes) - len(output)]
        output = replace(output, routes=routes.astype(np.uint8))
        changed.append(replace(each, completion=replace(each.completion, output=output)))
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_no_token_takes_other_experts_and_log_probs_are_nearer(family):
    model = experts_model(family, torch.bfloat16)
    samples = [sample(each) for each in answers(model, asked(8, 4), RandomTreeDrafter(), max_running=9).values()]
    for shares in (False, True):
        (with_replay, took, wanted), (without, took_own, wanted_own) = (
            in_update(model, samples, replays=replays, shares=shares) for replays in (True, False)
        )
        gaps = [np.abs(each - behaviour(samples)) for each in (with_replay, without)]
        print(
            f"\n{family} shares={shares}: mean {gaps[0].mean():.4f} / {gaps[1].mean():.4f} nats with / without replay,"
        )
        print(f"largest {gaps[0].max():.3f} / {gaps[1].max():.3f}; other experts {took:.2%} / {took_own:.2%} of tokens")
        assert took == 0
        assert took_own == wanted_own > 0, "the case is too easy: rounding changes no choice"
        assert wanted > 0
        assert gaps[0].mean() < gaps[1].mean()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token_and_no_route(drafter):
    model = experts_model()
    plain, found = answers(model, asked()), answers(model, asked(), DRAFTERS[drafter](), max_running=3)
    assert_same(plain, found)
    for name, completion in found.items():
        output, routes = completion.output, completion.output.routes
        assert routes is not None
        assert routes.dtype == np.uint8
        np.testing.assert_array_equal(routes, plain[name].output.routes)
        assert routes.shape == (len(completion.request.prompt.token_ids) + len(output), 4, 4)
        assert routes[:-1].min() >= 1, "only the last token has not been computed"
        assert routes[-1].max() == 0
    samples = [sample(each) for each in found.values()]
    for shares in (False, True):
        logprobs, *others = in_update(model, samples, shares=shares)
        np.testing.assert_allclose(logprobs, behaviour(samples), atol=1e-12, rtol=0)
        assert others == [0, 0]


def test_routes_follow_a_request_that_is_interrupted_preempted_and_saved():
    model, requests = experts_model(), asked()
    whole = answers(model, requests)
    tight = answers(model, requests, RandomTreeDrafter(), max_running=6, kv_tokens=70)
    engine = Engine(model, drafter=RandomTreeDrafter(), max_running=3, kv_tokens=4096)
    engine.submit(requests)
    done = engine.run(max_passes=5)
    halves = {each.request.id: each.output for each in engine.withdraw()}
    assert any(len(output) for output in halves.values())
    state = RunAheadState(step=0, asked="x", plan=SharedPlan(queues=[[0]], digest="d"), outputs=halves).state_dict()
    wire = Wire(RECORDS, key=b"k")
    saved = wire.unpack(wire.pack(dict(RunAheadState.of_state(state).outputs), address="a"), address="a")
    engine.submit([replace(request, output=saved[request.id]) for request in requests if request.id in saved])
    while engine.has_work:
        done += engine.run()
    for found in (tight, {each.request.id: each for each in done}):
        assert_same(whole, found)
        for name, completion in found.items():
            np.testing.assert_array_equal(completion.output.routes, whole[name].output.routes)


def test_an_engine_that_computes_tokens_again_takes_their_experts():
    """Other experts than its routers would choose: then every later token is computed from what they have made."""
    model, requests = experts_model(), asked(3, 2, max_tokens=16, stop_token_ids=())
    engine = Engine(model, kv_tokens=4096)
    engine.submit(requests)
    engine.run(max_passes=8)
    halves = tampered([sample(each) for each in engine.withdraw()])
    found = answers(model, [each.completion.resume() for each in halves], RandomTreeDrafter())
    samples = [sample(found[each.completion.request.id]) for each in halves]
    for half, each in zip(halves, samples, strict=True):
        known = half.completion.output.routes[:-1]
        assert len(half) >= 6
        np.testing.assert_array_equal(each.completion.output.routes[: len(known)], known)
    later = np.concatenate([np.arange(len(each)) >= len(half) for half, each in zip(halves, samples, strict=True)])
    for shares in (False, True):
        with_replay, without = (in_update(model, samples, replays=each, shares=shares)[0] for each in (True, False))
        gaps = [np.abs(each - behaviour(samples))[later] for each in (with_replay, without)]
        assert gaps[0].max() < 1e-12
        assert gaps[1].mean() > 0.1


def test_tokens_by_other_experts_are_not_computed_as_one():
    model = experts_model()
    first = sample(next(iter(answers(model, asked(1, 1, max_tokens=24, stop_token_ids=())).values())))
    samples = [first, *tampered([first]), first, *tampered([first], seed=1)]
    apart, shared = (in_update(model, samples, shares=shares)[0] for shares in (False, True))
    np.testing.assert_allclose(apart, shared, atol=1e-12, rtol=0)
    lines = shared.reshape(4, -1)
    assert np.array_equal(lines[0], lines[2])
    assert np.abs(lines[0] - lines[1]).max() > 0.01
    tokens = [token_batch(each, "cpu", shares=True).input_ids.shape[1] for each in ([first] * 4, samples)]
    assert tokens[0] + 2 * 22 <= tokens[1]


def updated(samples: Sequence[Sample], **settings: Any) -> tuple[PreTrainedModel, Mapping[str, float]]:
    model = copy.deepcopy(experts_model())
    model.train()
    update = UpdateSettings(learning_rate=1e-3, max_grad_norm=0, **settings)
    optimizer = update.optimizer(list(model.parameters()))
    parts: Any = {"temperature": 1.0, "seed": 1, "backward": Tensor.backward, "autocast": nullcontext}
    updater = Updater(model, GRPO(), update, draws_exactly=True, shares_prefixes=True, **parts)
    rewarded = [replace(each, reward=float(i % 2)) for i, each in enumerate(samples)]
    return model, updater.run(rewarded, 0, optimizer=optimizer, schedule=update.schedule(optimizer, 10))


def test_the_update_takes_them_also_where_its_backward_computes_again():
    samples = [sample(each) for each in answers(experts_model(), asked()).values()]
    others = tampered(samples)
    name, ratio = "sampling/routed_otherwise_frac", "sampling/importance_sampling_ratio/max"
    (plain, metrics), (same, unforced) = updated(samples), updated(samples, router_replay=False)
    assert metrics[name] == unforced[name] == 0
    assert metrics[ratio] == pytest.approx(1, abs=1e-12)
    assert_equal_weights(plain, same)
    (once, forced), (again, recomputed) = updated(others), updated(others, activation_checkpointing=True)
    own, unforced = updated(others, router_replay=False)
    assert forced[name] == recomputed[name] > 0.9
    assert unforced[name] > 0.9
    assert unforced[ratio] == pytest.approx(1, abs=1e-12), "its own experts, which have sampled the tokens"
    assert abs(forced[ratio] - 1) > 0.1
    assert_equal_weights(once, again)
    assert_equal_weights(plain, own)
    assert_equal_weights(once, updated(others, micro_batch_tokens=64)[0])
    with pytest.raises(AssertionError):
        assert_equal_weights(plain, once)


def assert_equal_weights(left: PreTrainedModel, right: PreTrainedModel) -> None:
    for mine, other in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def test_only_training_asks_for_routes_and_only_of_models_with_experts():
    evaluated = [replace(each, step=None) for each in asked()]
    assert all(each.output.routes is None for each in answers(experts_model(), evaluated).values())
    dense = tiny_policy().model
    engine = Engine(dense, kv_tokens=4096)
    engine.submit(asked())
    samples = [sample(each) for each in engine.run()]
    assert not engine.rows.routes
    assert not engine.rows.brought
    assert all(each.completion.output.routes is None for each in samples)
    assert all(token_batch(samples, "cpu", shares=shares).routes is None for shares in (False, True))


def test_outputs_are_cut_and_joined_with_their_routes():
    routes = np.arange(1, 15, dtype=np.uint8).reshape(7, 1, 2)  # of three tokens of a prompt and four of an answer
    output = replace(Output.of([5, 6, 7, 8]), routes=routes)
    for cut in range(5):
        assert listed(output[:cut]) == routes[: 3 + cut].tolist()
        assert listed(output[:cut] + output[cut:]) == routes.tolist()
    reply = Output.of([9, 9])
    assert listed(output + reply) == [*routes.tolist(), [[0, 0]], [[0, 0]]]
    assert listed(reply + output) == routes.tolist(), "a prompt in the place of a reply"
    turn = TurnEnd(start=4, stop=6, text="", rerendered=0)
    whole = replace(output + reply + Output.of([1]), turns=(turn,))
    part = replace(Output.of([1, 2]), routes=routes[:4])  # of the two tokens of its prompt and its own
    joined = replace(whole[:6].followed_by(part), turns=whole.turns)
    first, second = joined.segments(np.array([1, 2, 3], np.int32))
    assert first.routes is not None
    assert second.routes is not None
    assert first.routes.tolist() == routes.tolist()
    assert second.routes.tolist() == routes[:4].tolist()
    assert [len(each) for each in (first, second)] == [7, 4]
    assert (reply + reply).routes is None


def listed(output: Output) -> list[Any]:
    assert output.routes is not None
    return output.routes.tolist()


def test_what_cannot_be_replayed_is_told_or_refused(caplog: pytest.LogCaptureFixture):
    replays, scripted = UpdateSettings(router_replay=True), ScriptedBackend(lambda request: [0])
    with pytest.raises(ValueError, match=r"^update\.router_replay=true: ScriptedBackend cannot say which experts"):
        check_algorithm(GRPO(), rollout=RolloutSettings(), update=replays, backend=scripted)
    with pytest.raises(ConfigError, match=r"^update\.router_replay=true: Qwen2ForCausalLM has no routers"):
        replays.check(tiny_policy().model, 16)
    replays.check(experts_model(), 16)
    for model, settings in ((tiny_policy().model, {}), (experts_model(), {"router_replay": False})):
        UpdateSettings(**settings).warn(model, says_routes=False)
    UpdateSettings().warn(experts_model())
    assert caplog.messages == []
    UpdateSettings().warn(experts_model(), says_routes=False)
    (words,) = caplog.messages
    assert words.startswith("update.router_replay=null: the backend cannot say which experts of model.init (Qwen3Moe")


@pytest.mark.parametrize("family", ["phimoe", "jetmoe"])
def test_experts_that_cannot_be_read_are_told(family, caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "experts_implementation": "eager"}
    model = small_model(family, dtype=torch.float64, **experts).eval()
    (found,) = answers(model, asked(1, 1)).values()
    assert found.output.routes is None
    (words,) = caplog.messages
    assert words.startswith(f"{type(model).__name__}: its experts are chosen by something that is not read")
