"""Variance-suppressed sharpness-aware optimization."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._lasting import Lasting
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "vasso",
    "step",
    summary="SAM that ascends along a running mean of gradients.",
    source="Li, Giannakis 2023, arXiv:2309.15639",
    gradients=2,
    copies=3,
    space={"rho": Range(0.01, 0.5, log=True), "theta": Range(0.1, 0.99)},
)
class VaSSO(Step):
    r"""Variance-suppressed SAM: the adversary's direction is a running mean, which a single batch hardly turns.

    .. math::
        d_t = (1 - \theta) \, d_{t-1} + \theta \, g_t, \qquad
        w \leftarrow \text{base}\big(w, \nabla L(w + \rho \, d_t / \lVert d_t \rVert)\big)

    with :math:`g_t = \nabla L(w)`, :math:`d_1 = g_1` and one norm over all parameters.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 everywhere is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        theta: weight of the newest gradient, > 0 and <= 1. 1 is SAM, bit for bit.
        replay_rng: draw the same dropout masks in both passes.

    A step whose clean gradient is not finite leaves the mean as it was. A parameter without a gradient in a step
    is not moved in it and keeps its mean.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Li, Giannakis 2023, "Enhancing Sharpness-Aware Optimization Through Variance Suppression",
    arXiv:2309.15639.

    Example:
        >>> import torch
        >>> from flatmin.step import VaSSO
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = VaSSO(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, model=model)
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
        rho: float = 0.1,
        *,
        model: nn.Module | None,
        theta: float = 0.9,
        replay_rng: bool = True,
    ) -> None:
        self.theta = _check.number("theta", theta, low=0.0, high=1.0, open_low=True)
        # Gradients of steps with different loss scales meet in the mean.
        self.needs_true_gradient = self.theta != 1.0
        self._memory = Lasting()
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        ascent = mean = window.take_gradient()
        if self.theta != 1.0:
            if window.scale != 1.0:
                mean.mul_(1.0 / window.scale)
            mean = self._memory.mixed("mean", mean, self.theta)
            ascent = mean.copy()
        norm = ascent.norm()
        ascent.scale_(lambda group: group["rho"], norm)
        with window.moved(ascent):
            window.evaluate()
        if self.theta != 1.0:
            self._memory.keep("mean", mean, norm)

    def _method_state(self) -> dict[str, Any]:
        return {"vectors": self._memory.state(self.param_groups)}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self._memory.load(state["vectors"], self.param_groups)
