"""The parts of rhymerl in SGLang's own classes, without an engine around them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rhymerl.backends.remote.drafter_feed import ROUTE, Counters
from rhymerl.backends.sglang.plugin.route import FeedRoute
from rhymerl.errors import BackendError
from tests.backends.sglang.test_keyed import rollout_request, sampling_info

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.usefixtures("cpu_engine"),
    pytest.mark.filterwarnings("ignore"),  # as SGLang is imported
]

N = 3
BESIDE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=2)
dist.broadcast(torch.tensor([7, 8, 9]), src=0)
if sys.argv[2] == "True":
    dist.broadcast(torch.tensor([-0.7, -0.8, -0.9]), src=0)
sys.stdin.readline()
"""


@pytest.fixture(scope="module", autouse=True)
def ngram_worker():
    before = dict(os.environ)
    from sglang.srt.speculative import ngram_worker

    os.environ.clear()  # of what SGLang sets for its own processes
    os.environ.update(before)
    return ngram_worker


@pytest.mark.parametrize("fails", [False, True])
def test_masks_are_only_ours_where_we_complete_them(ngram_worker, monkeypatch, fails):
    """A version that prepares its batches elsewhere makes whole masks, as it did before."""
    from rhymerl.backends.sglang.plugin.worker import HistoryWorker

    trees, seen = torch.eye(N, dtype=torch.bool).flatten(), []

    def prepare(self, batch):
        seen.append(ngram_worker.USE_FULL_MASK)
        if fails:
            raise RuntimeError
        batch.spec_info = SimpleNamespace(custom_mask=trees)

    monkeypatch.setattr(ngram_worker.NGRAMWorker, "_prepare_for_speculative_decoding", prepare)
    monkeypatch.setattr(ngram_worker, "_is_cpu", False)
    worker = object.__new__(HistoryWorker)
    worker.draft_token_num = worker._most = N
    worker._trees = SimpleNamespace()
    lengths = torch.tensor([5])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True), seq_lens=lengths, seq_lens_cpu=lengths
    )
    if fails:
        with pytest.raises(RuntimeError):
            worker._prepare_for_speculative_decoding(batch)
    else:
        worker._prepare_for_speculative_decoding(batch)
        mask = batch.spec_info.custom_mask.view(N, 5 + N)
        assert mask[:, :5].all()
        assert torch.equal(mask[:, 5:].flatten(), trees)
    assert seen == [False]
    assert ngram_worker.USE_FULL_MASK


def test_the_plugin_leaves_masks_alone(ngram_worker, monkeypatch):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from rhymerl.backends.sglang.plugin import worker

    monkeypatch.setattr(SpeculativeAlgorithm, "register", lambda *name, **settings: lambda factory: factory)
    worker.install()
    assert ngram_worker.USE_FULL_MASK


@pytest.mark.parametrize(("device", "then"), [("cuda", ["catch up"]), ("cpu", [])])
def test_the_drafter_catches_up_when_the_pass_is_launched(ngram_worker, monkeypatch, device, then):
    """On a CPU the pass is over by then, and better drafts are all that is left to gain."""
    from rhymerl.backends.sglang.plugin import worker as plugin

    done = []

    def note(what, result=None):
        return lambda *args, **kwargs: done.append(what) or result

    one, none = torch.ones(1, dtype=torch.int32), SimpleNamespace()
    outcome = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None), can_run_cuda_graph=False)
    worker = object.__new__(plugin.HistoryWorker)
    worker.draft_token_num = worker.speculative_num_draft_tokens = worker._most = N
    worker._sizes = SimpleNamespace(sized=lambda n: nullcontext())
    monkeypatch.setattr(plugin, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    worker.device, worker.token_to_kv_pool_allocator, worker._prev_decode_rids = device, none, set()
    worker._target_worker = SimpleNamespace(forward_batch_generation=note("launch", outcome))
    worker._drafting = SimpleNamespace(propose=note("draft"), catch_up=note("catch up"))
    worker._prepare_for_speculative_decoding = note("prepare")
    monkeypatch.setattr(ngram_worker, "eagle_sample", note("verify", (one, one, torch.zeros(1, 1, dtype=torch.long))))
    monkeypatch.setattr(ngram_worker, "move_accept_tokens_to_target_kvcache", note("move"))
    for name in ("record_stream_for_v2_verify", "set_time_batch", "commit_mamba_states_after_verify"):
        monkeypatch.setattr(ngram_worker, name, lambda *args, **kwargs: None)
    for name in ("maybe_detect_nan", "maybe_detect_inf", "NgramVerifyInput"):
        monkeypatch.setattr(ngram_worker, name, lambda *args, **kwargs: SimpleNamespace())
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: None))
    monkeypatch.setattr(torch, "ones", lambda *size, device, **kwargs: one)
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid="a")],
        spec_info=SimpleNamespace(),
        forward_mode=SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: True),
        seq_lens_cpu=one,
        has_grammar=False,
        return_logprob=False,
        seq_lens=one,
    )
    worker.forward_batch_generation(batch)
    assert done == ["draft", "prepare", "launch", "verify", "move", *then]


