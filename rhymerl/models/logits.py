"""How a model turns its head's products into logits (by a scale, a soft cap, or both), and which of them count."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
_MULTIPLIES = ("hyperclovax",)  # families with a divisor's name for a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """y = c tanh(s z / c) of each product z, with a scale s and a cap c; without a cap y = s z.

    Only the first `num_tokens` count.
    """

    scale: float = 1.0
    cap: float | None = None
    num_tokens: int | None = None  # None: all

    @property
    def is_plain(self) -> bool:
        return self.scale == 1 and self.cap is None

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits that count, [..., tokens] of [..., V]."""
        products = products[..., : self.num_tokens]
        scaled = products * self.scale if self.scale != 1 else products
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap

    def slope(self, products: Tensor) -> Tensor | float:
        """Return the derivative of each logit with respect to its product: s (1 - tanh(s z / c)^2)."""
        if self.cap is None:
            return self.scale
        return (1 - (products * (self.scale / self.cap)).tanh().square()) * self.scale


PLAIN = LogitTransform()


def transform_of(model: PreTrainedModel) -> LogitTransform:
    """Return the transform that a config names; `prove_update` checks that the model does that and nothing else."""
    text = model.config.get_text_config()
    scale = 1.0
    for name in (*_FACTORS, *_DIVISORS):
        value = getattr(text, name, None)
        if value is not None:
            divides = name in _DIVISORS and not text.model_type.startswith(_MULTIPLIES)
            scale = scale / value if divides else scale * value
    caps = [value for name in _CAPS if (value := getattr(text, name, None))]
    return LogitTransform(scale=scale, cap=caps[0] if caps else None, num_tokens=num_tokens(model))


def num_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens are sampled from: ids from 0 to below this."""
    rows = num_embeddings(model)
    return min(getattr(model, "num_tokens", rows), rows)


def num_embeddings(model: PreTrainedModel) -> int:
    """Return how many tokens may be fed to a model: ids from 0 to below this."""
    return len(model.get_input_embeddings().get_parameter("weight"))
