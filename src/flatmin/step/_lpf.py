"""Low-pass filtering SGD."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._memory import Noise
from flatmin.step._noisy import drawing, load_noise_state, noise_state, scale_by_filters, smooth
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "lpf",
    "step",
    summary="Mean gradient over weights blurred in proportion to each filter's norm.",
    source="Bisla, Wang, Choromanska 2022, arXiv:2201.08025",
    gradients=lambda o: 1.0 + o["samples"],  # the clean pass and the samples
    copies=1,
    space={"gamma": Range(0.0001, 0.02, log=True)},
)
class LPFSGD(Step):
    r"""Low-pass filtering SGD: the gradient of the loss smoothed by noise that follows each filter's norm.

    .. math:: w \leftarrow \text{base}\Big(w,\; \frac1M \sum_{m=1}^{M} \nabla L(w + \gamma_t S n_m)\Big), \qquad
              n_m \sim N(0, I), \quad S = \operatorname{diag} \lVert w_{\text{filter}} \rVert_2

    .. math:: \gamma_t = \gamma \Big(1 + \frac{\alpha}{2} \big(1 - \cos(\pi \min(t, T) / T)\big)\Big)

    One step takes 1 + ``samples`` gradients of the whole window, of which the one at w does not enter the update.
    The paper splits a batch into M parts with noise of their own, at the cost of one gradient.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; SGD in the paper.
        gamma: noise relative to the filter's norm, >= 0; a group's own ``"gamma"`` overrides it. 0 is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        samples: M, >= 1.
        increase: alpha, >= 0: by the end gamma has grown to 1 + alpha times itself along a cosine; 0 keeps it.
        total_steps: T, needed where ``increase`` > 0; from then on gamma stays.
        vectors: in tensors with fewer than two dimensions the noise is relative to the tensor's norm
            (``"norm"``, as in the paper's code), or each entry's to its own size (``"elementwise"``).
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Bisla, Wang, Choromanska 2022, "Low-Pass Filtering SGD for Recovering Flat Optima in the Deep Learning
    Optimization Landscape", arXiv:2201.08025.

    Example:
        >>> import torch
        >>> from flatmin.step._lpf import LPFSGD
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = LPFSGD(torch.optim.SGD(model.parameters(), lr=0.1), gamma=0.002, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    def __init__(
        self,
        base: Optimizer,
        gamma: float = 0.002,
        *,
        model: nn.Module | None,
        samples: int = 1,
        increase: float = 0.0,
        total_steps: int | None = None,
        vectors: str = "norm",
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.samples = _check.integer("samples", samples, low=1)
        self.increase = _check.number("increase", increase, low=0.0)
        self.total_steps = None if total_steps is None else _check.integer("total_steps", total_steps, low=1)
        if self.increase and self.total_steps is None:
            raise ValueError(
                f"total_steps is required with increase={increase}: the number of steps over which gamma grows"
            )
        self.vectors = _check.choice("vectors", vectors, ("norm", "elementwise"))
        self._noise = Noise(_check.integer("seed", seed, low=0))
        self._taken = 0
        super().__init__(base, model=model, defaults={"gamma": gamma}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        _check.number("gamma", group["gamma"], low=0.0)

    def growth(self) -> float:
        """What the groups' gamma is multiplied by in the coming step."""
        if self.total_steps is None:
            return 1.0
        progress = min(self._taken / self.total_steps, 1.0)
        return 1.0 + self.increase * (1.0 - math.cos(math.pi * progress)) / 2.0

    def _replace_gradient(self, window: Window) -> None:
        if any(group["gamma"] for group in self.param_groups):
            with drawing(self._noise):
                smooth(window, self._shift, samples=self.samples)
        self._taken += 1

    def _shift(self, like: Direction, norm: Tensor) -> Direction:
        shift = self._noise.normal(like)
        scale_by_filters(shift, vectors=self.vectors)
        growth = self.growth()
        shift.scale_(lambda group: group["gamma"] * growth, norm, divide=False)
        return shift

    def _method_state(self) -> dict[str, Any]:
        return {**noise_state(self._noise), "taken": self._taken}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)
        self._taken = int(state["taken"])
