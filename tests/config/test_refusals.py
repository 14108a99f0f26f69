"""Settings, files and configs that are refused, each with one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymerl.config import compose, resolved
from rhymerl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sede=1"], "unknown setting sede; did you mean seed?"),
        (["chekpoint.keep=1"], "unknown setting chekpoint.keep; did you mean checkpoint.keep?"),
        (["checkpoint.kep=1"], "unknown setting checkpoint.kep; did you mean checkpoint.keep?"),
        (["settings.cuont=1"], "unknown setting settings.cuont; did you mean settings.count?"),
        (["count=1"], "unknown setting count; did you mean settings.count?"),
        (["+count=1"], "unknown setting count; did you mean settings.count?"),
        (["seed.x=1"], "unknown setting seed.x: seed is a value, not a mapping"),
        (
            ["drafter=my_module.MyDrafter", "job.drafter.max_nodez=1"],
            "unknown setting drafter.max_nodez; did you mean drafter.max_nodes?",
        ),
        (["~seed"], "seed: cannot be removed; set it to null"),
        (["~sede"], "unknown setting sede; did you mean seed?"),
        (["settings.items.2=1"], "unknown setting settings.items.2: the list has 0 items, counted from 0"),
        (["seed"], "'seed': expected an override of the form key=value"),
        (
            ["seed=1,2"],
            "'seed=1,2': expected one value; write a list as [a,b], and quote a text with commas: '\"a,b\"'",
        ),
        (["seed=abc"], "seed='abc': expected int"),
        (["checkpoint.keep=abc"], "checkpoint.keep='abc': expected int"),
        (["settings.count=1.5"], "settings.count=1.5: expected int"),
        (["settings.count=true"], "settings.count=True: expected int"),
        (["settings.count=null"], "settings.count=None: expected int"),
        (["settings.rate=fast"], "settings.rate='fast': expected float"),
        (["settings.on=1"], "settings.on=1: expected bool (true or false)"),
        (["settings.name=[a]"], "settings.name=['a']: expected str"),
        (["settings.where=1.5"], "settings.where=1.5: expected Path or null"),
        (["settings.mode=medium"], "settings.mode='medium': expected one of fast, slow"),
        (["settings.any_of=1.5"], "settings.any_of=1.5: expected int or str or null"),
        (["settings.table={a: x}"], "settings.table.a='x': expected float"),
        (["settings.table=3"], "settings.table=3: expected mapping or null"),
        (["settings.betas=[1]"], "settings.betas=[1]: expected list of 2 values"),
        (["settings.items=[1,x]"], "settings.items[1]='x': expected int"),
        (["settings.items=12"], "settings.items=12: expected list of int"),
        (
            ["drafter=ngrm"],
            "drafter='ngrm': expected one of history_tree, ngram, none, paper, or a dotted class path such as my_module.MyClass; did you mean ngram?",
        ),
        (
            ["drafter=history", "drafter.depth=2"],
            "drafter='history': expected one of history_tree, ngram, none, paper, or a dotted class path such as my_module.MyClass; did you mean history_tree?",
        ),
        (
            ["drafter=my_module.MyDraftr"],
            "drafter='my_module.MyDraftr': my_module has no 'MyDraftr'; did you mean MyDrafter?",
        ),
        (
            ["drafter=my_modul.MyDrafter"],
            "drafter='my_modul.MyDrafter': no module named 'my_modul', neither installed nor in the current directory; did you mean my_module?",
        ),
        (
            ["drafter=broken.It"],
            "drafter='broken.It': importing 'broken' failed: ModuleNotFoundError: No module named 'not_there' (broken.py:1)",
        ),
        (
            ["drafter=rhymerl.schedulers.FIFOScheduler"],
            "drafter='rhymerl.schedulers.FIFOScheduler': expected a Drafter, which FIFOScheduler is not",
        ),
        (["drafter=null"], "drafter=None: expected a Drafter (a mapping whose _target_ names its class)"),
        (["job.drafter=3"], "job.drafter=3: expected a Drafter (a mapping whose _target_ names its class)"),
        (["ckpt_path=${sede}/x"], "ckpt_path='${sede}/x': Interpolation key 'sede' not found"),
        (["ckpt_path=${sede}"], "ckpt_path='${sede}': unknown setting sede; did you mean seed?"),
        (["seed=${checkpoint.keep}", "checkpoint.keep=${seed}"], "settings.seed: its references go round in a circle"),
    ],
)
def test_bad_input(here: Path, overrides: list[str], message: str) -> None:
    (here / "broken.py").write_text("import not_there\n")
    with pytest.raises(ConfigError) as caught:
        resolved(compose("main.yaml", overrides))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [main, _self_]\nsede: 1\n", "unknown setting sede; did you mean seed?"),
        ("defaults: [main, _self_]\ncheckpoint: {kep: 1}\n", "unknown setting checkpoint.kep"),
        ("defaults: [main, _self_]\nseed: abc\n", "seed='abc': expected int"),
        ("defaults: [mian, _self_]\n", "defaults name 'mian'"),
        ("defaults: [mine, _self_]\n", "lead back to itself"),
        ("defaults: [main, {drafter: none}]\n", "write 'override drafter: ...'"),
        ("seed: 1\n  x: [\n", "line 2: not YAML"),
        ("- 1\n", "expected a mapping of settings"),
    ],
)
def test_bad_file(here: Path, text: str, message: str) -> None:
    (here / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose("mine.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "nothing.yaml", "dir/nothing.yaml", "my_module.py"])
def test_no_such_config(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected the path of a \.yaml file, or one of .*base.*warmstart"):
        compose(name)
