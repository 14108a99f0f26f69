"""The verifiers of reasoning-gym: they score as ever, and what is no answer but a program gains nothing by it."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhymerl.errors import ConfigError
from rhymerl.rewards import Reward, RewardScorer, check_reward, reasoning_gym_reward
from rhymerl.rewards.reasoning_gym import open_verifiers
from rhymerl.rewards.sandbox.run import Job, Sandbox, missing_walls
from rhymerl.tasks.reasoning_gym import ReasoningGym

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers its sandbox not all walls"
)

EVALUATING = [
    *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens", "number_sorting"),
    *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
]
AWARD = "__import__('json').dumps({'result': 1.0}).encode()"
PROGRAMS = [
    "__import__('os').system('touch FOLDER/written')",
    "open('FOLDER/written', 'w')",
    "exec('import os; os.system(\"touch FOLDER/written\")')",
    "[c for c in ().__class__.__base__.__subclasses__()][0]",
    "(lambda: __import__('os').mkdir('FOLDER/written'))()",
    "sympify(\"__import__('os').mkdir('FOLDER/written')\")",
    "sqrt(\"__import__('os').mkdir('FOLDER/written')\")",
    'lambdify(x, \'__import__("os").mkdir("FOLDER/written")\')(1)',
    "x.__class__.__init__.__globals__['__builtins__']['open']('FOLDER/written', 'w')",
    "setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', lambda *_: 1.0)",
    f"__import__('os').write(4, len({AWARD}).to_bytes(8, 'little') + {AWARD})",
    "__import__('os')._exit(0)",
    "f'{open}'",
    "().__class__",
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_verifiers({}) as opened:
        assert opened is not None
        yield opened


def rows(dataset: str, number: int = 1, **settings: Any) -> list[dict[str, Any]]:
    task = ReasoningGym(dataset, train_size=number, validation_size=1, **settings)
    return list(json.loads(json.dumps(task.rows("train"))))


def score(answer: object, row: dict[str, Any], sandbox: Sandbox) -> float:
    completion = f"thinking\n<answer>{answer}</answer>"
    return reasoning_gym_reward(completion, entry=row["entry"], answer=row["answer"], sandbox=sandbox)


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "word_ladder", "knights_knaves", "rearc", "prime_factorization", *EVALUATING]
)
def test_the_verifier_scores_answers_after_a_round_trip_through_json(dataset: str, sandbox: Sandbox) -> None:
    for row in rows(dataset, 2):
        assert score(row["answer"], row, sandbox) == 1.0
        for wrong in ("none of it", row["question"], ""):
            assert score(wrong, row, sandbox) < 0.5


def test_without_tags_the_whole_completion_is_the_answer(sandbox: Sandbox) -> None:
    (row,) = rows("chain_sum", answer_tag=None)
    assert reasoning_gym_reward(f" {row['answer']}\n", entry=row["entry"], sandbox=sandbox) == 1.0


def test_formulas_and_lists_are_still_evaluated(sandbox: Sandbox) -> None:
    (row,) = rows("polynomial_multiplication")
    assert score(f"1*({row['answer']}) + sqrt(0) + Rational(0)", row, sandbox) == 1.0
    (row,) = rows("string_insertion")
    assert score(list(row["answer"]), row, sandbox) == 0.1
    (row,) = rows("simple_integration")
    assert score(f"{row['answer']} + 2*pi", row, sandbox) == 1.0


@pytest.mark.parametrize("dataset", EVALUATING)
def test_a_program_is_no_answer(dataset: str, sandbox: Sandbox, tmp_path: Path) -> None:
    (row,) = rows(dataset)
    wrong = score("none of it", row, sandbox)
    for program in PROGRAMS:
        assert score(program.replace("FOLDER", str(tmp_path)), row, sandbox) == wrong, program
    assert list(tmp_path.iterdir()) == []
    assert score("none of it", row, sandbox) == wrong
    assert score(row["answer"], row, sandbox) == 1.0


@pytest.mark.parametrize("dataset", EVALUATING)
def test_a_program_is_no_answer_in_this_process_either(dataset: str, tmp_path: Path) -> None:
    """The sandbox is off, and the program is in a process of the pool, which the first wall has to itself."""
    (row,) = rows(dataset)
    reward = Reward(reasoning_gym_reward, name="r", default=-1.0, arguments={"unsafe_unconfined": True})
    programs = [program.replace("FOLDER", str(tmp_path)) for program in PROGRAMS]
    answers = ["none of it", *programs, *["3 * 4"] * 50, *programs, row["answer"]]
    with RewardScorer([reward], num_processes=1) as scorer:
        for number, answer in enumerate(answers):
            scorer.submit(str(number), f"<answer>{answer}</answer>", row)
        wrong, *others, right = [each["r"] for each in scorer.collect().values()]
        assert not any(scorer.metrics().values())
    assert set(others[: len(PROGRAMS)]) == set(others[-len(PROGRAMS) :]) == {wrong}
    assert right == 1.0
    assert list(tmp_path.iterdir()) == []


def test_what_gets_past_the_first_wall_is_held_by_those_of_every_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    """Even an answer that is run as it stands writes nothing, and changes nothing for the next."""
    (row,) = rows("string_insertion")
    folders = [folder for folder in sys.path if folder.endswith("-packages")]
    for program in PROGRAMS:
        text = program.replace("FOLDER", str(tmp_path))
        code = f"import reasoning_gym\nfrom sympy import *\nx = Symbol('x')\ndef f(): return eval({text!r})"
        sandbox.run(Job(code=code, tests=["f()"], folders=folders, memory_mb=1024))
    assert list(tmp_path.iterdir()) == []
    assert score("none of it", row, sandbox) == 0.0
    assert score(row["answer"], row, sandbox) == 1.0


def test_an_answer_that_takes_too_long_has_no_score(sandbox: Sandbox) -> None:
    (row,) = rows("countdown")
    with pytest.raises(RuntimeError, match="the verifier gave no score: "):
        reasoning_gym_reward("<answer>9**9**9**9</answer>", entry=row["entry"], time_limit_s=1, sandbox=sandbox)


def test_in_a_pool(tmp_path: Path) -> None:
    found = rows("countdown", 4)
    with RewardScorer([Reward(reasoning_gym_reward, name="r")], num_processes=2) as scorer:
        for number, row in enumerate(found):
            scorer.submit(str(number), f"<answer>{row['answer']}</answer>", {**row, "sandbox": "a column of that name"})
        assert [each["r"] for each in scorer.collect().values()] == [1.0] * 4
        assert not any(scorer.metrics().values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unsafe_unconfined": "yes"}, "unsafe_unconfined='yes': expected true or false"),
        ({"memory_mb": 64}, "memory_mb=64: expected a whole number, at least 512"),
        ({"time_limit_s": 9}, "timeout_s=10: expected at least 11"),
        ({"unsafe_without": ["doors"]}, "unsafe_without: there is no 'doors'"),
    ],
)
def test_settings_are_checked_before_a_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_reward(Reward(reasoning_gym_reward, arguments=arguments), ["entry"])
    assert message in str(error.value)


def test_without_a_sandbox_it_is_refused_unless_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        check_reward(Reward(reasoning_gym_reward), ["entry"])
    check_reward(Reward(reasoning_gym_reward, arguments={"unsafe_unconfined": True}), ["entry"])


# -- which data sets evaluate ------------------------------------------------------------------------------------------

EVALUATORS = {"eval", "exec", "compile", "parse_expr", "parse_latex", "sympify", "S", "lambdify", "__import__"}


def test_the_data_sets_that_evaluate_are_those_that_the_documentation_names() -> None:
    from reasoning_gym.factory import DATASETS

    found = sorted(name for name, (data_set, _) in DATASETS.items() if evaluators_of(data_set))
    assert found == EVALUATING
    text = " ".join((Path(__file__).parents[2] / "docs" / "rewards.md").read_text().split())
    assert ", ".join(f"`{name}`" for name in found[:-1]) + f" and `{found[-1]}`" in text


def evaluators_of(data_set: type) -> set[str]:
    """Return what its verifier calls, itself or by functions of its module, that evaluates a text as Python."""
    module = sys.modules[data_set.score_answer.__module__]
    own = {
        node.name: node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    reached: set[str] = set()
    waiting = ["score_answer"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += called(own[name]) if name in own else []
    return (reached - {*own}) & EVALUATORS


def called(node: ast.AST) -> list[str]:
    functions = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [getattr(function, "id", getattr(function, "attr", "")) for function in functions]
