"""The settings of a server as words of its command line."""

from __future__ import annotations

import pytest

from rhymerl.backends.sglang.arguments import (
    check,
    check_for_ranks,
    engine_dtype,
    of_device,
    without_expandable_segments,
    words,
)
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.errors import ConfigError

GIVEN = {
    "model_path": "/m",
    "dtype": "float32",
    "max_running": 4,
    "tensor_parallel": 2,
    "context_tokens": 512,
}


def test_settings_become_flags():
    line = " ".join(words(**GIVEN, n=8, algorithm="RHYMERL", more={}))
    assert line == (
        "--model-path /m --dtype float32 --max-running-requests 4 --tp-size 2 --context-length 512 "
        "--skip-tokenizer-init --speculative-algorithm RHYMERL --speculative-num-draft-tokens 8"
    )


@pytest.mark.parametrize(("n", "algorithm"), [(1, "RHYMERL"), (8, None)])
def test_without_drafts_nothing_is_said_of_speculation(n, algorithm):
    assert not [word for word in words(**GIVEN, n=n, algorithm=algorithm, more={}) if "speculative" in word]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("disable_radix_cache", True, ["--disable-radix-cache"]),
        ("disable-radix-cache", True, ["--disable-radix-cache"]),
        ("disable_radix_cache", False, []),
        ("chunked_prefill_size", None, []),
        ("mem_fraction_static", 0.5, ["--mem-fraction-static", "0.5"]),
        ("cuda_graph_bs", [1, 2, 4], ["--cuda-graph-bs", "1", "2", "4"]),
        ("json_model_override_args", {"a": 1}, ["--json-model-override-args", '{"a": 1}']),
    ],
)
def test_arguments_of_the_users_own(name, value, expected):
    plain, more = (words(**GIVEN, n=1, algorithm=None, more=each) for each in ({}, {name: value}))
    assert more == plain + expected


def test_they_come_in_the_place_of_ours():
    found = words(**GIVEN, n=1, algorithm=None, more={"context-length": 99})
    assert [found[i + 1] for i, word in enumerate(found) if word == "--context-length"] == ["99"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model_path", "x", r"^arguments\.model_path='x': is set by model\.path"),
        ("tp-size", 2, r"^arguments\.tp-size=2: is set by backend\.tensor_parallel"),
        ("tp", 2, r"read as tp_size: is set by backend\.tensor_parallel"),
        ("speculative_algorithm", "NGRAM", r"is set by drafter"),
        ("speculative_num_draft_tokens", 4, r"is set by backend\.nodes"),
        ("dp_size", 2, r"dp_size=2: expected 1; every rank of the trainer has its own engine"),
        ("speculative_accept_threshold_single", 0.9, r"threshold_single=0\.9: expected 1\.0; below it drafts change"),
        ("speculative-accept-threshold-acc", "0.9", r"threshold-acc='0\.9': expected 1\.0"),
        ("host", "0.0.0.0", r"arguments\.host='0\.0\.0\.0': .*`rhymerl sglang-args` takes it from backend\.url"),
        ("model", "x", r"arguments\.model='x': is set by model\.path"),
        ("api_key", "secret", r"arguments\.api_key='secret': cannot be set, because rhymerl's calls would be refused"),
        ("admin-api-key", "secret", r"cannot be set, because rhymerl's calls would be refused"),
        ("config", "more.yaml", r"arguments\.config='more\.yaml': cannot be set, because what a file says"),
        ("mod", "x", r"arguments\.mod='x', which SGLang may read as model: is set by model\.path"),
        (
            "max_running",
            8,
            r"max_running=8, which SGLang may read as max_running_requests: is set by backend\.max_running",
        ),
        ("speculative_num_draft", 4, r"read as speculative_num_draft_tokens: is set by backend\.nodes"),
        ("speculative-algo", "NGRAM", r"read as speculative_algorithm: is set by drafter"),
        ("speculative_accept_threshold_s", 0.9, r"read as speculative_accept_threshold_single: expected 1\.0"),
        ("speculative_ngram_max_bfs", 1, r"trees would be verified as chains"),
        ("dp", 2, r"read as dp_size: expected 1; every rank"),
        ("pp", 2, r"read as pp_size: cannot be set"),
    ],
)
def test_what_is_ours_to_set_or_would_change_the_tokens_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        check({name: value})
    with pytest.raises(ValueError, match=message):
        SGLangBackend(arguments={name: value})


