from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from rhymerl.config import compose, instantiate, recorded, resolved, save_config
from rhymerl.config.composition import parse
from rhymerl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


def main(*overrides: str) -> dict[str, Any]:
    return resolved(compose("main.yaml", overrides))


def test_every_argument_of_every_class_is_filled_in() -> None:
    config = main()
    assert config["settings"]["mode"] == "fast"
    assert config["settings"]["betas"] == [0.9, 0.99]
    assert config["job"]["record"] == {"_target_": "my_module.Record", "sizes": [1, 2]}
    assert config["drafter"] == {"_target_": "rhymerl.drafters.NoDrafter"}
    assert config["task"] is None


def test_resolvers_give_values() -> None:
    assert main()["run_dir"].startswith("runs/main-20")


def test_all_settings_have_the_time_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0, 100)
    monkeypatch.setattr("time.time", lambda: next(seconds))
    config = main("run_dir=${now:%H-%M-%S}", "ckpt_path=${run_dir}/${now:%S}")
    assert config["ckpt_path"] == f"{config['run_dir']}/{config['run_dir'][-2:]}"


def test_text_out_of_the_environment_stays_named(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """A number is no key, and settings want it as one."""
    monkeypatch.setenv("WHERE", "data.jsonl")
    monkeypatch.setenv("COUNT", "3")
    (here / "own.yaml").write_text(
        "defaults: [quickstart, _self_]\n"
        "seed: ${oc.env:COUNT}\n"
        "data: {train: '${oc.env:WHERE}', validation: 'more ${data.train}', prompt_column: '${oc.env:NONE,prompt}'"
        ", system_prompt: '${oc.decode:${oc.env:WHERE}}'}\n"
    )
    config = compose("own.yaml")
    assert (config.data.train, config.data.validation, config.data.prompt_column, config.seed) == (
        *("data.jsonl", "more data.jsonl", "prompt"),
        3,
    )
    text = OmegaConf.to_yaml(config)
    assert "train: ${oc.env:WHERE}" in text
    assert "validation: more ${data.train}" in text
    assert "seed: 3" in text
    assert "system_prompt: ${oc.decode:${oc.env:WHERE}}" in text
    kept = recorded(config)["data"]
    assert (kept["train"], kept["validation"]) == ("${oc.env:WHERE}", "more ${oc.env:WHERE}")
    assert kept["system_prompt"] == "${oc.env:WHERE}"
    assert resolved(config)["data"]["validation"] == "more data.jsonl"
    monkeypatch.delenv("WHERE")
    with pytest.raises(ConfigError, match=r"^data\.train='\$\{oc\.env:WHERE\}': .*WHERE"):
        compose("own.yaml")


def test_text_out_of_the_environment_may_stand_beside_the_time_and_the_name_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHERE", "scratch")
    config = compose("main.yaml", ["run_dir=${oc.env:WHERE}/${config_name:}-${now:%Y}"])
    assert config.run_dir.startswith("scratch/main-20")
    assert "run_dir: ${oc.env:WHERE}/main-20" in OmegaConf.to_yaml(config)


def test_asset_is_a_directory_of_the_package(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    from rhymerl.config import interpolation

    monkeypatch.setattr(interpolation, "PACKAGE", here)
    (here / "assets" / "tiny").mkdir(parents=True)
    assert main("ckpt_path=${asset:tiny}")["ckpt_path"] == str(here / "assets" / "tiny")
    with pytest.raises(ConfigError, match=r"ckpt_path=.*no asset 'tinny'; there are tiny"):
        main("ckpt_path=${asset:tinny}")


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["seed=3"], "settings.seed", 3),
        (["settings.count=1e2"], "settings.count", 100),
        (["settings.rate=1"], "settings.rate", 1.0),
        (["settings.rate=1e-4"], "settings.rate", 1e-4),
        (["settings.rate='1e-4'"], "settings.rate", 1e-4),
        (["settings.name=7"], "settings.name", "7"),
        (["settings.where=/a b/c"], "settings.where", "/a b/c"),
        (["ckpt_path=runs/epoch=1-step=10.ckpt"], "ckpt_path", "runs/epoch=1-step=10.ckpt"),
        (["ckpt_path=~/x"], "ckpt_path", "~/x"),
        (["ckpt_path='a,b'"], "ckpt_path", "a,b"),
        ([r"ckpt_path=Put it in \boxed{}."], "ckpt_path", r"Put it in \boxed{}."),
        ([r"ckpt_path=<answer>\d{1,3}</answer>"], "ckpt_path", r"<answer>\d{1,3}</answer>"),
        ([r"ckpt_path=\(\d\)\\"], "ckpt_path", r"\(\d\)\\"),
        (["ckpt_path=C:\\runs\\"], "ckpt_path", "C:\\runs\\"),
        ([r"""ckpt_path='\d "x"'"""], "ckpt_path", r'\d "x"'),
        (["ckpt_path=${seed}/x"], "ckpt_path", "0/x"),
        (["settings.any_of=x"], "settings.any_of", "x"),
        (["settings.any_of=null"], "settings.any_of", None),
        (["settings.table={a: 1}", "settings.table.b=2"], "settings.table", {"a": 1, "b": 2}),
        (["settings.free.a.b=1"], "settings.free", {"a": {"b": 1}}),
        (["+settings.free.a=1"], "settings.free", {"a": 1}),
        (["settings.free={a: 1, b: 2}", "~settings.free.a"], "settings.free", {"b": 2}),
        (["~settings.count"], "settings.count", 1),
        (["settings.items=[1,2]", "settings.items.1=5"], "settings.items", [1, 5]),
        (["rewards.exact.weight=0.5"], "job.rewards", {"exact": {"weight": 0.5}}),
        (["job.task=null", "task=running_sum"], "job.task", None),
        (["task=running_sum", "job.task.difficulty=3"], "task.difficulty", 3),
        (["checkpoint={keep: 5}"], "checkpoint", {"every_n_steps": 10, "keep": 5}),
        (["settings.unseen.x=1"], "settings.unseen", {"x": 1}),
    ],
)
def test_overrides(overrides: list[str], key: str, expected: object) -> None:
    config = compose("main.yaml", overrides)
    found = OmegaConf.select(config, key)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == expected
    assert type(found) is type(expected)


