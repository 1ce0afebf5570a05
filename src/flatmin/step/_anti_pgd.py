"""Perturbed gradient descent with anticorrelated noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._memory import Noise
from flatmin.step._noisy import drawing, load_noise_state, noise_state, rademacher, smooth
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "antipgd",
    "step",
    summary="Gradient descent with anticorrelated noise, seen from the iterate without noise.",
    source="Orvieto, Kersting, Proske, Bach, Lucchi 2022, arXiv:2202.02831",
    gradients=2,  # one of them at w itself, which only tells whether the window's gradient is finite
    copies=1,
    space={"sigma": Range(0.001, 0.2, log=True)},
)
class AntiPGD(Step):
    r"""Anti-PGD: gradient descent with injected noise whose increments are anticorrelated.

    .. math:: w_{t+1} = w_t - \eta \nabla L(w_t) + (\xi_{t+1} - \xi_t), \qquad
              \xi_t \text{ independent, mean } 0, \text{ covariance } \sigma^2 I

    With :math:`y_t = w_t - \xi_t` this is :math:`y_{t+1} = y_t - \eta \nabla L(y_t + \xi_t)`, and that is what the
    step does: the live weights are y, the gradient is taken at :math:`y + \xi` with fresh noise in every step, and
    the weights at the end are those without noise. It is exact for SGD, with momentum too. Weight decay acts on
    y, where in the first form it would act on w. In expectation a step follows
    :math:`L + (\sigma^2 / 2) \operatorname{tr} H + O(\sigma^4)`.

    It takes two gradients a step, of which that at y itself does not enter the update.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``.
        sigma: standard deviation of each entry of the noise, >= 0; a group's own ``"sigma"`` overrides it. 0 is
            the base optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        noise: ``"rademacher"``, entries of size sigma with random signs, as the theory takes them, or
            ``"gaussian"``: then it is ``WeightNoise``.
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in both passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Orvieto, Kersting, Proske, Bach, Lucchi 2022, "Anticorrelated Noise Injection for Improved
    Generalization", arXiv:2202.02831.

    Example:
        >>> import torch
        >>> from flatmin.step._anti_pgd import AntiPGD
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = AntiPGD(torch.optim.SGD(model.parameters(), lr=0.1), sigma=0.01, model=model)
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
        sigma: float = 0.05,
        *,
        model: nn.Module | None,
        noise: str = "rademacher",
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.noise = _check.choice("noise", noise, ("rademacher", "gaussian"))
        self._noise = Noise(_check.integer("seed", seed, low=0))
        super().__init__(base, model=model, defaults={"sigma": sigma}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        _check.number("sigma", group["sigma"], low=0.0)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["sigma"] for group in self.param_groups):
            return
        with drawing(self._noise):
            smooth(window, self._shift)

    def _shift(self, like: Direction, norm: Tensor) -> Direction:
        shift = rademacher(self._noise, like) if self.noise == "rademacher" else self._noise.normal(like)
        shift.scale_(lambda group: group["sigma"], norm, divide=False)
        return shift

    def _method_state(self) -> dict[str, Any]:
        return noise_state(self._noise)

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)
