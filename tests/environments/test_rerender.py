"""Episodes whose conversation is rendered anew where the chat template does more than append."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from rhymerl.environments.base import Environment
from rhymerl.environments.encoding import CUT_MARK
from rhymerl.environments.episodes import Episodes, of_last_segment
from rhymerl.environments.pool import EnvironmentPool
from rhymerl.environments.proof import prove
from rhymerl.errors import ConfigError
from rhymerl.rollout.base import RolloutSettings
from rhymerl.types import Completion, Output, Prompt, RolloutRequest, SamplingParams
from rhymerl.workers.host import Host
from rhymerl.workers.versions import Versions
from tests.environments.families import FAMILIES, Family, encoder_of
from tests.environments.test_episodes import answers
from tests.environments.worlds import Echoes, Rambles
from tests.rollout.tokens import TokenBackend

STEP = Versions(oldest=0, final=0)
WORDS = ("yes", "12", "no other", "the answer is 12", "naïve 你好 🙂", "")


@cache
def tokens_of(family: Family, text: str) -> list[int]:
    return list(family.tokenizer()(text, add_special_tokens=False)["input_ids"])


class Speaks(TokenBackend):
    """Says a text, with thoughts or without, that follows from the request's seed and what the policy reads."""

    def __init__(self, name: str = "qwen3", **settings: Any) -> None:
        super().__init__(lambda request: len(self.said(request)), **settings)
        self.family = FAMILIES[name]
        self.contexts: dict[str, list[list[int]]] = {}  # that turns began with, by request id

    def said(self, request: RolloutRequest) -> list[int]:
        output = request.output or Output.of()
        begin = output.turns[-1].stop if output.turns else 0
        noise = random.Random(f"{request.seed} {begin}")
        thought = f"<think>\n{noise.choice(WORDS)}?\n</think>\n\n" if noise.random() < 0.6 else ""
        tokens = tokens_of(self.family, f"{thought}{noise.choice(WORDS)}{self.family.end}")
        return [*output.token_ids[:begin].tolist(), *tokens][: request.sampling.max_tokens]

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            output = request.output or Output.of()
            if not len(output) or (output.turns and output.turns[-1].stop == len(output)):
                context = [*request.prompt.token_ids.tolist(), *output.token_ids.tolist()]
                self.contexts.setdefault(request.id, []).append(context)
        super().submit(requests)

    def _pass(self) -> list[Completion]:
        ended = []
        for request, tokens, versions in list(self.answers.values())[: self.max_running]:
            said = self.said(request)
            tokens.append(said[len(tokens)])
            versions.append(self.version)
            if len(tokens) == len(said):
                ended.append(self._leave(request.id, "stop" if said[-1] in self.stops else "length"))
        return ended

    @property
    def stops(self) -> list[int]:
        return self.family.stop_token_ids()


@contextmanager
def episodes(name: str = "qwen3", environment: Environment | None = None, **settings: Any):
    family, reply_tokens = FAMILIES[name], settings.pop("max_reply_tokens", None)
    made = Episodes(
        EnvironmentPool(environment or Echoes(), num_processes=1),
        encoder_of(name, max_reply_tokens=reply_tokens),
        decode=lambda ids: family.tokenizer().decode(ids, skip_special_tokens=False),
        **{"context_tokens": 4096, "rerenders": True, **settings},
    )
    try:
        yield made
    finally:
        made.close()


def requests(count: int, name: str = "qwen3", *, max_tokens: int = 1000, turns: int = 4) -> list[RolloutRequest]:
    family = FAMILIES[name]
    messages = [{"role": "user", "content": "yes?"}]
    tokens = rendering(name, messages)
    prompt = Prompt(id="p", key="p", token_ids=tokens, text="yes?", columns={"turns": turns}, messages=messages)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(family.stop_token_ids()))
    return [
        RolloutRequest(id=f"0/p/{n}", prompt=prompt, sample=n, seed=n, step=0, sampling=sampling) for n in range(count)
    ]


