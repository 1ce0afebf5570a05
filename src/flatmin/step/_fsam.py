"""Friendly sharpness-aware minimization."""

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
    "fsam",
    "step",
    summary="SAM that ascends along what this batch's gradient adds to the running mean of earlier ones.",
    source="Li, Zhou, He, Cheng, Huang 2024, arXiv:2403.12350",
    gradients=2,
    copies=3,
    space={"rho": Range(0.01, 0.5, log=True), "lam": Range(0.6, 0.99)},
)
class FriendlySAM(Step):
    r"""Friendly SAM: ascent along the batch's own part of the gradient.

    .. math::
        d_t = g_t - \sigma \, m_{t-1}, \qquad w \leftarrow \text{base}\big(w, \nabla L(w + \rho \, d_t / \lVert d_t
        \rVert)\big), \qquad m_t = \lambda \, m_{t-1} + (1 - \lambda) \, g_t

    with :math:`g_t = \nabla L(w)`, :math:`d_1 = m_1 = g_1` and one norm over all parameters. The running mean m
    stands for the gradient on all data; it is updated after its use, with the gradient itself.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. 0 everywhere is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        sigma: how much of the mean is taken away, >= 0. 0 is SAM, bit for bit.
        lam: memory of the mean, >= 0 and < 1.
        replay_rng: draw the same dropout masks in both passes.

    Where d is exactly zero the weights do not move before the second gradient. A step whose clean gradient is not
    finite leaves the mean as it was. A parameter without a gradient in a step keeps its mean.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Li, Zhou, He, Cheng, Huang 2024, "Friendly Sharpness-Aware Minimization", arXiv:2403.12350, and its
    released code.

    Example:
        >>> import torch
        >>> from flatmin.step import FriendlySAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, model=model)
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
        sigma: float = 1.0,
        lam: float = 0.9,
        replay_rng: bool = True,
    ) -> None:
        self.sigma = _check.number("sigma", sigma, low=0.0)
        self.lam = _check.number("lam", lam, low=0.0, high=1.0, open_high=True)
        # Gradients of steps with different loss scales meet in the mean.
        self.needs_true_gradient = self.sigma != 0.0
        self._memory = Lasting()
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        ascent = clean = window.take_gradient(keep=self.sigma != 0.0)
        if self.sigma != 0.0:
            if window.scale != 1.0:
                clean.mul_(1.0 / window.scale)
            ascent = self._memory.get("mean", clean).mul_(-self.sigma).add_(clean)
        norm = ascent.norm()
        ascent.scale_(lambda group: group["rho"], norm)
        with window.moved(ascent):
            window.evaluate()
        if self.sigma != 0.0:
            self._memory.keep("mean", self._memory.mixed("mean", clean, 1.0 - self.lam), norm)

    def _method_state(self) -> dict[str, Any]:
        return {"vectors": self._memory.state(self.param_groups)}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self._memory.load(state["vectors"], self.param_groups)
