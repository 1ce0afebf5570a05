"""Adaptive sharpness-aware minimization."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "asam",
    "step",
    summary="SAM whose radius follows the size of each weight.",
    source="Kwon, Kim, Park, Choi 2021, arXiv:2102.11600",
    gradients=2,
    copies=1,
    space={"rho": Range(0.1, 2.0, log=True)},
)
class ASAM(Step):
    r"""Adaptive SAM: a radius measured relative to each weight, so that rescaling layers changes nothing.

    .. math:: \epsilon = \rho \, T^2 g / \lVert T g \rVert_2, \qquad
              T = \operatorname{diag}(|w_i| + \eta), \quad g = \nabla L(w)

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``.
        rho: radius in the rescaled norm, >= 0, about ten times SAM's; a group's own ``"rho"`` overrides it.
        model: the model whose buffers stay as after the clean pass, and whose names tell weights from
            biases; ``None`` declares that there are no buffers to protect.
        eta: added to \|w\|, >= 0. With 0 a zero weight never moves.
        scaled: which parameters T rescales. ``"weights"``: those whose name contains ``weight`` (BatchNorm
            scales too, biases not, for which T = 1), as the paper's code does; the names come from
            ``model`` or from a base built with named parameters. ``"all"``: every parameter, as
            davda54/sam does (there with eta = 0).
        replay_rng: draw the same dropout masks in both passes.
        sync: under DistributedDataParallel, ``"global"``: ascend along the gradient of the whole batch;
            ``"per_worker"``: each process along its own, as the paper's reference code does, at one reduction
            less. FSDP2 knows ``"global"`` only.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; also when
            ``scaled="weights"`` and a parameter has no name.

    Source: Kwon, Kim, Park, Choi 2021, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant
    Learning of Deep Neural Networks", arXiv:2102.11600.

    Example:
        >>> import torch
        >>> from flatmin import ASAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = ASAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, model=model)
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
        model: nn.Module | None,
        eta: float = 0.01,
        scaled: str = "weights",
        replay_rng: bool = True,
        sync: str = "global",
    ) -> None:
        self.eta = _check.number("eta", eta, low=0.0)
        self.scaled = _check.choice("scaled", scaled, ("weights", "all"))
        # Parameters, not their ids: a deep copy of the optimizer has other ids.
        self._unscaled: list[Tensor] = []
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng, sync=sync)

    def _prepare(self) -> None:
        self._find_unscaled(self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the base; its parameters need names where ``scaled="weights"``."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            self._find_unscaled(self.param_groups[before:])
        except ValueError:
            del self.param_groups[before:]
            raise

    def _find_unscaled(self, groups: list[Group]) -> None:
        if self.scaled == "all":
            return
        names: dict[int, str] = {}
        if self.model is not None:
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                names[id(parameter)] = f"{names.get(id(parameter), '')} {name}"
        for group in groups:
            for parameter, name in zip(group["params"], group.get("param_names", []), strict=False):
                names.setdefault(id(parameter), name)
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        "scaled='weights' needs the parameters' names to tell weights from biases: pass model=, "
                        "build the base from model.named_parameters(), or choose scaled='all'"
                    )
                if "weight" not in names[id(parameter)]:
                    self._unscaled.append(parameter)

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        ascent = window.take_gradient()
        unscaled = {id(parameter) for parameter in self._unscaled}
        self._rescale(ascent, unscaled)  # T g
        # Divided before the second T: T^2 g may leave the range of float32 where the perturbation does not.
        ascent.scale_(lambda group: group["rho"], ascent.norm())
        self._rescale(ascent, unscaled)
        with window.moved(ascent):
            window.evaluate()

    @torch.no_grad()
    def _rescale(self, direction: Direction, unscaled: set[int]) -> None:
        for bucket in direction:
            scaled = [index for index, leaf in enumerate(bucket.parameters) if id(leaf) not in unscaled]
            if not scaled:
                continue
            values = [bucket.values[index] for index in scaled]
            factors = [bucket.weights[index] for index in scaled]
            if self.eta:
                factors = list(torch._foreach_abs(factors))
                torch._foreach_add_(factors, self.eta)
            # With eta = 0, w in place of |w| gives the same |T g| and T^2 and needs no copy.
            torch._foreach_mul_(values, factors)
