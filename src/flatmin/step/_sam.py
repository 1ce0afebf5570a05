"""Sharpness-aware minimization."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "sam",
    "step",
    summary="Gradient at the point of steepest ascent within radius rho.",
    source="Foret, Kleiner, Mobahi, Neyshabur 2021, arXiv:2010.01412",
    gradients=2,
    copies=1,
    space={"rho": Range(0.01, 0.5, log=True)},
)
class SAM(Step):
    r"""Sharpness-aware minimization: the gradient at the point of steepest ascent.

    .. math:: w \leftarrow \text{base}\big(w, \nabla L(w + \epsilon)\big), \qquad
              \epsilon = \rho \, \nabla L(w) / \lVert \nabla L(w) \rVert_2

    with one norm over all parameters. With ``normalize=False`` (un-normalised SAM)
    :math:`\epsilon = \rho \nabla L(w)`.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, in units of the weights, >= 0; a group's own ``"rho"`` overrides
            it. 0 is the base optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers (BatchNorm statistics, spectral-norm vectors) stay as after the
            clean pass; ``None`` declares that there are none to protect.
        normalize: divide by the norm.
        replay_rng: draw the same dropout masks in both passes.
        sync: under DistributedDataParallel, ``"global"``: ascend along the gradient of the whole batch;
            ``"per_worker"``: each process along its own, as the paper's reference code does, at one reduction
            less. FSDP2 knows ``"global"`` only.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Foret, Kleiner, Mobahi, Neyshabur 2021, "Sharpness-Aware Minimization for Efficiently
    Improving Generalization", arXiv:2010.01412.

    Example:
        >>> import torch
        >>> from flatmin import SAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
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
        normalize: bool = True,
        replay_rng: bool = True,
        sync: str = "global",
    ) -> None:
        self.normalize = _check.boolean("normalize", normalize)
        self.needs_true_gradient = not normalize
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng, sync=sync)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        ascent = window.take_gradient()
        norm = ascent.norm()
        if self.normalize:
            ascent.scale_(lambda group: group["rho"], norm)
        else:
            ascent.scale_(lambda group: group["rho"] / window.scale, norm, divide=False)
        with window.moved(ascent):
            window.evaluate()