def rendering(name: str, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = FAMILIES[name].tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def messages_before(request: RolloutRequest, output: Output, number: int) -> list[dict[str, Any]]:
    """The conversation in front of a turn."""
    messages = [*request.prompt.messages]
    for turn in output.turns[:number]:
        messages += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": turn.reply}]
    return messages


def test_each_turn_begins_behind_the_templates_rendering_of_what_was_said():
    backend, asked = Speaks(), requests(30)
    with episodes() as made:
        found = answers(Host(backend, version=0, episodes=made), asked)
    counts = set()
    for request in asked:
        output, contexts = found[request.id], backend.contexts[request.id]
        assert (output.finish_reason, len(output.turns), len(contexts)) == ("stop", 4, 4)
        for number, context in enumerate(contexts):
            assert context == rendering("qwen3", messages_before(request, output, number))
        parts = output.segments(request.prompt.token_ids)
        counts.add(len(parts))
        assert [part.prompt.tolist() for part in parts[1:]] == [
            contexts[number + 1] for number, turn in enumerate(output.turns) if turn.rerendered is not None
        ]
        for number, turn in enumerate(output.turns[:3], start=1):
            said = " ".join(each.text.rpartition("\n")[2] for each in output.turns[:number])
            assert turn.reply == f"{number} {said}", "the environment sees all turns"
        for turn in output.turns[:-1]:
            assert output.token_ids[turn.start - 1] in backend.stops
    assert counts == {1, 2, 3, 4}


def test_a_part_begins_only_where_something_was_dropped():
    with episodes() as made:
        found = answers(Host(Speaks(), version=0, episodes=made), requests(30))
    for output in found.values():
        for turn in output.turns[:-1]:
            thinks = "</think>" in turn.text or turn.text.startswith("\n")
            assert (turn.rerendered is not None) == thinks


def test_people_and_rewards_read_each_turn_once():
    tokenizer = FAMILIES["qwen3"].tokenizer()
    with episodes() as made:
        found = answers(Host(Speaks(), version=0, episodes=made), requests(12))
    for output in found.values():
        shown = output.conversation()
        text = tokenizer.decode(shown.token_ids)
        assert text.count("<|im_start|>assistant") == 3
        for turn, as_it_was in zip(shown.turns, output.turns, strict=True):
            reply = tokenizer.decode(shown.token_ids[turn.start : turn.stop])
            assert (turn.text, turn.reply) == (as_it_was.text, as_it_was.reply)
            assert turn.reply is None or reply == f"\n<|im_start|>user\n{turn.reply}<|im_end|>\n<|im_start|>assistant\n"
        assert shown.token_ids[shown.sampled].tolist() == output.token_ids[output.sampled].tolist()
        assert shown.num_sampled == output.num_sampled == int(output.sampled.sum())


@pytest.mark.parametrize("name", ["qwen2.5", "command-r"])
def test_where_the_template_only_appends_all_is_as_if_it_was_kept(name):
    found = []
    for rerenders in (False, True):
        with episodes(name, rerenders=rerenders) as made:
            found.append(answers(Host(Plain(name), version=0, episodes=made), requests(10, name)))
    for name, kept in found[0].items():
        rendered = found[1][name]
        assert kept.token_ids.tolist() == rendered.token_ids.tolist()
        assert [each.stop for each in kept.turns] == [each.stop for each in rendered.turns]
        assert all(turn.rerendered is None for turn in rendered.turns)


class Plain(Speaks):
    """Speaks as the template writes it."""

    def said(self, request: RolloutRequest) -> list[int]:
        output = request.output or Output.of()
        begin = output.turns[-1].stop if output.turns else 0
        word = random.Random(f"{request.seed} {begin}").choice(WORDS[:4])
        _, said = self.family.answer(word, "user")
        return [*output.token_ids[:begin].tolist(), *tokens_of(self.family, said)]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))])
def test_withdrawn_anywhere_it_goes_on_elsewhere_with_the_same_tokens(seed):
    asked, draw = requests(8), random.Random(seed)
    with episodes() as made:
        whole = answers(Host(Speaks(), version=0, episodes=made), asked)
    moved: dict[str, Output] = {}
    with episodes() as one, episodes() as other:
        hosts = [Host(Speaks(), version=0, episodes=made) for made in (one, other)]
        hosts[0].submit(asked, priority=0, versions=STEP)
        in_parts = 0
        while len(moved) < len(asked):
            for host in draw.sample(hosts, 2):
                host.decode(timeout_s=0.01, max_passes=draw.randint(1, 4))
                moved |= {each.request.id: each.output for each in host.finished}
                host.finished.clear()
            here, there = draw.sample(hosts, 2)
            here.withdraw([each.id for each in asked if draw.random() < 0.3])
            released, here.released = here.released, []
            in_parts += sum(begin_of(each.output) > 0 for each in released)
            there.submit([each.resume() for each in released], priority=0, versions=STEP)
    assert in_parts > 3
    for name, output in whole.items():
        assert moved[name].token_ids.tolist() == output.token_ids.tolist()
        assert moved[name].logprobs.tolist() == output.logprobs.tolist()
        assert moved[name].sampled.tolist() == output.sampled.tolist()
        assert [each.rerendered for each in moved[name].turns] == [each.rerendered for each in output.turns]
        assert moved[name].finish_reason == output.finish_reason