class Graphs:
    """Stands in for SGLang's runner of CUDA graphs, which captures them as it is made."""

    def __init__(self, runner, *, attn_backend, speculative_num_draft_tokens) -> None:
        self.attn_backend, self.n = attn_backend, speculative_num_draft_tokens


class Attention:
    """Stands in for SGLang's attention, which is made for as many tokens as its settings say."""

    def __init__(self, n) -> None:
        self.n = n


@pytest.fixture
def sizes(monkeypatch):
    """A worker whose passes have 17 tokens or less, and its sets; `settings` is what SGLang's settings say."""
    from rhymerl.backends.sglang.plugin import pass_sizes

    settings = SimpleNamespace(n=17)
    context = SimpleNamespace(
        override=lambda who, *, speculative_num_draft_tokens: setattr(settings, "n", speculative_num_draft_tokens)
    )
    monkeypatch.setattr(pass_sizes, "get_context", lambda: context)
    monkeypatch.setattr(pass_sizes, "DecodeCudaGraphRunner", Graphs)
    worker = SimpleNamespace(draft_token_num=17, positions=17, device="cuda")
    worker._init_preallocated_tensors = lambda: setattr(worker, "positions", worker.draft_token_num)
    worker.model_runner = SimpleNamespace(init_new_workspace=False, attn_backend=Attention(17))
    worker.model_runner.decode_cuda_graph_runner = Graphs(
        worker.model_runner, attn_backend=worker.model_runner.attn_backend, speculative_num_draft_tokens=17
    )

    def attention(*, init_new_workspace):
        worker.model_runner.init_new_workspace = init_new_workspace
        return Attention(settings.n)

    worker.model_runner._get_attention_backend = attention
    return worker, pass_sizes.PassSizes(worker, [1, 3, 5, 9, 17]), settings


def test_each_size_has_its_own_buffers_attention_and_graphs(sizes):
    worker, sets, settings = sizes
    runner = worker.model_runner
    before = dict(vars(worker)), dict(vars(runner))
    sets.make_buffers()
    sets.make_runners()
    assert (vars(worker), vars(runner), settings.n) == (*before, 17)
    for n in (1, 9, 3, 17, 5):
        with sets.sized(n):
            found = (worker.draft_token_num, worker.positions, runner.attn_backend.n, runner.decode_cuda_graph_runner.n)
            assert found == (n, n, n, n)
            assert runner.decode_cuda_graph_runner.attn_backend is runner.attn_backend
        assert (vars(worker), vars(runner)) == before
    with pytest.raises(RuntimeError), sets.sized(3):
        raise RuntimeError
    assert (vars(worker), vars(runner)) == before


def test_where_the_engine_has_no_graphs_no_size_has(sizes):
    worker, sets, _ = sizes
    worker.model_runner.decode_cuda_graph_runner = eager = SimpleNamespace()
    sets.make_buffers()
    sets.make_runners()
    with sets.sized(3):
        assert worker.model_runner.decode_cuda_graph_runner is eager
        assert worker.model_runner.attn_backend.n == 3


def test_attention_that_other_features_have_wrapped_is_not_lost(sizes):
    worker, sets, _ = sizes
    worker.model_runner.attn_backend = SimpleNamespace(primary=Attention(17))
    sets.make_buffers()
    with pytest.raises(
        BackendError, match=r"attention \(SimpleNamespace\) is made for passes of one size: expected budget=fixed"
    ):
        sets.make_runners()