@given(st.text(st.sampled_from("\\'\"{}[]=,:#~$% \nab1")))
def test_text_with_a_backslash_arrives_as_it_was_given(text: str) -> None:
    given_text = f"a{text}\\"
    assume("${" not in given_text)
    (override,) = parse([f"ckpt_path={given_text}"])
    assert override.value() == given_text


@pytest.mark.parametrize(
    "overrides",
    [
        ["drafter=my_module.MyDrafter", "drafter.depth=3"],
        ["drafter.depth=3", "drafter=my_module.MyDrafter"],
        ["drafter.depth=3", "drafter._target_=my_module.MyDrafter"],
        ["drafter={_target_: my_module.MyDrafter, depth: 3}"],
        ["job.drafter.depth=3", "drafter=my_module.MyDrafter"],
    ],
)
def test_a_class_of_the_current_directory_replaces_a_group(overrides: list[str]) -> None:
    expected = {"_target_": "my_module.MyDrafter", "depth": 3, "max_nodes": 8, "inner": None}
    config = compose("main.yaml", overrides)
    assert resolved(config)["drafter"] == resolved(config)["job"]["drafter"] == expected
    job = instantiate(config.job)
    assert (type(job.drafter).__name__, job.drafter.depth) == ("MyDrafter", 3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["outer.inner=my_module.MyDrafter", "outer.inner.depth=3"],
        ["outer.inner.depth=3", "outer.inner=my_module.MyDrafter"],
        ["outer.inner={_target_: my_module.MyDrafter, depth: 3}"],
    ],
)
def test_a_class_path_stands_for_its_component(overrides: list[str], here: Path) -> None:
    (here / "nested.yaml").write_text("outer: {_target_: my_module.MyDrafter}\n")
    expected = {"_target_": "my_module.MyDrafter", "depth": 3, "max_nodes": 8, "inner": None}
    config = compose("nested.yaml", overrides)
    assert resolved(config)["outer"]["inner"] == expected
    assert instantiate(config.outer).inner.depth == 3
    (here / "again.yaml").write_text("defaults: [nested, _self_]\nouter: {inner: my_module.MyDrafter}\n")
    assert resolved(compose("again.yaml", ["outer.inner.depth=3"]))["outer"]["inner"] == expected


