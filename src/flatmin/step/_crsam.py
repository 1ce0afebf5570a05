"""Curvature-regularized sharpness-aware minimization."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "crsam",
    "step",
    summary="SAM with a second difference of gradients along the ascent direction.",
    source="Wu, Luo, Wunsch 2024, arXiv:2312.13555",
    gradients=3,
    copies=3,
    space={"rho": Range(0.01, 0.5, log=True), "gamma": Range(0.01, 0.5, log=True)},
)
class CRSAM(Step):
    r"""CR-SAM: SAM with finite differences that stand for the curvature and the slope of the loss.

    .. math:: g_+ + \gamma \, (g_+ + g_- - 2 g) + \beta \, (g_+ - g_-), \qquad
              g_\pm = \nabla L(w \pm \rho \, g / \lVert g \rVert), \quad g = \nabla L(w)

    The terms are the gradients, up to the movement of the perturbation, of L(w+e) + L(w-e) - 2 L(w) and of
    L(w+e) - L(w-e). They measure curvature along one direction. The paper's objective contains logarithms of
    both; this is the update of its released code, which does not.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 is the base optimizer, bit
            for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        gamma: weight of the second difference, >= 0.
        beta: weight of the first difference, >= 0. With gamma and beta 0 it is SAM, bit for bit, at two gradients
            a step.
        replay_rng: draw the same dropout masks in all passes.

    A parameter without a gradient in one of the three passes counts as having a zero gradient there.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Wu, Luo, Wunsch 2024, "CR-SAM: Curvature Regularized Sharpness-Aware Minimization", arXiv:2312.13555,
    and its released code.

    Example:
        >>> import torch
        >>> from flatmin.step import CRSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = CRSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, model=model)
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
        gamma: float = 0.1,
        beta: float = 0.01,
        replay_rng: bool = True,
    ) -> None:
        self.gamma = _check.number("gamma", gamma, low=0.0)
        self.beta = _check.number("beta", beta, low=0.0)
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        plain = self.gamma == self.beta == 0.0
        clean = window.take_gradient(keep=not plain)
        ascent = clean if plain else clean.copy()
        ascent.scale_(lambda group: group["rho"], clean.norm())
        with window.moved(ascent, keep=not plain):
            window.evaluate()
        if plain:
            return
        total = window.take_gradient(keep=True)
        with window.moved(ascent, -1.0):
            window.evaluate()
        total.mul_(1.0 + self.gamma + self.beta)
        total.add_(window.take_gradient(), self.gamma - self.beta).add_(clean, -2.0 * self.gamma).put()
