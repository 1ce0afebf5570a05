"""Sharpness-aware minimization that leans its perturbation towards the Hessian's top eigenvector."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction
from flatmin.step._memory import Memory, Noise
from flatmin.step._optimizer import Step
from flatmin.step._products import PRODUCTS, Twice, check_step, check_twice, difference, stretch_
from flatmin.step._window import Window


class _Estimate(NamedTuple):
    """The vector, of norm 1, the Rayleigh quotient of the one before it, and the shift."""

    vector: Direction
    eigenvalue: Tensor
    shift: Tensor


@register(
    "eigensam",
    "step",
    summary="SAM whose perturbation leans towards the Hessian's top eigenvector.",
    source="Luo, Truong, Pham, Harandi, Phung, Le 2024, arXiv:2501.12666",
    gradients=2.05,  # 2, and 5 more in every 100th step
    copies=3,
    space={"rho": Range(0.01, 0.5, log=True), "alpha": Range(0.05, 0.5)},
)
class EigenSAM(Step):
    r"""Eigen-SAM: SAM's perturbation, turned towards the top eigenvector v of the Hessian.

    .. math:: \epsilon = \rho \big(\hat g + \alpha \operatorname{sign}(\hat g \cdot v) \,
              (v - (\hat g \cdot v) \, \hat g)\big), \qquad \hat g = g / \lVert g \rVert

    It is not normalised again. v comes from ``iterations`` steps of power iteration in every ``period``-th step,
    each of which starts where the last one ended. Power iteration alone finds the eigenvalue of largest size, which
    may be negative; here a negative Rayleigh quotient shifts the spectrum until the largest eigenvalue is also
    the largest in size. A shift once needed is kept. The Hessian is that of the step's own batch, in training mode
    (the released code measures it in evaluation mode).

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius along the gradient, >= 0; a group's own ``"rho"`` overrides it. 0 is the base optimizer, bit for
            bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass, under data parallelism the
            ``DistributedDataParallel`` module; ``None`` declares that there are no buffers to protect.
        alpha: weight of the eigenvector, >= 0. 0 is SAM, which looks for no eigenvector.
        period: steps from one estimate to the next, >= 1. The first step makes the first estimate; one that is not
            finite is made again in the next step.
        iterations: products with the Hessian for one estimate, >= 1.
        product: of the Hessian: ``"difference"`` of two gradients, or ``"exact"``, by a second differentiation.
        r: length of the finite difference's step, > 0, in units of the weights; 0.01 where not given. Only with
            ``product="difference"``.
        seed: of the vector that the first estimate starts from.
        replay_rng: draw the same dropout masks in all passes.

    Attributes:
        eigenvalue: the last estimate of the largest eigenvalue, ``None`` before the first.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; ``ValueError`` also when groups
            differ in ``maximize``.

    Source: Luo, Truong, Pham, Harandi, Phung, Le 2024, "Explicit Eigenvalue Regularization Improves Sharpness-Aware
    Minimization", arXiv:2501.12666.

    Example:
        >>> import torch
        >>> from flatmin.step import EigenSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = EigenSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    needs_true_gradient = True  # the shift outlives the loss scale that the products carry

    def __init__(
        self,
        base: Optimizer,
        rho: float = 0.1,
        *,
        model: nn.Module | None,
        alpha: float = 0.2,
        period: int = 100,
        iterations: int = 5,
        product: str = "difference",
        r: float | None = None,
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.alpha = _check.number("alpha", alpha, low=0.0)
        self.period = _check.integer("period", period, low=1)
        self.iterations = _check.integer("iterations", iterations, low=1)
        self.product = _check.choice("product", product, PRODUCTS)
        self.r = check_step("r", r, product, default=0.01)
        self.seed = _check.integer("seed", seed, low=0)
        self.eigenvalue: Tensor | None = None
        self._memory = Memory()
        self._shift: Tensor | None = None
        self._age = self.period  # steps since the last estimate: the first is due
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)
        if product == "exact":
            check_twice(model, self.param_groups)

    def _replace_gradient(self, window: Window) -> None:
        groups = self.param_groups
        if not any(group["rho"] for group in groups):
            return
        due = self.alpha > 0.0 and self._age >= self.period
        ascent = window.take_gradient(keep=due)
        norm = ascent.norm()
        estimate = self._estimate(window, ascent, norm) if due else None
        if self.alpha > 0.0:
            vector = estimate.vector.copy() if estimate is not None else self._memory.get("top", ascent)
            stretch_(ascent, 1.0, norm)
            cosine = ascent.dot(vector)
            ascent.mul_(1.0 - self.alpha * cosine.abs())
            ascent.add_(vector, self.alpha * cosine.sign())
            vector.buckets = []
            ascent.scale_(lambda group: group["rho"], norm, divide=False)
        else:
            ascent.scale_(lambda group: group["rho"], norm)
        with window.moved(ascent):
            window.evaluate()
        if estimate is not None:
            self._memory.put("top", estimate.vector)
            self.eigenvalue, self._shift, self._age = estimate.eigenvalue, estimate.shift, 1
        elif not due:
            self._age += 1

    def _estimate(self, window: Window, clean: Direction, norm: Tensor) -> _Estimate | None:
        """A new estimate; none where anything is not finite."""
        maximize = {bool(group.get("maximize")) for group in self.param_groups}
        if len(maximize) > 1:
            raise ValueError("maximize must be the same in all groups: the top eigenvector of a saddle is not defined")
        # The objective is then -L, and its largest eigenvalue is wanted.
        sign = (-1.0 if maximize == {True} else 1.0) / window.scale
        twice = Twice(window, self.param_groups, self.model) if self.product == "exact" else None
        vector = self._memory.get("top", clean) if "top" in self._memory else Noise(self.seed).normal(clean)
        shift = torch.zeros_like(norm) if self._shift is None else self._shift.to(norm)
        vector = stretch_(vector, 1.0, torch.where(torch.isfinite(norm), vector.norm(), norm))
        eigenvalue, usable = shift, torch.isfinite(norm)
        for _ in range(self.iterations):
            if twice is not None:
                image = twice.product(vector)
            else:
                image = difference(window, clean, vector.copy(), torch.where(torch.isfinite(norm), 1.0, norm), self.r)
            image.mul_(sign)
            eigenvalue = vector.dot(image)
            # Twice what is needed, so that an eigenvector of a negative eigenvalue is not mapped to zero.
            shift = torch.maximum(shift, -2.0 * eigenvalue)
            image.add_(vector, shift)
            length = image.norm()
            stalled = (length == 0.0).to(length.dtype)  # the Hessian is zero: the vector stays
            image.add_(vector, stalled)
            vector = stretch_(image, 1.0, length + stalled)
            usable = usable & torch.isfinite(length)
        # The only wait for the device, once in a period.
        return _Estimate(vector, eigenvalue, shift) if bool(usable) else None

    def _method_state(self) -> dict[str, Any]:
        return {
            "vectors": self._memory.state(self.param_groups),
            "eigenvalue": self.eigenvalue,
            "shift": self._shift,
            "age": self._age,
        }

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self._memory.load(state["vectors"], self.param_groups)
        self.eigenvalue, self._shift, self._age = state["eigenvalue"], state["shift"], int(state["age"])