def test_overrides_of_one_setting_keep_their_order() -> None:
    words = ["rewards={old: my_module.run}", "rewards=null", "rewards.mine=my_module.run"]
    assert main(*words)["rewards"] == {"mine": "my_module.run"}


def test_a_mapping_with_names_of_ones_own_takes_others(here: Path) -> None:
    (here / "named.yaml").write_text(
        "rewards: {exact: {weight: 1}}\njob: {_target_: my_module.Job, rewards: '${rewards}'}\n"
    )
    config = compose("named.yaml", ["rewards.short.weight=2"])
    assert config.rewards == {"exact": {"weight": 1}, "short": {"weight": 2}}


def test_a_class_path_that_does_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"job.record='my_module.MyDrafter': expected a Record, which MyDrafter is not"
    ):
        main("job.record=my_module.MyDrafter")
    with pytest.raises(ConfigError, match="job.record._target_='my_module.Recrod': my_module has no 'Recrod'; did you"):
        main("job.record=my_module.Recrod")
    with pytest.raises(ConfigError, match="job.record='none': expected"):
        main("job.record=none")


def test_a_group_replaces_the_whole_node(here: Path) -> None:
    """Settings that a file made for another class do not come along."""
    (here / "mine.yaml").write_text(
        "defaults: [main, {override drafter: my_module.MyDrafter}, _self_]\ndrafter: {depth: 4}\nseed: 5\n"
    )
    config = resolved(compose("mine.yaml"))
    assert (config["drafter"]["depth"], config["settings"]["seed"]) == (4, 5)
    assert resolved(compose("mine.yaml", ["drafter=none"]))["drafter"] == {"_target_": "rhymerl.drafters.NoDrafter"}
    (here / "again.yaml").write_text("defaults: [mine, {override drafter: none}, _self_]\n")
    assert resolved(compose("again.yaml"))["drafter"] == {"_target_": "rhymerl.drafters.NoDrafter"}


@pytest.mark.parametrize("body", ["drafter: my_module.MyDrafter", "drafter: {_target_: my_module.MyDrafter}"])
def test_a_file_may_name_a_class_in_its_body(here: Path, body: str) -> None:
    (here / "mine.yaml").write_text(f"defaults: [main, _self_]\n{body}\n")
    assert resolved(compose("mine.yaml"))["drafter"]["depth"] == 2


def test_own_options_and_packaged_ones(here: Path) -> None:
    (here / "drafter").mkdir()
    (here / "drafter" / "deep.yaml").write_text("_target_: my_module.MyDrafter\ndepth: 9\n")
    assert main("drafter=deep")["drafter"]["depth"] == 9
    with pytest.raises(
        ConfigError, match="expected one of deep, history_tree, ngram, none, paper, or a dotted class path"
    ):
        main("drafter=depe")


