"""Weighted sharpness-aware minimization."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "wsam",
    "step",
    summary="SAM with the sharpness weighted freely, by default in a step of its own after the base's.",
    source="Yue, Jiang, Ye, Gao, Liu, Zhang 2023, arXiv:2305.15817",
    gradients=2,
    copies=2,
    space={"rho": Range(0.01, 0.5, log=True), "gamma": Range(0.5, 0.95)},
)
class WSAM(Step):
    r"""Weighted SAM: the sharpness as a regulariser with a weight of its own.

    .. math:: L(w) + \tfrac{\gamma}{1 - \gamma} \big(\max_{\lVert e \rVert \le \rho} L(w + e) - L(w)\big)

    With :math:`g = \nabla L(w)`, :math:`g_p = \nabla L(w + \rho \, g / \lVert g \rVert)`, :math:`a = \gamma / (1 -
    \gamma)` the two forms are

    .. math::
        \text{decoupled:}\quad & w \leftarrow \text{base}(w, g) - lr \; a \, (g_p - g) \\
        \text{coupled:}\quad & w \leftarrow \text{base}\big(w,\; a \, g_p + (1 - a) \, g\big)

    As decoupled weight decay does, the decoupled form keeps the regulariser out of the base's momentum and
    second moments. It acts in every update of the base that follows a :meth:`step` or :meth:`transform`, be it
    by ``opt.step``, ``opt.base.step`` or a scaler; between :meth:`transform` and that update ``.grad`` is g, so
    that clipping does not see the regulariser. :meth:`begin_window` and :meth:`zero_grad` take back one that no
    update has followed.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 everywhere is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        gamma: weight, >= 0 and < 1. 0 is the base optimizer, bit for bit, at one gradient a step; coupled, 0.5 is
            SAM, bit for bit; 0.9 is nine times the sharpness.
        decoupled: which form.
        replay_rng: draw the same dropout masks in both passes.

    A parameter without a gradient in one of the passes counts as having a zero gradient there.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Yue, Jiang, Ye, Gao, Liu, Zhang 2023, "Sharpness-Aware Minimization Revisited: Weighted Sharpness as a
    Regularization Term", arXiv:2305.15817.

    Example:
        >>> import torch
        >>> from flatmin.step import WSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = WSAM(torch.optim.SGD(model.parameters(), lr=0.01), rho=0.05, model=model)
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
        gamma: float = 0.9,
        decoupled: bool = True,
        replay_rng: bool = True,
    ) -> None:
        self.gamma = _check.number("gamma", gamma, low=0.0, high=1.0, open_high=True)
        self.decoupled = _check.boolean("decoupled", decoupled)
        # The correction goes past the scaler, which would divide by the loss scale.
        self.needs_true_gradient = decoupled
        self._pending: Direction | None = None
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)
        self._follow_base()

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if self.decoupled and "lr" not in {**self.base.defaults, **group}:
            raise ValueError("decoupled must be False for a base optimizer without a learning rate, got True")

    def _replace_gradient(self, window: Window) -> None:
        self._pending = None
        if self.gamma == 0.0 or not any(group["rho"] for group in self.param_groups):
            return
        weight = self.gamma / (1.0 - self.gamma)
        plain = not self.decoupled and weight == 1.0
        clean = window.take_gradient(keep=not plain)
        ascent = clean if plain else clean.copy()
        ascent.scale_(lambda group: group["rho"], ascent.norm())
        with window.moved(ascent):
            window.evaluate()
        if plain:
            return
        perturbed = window.take_gradient()
        if not self.decoupled:
            perturbed.mul_(weight).add_(clean, 1.0 - weight).put()
            return
        sharpness = perturbed.add_(clean, -1.0).mul_(weight / window.scale)
        # A scaler looks at the gradient only, and must skip the step where the second pass alone overflows.
        clean.mul_(torch.where(torch.isfinite(sharpness.norm()), 1.0, math.nan)).put()
        self._pending = sharpness

    def _follow_base(self) -> None:
        """Have the base's updates followed by the correction, whoever calls them."""
        if not self.decoupled:
            return
        own = weakref.ref(self)  # the base holds the hook, and must not hold the wrapper

        def follow(*_: Any) -> None:
            step = own()
            if step is not None:
                step._correct()

        self.base.register_step_post_hook(follow)

    @torch.no_grad()
    def _correct(self) -> None:
        pending, self._pending = self._pending, None
        for bucket in pending or ():
            rate = float(bucket.group["lr"]) * (1.0 if bucket.group.get("maximize") else -1.0)
            if bucket.weights[0].dtype == bucket.values[0].dtype:
                torch._foreach_add_(bucket.weights, bucket.values, alpha=rate)
                continue
            for weight, value in zip(bucket.weights, bucket.values, strict=True):
                weight.copy_(weight.to(value.dtype).add_(value, alpha=rate))  # summed in float32, rounded once

    def begin_window(self) -> None:
        """Mark the start of a window, before its first forward; what no update has followed is taken back."""
        super().begin_window()
        self._pending = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the base does; what no update has followed is taken back."""
        super().zero_grad(set_to_none)
        self._pending = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow_base()  # copies of optimizers have no hooks
