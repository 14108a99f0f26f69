"""The head's own gradient: that of plain autograd, for any chunks, dtypes and parts of it that are asked for."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from rhymerl.models.head import chosen_logprobs, head_logprobs
from rhymerl.models.logits import LogitTransform
from tests.products import pairs_first

COUNT, WIDTH, VOCABULARY = 23, 6, 31


class Other(nn.Module):
    """A head that is not known to be linear."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight = inner.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def inputs(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = (3 * torch.randn(COUNT, WIDTH)).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (COUNT,))


def plain(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    everything = ((logits if logits.dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)
    return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


@pytest.fixture(autouse=True, params=[2**28, 0], ids=["kept", "computed again"])
def kept_bytes(request, monkeypatch):
    monkeypatch.setattr(f"{__name__}.head_logprobs", functools.partial(head_logprobs, kept_bytes=request.param))


def gradients(found: tuple[Tensor, Tensor], hidden: Tensor, head: nn.Module, *, which: str) -> list[Tensor]:
    logprobs, entropy = found
    loss = sum(
        part
        for part, name in (((logprobs**2).sum(), "logprobs"), ((entropy**3).sum(), "entropy"))
        if name in which.split()
    )
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("which", ["logprobs", "entropy", "logprobs entropy"])
@pytest.mark.parametrize(("bias", "temperature"), [(False, 1.0), (True, 0.7)])
@pytest.mark.parametrize("wrap", [lambda head: head, Other], ids=["linear", "other"])
def test_it_is_that_of_autograd(wrap, bias, temperature, which, chunk_tokens):
    hidden, head, targets = inputs(bias=bias)
    expected = plain(hidden, head, targets, temperature)
    found = head_logprobs(hidden, wrap(head), targets, temperature=temperature, chunk_tokens=chunk_tokens)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
    pairs = zip(
        gradients(found, hidden, head, which=which), gradients(expected, hidden, head, which=which), strict=True
    )
    for left, right in pairs:
        torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-10)


def test_it_is_that_of_finite_differences():
    hidden, head, targets = inputs(bias=True)
    arguments = (hidden, *(parameter.detach().requires_grad_() for parameter in (head.weight, head.bias)))

    def work(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return head_logprobs_of(hidden, weight, bias, targets)

    assert torch.autograd.gradcheck(work, arguments)


def head_logprobs_of(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    del head.weight, head.bias
    head.weight, head.bias = weight, bias
    return head_logprobs(hidden, head, targets, temperature=0.7, chunk_tokens=5)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_gets_none(frozen):
    hidden, head, targets = inputs()
    if frozen == "hidden":
        hidden = hidden.detach()
    else:
        head.requires_grad_(False)
    head_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=5)[0].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (head.weight.grad is None) == (frozen == "head")


def test_in_bfloat16_many_chunks_lose_nothing_of_the_heads_gradient():
    """Each chunk's product is rounded, but not their sum: few and many chunks are equally far from float64."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=True, dtype=torch.bfloat16)
    hidden, targets = (1 + torch.randn(2000, WIDTH)).bfloat16(), torch.zeros(2000, dtype=torch.int64)
    exact = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    plain(hidden.double(), exact, targets, 1.0)[0].sum().backward()
    head_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=4)[0].sum().backward()
    for found, expected in ((head.weight, exact.weight), (head.bias, exact.bias)):
        torch.testing.assert_close(
            found.grad.double(), expected.grad, rtol=0, atol=6e-3 * float(expected.grad.abs().max())
        )


@pytest.mark.parametrize("mixed", [False, True])
def test_in_bfloat16_log_probs_are_in_float32_and_gradients_where_they_belong(mixed):
    hidden, head, targets = inputs(dtype=torch.float32 if mixed else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        expected = plain(hidden, head, targets, 1.0)
        for chunk_tokens in (5, 100):
            found = head_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=chunk_tokens)
            assert found[0].dtype == found[1].dtype == torch.float32
            torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
            pairs = zip(
                gradients(found, hidden, head, which="logprobs"),
                gradients(plain(hidden, head, targets, 1.0), hidden, head, which="logprobs"),
                [hidden, head.weight],
                strict=True,
            )
            for left, right, of in pairs:
                assert left.dtype == of.dtype
                torch.testing.assert_close(left, right, atol=0.1, rtol=0.05)


def test_a_second_backward_through_a_single_chunk_is_the_first():
    hidden, head, targets = inputs()
    logprobs, _ = head_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=100)
    first, second = (torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_log_probs_alone_are_the_same(temperature, chunk_tokens):
    hidden, head, targets = inputs(bias=True)
    alone = chosen_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    assert not alone.requires_grad
    assert torch.equal(
        alone, head_logprobs(hidden, head, targets, temperature=temperature, chunk_tokens=chunk_tokens)[0]
    )


TRANSFORMS = [
    LogitTransform(scale=0.3),
    LogitTransform(cap=4.0),
    LogitTransform(scale=2.5, cap=4.0),
    LogitTransform(scale=0.3, cap=4.0, num_tokens=7),
]


@pytest.mark.parametrize(
    ("transform", "wrap", "chunk_tokens", "which"),
    pairs_first(
        TRANSFORMS, {"linear": lambda head: head, "other": Other}, [4, 100], ["logprobs", "entropy", "logprobs entropy"]
    ),
)
def test_scaled_and_capped_logits_have_the_gradient_of_autograd(transform, wrap, chunk_tokens, which):
    hidden, head, targets = inputs(bias=True)
    targets %= transform.num_tokens or VOCABULARY

    def capped(states: Tensor) -> Tensor:
        products = transform.scale * head(states)[:, : transform.num_tokens]
        return products if transform.cap is None else transform.cap * torch.tanh(products / transform.cap)

    expected = plain(hidden, capped, targets, 0.7)
    settings = {"temperature": 0.7, "chunk_tokens": chunk_tokens, "transform": transform}
    found = head_logprobs(hidden, wrap(head), targets, **settings)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        chosen_logprobs(hidden, wrap(head), targets, **settings), expected[0], atol=1e-12, rtol=0
    )
    for left, right in zip(
        gradients(found, hidden, head, which=which), gradients(expected, hidden, head, which=which), strict=True
    ):
        torch.testing.assert_close(left, right, atol=1e-11, rtol=0)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_the_slope_is_the_derivative(transform):
    products = torch.linspace(-9, 9, 31, dtype=torch.float64, requires_grad=True)
    transform(products).sum().backward()
    slope = transform.slope(products.detach()) * torch.ones_like(products)
    slope[len(products) if transform.num_tokens is None else transform.num_tokens :] = 0
    torch.testing.assert_close(products.grad, slope, atol=1e-14, rtol=0)
