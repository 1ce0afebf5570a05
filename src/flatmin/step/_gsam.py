"""Surrogate-gap guided sharpness-aware minimization."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Group
from flatmin.step._optimizer import Step
from flatmin.step._projection import along, normalize_
from flatmin.step._window import Window


@register(
    "gsam",
    "step",
    summary="SAM that also lowers the gap between the loss around w and at w; the radius may follow the rate.",
    source="Zhuang et al. 2022, arXiv:2203.08065",
    gradients=2,
    copies=2,
    space={"rho": Range(0.01, 0.6, log=True), "alpha": Range(0.01, 1.0, log=True)},
)
class GSAM(Step):
    r"""Surrogate-gap guided SAM: descent on the perturbed loss, and ascent on the part of the loss that this leaves.

    .. math::
        w \leftarrow \text{base}\Big(w,\; g_p - \alpha \big(g - \tfrac{\langle g, g_p \rangle}{\lVert g_p \rVert^2}
        g_p\big)\Big), \qquad g_p = \nabla L(w + \rho_t \, g / \lVert g \rVert), \quad g = \nabla L(w) \\
        \rho_t = \rho_{\min} + (\rho - \rho_{\min}) \, \frac{lr - lr_{\min}}{lr_{\max} - lr_{\min}}

    What is taken away is orthogonal to :math:`g_p`: to first order it leaves the perturbed loss as it is and
    raises the loss at w, so that their difference, the surrogate gap, becomes smaller.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation at the learning rate ``lr_max``, >= 0.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        rho_min: radius at the learning rate ``lr_min``, between 0 and ``rho``; ``None`` keeps the radius at ``rho``.
            In between the radius follows the group's actual learning rate, outside it stays at the nearer extreme.
        lr_max: the largest learning rate that the schedule reaches, required with ``rho_min``.
        lr_min: the smallest, >= 0.
        alpha: weight of the orthogonal part, >= 0. With 0 and without ``rho_min`` it is SAM, bit for bit.
        replay_rng: draw the same dropout masks in both passes.

    A group's own ``"rho"``, ``"rho_min"``, ``"lr_max"`` and ``"lr_min"`` override the arguments. Where all radii
    are 0 it is the base optimizer, bit for bit, at one gradient a step. A parameter without a gradient in one of
    the passes counts as having a zero gradient there.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Zhuang, Gong, Yuan, Cui, Adam, Dvornek, Tatikonda, Duncan, Liu 2022, "Surrogate Gap Minimization Improves
    Sharpness-Aware Training", arXiv:2203.08065.

    Example:
        >>> import torch
        >>> from flatmin.step import GSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = GSAM(base, rho=0.04, rho_min=0.02, lr_max=0.1, alpha=0.1, model=model)
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
        rho: float = 0.05,
        *,
        model: nn.Module | None,
        rho_min: float | None = None,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        alpha: float = 0.4,
        replay_rng: bool = True,
    ) -> None:
        self.alpha = _check.number("alpha", alpha, low=0.0)
        defaults = {"rho": rho, "rho_min": rho_min, "lr_max": lr_max, "lr_min": lr_min}
        super().__init__(base, model=model, defaults=defaults, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        rho = _check.number("rho", group["rho"], low=0.0)
        lr_min = _check.number("lr_min", group["lr_min"], low=0.0)
        if group["lr_max"] is not None:
            _check.number("lr_max", group["lr_max"], low=lr_min, open_low=True)
        if group["rho_min"] is None:
            return
        _check.number("rho_min", group["rho_min"], low=0.0, high=rho)
        if group["lr_max"] is None:
            raise ValueError("lr_max is required with rho_min: the learning rate at which the radius is rho, got None")
        if "lr" not in {**self.base.defaults, **group}:
            raise ValueError("rho_min must be None for a base optimizer without a learning rate, got a number")

    def _replace_gradient(self, window: Window) -> None:
        if not any(radius(group) for group in self.param_groups):
            return
        ascent = clean = window.take_gradient(keep=self.alpha != 0.0)
        if self.alpha != 0.0:
            ascent = clean.copy()
        ascent.scale_(radius, ascent.norm())
        with window.moved(ascent):
            window.evaluate()
        if self.alpha == 0.0:
            return
        perturbed = window.take_gradient()
        length = normalize_(perturbed)
        # g_p - alpha (g - <g, u> u) with u = g_p / |g_p|.
        perturbed.mul_(length + self.alpha * along(clean, perturbed)).add_(clean, -self.alpha).put()


def radius(group: Group) -> float:
    """The group's radius at its learning rate."""
    rho, low = float(group["rho"]), group["rho_min"]
    if low is None:
        return rho
    start, end = group["lr_min"], group["lr_max"]
    # The rate itself, not its share of the peak; a rate beyond the extremes must not take the radius with it.
    share = (min(max(float(group["lr"]), start), end) - start) / (end - start)
    return float(low + (rho - low) * share)
