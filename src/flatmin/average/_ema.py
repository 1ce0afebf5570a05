"""Exponential moving average of the weights."""

from __future__ import annotations

from torch import nn

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.average._average import Average, Settings


@register(
    "ema",
    "average",
    summary="Exponential moving average of the weights.",
    source="Polyak and Juditsky, 1992; decay warm-up as in TensorFlow's ExponentialMovingAverage",
    copies=1.0,
    space={"decay": Range(0.9, 0.9999)},
)
class EMA(Average):
    r"""Exponential moving average of the weights, to evaluate and to keep.

    .. math::
        e_0 = w_0, \qquad e_t = d_t e_{t-1} + (1 - d_t) w_t, \qquad
        d_t = \min\left(d, \frac{1 + t}{10 + t}\right) \text{ with warm-up, else } d

    after the optimizer step t = 1, 2, ... . The average of 16-bit weights is kept in fp32. Tied weights count
    once; frozen ones are followed and keep their bits. No update waits for the device.

    Args:
        model: the module whose parameters are averaged; the average starts as a copy of them.
        decay: share d of the old average that is kept, in [0, 1].
        warmup: begin with the smaller decays 2/11, 3/12, 4/13, ...
        buffers: ``"copy"``: the average goes with the live buffers; ``"average"``: floating buffers are
            averaged likewise and integer ones copied.

    Raises:
        ValueError: ``decay`` outside [0, 1], unknown ``buffers``, or a model without parameters.
        TypeError: an argument of another type.

    Source: B. T. Polyak and A. B. Juditsky, Acceleration of stochastic approximation by averaging, SIAM J.
    Control Optim., 1992. Effects and settings: D. Morales-Brotons, T. Vogels, H. Hendrikx, Exponential moving
    average of weights in deep learning, 2024, arXiv:2411.18704.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> average = EMA(model, decay=0.9, warmup=False)
    >>> _ = torch.nn.init.ones_(model.weight)  # stands for an optimizer step
    >>> average.update()
    >>> with average.applied():
    ...     print(f"{model.weight.item():.2f}")
    0.10
    >>> model.weight.item()
    1.0
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True, buffers: str = "copy") -> None:
        self._adopt({"decay": decay, "warmup": warmup})
        super().__init__(model, buffers=buffers)

    @property
    def decay(self) -> float:
        """The share of the old average that is kept once the warm-up is over."""
        return self._decay

    def update(self) -> None:
        """Take the live weights into the average; call it once after every optimizer step."""
        t = self._updates + 1
        self._follow(min(self._decay, (1 + t) / (10 + t)) if self._warmup else self._decay)

    def _settings(self) -> Settings:
        return {"decay": self._decay, "warmup": self._warmup}

    def _adopt(self, settings: Settings) -> None:
        decay = _check.number("decay", settings["decay"], low=0.0, high=1.0)
        warmup = _check.boolean("warmup", settings["warmup"])
        self._decay, self._warmup = decay, warmup
