"""Weight noise, also known as random weight perturbation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._memory import Noise
from flatmin.step._noisy import drawing, load_noise_state, noise_state, scale_by_filters, smooth
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "noise",
    "step",
    summary="Gradient at weights with Gaussian noise, applied to the weights without it.",
    source="Li, Tao, Yan et al. 2024, arXiv:2404.00357",
    gradients=lambda o: 1.0 if o["mix"] == 1 else 1.0 + o["samples"] * (2 if o["antithetic"] else 1),
    copies=1,
    space={"sigma": Range(0.001, 0.1, log=True)},
)
class WeightNoise(Step):
    r"""Weight noise: gradients at randomly shifted weights, in expectation those of the smoothed loss.

    .. math:: w \leftarrow \text{base}\Big(w,\; \mu \, \nabla L(w) +
              \frac{1 - \mu}{M} \sum_{m=1}^{M} \nabla L(w + \sigma S n_m)\Big), \qquad n_m \sim N(0, I)

    With :math:`S = I` its expectation is the gradient of
    :math:`L + (1 - \mu) (\sigma^2 / 2) \operatorname{tr} H + O(\sigma^4)`.

    One step takes 1 + ``samples`` gradients, 1 + 2 ``samples`` if ``antithetic``. The first of them, at w itself,
    contributes only if ``mix`` > 0: without it the same rule in a hand-written loop takes one less.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``.
        sigma: standard deviation of the noise, >= 0; a group's own ``"sigma"`` overrides it. 0 is the base
            optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        scale: ``"absolute"``: S = 1. ``"filter"``: each entry is multiplied by the norm of its filter (the row of
            the first dimension), in tensors with fewer than two dimensions by the tensor's norm.
        mix: share of the clean gradient, from 0 to 1. 1 is the base optimizer.
        samples: shifts per step, >= 1.
        antithetic: evaluate at w - e too for each shift e, which cancels the odd orders of the noise.
        seed: of the noise, which depends on nothing else and not on torch's own generators.
        replay_rng: draw the same dropout masks in all passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Li, Tao, Yan, Lei, Wu, Fang, He, Huang 2024, "Revisiting Random Weight Perturbation for Efficiently
    Improving Generalization", arXiv:2404.00357, for the filter-wise scale and the mixture (theirs takes the two
    gradients on different batches); the idea itself is older.

    Example:
        >>> import torch
        >>> from flatmin.step._weight_noise import WeightNoise
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = WeightNoise(torch.optim.SGD(model.parameters(), lr=0.1), sigma=0.01, model=model)
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
        sigma: float = 0.01,
        *,
        model: nn.Module | None,
        scale: str = "absolute",
        mix: float = 0.0,
        samples: int = 1,
        antithetic: bool = False,
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.scale = _check.choice("scale", scale, ("absolute", "filter"))
        self.mix = _check.number("mix", mix, low=0.0, high=1.0)
        self.samples = _check.integer("samples", samples, low=1)
        self.antithetic = _check.boolean("antithetic", antithetic)
        self._noise = Noise(_check.integer("seed", seed, low=0))
        super().__init__(base, model=model, defaults={"sigma": sigma}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        _check.number("sigma", group["sigma"], low=0.0)

    def _replace_gradient(self, window: Window) -> None:
        if self.mix == 1.0 or not any(group["sigma"] for group in self.param_groups):
            return
        with drawing(self._noise):
            smooth(window, self._shift, samples=self.samples, antithetic=self.antithetic, mix=self.mix)

    def _shift(self, like: Direction, norm: Tensor) -> Direction:
        shift = self._noise.normal(like)
        if self.scale == "filter":
            scale_by_filters(shift)
        shift.scale_(lambda group: group["sigma"], norm, divide=False)
        return shift

    def _method_state(self) -> dict[str, Any]:
        return noise_state(self._noise)

    def _load_method_state(self, state: dict[str, Any]) -> None:
        load_noise_state(self._noise, state)
