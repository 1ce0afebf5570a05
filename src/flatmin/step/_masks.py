"""Products with parts of the Hessian: what the activations' second derivative makes, and what remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.step._direction import Direction
from flatmin.step._guard import modules_of
from flatmin.step._products import Twice

#: The whole Hessian, or the Gauss-Newton part with a part of the rest.
MASKS = ("whole", "diagonal", "off_diagonal")

_SMOOTH = (nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.LogSigmoid)
_PIECEWISE_LINEAR = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh)


def check_mask(mask: str, product: str, model: nn.Module | None) -> None:
    """Raise where ``mask`` cannot be had."""
    if mask == "whole":
        return
    if product != "exact":
        raise ValueError(f"mask={mask!r} needs product='exact', got {product!r}: a difference sees the whole Hessian")
    if model is None:
        raise ValueError(f"mask={mask!r} needs model=, whose layers and activations it tells apart, got None")
    if mask == "off_diagonal":
        for module in model.modules():
            activation = type(module).__module__ == "torch.nn.modules.activation"
            if activation and not isinstance(module, (*_SMOOTH, *_PIECEWISE_LINEAR)):
                known = ", ".join(kind.__name__ for kind in (*_SMOOTH, *_PIECEWISE_LINEAR))
                raise ValueError(f"mask='off_diagonal' knows the activations {known}, got {type(module).__name__}")


@contextmanager
def without_second_derivatives(model: nn.Module | None) -> Iterator[None]:
    """Activation modules keep value and first derivative in the block; their second derivative is zero."""
    smooth = [module for module in modules_of(model) if isinstance(module, _SMOOTH)]
    own = [vars(module).get("forward") for module in smooth]
    for module in smooth:
        vars(module)["forward"] = _linearized(module.forward)
    try:
        yield
    finally:
        for module, forward in zip(smooth, own, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def _linearized(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            value = activation(point.clone())  # it may work in place, which a leaf does not allow
            (slope,) = torch.autograd.grad(value.sum(), point)
        return value.detach() + slope * (x - x.detach())

    return forward


@contextmanager
def outputs_of(model: nn.Module | None) -> Iterator[list[Tensor]]:
    """What the model's forward passes in the block return."""
    outputs: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise TypeError(f"mask='diagonal' needs a model that returns one tensor, got {type(output).__name__}")
        outputs.append(output)

    if model is None:
        raise ValueError("model is required")
    handle = model.register_forward_hook(note)
    try:
        yield outputs
    finally:
        handle.remove()


def diagonal_product(twice: Twice, outputs: list[Tensor], model: nn.Module | None, vector: Direction) -> Direction:
    """G ``vector``, and from the rest of the Hessian only the blocks of one layer with itself.

    The loss must depend on the parameters through ``outputs`` alone.
    """
    gauss_newton = _GaussNewton(twice, outputs)
    grads, values = twice.pairs(vector, constant=True)
    known = {id(p): (p, g, v) for p, g, v in zip(twice.parameters, grads, values, strict=True)}
    totals = dict(zip(known, gauss_newton(twice.parameters, values), strict=True))
    twice.count()
    for layer in _layers(model):
        block = [known.pop(id(p)) for p in layer if id(p) in known]
        curved = [(g, v) for _, g, v in block if g.requires_grad]
        if not curved:
            continue
        parameters = [p for p, _, _ in block]
        whole = torch.autograd.grad(
            [g for g, _ in curved],
            parameters,
            grad_outputs=[v for _, v in curved],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        linear = gauss_newton(parameters, [v for _, _, v in block])
        for p, h, part in zip(parameters, whole, linear, strict=True):
            totals[id(p)] = totals[id(p)] + h - part
        twice.count(2.0)
    return twice.direction(twice.parameters, [totals[id(p)] for p in twice.parameters])


class _GaussNewton:
    """Products J' H_z J v, with J the derivative of the outputs and H_z the loss's Hessian in them."""

    def __init__(self, twice: Twice, outputs: list[Tensor]) -> None:
        self._twice, self._outputs = twice, outputs
        create: Any = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        self._slopes = torch.autograd.grad(twice.loss, outputs, **create)
        # J' u is linear in u: its derivative in u along v is J v.
        self._inputs = [torch.zeros_like(output, requires_grad=True) for output in outputs]
        pulled = torch.autograd.grad(outputs, twice.parameters, self._inputs, **create)
        self._pulled = dict(zip(map(id, twice.parameters), pulled, strict=True))

    def __call__(self, parameters: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        keep: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        reached = [(self._pulled[id(p)], v) for p, v in zip(parameters, values, strict=True)]
        reached = [(pulled, v) for pulled, v in reached if pulled.requires_grad]
        curved = [slope for slope in self._slopes if slope.requires_grad]
        if not reached or not curved:
            return [torch.zeros_like(v) for v in values]
        pushed = torch.autograd.grad([p for p, _ in reached], self._inputs, [v for _, v in reached], **keep)
        along = [each for slope, each in zip(self._slopes, pushed, strict=True) if slope.requires_grad]
        bent = torch.autograd.grad(curved, self._outputs, along, **keep)
        return list(torch.autograd.grad(self._outputs, parameters, bent, **keep))


def _layers(model: nn.Module | None) -> list[list[Tensor]]:
    """The parameters that stand in one module together; a shared one belongs to the first that is met."""
    return [[p for p in module._parameters.values() if p is not None] for module in modules_of(model)]