def test_an_option_may_build_on_another_and_choose_options_of_its_own(here: Path) -> None:
    (here / "drafter" / "inner").mkdir(parents=True)
    (here / "drafter" / "deep.yaml").write_text("_target_: my_module.MyDrafter\ndepth: 9\nmax_nodes: 2\n")
    (here / "drafter" / "wide.yaml").write_text("defaults: [deep, {inner: small}, _self_]\nmax_nodes: 5\n")
    (here / "drafter" / "inner" / "small.yaml").write_text("_target_: my_module.MyDrafter\ndepth: 1\n")
    found = main("drafter=wide", "drafter.inner.max_nodes=3")["drafter"]
    assert (found["depth"], found["max_nodes"]) == (9, 5)
    assert (found["inner"]["depth"], found["inner"]["max_nodes"]) == (1, 3)


@pytest.mark.parametrize(("order", "seed"), [("main, _self_", 5), ("main", 5), ("_self_, main", 0)])
def test_self_says_where_a_file_stands_among_those_that_it_builds_on(here: Path, order: str, seed: int) -> None:
    (here / "mine.yaml").write_text(f"defaults: [{order}]\nseed: 5\n")
    assert compose("mine.yaml").seed == seed


def test_a_file_in_another_directory(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("it's elsewhere")
    (elsewhere / "mine.yaml").write_text(
        "defaults: [{task: running_sum}, _self_]\ntask: {difficulty: 3}\njob: {_target_: my_module.Job, task: '${task}', drafter: {_target_: my_module.MyDrafter}}\n"
    )
    job = instantiate(compose(elsewhere / "mine.yaml").job)
    assert job.task.difficulty == 3


def test_saved_and_printed_configs_load_again(here: Path) -> None:
    config = compose("main.yaml", ["task=running_sum", "drafter=my_module.MyDrafter", "settings.free.a=1"])
    assert save_config(config, here / "run") is None
    again = compose(here / "run" / "config.yaml")
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(config)
    assert again == config
    changed = resolved(compose(here / "run" / "config.yaml", ["seed=7", "drafter=none", "task.difficulty=2"]))
    assert changed["settings"]["seed"] == 7
    assert changed["job"]["drafter"] == {"_target_": "rhymerl.drafters.NoDrafter"}
    assert changed["job"]["task"]["difficulty"] == 2


def test_a_run_directory_that_cannot_be_written(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir='file/run': cannot be written to: Not a directory"):
        save_config(compose("main.yaml"), "file/run")


def test_no_global_state_is_left() -> None:
    """A program's own resolvers of the same names stay as they are, and are not ours."""
    OmegaConf.register_new_resolver("asset", lambda name: f"theirs: {name}")
    OmegaConf.register_new_resolver("oc.env", lambda name: f"theirs: {name}", replace=True)
    try:
        assert "theirs" not in main("ckpt_path=${asset:quickstart_policy}")["ckpt_path"]
        recorded(compose("main.yaml", ["ckpt_path=${oc.env:NAME}"]))
        with pytest.raises(ConfigError):
            main("sede=1")
        assert OmegaConf.create({"it": "${asset:a} ${oc.env:b}"}).it == "theirs: a theirs: b"
        assert not OmegaConf.has_resolver("package")
    finally:
        OmegaConf.clear_resolver("asset")
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert not GlobalHydra.instance().is_initialized()
    assert sys.path.count(str(Path.cwd())) == 1


def test_no_file_of_the_current_directory_stands_in_for_an_installed_module(here: Path) -> None:
    """The check runs outside this process and its imports; -P leaves the current directory to rhymerl."""
    for name in ("torch", "lightning", "transformers"):
        (here / f"{name}.py").write_text("open('ran', 'w').close()\n")
    words = ["fit", "--config", "quickstart", "drafter=my_module.MyDrafter", "--print-config"]
    command = [sys.executable, "-P", "-m", "rhymerl", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "my_module.MyDrafter" in done.stdout
    assert not (here / "ran").exists()


def test_a_module_of_the_current_directory_that_an_installed_one_hides_is_named(here: Path) -> None:
    (here / "colorsys.py").write_text("class Mine: ...")
    with pytest.raises(ConfigError, match=r"colorsys has no 'Mine'; it is .*, which hides yours of the same name"):
        main("drafter=colorsys.Mine")