def test_the_last_token_of_each_request(ngram_worker):
    from rhymerl.backends.sglang.plugin.worker import last_tokens

    relayed = SimpleNamespace(
        accept_tokens=torch.tensor([5, 6, 7, 8, 0, 0], dtype=torch.int32), accept_lens=torch.tensor([3, 1])
    )
    assert last_tokens(relayed).tolist() == [7, 8]


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_ranks_go_on_from_the_same_tokens(tmp_path, with_logprobs):
    """Whatever another rank has sampled: sums over a vocabulary need not be the same on two devices."""
    sampler, info, logits = sampler_and_batch()
    words = [sys.executable, "-c", BESIDE, str(tmp_path / "store"), str(with_logprobs)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as first:
        try:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=1, world_size=2)
            sampler.tp_sync_group = dist.group.WORLD
            output = SimpleNamespace(next_token_logits=logits.clone(), next_token_logprobs=None)
            tokens = sampler(output, info, with_logprobs, [0] * 3, [None] * 3, torch.full((3,), 5))
        finally:
            first.kill()
            if dist.is_initialized():
                dist.destroy_process_group()
    assert tokens.tolist() == [7, 8, 9]
    if with_logprobs:
        assert torch.allclose(output.next_token_logprobs, torch.tensor([-0.7, -0.8, -0.9]))


@pytest.mark.parametrize("wanted", ["plain", "top", "of ids"])
def test_log_probs_of_accepted_tokens_are_those_that_sglang_computes(ngram_worker, wanted):
    """From what the draw has found; what else is asked for, SGLang computes itself."""
    from rhymerl.backends.sglang.plugin import keyed, verify

    (name,) = (each for each in verify._LOGPROBS if hasattr(ngram_worker, each))
    original, calls = getattr(ngram_worker, name), []
    info = sampling_info([rollout_request(seed, temperature=0.7) for seed in range(2)])
    info.is_all_greedy = False
    logits = torch.randn(2 * N, info.vocab_size) * 3
    tokens, drawn = keyed.draw(logits, info, torch.arange(2 * N), each=N)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    batch = SimpleNamespace(
        seq_lens=torch.tensor([9, 9]),
        sampling_info=info,
        top_logprobs_nums=[2, 0] if wanted == "top" else [0, 0],
        token_ids_logprobs=[None, [1]] if wanted == "of ids" else [None, None],
    )
    rest = (N - 1,) if name == "compute_spec_v2_logprobs" else ()

    def theirs(*args, **kwargs):
        calls.append(args)
        original(*args, **kwargs)

    def logprobs(compute):
        output = SimpleNamespace(next_token_logits=logits.clone(), keyed_logprobs=drawn)
        if rest:
            compute(batch, output, tokens.int(), accepted, *rest)
        else:
            compute(batch, output, tokens.int(), accept_index=accepted)
        return output.next_token_logprobs

    torch.testing.assert_close(logprobs(verify.keyed_logprobs(theirs)), logprobs(original), atol=1e-5, rtol=0)
    assert len(calls) == (0 if wanted == "plain" else 1)


def sampler_and_batch():
    """Return a sampler and a batch of three requests whose own draws are none of those that the first rank has."""
    from rhymerl.backends.sglang.plugin.sampler import KeyedSampler

    sampler = object.__new__(KeyedSampler)
    torch.nn.Module.__init__(sampler)
    info = sampling_info([rollout_request(seed) for seed in range(3)])
    logits = torch.randn(3, info.vocab_size)
    logits[:, 20] = 30.0
    return sampler, info, logits


@pytest.mark.parametrize(("key", "status"), [(None, 400), ("secret", 401)])
def test_a_server_with_a_key_asks_for_it_at_our_route_too(tmp_path, key, status):
    from fastapi import FastAPI
    from sglang.srt.utils.auth import add_api_key_middleware
    from starlette.testclient import TestClient

    Counters(tmp_path / "counters", new=True)
    app = FastAPI()
    app.add_route(ROUTE, FeedRoute(tmp_path))
    if key is not None:
        add_api_key_middleware(app, api_key=key, admin_api_key=None)
    client = TestClient(app)
    assert client.post(ROUTE, content=b"no message").status_code == status
    known = client.post(ROUTE, content=b"no message", headers={"Authorization": f"Bearer {key}"})
    assert (known.status_code, known.json()) == (400, {"error": "history message: not a history file"})
    assert client.put(ROUTE).status_code in (401, 405)