def test_a_host_tells_the_tokens_of_the_whole_episode():
    with episodes() as made:
        host = Host(Speaks(), version=0, episodes=made)
        (request,) = requests(1)
        host.submit([request], priority=0, versions=STEP)
        seen = [0]
        while not host.finished:
            host.decode(max_passes=1)
            seen += host.progress().values() if host.is_running else []
    assert seen == sorted(seen)
    output = host.finished[0].output
    assert begin_of(output) < seen[-1] < len(output)


def test_parts_draw_noise_of_their_own():
    with episodes() as made:
        output = answers(Host(Speaks(), version=0, episodes=made), requests(1))["0/p/0"]
    (request,) = requests(1)
    ends = [turn.stop for turn in output.turns if turn.rerendered is not None]
    asked = [of_last_segment(with_output(request, output[: end + 1])) for end in [0, *ends]]
    assert asked[0] == with_output(request, output[:1])
    assert len({each.seed for each in asked}) == len(asked) == 1 + len(ends) > 2
    assert [each.segment for each in asked] == list(range(len(asked)))
    assert all(each.id == request.id and each.prompt.key == request.prompt.key for each in asked)


def begin_of(output: Output) -> int:
    return output.segments(output.token_ids)[-1].start


def with_output(request: RolloutRequest, output: Output) -> RolloutRequest:
    return replace(
        request, output=replace(output, turns=tuple(each for each in output.turns if each.stop <= len(output)))
    )


@pytest.mark.parametrize(
    ("limits", "max_tokens", "reason"),
    [
        ({"max_turns": 3}, 1000, "max_turns"),
        ({}, 40, "length"),
        ({"max_turn_tokens": 5}, 1000, "length"),
        ({"context_tokens": 90}, 1000, "context"),
    ],
)
def test_limits_are_of_the_whole_episode_and_the_context_of_each_part(limits, max_tokens, reason, caplog):
    with episodes(**limits) as made:
        found = answers(Host(Speaks(), version=0, episodes=made), requests(12, max_tokens=max_tokens, turns=9))
    assert reason in {each.finish_reason for each in found.values()}
    context = limits.get("context_tokens", 4096)
    (request,) = requests(1)
    for output in found.values():
        assert output.num_sampled <= max_tokens
        assert len(output.turns) <= limits.get("max_turns", 9)
        parts = output.segments(request.prompt.token_ids)
        assert all(len(part) <= context for part in parts)
        assert len(parts[-1].token_ids), "a prompt that nothing follows would be no part"
    if reason == "context":
        assert max(len(each) for each in found.values()) > context, "parts leave the thoughts of earlier turns behind"


def test_a_reply_that_was_cut_is_rendered_as_it_was_cut():
    backend, asked = Speaks(), requests(6)
    with episodes(environment=Rambles(), max_reply_tokens=30) as made:
        found = answers(Host(backend, version=0, episodes=made), asked)
    tokenizer = FAMILIES["qwen3"].tokenizer()
    for request in asked:
        output = found[request.id]
        assert all(len(turn.reply) > 1000 for turn in output.turns[:-1]), "environments see what they have said"
        for number, context in enumerate(backend.contexts[request.id]):
            text = tokenizer.decode(context)
            assert text.count(CUT_MARK) == number
        assert all(turn.stop - turn.start - (turn.rerendered or 0) <= 30 for turn in output.turns)


def test_a_draft_goes_on_in_the_part_that_it_agrees_with():
    with episodes() as made:
        output = answers(Host(Speaks(), version=0, episodes=made), requests(1))["0/p/0"]
    (request,) = requests(1)
    begun = next(turn for turn in output.turns if turn.rerendered is not None)
    behind = with_output(replace(request, prefetched=output.token_ids), output[: begun.stop + 1])
    assert of_last_segment(behind).prefetched.tolist() == output.token_ids[begun.stop :].tolist()
    other = replace(behind, prefetched=np.roll(output.token_ids, 1))
    assert of_last_segment(other).prefetched is None


def test_a_run_says_what_is_done_where_the_template_drops_thoughts():
    said = prove(encoder_of("qwen3"), ["user"], rerenders=True)
    assert str(said).startswith(
        "another part of an episode begins where one rendering of the whole has others (thinking"
    )
    assert prove(encoder_of("qwen2.5"), ["user", "tool"], rerenders=True) is None


@pytest.mark.parametrize("name", ["harmony", "mistral"])
def test_a_template_that_writes_calls_itself_is_refused(name):
    with pytest.raises(ConfigError, match="rollout.history='rerender': the tokenizer's chat template takes a tool's"):
        prove(encoder_of(name), ["tool"], rerenders=True)


def test_another_word_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^history='something': expected keep or rerender$"):
        RolloutSettings(history="something")  # type: ignore[arg-type]
