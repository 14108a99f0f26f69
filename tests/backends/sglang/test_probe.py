"""The names of what a version of SGLang lacks."""

from __future__ import annotations

import sys
import types

import pytest

from rhymerl.backends.sglang.plugin import probe
from rhymerl.backends.sglang.plugin.probe import Findings
from rhymerl.backends.sglang.plugin.settings import EngineSettings
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError


@pytest.fixture
def version(monkeypatch):
    """An SGLang that has all that is asked for."""
    modules = {}
    for module, names in [*probe._DRAFTING.items(), *probe._DRAWING.items()]:
        for name in names:
            index = modules.setdefault(module, types.ModuleType(module))
            *owner, last = name.split(".")
            for each in owner:
                index.__dict__.setdefault(each, types.SimpleNamespace())
                index = getattr(index, each)
            setattr(index, last, None)
    for parent in {name.rpartition(".")[0] for name in modules} | {"sglang", "sglang.srt"}:
        modules.setdefault(parent, types.ModuleType(parent))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_nothing_is_missing_where_all_is_there(version):
    assert Findings.of_this_version() == Findings(drafting=[], drawing=[])


def test_a_name_that_has_moved_is_told(version):
    del version["sglang.srt.layers.sampler"].Sampler._sync_token_ids_across_tp
    del version["sglang.srt.speculative.ngram_worker"].NGRAMWorker
    found = Findings.of_this_version()
    assert found.drawing == ["sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp"]
    assert [name.rpartition(".")[2] for name in found.drafting] == [
        "_init_preallocated_tensors",
        "_prepare_draft_tokens",
        "_prepare_for_speculative_decoding",
        "_update_ngram_corpus",
        "alloc_memory_pool",
        "clear_cache_pool",
        "init_cuda_graphs",
    ]


def test_a_module_that_is_gone_lacks_all_of_it(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_utils", None)
    assert Findings.of_this_version().drawing == ["sglang.srt.speculative.eagle_utils.verify_tree_greedy_func"]


def test_findings_go_to_another_process(tmp_path):
    found = Findings(drafting=["a.b"], drawing=[])
    EngineSettings.of(NoDrafter(), None, tmp_path).report(found)
    assert EngineSettings.read_report(tmp_path) == found


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (Findings(), []),
        (Findings(drawing=["a.draw"]), [(True, True)]),
        (Findings(drafting=["a.draft"]), [(True, True), (True, False)]),
    ],
)
def test_drafts_that_cannot_be_had_or_would_bias_are_refused(found, refused):
    """SGLang without our draw verifies by its own rule, which is greedy on a CPU."""
    for drafts in (False, True):
        for on_cpu in (False, True):
            if (drafts, on_cpu) not in refused:
                found.check(drafts=drafts, on_cpu=on_cpu)
                continue
            with pytest.raises(
                BackendError, match=r"lacks what rhymerl's drafters need \(a\.dra(w|ft)\): take drafter=none"
            ):
                found.check(drafts=drafts, on_cpu=on_cpu)
