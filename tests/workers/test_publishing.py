"""What goes out of a policy with adapters: its base once and then the adapters, and the same weights arrive."""

from __future__ import annotations

import pytest
import torch

from rhymerl.testing import tiny_policy
from rhymerl.workers.remote.publishing import Publisher
from tests.models.test_lora import adapted, change


class Wire:
    """Copies tensors, and counts the bytes of each time."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __call__(self, named):
        tensors = {name: tensor.detach().clone() for name, tensor in named}
        self.sent.append(sum(tensor.nbytes for tensor in tensors.values()))
        return lambda: tensors


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_adapters_alone_go_out_and_the_merged_weights_arrive(dtype):
    policy, wire = adapted(dtype), Wire()
    publisher = Publisher(policy.model, wire)
    parts = [parameter for name, parameter in policy.model.named_parameters() if ".lora_" in name]
    for step in range(3):
        if step:
            with torch.no_grad():
                for part in parts:
                    part.mul_(1.5).add_(0.01)
        found = publisher.publish(policy.named_weights())()
        expected = dict(policy.named_weights())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
    adapters = sum(part.nbytes for part in parts)
    assert wire.sent == [sum(tensor.nbytes for tensor in expected.values()), *[adapters] * 3]


def test_a_source_keeps_the_weights_of_its_time():
    policy = adapted()
    publisher = Publisher(policy.model, Wire())
    source = publisher.publish(policy.named_weights())
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    change(policy.model)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in source().items())


def test_a_policy_without_adapters_goes_out_as_a_whole():
    policy, wire = tiny_policy(), Wire()
    publisher = Publisher(policy.model, wire)
    for _ in range(2):
        found = publisher.publish(policy.named_weights())()
        assert all(torch.equal(found[name], tensor) for name, tensor in policy.named_weights())
    assert wire.sent == [sum(tensor.nbytes for tensor in found.values())] * 2
