"""What is kept of answers to a step to come: to which requests it belongs, and what all ranks have of it."""

from __future__ import annotations

from dataclasses import replace

from rhymerl.testing import make_requests
from rhymerl.types import Output
from rhymerl.workers.coordinator import SharedPlan, StepRequests
from rhymerl.workers.run_ahead_state import RunAheadState, merge_states


def test_other_noise_or_another_way_of_sampling_is_another_request():
    requests = make_requests(3, group_size=2)
    asked = StepRequests(step=0, requests=requests).asked
    assert asked == StepRequests(step=0, requests=make_requests(3, group_size=2)).asked
    assert asked != StepRequests(step=0, requests=requests, episodes="other turns").asked
    others = [
        [replace(request, seed=request.seed + 1) for request in requests],
        [replace(request, id=f"{request.id}a") for request in requests],
        [replace(request, sampling=replace(request.sampling, temperature=0.5)) for request in requests],
        requests[1:],
    ]
    assert asked not in [StepRequests(step=0, requests=each).asked for each in others]


def test_the_whole_state_has_the_outputs_of_all_ranks():
    def state(*names: str) -> RunAheadState:
        plan = SharedPlan(queues=[[0, 1], [2]], digest="d")
        return RunAheadState(step=3, asked="x", plan=plan, outputs=dict.fromkeys(names, output))

    output = Output.of([4], logprob=-0.5, policy_version=2)
    whole = merge_states([state("a", "b"), None, state("c")])
    assert whole is not None
    assert list(whole.outputs) == ["a", "b", "c"]
    assert merge_states([None, None]) is None
