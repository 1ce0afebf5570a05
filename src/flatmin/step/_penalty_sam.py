"""Gradient penalties: the first-order relatives of sharpness-aware minimization."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction
from flatmin.step._masks import MASKS, check_mask, diagonal_product, outputs_of, without_second_derivatives
from flatmin.step._optimizer import Step
from flatmin.step._products import PRODUCTS, Twice, check_step, check_twice
from flatmin.step._window import Window


@register(
    "psam",
    "step",
    summary="Penalty on the gradient's norm, by a second differentiation or a finite difference.",
    source="Dauphin, Agarwala, Mobahi 2024, arXiv:2401.10809; Zhao, Zhang, Hu 2022, arXiv:2202.03599",
    gradients=lambda o: 2.0 if o["product"] == "difference" else 3.0 if o["mask"] == "whole" else 4.0,
    copies=2,
    space={"rho": Range(0.001, 0.5, log=True)},
)
class PenaltySAM(Step):
    r"""Gradient penalty: the loss plus rho times its gradient's norm, or the norm's square.

    .. math:: L + \rho \lVert g \rVert^p, \qquad
              w \leftarrow \text{base}\big(w,\; g + H v\big), \quad v = \rho \, p \, \lVert g \rVert^{p-2} g

    with :math:`g = \nabla L(w)` and H the Hessian of L at w. With p = 1 the update agrees with SAM's to first order
    in rho, with p = 2 with un-normalised SAM's of radius 2 rho.

    ``product="exact"`` differentiates twice: H then contains the second derivatives of the activations, which are
    zero almost everywhere for ReLU. ``product="difference"`` takes
    :math:`(1 - a) g + a \nabla L(w + r g / \lVert g \rVert)` with :math:`a = \rho p \lVert g \rVert^{p-1} / r`,
    which sees their kinks; a = 1 is SAM.

    ``mask`` takes parts of H, with ``product="exact"`` only. H is the Gauss-Newton matrix G, without second
    derivatives of the network, plus a rest N. ``"off_diagonal"`` sets the activations' second derivative to zero
    in the penalty: G remains, and from N what lies between different layers and does not pass through that
    derivative. ``"diagonal"`` takes G and from N the blocks of each layer with itself. These are instruments to
    study what the parts do; they take gradients at w twice, and ``"diagonal"`` two products for each layer.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: weight of the penalty, >= 0; a group's own ``"rho"`` overrides it, and scales its entries of v. 0 is the
            base optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass, under data parallelism the
            ``DistributedDataParallel`` module; ``None`` declares that there are no buffers to protect.
        power: p, 1 or 2.
        product: ``"exact"`` or ``"difference"``.
        r: length of the finite difference's step, > 0, in units of the weights; 0.1 where not given. Only with
            ``product="difference"``.
        mask: ``"whole"``, ``"diagonal"`` or ``"off_diagonal"``. ``"off_diagonal"`` knows the activations that are
            modules of ``model``, not calls of functions inside its ``forward``; for ``"diagonal"`` the loss must
            depend on the parameters through the one tensor that ``model`` returns. Both work with ``model`` alone.
        replay_rng: draw the same dropout masks in all passes.
        sync: under DistributedDataParallel, ``"global"``: the penalty on the gradient of the whole batch;
            ``"per_worker"``: each process penalises its own, and the means of their gradients are taken; only with
            ``product="exact"``. FSDP2 knows ``"global"`` and ``product="difference"`` only.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it.

    Source: Dauphin, Agarwala, Mobahi 2024, "Neglected Hessian component explains mysteries in sharpness
    regularization", arXiv:2401.10809 (exact); Zhao, Zhang, Hu 2022, "Penalizing Gradient Norm for Efficiently
    Improving Generalization in Deep Learning", arXiv:2202.03599 (difference).

    Example:
        >>> import torch
        >>> from flatmin.step import PenaltySAM
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> opt = PenaltySAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
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
        power: int = 1,
        product: str = "exact",
        r: float | None = None,
        mask: str = "whole",
        replay_rng: bool = True,
        sync: str = "global",
    ) -> None:
        self.power = _check.integer("power", power, low=1, high=2)
        self.product = _check.choice("product", product, PRODUCTS)
        self.r = check_step("r", r, product, default=0.1)
        self.mask = _check.choice("mask", mask, MASKS)
        check_mask(mask, product, model)
        if product == "difference" and sync == "per_worker":
            raise ValueError(
                "sync must be 'global' with product='difference', got 'per_worker': each process's clean gradient "
                "enters the update and would stay unreduced; use product='exact'"
            )
        self.needs_true_gradient = power == 2
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng, sync=sync)
        if product == "exact":
            check_twice(model, self.param_groups)

    @property
    def needs_graph(self) -> bool:  # type: ignore[override]  # without a penalty the base's one pass is enough
        """Whether the coming step differentiates twice."""
        return (self.product, self.mask) == ("exact", "whole") and any(group["rho"] for group in self.param_groups)

    def _local_gradients(self) -> AbstractContextManager[Any]:
        # The exact penalty's only backward pass is the one that must be reduced, whoever's gradient is penalised.
        return nullcontext() if self.product == "exact" else super()._local_gradients()

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        if self.product == "difference":
            self._by_difference(window)
            return
        if self.mask != "whole":
            self._masked(window)
            return
        twice = Twice(window, self.param_groups, self.model)
        twice.backward(self._vector(window, twice))

    def _vector(self, window: Window, twice: Twice) -> Direction:
        vector = twice.gradient(everywhere=self.sync == "global")
        norm = vector.norm()
        if self.power == 1:
            vector.scale_(lambda group: group["rho"], norm)
        else:
            vector.scale_(lambda group: 2.0 * group["rho"] / window.scale, norm, divide=False)
        return vector

    def _masked(self, window: Window) -> None:
        total = window.take_gradient(keep=True)
        if self.mask == "diagonal":
            with outputs_of(self.model) as outputs:
                twice = Twice(window, self.param_groups, self.model)
            product = diagonal_product(twice, outputs, self.model, self._vector(window, twice))
        else:
            # Around the product too: checkpointed layers run forward once more there.
            with without_second_derivatives(self.model):
                twice = Twice(window, self.param_groups, self.model)
                product = twice.product(self._vector(window, twice))
        total.add_(product).put()

    def _by_difference(self, window: Window) -> None:
        clean = window.take_gradient(keep=True)
        norm = clean.norm()
        # The largest rho sets the share; groups with a smaller one move less.
        rho = max(group["rho"] for group in self.param_groups)
        share: float | Tensor = rho / self.r
        if self.power == 2:
            share = 2.0 * norm / window.scale * share
            share = torch.where(torch.isfinite(norm), share, 1.0)
        ascent = clean.copy()
        ascent.scale_(lambda group: self.r * (group["rho"] / rho), norm)
        with window.moved(ascent):
            window.evaluate()
        if isinstance(share, float) and share == 1.0:
            return
        window.take_gradient().mul_(share).add_(clean, 1.0 - share).put()