def test_what_is_lossless_is_not_refused():
    check({"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": None, "dp_size": 1, "dp": 1})


@pytest.mark.parametrize(
    "name", ["model_impl", "tp_size_of_mine", "speculative_num_steps", "served_model_name", "enable-dp-attention"]
)
def test_others_that_begin_alike_are_not_refused(name):
    check({name: "x"})


@pytest.mark.parametrize(
    ("name", "read_as"),
    [("base-gpu-id", None), ("base_gpu", "base_gpu_id"), ("nccl_init_addr", None), ("dist_init", "dist_init_addr")],
)
def test_what_only_one_engine_can_have_is_refused_for_ranks(name, read_as):
    as_what = f", which SGLang may read as {read_as}" if read_as else ""
    with pytest.raises(ValueError, match=rf"^arguments\.{name}=3{as_what}: cannot be the same for all ranks"):
        check_for_ranks({name: 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": -1}, r"^nodes=-1"),
        ({"max_running": 0}, r"^max_running=0"),
        ({"tensor_parallel": 0}, r"^tensor_parallel=0"),
        ({"restarts": -1}, r"^restarts=-1"),
        ({"start_timeout_s": 0}, r"^start_timeout_s=0"),
        ({"expected_accept_rate": 1.0}, r"^expected_accept_rate=1\.0: expected at least 0 and below 1"),
        ({"costs": "/nowhere.json"}, r"^costs='/nowhere\.json'"),
        ({"url": "127.0.0.1:30000"}, r"^url='127\.0\.0\.1:30000': expected http://HOST:PORT"),
        ({"url": "ftp://host:1"}, r"^url='ftp://host:1'"),
        ({"url": []}, r"^url=\[\]: expected an address"),
        ({"url": ["http://host:1", "host:2"]}, r"^url='host:2'"),
        ({"silence_timeout_s": 0}, r"^silence_timeout_s=0"),
        ({"url": "http://host:99999"}, r"^url='http://host:99999'"),
        ({"url": "http://host:port"}, r"^url"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SGLangBackend(**settings)


@pytest.mark.parametrize(
    ("wanted", "policy", "on_cpu", "expected"),
    [
        (None, "float32", True, "float32"),
        (None, "bfloat16", True, "bfloat16"),
        (None, "float64", True, "float32"),
        (None, "float32", False, "bfloat16"),
        (None, "float64", False, "bfloat16"),
        ("float32", "bfloat16", False, "float32"),
        ("bfloat16", "float32", True, "bfloat16"),
    ],
)
def test_an_engine_computes_in_what_is_asked_else_as_its_device_does_well(wanted, policy, on_cpu, expected):
    assert engine_dtype(wanted, policy, on_cpu=on_cpu) == expected


def test_float32_on_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"backend\.dtype=float32: .* expected bfloat16, or null"):
        of_device("cuda", dtype="float32", saves_memory=True)
    assert of_device("cuda", dtype="bfloat16", saves_memory=False) == {"enable_memory_saver": False}
    assert of_device("cpu", dtype="float32", saves_memory=False) == {"device": "cpu"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True, garbage_collection_threshold:0.8"},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, garbage_collection_threshold:0.8"},
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "HOME": "/"}, {}),
    ],
)
def test_expandable_segments_stay_with_the_trainer(given, expected):
    assert without_expandable_segments(given) == expected
