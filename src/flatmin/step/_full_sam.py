"""Sharpness-aware minimization without the stopped gradient."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._optimizer import Step
from flatmin.step._products import PRODUCTS, Twice, check_step, check_twice, difference, stretch_
from flatmin.step._window import Window


@register(
    "sam_full",
    "step",
    summary="SAM's whole gradient, with the Hessian term that SAM leaves out.",
    source="Foret, Kleiner, Mobahi, Neyshabur 2021, arXiv:2010.01412",
    gradients=lambda o: 3.0 if o["product"] == "difference" else 5.0,
    copies=4,
    space={"rho": Range(0.01, 0.5, log=True)},
)
class FullSAM(Step):
    r"""SAM that keeps the dependence of the perturbation on the weights.

    .. math:: \nabla_w L\big(w + \rho \, g / \lVert g \rVert\big)
              = g_p + \frac{\rho}{\lVert g \rVert} H \big(g_p - \hat g \, (\hat g \cdot g_p)\big)

    with :math:`g = \nabla L(w)`, :math:`\hat g = g / \lVert g \rVert`, :math:`g_p = \nabla L(w + \rho \hat g)` and H
    the Hessian at w. SAM takes :math:`g_p` alone. The second term grows without bound as g goes to 0, where the
    perturbed loss has no gradient.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 is the base optimizer, bit
            for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass, under data parallelism the
            ``DistributedDataParallel`` module; ``None`` declares that there are no buffers to protect.
        product: of the Hessian: ``"exact"``, by a second differentiation, or ``"difference"`` of two gradients.
        r: length of the finite difference's step, > 0, in units of the weights; 0.01 where not given. Only with
            ``product="difference"``.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Foret, Kleiner, Mobahi, Neyshabur 2021, "Sharpness-Aware Minimization for Efficiently Improving
    Generalization", arXiv:2010.01412, who drop the second term and find that keeping it does slightly worse.

    Example:
        >>> import torch
        >>> from flatmin.step import FullSAM
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> opt = FullSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
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
        product: str = "exact",
        r: float | None = None,
        replay_rng: bool = True,
    ) -> None:
        self.product = _check.choice("product", product, PRODUCTS)
        self.r = check_step("r", r, product, default=0.01)
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)
        if product == "exact":
            check_twice(model, self.param_groups)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        clean = window.take_gradient(keep=True)
        norm = clean.norm()
        ascent = clean.copy()
        ascent.scale_(lambda group: group["rho"], norm)
        with window.moved(ascent):
            window.evaluate()
        full = window.take_gradient(keep=True)
        # What H multiplies; with rho inside, for it may differ between groups and is negative where they maximize.
        inner = full.copy()
        inner.scale_(lambda group: group["rho"], norm)
        unit = stretch_(clean.copy(), 1.0, norm)
        inner.add_(unit, -unit.dot(inner))
        unit.buckets = []
        if self.product == "exact":
            # The graph cannot be that of the clean pass: moving the weights would have made it stale.
            clean.buckets = []
            product = Twice(window, self.param_groups, self.model).product(inner)
        else:
            product = difference(window, clean, inner, inner.norm(), self.r)
        full.add_(product).put()
