"""The reward that compares mathematical expressions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest

from rhymerl.errors import ConfigError
from rhymerl.rewards import Reward, RewardScorer, check_reward, math_match

HAS_MATH = find_spec("math_verify") is not None


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
@pytest.mark.parametrize("where", ["pool", "main"])
def test_math_match(where: Any) -> None:
    cases = {
        r"so it is $\frac{1}{2}$": ("0.5", 1.0),
        r"\boxed{\sqrt{8}}": (r"2\sqrt{2}", 1.0),
        "the answer is 7": ("8", 0.0),
        "nothing": ("8", 0.0),
        r"\boxed{8}": ("$8$", 1.0),
    }
    with RewardScorer([Reward("rhymerl.rewards.math_match", where=where)]) as scorer:
        for text, (answer, _) in cases.items():
            scorer.submit(text, text, {"answer": answer})
        assert {text: each["math_match"] for text, each in scorer.collect().items()} == {
            text: reward for text, (_, reward) in cases.items()
        }
        assert not any(scorer.metrics().values())


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{28\%}", "28%", 1),
        ("It fell by 28%.", "28%", 1),
        (r"\boxed{28\%}", r"28\%", 1),
        (r"\boxed{0.28}", "28%", 1),
        (r"\boxed{29\%}", "28%", 0),
        (r"\boxed{18}", "18 dollars", 1),
        (r"\boxed{18 dollars}", "18", 1),
        (r"\boxed{18 \text{ dollars}}", "18 dollars", 1),
        (r"\boxed{19}", "18 dollars", 0),
        (r"\boxed{100000}", "100,000 dollars", 1),
        (r"\boxed{\$18}", "$18", 1),
        (r"\boxed{18}", "\u20ac18", 1),
        (r"\boxed{-5}", "-$5", 1),
        (r"\boxed{5 \text{ cm}^2}", "5 cm^2", 1),
        (r"\boxed{5 cm^2}", "5", 1),
        (r"\boxed{60}", "60 km/h", 1),
        (r"\boxed{30^\circ}", "30\u00b0", 1),
        (r"\boxed{1/2}", "1/2 cup", 1),
        (r"\boxed{1\frac{1}{2}}", "1 1/2", 1),
        (r"\boxed{1.5}", "1 1/2 inches", 1),
        (r"\boxed{1234}", "1 234", 1),
        (r"\boxed{2xy}", "2xy", 1),
        (r"\boxed{2}", "2xy", 0),
        (r"\boxed{2}", "2 xy", 0),
        (r"\boxed{2}", "2 pi", 0),
        (r"\boxed{18}", "18 million", 0),
        (r"\boxed{\text{blue}}", "blue", 1),
        (r"\boxed{blue}", "blue", 1),
        (r"\boxed{lube}", "blue", 0),
        (r"\boxed{\text{New York}}", "New York", 1),
        (r"\boxed{(3, 4)}", "(3, 4)", 1),
        (r"\boxed{72}", 72.0, 1),
        (r"\boxed{0.00001}", 1e-5, 1),
        (r"\boxed{3}", ["3", "4"], ValueError),
        (r"\boxed{3}", None, ValueError),
        (r"\boxed{3}", True, ValueError),
    ],
)
def test_answers_that_are_no_latex(completion: str, answer: object, reward: Any) -> None:
    with pytest.raises(ValueError, match="answer=") if reward is ValueError else nullcontext():
        assert math_match(completion, answer=answer) == reward


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
def test_math_match_in_a_thread_and_as_votes() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_match, "$1/2$", answer="0.5").result() == 1.0
    extract = Reward("rhymerl.rewards.math_match").extract
    assert extract is not None
    assert extract(r"\boxed{\frac{2}{4}}") == extract(r"\boxed{\frac{1}{2}}") != extract(r"\boxed{3}")
    assert extract("nothing") is None
    with pytest.raises(ValueError, match="no expression"):
        math_match("1", answer=" ")


@pytest.mark.skipif(HAS_MATH, reason="math-verify is installed")
def test_math_match_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.math_match.* needs math-verify: pip install 'rhymerl\[math\]'"):
        check_reward(Reward("rhymerl.rewards.math_match"), ["answer"])
