"""Servers that were started by hand are asked how."""

from __future__ import annotations

import pytest

from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.testing import RandomTreeDrafter, make_requests
from tests.backends.sglang.test_session import all_of, connected

OURS = {
    "speculative_algorithm": "RHYMERL",
    "speculative_num_draft_tokens": 4,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "tp_size": 1,
    "dp_size": 1,
    "enable_memory_saver": False,
}


@pytest.mark.parametrize(
    ("info", "settings", "message"),
    [
        (
            {"speculative_accept_threshold_single": 0.9},
            {},
            "speculative_accept_threshold_single=0.9, below 1 its drafts change",
        ),
        ({"speculative_accept_threshold_acc": 0.5}, {}, "speculative_accept_threshold_acc=0.5"),
        ({"speculative_algorithm": "NGRAM"}, {}, "speculative_algorithm=NGRAM; expected none, or RHYMERL"),
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative_algorithm=EAGLE; expected none, or RHYMERL"),
        ({"dp_size": 2}, {}, "dp_size=2; start as many servers"),
        ({"tp_size": 4}, {}, "tp_size=4; expected backend.tensor_parallel=1"),
        ({}, {"tensor_parallel": 2}, "tp_size=1; expected backend.tensor_parallel=2"),
        ({"max_running_requests": 9}, {}, "max_running_requests=9; expected backend.max_running=4"),
        ({}, {"release_memory": True}, "no --enable-memory-saver, so backend.release_memory=true"),
    ],
)
def test_one_that_does_not_fit_is_refused(engine, flat_policy, info, settings, message):
    engine.answers["/server_info"] = 200, {**OURS, **info}
    with (
        pytest.raises(ConfigError, match=rf"backend\.url='{engine.url}': the server there has {message}"),
        connected(engine, flat_policy, **settings),
    ):
        pass


@pytest.mark.parametrize("told", ["four", "4", "", -3, 3.5, True, [4], {}, pytest.param("x\n" * 1000, id="long")])
def test_a_number_of_draft_tokens_that_is_no_count_is_one_line(engine, flat_policy, told):
    engine.answers["/server_info"] = 200, {**OURS, "speculative_num_draft_tokens": told}
    words = rf"^the SGLang engine at {engine.url} says speculative_num_draft_tokens=.*; expected a count$"
    with pytest.raises(BackendError, match=words) as error, connected(engine, flat_policy):
        pass
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("page", ["<html>\n502 Bad Gateway</html>", "", [OURS], 3])
def test_a_page_in_the_place_of_its_settings_is_one_line(engine, flat_policy, page):
    engine.answers["/server_info"] = 200, page
    words = rf"^the SGLang engine at {engine.url} answered /server_info with .*; expected a JSON object$"
    with pytest.raises(BackendError, match=words), connected(engine, flat_policy):
        pass


def test_one_without_the_route_is_taken_as_the_settings_say(engine, flat_policy):
    engine.answers["/server_info"] = 404, "<html>Not Found</html>"
    with connected(engine, flat_policy, nodes=3) as backend:
        backend.submit(make_requests(1, max_tokens=9, stop_token_ids=()))
        assert [each.num_drafted for each in all_of(backend, 1).values()] == [12]


@pytest.mark.parametrize(
    ("drafter", "info", "drafted"),
    [(RandomTreeDrafter(), OURS, 12), (NoDrafter(), {**OURS, "speculative_algorithm": None}, 0)],
    ids=["drafts", "none"],
)
def test_its_own_drafts_are_what_is_counted(engine, flat_policy, drafter, info, drafted):
    """The engine says that it verified 4 times."""
    engine.answers["/server_info"] = 200, info
    with connected(engine, flat_policy, drafter) as backend:
        backend.submit(make_requests(3, max_tokens=9, stop_token_ids=()))
        assert {each.num_drafted for each in all_of(backend, 3).values()} == {drafted}
