"""LookSAM: sharpness-aware minimization with a second gradient in every k-th step only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction
from flatmin.step._memory import Memory
from flatmin.step._optimizer import Step
from flatmin.step._projection import along, normalize_
from flatmin.step._window import Window


@register(
    "looksam",
    "step",
    summary="SAM in every k-th step; in between the part of its gradient that changes slowly is used again.",
    source="Liu, Mai, Chen, Hsieh, You 2022, arXiv:2203.02714",
    gradients=lambda o: 1.0 + 1.0 / o["k"],
    copies=3,
    space={"rho": Range(0.01, 0.5, log=True), "alpha": Range(0.2, 1.0)},
)
class LookSAM(Step):
    r"""LookSAM: what SAM's gradient adds to the clean one, orthogonally, is used again for some steps.

    .. math::
        \text{every k-th step:}\quad & g_s = \nabla L(w + \rho \, g / \lVert g \rVert), \qquad
        g_v = g_s - \tfrac{\langle g_s, g \rangle}{\lVert g \rVert^2} g, \qquad w \leftarrow \text{base}(w, g_s) \\
        \text{otherwise:}\quad & w \leftarrow \text{base}\Big(w,\; g + \alpha \,
        \tfrac{\lVert g \rVert}{\lVert g_v \rVert} g_v\Big)

    with :math:`g = \nabla L(w)` and projection and norms over all parameters.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 everywhere is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        k: steps from one use of SAM to the next, >= 1, the first step included. 1 is SAM, bit for bit.
        alpha: weight of the reused part, >= 0.
        replay_rng: draw the same dropout masks in both passes.

    Where g_s has no part of its own beside g, up to rounding, nothing is reused. A step whose gradients are not
    finite leaves the reused part as it was. A parameter without a gradient in a step gets none of the reused part.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Liu, Mai, Chen, Hsieh, You 2022, "Towards Efficient and Scalable Sharpness-Aware Minimization",
    arXiv:2203.02714.

    Example:
        >>> import torch
        >>> from flatmin.step import LookSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = LookSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, k=5, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(5):
        ...     loss = opt.step(closure)
        >>> opt.evaluations
        6.0
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float = 0.05,
        *,
        model: nn.Module | None,
        k: int = 5,
        alpha: float = 0.7,
        replay_rng: bool = True,
    ) -> None:
        self.k = _check.integer("k", k, low=1)
        self.alpha = _check.number("alpha", alpha, low=0.0)
        self._count = 0
        self._memory = Memory()  # g_v / |g_v|
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        if self._count % self.k == 0:
            self._refresh(window)
        elif self.alpha != 0.0 and "aside" in self._memory:
            clean = window.take_gradient()
            norm = clean.norm()
            aside = self._memory.get("aside", clean)
            clean.add_(aside.mul_(torch.where(torch.isfinite(norm), self.alpha * norm, 0.0))).put()
        self._count += 1

    def _refresh(self, window: Window) -> None:
        clean = window.take_gradient(keep=self.k > 1)
        ascent = clean.copy() if self.k > 1 else clean
        ascent.scale_(lambda group: group["rho"], ascent.norm())
        with window.moved(ascent):
            window.evaluate()
        if self.k == 1:
            return
        perturbed = window.take_gradient()
        normalize_(clean)
        aside = clean.mul_(-along(perturbed, clean)).add_(perturbed)
        self._remember(aside, perturbed.norm())
        perturbed.put()

    @torch.no_grad()
    def _remember(self, aside: Direction, whole: Tensor) -> None:
        length = aside.norm()
        # Parallel gradients leave rounding errors here, which must not be blown up to the gradient's length.
        rounding = 16.0 * max((torch.finfo(bucket.values[0].dtype).eps for bucket in aside), default=0.0)
        aside.mul_(torch.where(length > rounding * whole, 1.0 / length, 0.0))
        usable = torch.isfinite(length) & torch.isfinite(whole)
        for bucket, old in zip(aside, self._memory.get("aside", aside), strict=True):
            pairs = zip(bucket.values, old.values, strict=True)
            bucket.values = [torch.where(usable.to(new.device), new, value) for new, value in pairs]
        self._memory.put("aside", aside)

    def _method_state(self) -> dict[str, Any]:
        return {"vectors": self._memory.state(self.param_groups), "count": self._count}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self._memory.load(state["vectors"], self.param_groups)
        self._count = int(state["count"])
