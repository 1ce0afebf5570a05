"""Gradient norm aware minimization: first-order flatness."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Group
from flatmin.step._optimizer import Step
from flatmin.step._products import stretch_
from flatmin.step._window import Window


@register(
    "gnorm_aware",
    "step",
    summary="SAM's gradient at two points, the second where the gradient's norm rises, less what opposes neither.",
    source="Zhang, Xu, Yu, Zou, Cui 2023, arXiv:2303.03108",
    gradients=4,
    copies=5,
    space={"rho": Range(0.05, 0.5, log=True), "r": Range(0.01, 0.1, log=True), "gamma": Range(0.01, 0.1, log=True)},
)
class GradientNormAware(Step):
    r"""Gradient norm aware minimization, in the accelerated form of its released code.

    .. math::
        g_1 &= G(w + r \, g_0 / \lVert g_0 \rVert), \quad
        s = \rho \, (g_1 - g_0) / \lVert g_1 - g_0 \rVert, \quad
        g_2 = G(w + s), \quad g_3 = G(w + s + r \, g_2 / \lVert g_2 \rVert) \\
        q &= \beta_1 g_1 + \beta_3 g_3, \qquad p = g_0 + \beta_2 g_2, \qquad
        w \leftarrow \text{base}\big(w,\; q - \gamma \, (p - \tfrac{\langle p, q \rangle}{\lVert q \rVert^2} q)\big)

    with :math:`G = \nabla L` and :math:`g_0 = G(w)`. :math:`g_1 - g_0` is r times the Hessian's product with the
    unit gradient, the direction in which the gradient's norm grows. All norms are over all parameters.

    It is the method that its authors call GAM; Generalization Aware Minimization is another one.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: distance of the second point, >= 0; a group's own ``"rho"`` overrides it.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        r: radius of both SAM steps, >= 0; a group's own ``"r"`` overrides it. 0 is the base optimizer along
            :math:`(\beta_1 + \beta_3) g_0`, with the defaults bit for bit, at one gradient a step.
        gamma: weight of the part of p orthogonal to q, >= 0.
        beta1: weight of g_1, >= 0.
        beta2: weight of g_2, >= 0.
        beta3: weight of g_3, >= 0; 1 - beta1 in the released settings.
        replay_rng: draw the same dropout masks in all passes.

    A parameter without a gradient in one of the four passes counts as having a zero gradient there. Under data
    parallelism all four gradients are means over the processes; the released code takes each process's own.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Zhang, Xu, Yu, Zou, Cui 2023, "Gradient Norm Aware Minimization Seeks First-Order Flatness and Improves
    Generalization", arXiv:2303.03108, and its released code, whose settings for CIFAR-10 are the defaults.

    Example:
        >>> import torch
        >>> from flatmin.step._gradient_norm_aware import GradientNormAware
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = GradientNormAware(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
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
        rho: float = 0.2,
        *,
        model: nn.Module | None,
        r: float = 0.02,
        gamma: float = 0.03,
        beta1: float = 0.6,
        beta2: float = 0.5,
        beta3: float = 0.4,
        replay_rng: bool = True,
    ) -> None:
        self.gamma = _check.number("gamma", gamma, low=0.0)
        self.beta1 = _check.number("beta1", beta1, low=0.0)
        self.beta2 = _check.number("beta2", beta2, low=0.0)
        self.beta3 = _check.number("beta3", beta3, low=0.0)
        super().__init__(base, model=model, defaults={"rho": rho, "r": r}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        _check.number("rho", group["rho"], low=0.0)
        _check.number("r", group["r"], low=0.0)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["r"] for group in self.param_groups):
            if (whole := self.beta1 + self.beta3) != 1.0:
                window.take_gradient().mul_(whole).put()
            return
        clean = window.take_gradient(keep=True)  # g_0
        ascent = clean.copy()
        ascent.scale_(lambda group: group["r"], clean.norm())
        with window.moved(ascent):
            window.evaluate()
        aim = window.take_gradient(keep=True)  # g_1
        shift = aim.copy().add_(clean, -1.0)
        shift.scale_(lambda group: group["rho"], shift.norm())
        with window.moved(shift, keep=True):
            window.evaluate()
        second = window.take_gradient(keep=True)  # g_2
        rest = clean.add_(second, self.beta2)  # p
        second.scale_(lambda group: group["r"], second.norm())
        with window.moved(shift.add_(second)):
            window.evaluate()
        aim.mul_(self.beta1).add_(window.take_gradient(), self.beta3)  # q
        # The projection by way of a unit vector: squares of the gradient might leave float32's range.
        unit = stretch_(aim.copy(), 1.0, aim.norm())
        rest.add_(unit, -rest.dot(unit))
        aim.add_(rest, -self.gamma).put()
