"""Differences that one version of SGLang on a CPU does not show: a GPU's masks, and versions that lack something."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.errors import BackendError
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.sglang.conftest import CpuEngine
from tests.sglang.engines import answered, embedded, equal, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

LACKS = {"RHYMERL_TEST_LACKS": "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.sampling_seed"}


def as_version(variables):
    return {**CpuEngine().environment, **variables}


def test_masks_as_on_a_gpu():
    """The whole mask is handed to attention there; the stand-in's takes either."""
    policy = tiny_policy(dtype="float32", context=512)
    requests = make_requests(24, group_size=4, seed=5)
    with sglang(environment=as_version({"RHYMERL_TEST_MASKS": "1"})) as backend:
        answers = answered(started(backend, policy, RandomTreeDrafter(seed=1)), requests)
        assert backend.metrics()["spec/draft_hit_rate"] > 0.5
    assert equal(answers, embedded(policy, requests)) >= 0.98


def test_without_our_draw_it_is_sglangs_own(caplog):
    """Chi-square of homogeneity against the embedded engine, over answers of two tokens."""
    from scipy.stats import chi2_contingency

    policy = tiny_policy(dtype="float32", context=512)
    (request,) = make_requests(1, seed=11, max_tokens=2, temperature=1.5, stop_token_ids=())
    requests = [dataclasses.replace(request, id=f"r{i}", sample=i, seed=i) for i in range(1024)]
    with sglang(environment=as_version(LACKS)) as backend:
        theirs = answered(started(backend, policy, NoDrafter()), requests)
    assert "draws tokens by its own rule" in caplog.text
    ours = embedded(policy, requests)
    assert equal(ours, theirs) < 0.5
    counts = [Counter(tuple(each.token_ids.tolist()) for each in answers.values()) for answers in (ours, theirs)]
    common = [answer for answer, count in (counts[0] + counts[1]).items() if count >= 10]
    table = [
        [*(count[answer] for answer in common), 1024 - sum(count[answer] for answer in common)] for count in counts
    ]
    assert len(common) >= 10
    p = chi2_contingency(np.array(table)).pvalue
    print(f"chi-square over {len(common) + 1} outcomes: p = {p:.3f}")
    assert p > 0.01


def test_without_our_draw_a_cpu_has_no_drafts():
    with pytest.raises(
        BackendError,
        match=r"lacks what .* need \(sglang\.srt\.sampling\.sampling_batch_info\.SamplingBatchInfo\.sampling_seed\)",
    ):
        sglang(environment=as_version(LACKS)).start(tiny_policy(dtype="float32"), HistoryTreeDrafter())
