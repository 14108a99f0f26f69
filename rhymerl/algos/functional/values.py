"""Targets and losses of a critic. All [B, T]."""

from __future__ import annotations

from torch import Tensor


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and where the clipped value's error is used.

    The worse of the value's and of the value that moved at most `clip` from the old one: baselines, PPO2; a clip of
    None leaves the first.
    """
    error = (values - returns) ** 2
    if clip is None:
        return error / 2, error < 0
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    return error.maximum(clipped) / 2, clipped > error


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) over the mask; None where returns do not vary."""
    wanted, error = returns[mask], (returns - values)[mask]
    if len(wanted) < 2 or not wanted.var() > 0:
        return None
    return float(1 - error.var() / wanted.var())
