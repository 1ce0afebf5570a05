"""Sharpness-aware minimization of the normalisation layers only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin._registry import Range, register
from flatmin.step._direction import Bucket, Direction, Group
from flatmin.step._guard import modules_of
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "samon",
    "step",
    summary="SAM that moves only the scales and shifts of the normalisation layers.",
    source="Mueller, Vlaar, Rolnick, Hein 2023, arXiv:2306.04226",
    gradients=2,
    copies=0,
    space={"rho": Range(0.05, 2.0, log=True)},
)
class SAMON(Step):
    r"""SAM-ON: only the normalisation layers are perturbed, all parameters are trained.

    .. math:: w \leftarrow \text{base}\big(w, \nabla L(w + \epsilon)\big), \qquad
              \epsilon = \rho \, \frac{P g}{\lVert P g \rVert_2}, \quad g = \nabla L(w)

    where P keeps the entries that belong to a normalisation layer's scale and shift. The norm is over these alone.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation, >= 0; a group's own ``"rho"`` overrides it. It has to be larger than SAM's,
            since few weights share it; the default is a place to start from. 0 is the base optimizer, bit for bit,
            at one gradient a step.
        model: the model, whose normalisation layers are looked for: BatchNorm, InstanceNorm, LayerNorm, GroupNorm,
            RMSNorm, and every other module with a class, its own or one that it derives from, whose name contains
            "Norm"; of each the parameters that are its own and not a submodule's.
        replay_rng: draw the same dropout masks in both passes.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; also where ``model`` has no
            normalisation layer with parameters that ``base`` optimizes.

    Source: Mueller, Vlaar, Rolnick, Hein 2023, "Normalization Layers Are All That Sharpness-Aware Minimization
    Needs", arXiv:2306.04226.

    Example:
        >>> import torch
        >>> from flatmin.step import SAMON
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
        >>> opt = SAMON(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
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
        rho: float = 0.5,
        *,
        model: nn.Module,
        replay_rng: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be the torch.nn.Module whose layers to find, got {type(model).__name__}")
        # Parameters, not their ids: a deep copy of the optimizer has other ids.
        self._affine = _parameters_of_norms(model)
        if isinstance(base, Optimizer):
            own = {id(parameter) for group in base.param_groups for parameter in group["params"]}
            if not any(id(parameter) in own for parameter in self._affine):
                raise ValueError(
                    "model must have a normalisation layer with a scale or shift that base optimizes, got none: "
                    "use SAM, which moves all parameters"
                )
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base; layers that the model has got since are found."""
        super().add_param_group(param_group)
        self._affine = _parameters_of_norms(self.model)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        gradient = window.take_gradient()
        whole = gradient.norm()
        affine = {id(parameter) for parameter in self._affine}
        ascent = Direction([part for bucket in gradient if (part := _part(bucket, affine)).values])
        gradient.buckets = []  # the rest is not needed during the evaluation
        # Nothing moves where any gradient is not finite, be it that of another layer.
        ascent.scale_(lambda group: group["rho"], torch.where(torch.isfinite(whole), ascent.norm().to(whole), whole))
        with window.moved(ascent):
            window.evaluate()


def _parameters_of_norms(model: nn.Module | None) -> list[Tensor]:
    return [
        parameter
        for module in modules_of(model)
        if any("Norm" in kind.__name__ for kind in type(module).__mro__)
        for parameter in module._parameters.values()
        if parameter is not None
    ]


def _part(bucket: Bucket, wanted: set[int]) -> Bucket:
    """The bucket's tensors of the ``wanted`` parameters."""
    places = [place for place, parameter in enumerate(bucket.parameters) if id(parameter) in wanted]
    lists = ([each[place] for place in places] for each in (bucket.parameters, bucket.weights, bucket.values))
    parameters, weights, values = lists
    return Bucket(bucket.group, parameters, weights, values, bucket.shards)
