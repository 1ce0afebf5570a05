"""Averages in float64 as their formulas say, on plain sequences of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ema(start: Tensor, weights: Sequence[Tensor], decay: float, *, warmup: bool) -> Tensor:
    e = start.double()
    for t, w in enumerate(weights, start=1):
        d = min(decay, (1 + t) / (10 + t)) if warmup else decay
        e = d * e + (1 - d) * w.double()
    return e


def switch_sgd(
    w: float, *, lr: float, momentum: float, decay: float, steps: int, epochs: int, reset: bool
) -> list[float]:
    """Switch EMA on f = w^2/2 with momentum SGD: the weight after each epoch's switch."""
    e, buffer, seen = w, 0.0, []
    for _ in range(epochs):
        for _ in range(steps):
            buffer = momentum * buffer + w
            w = w - lr * buffer
            e = decay * e + (1 - decay) * w
        w = e
        buffer = 0.0 if reset else buffer
        seen.append(w)
    return seen


def switch_rate(decay: float, steps: int) -> float:
    """Distance of the average over distance of the weights, for weights that move by one each step."""
    e = 0.0
    for w in range(1, steps + 1):
        e = decay * e + (1 - decay) * w
    return e / steps


def set_to(model: torch.nn.Module, value: float) -> None:
    """Stand in for an optimizer step that brings every weight to one value."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)
