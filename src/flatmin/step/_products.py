"""Products with the Hessian: exact, by differentiating a window's loss twice, or by finite differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin import _check
from flatmin.step._direction import Direction, Group, is_sharded
from flatmin.step._graph import gradient_graph
from flatmin.step._guard import modules_of
from flatmin.step._window import Window

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max

#: How the products are made.
PRODUCTS = ("exact", "difference")


def check_step(name: str, value: float | None, product: str, default: float) -> float:
    """The length of a finite difference's step, ``default`` where none is given; raise where there is none."""
    if value is None:
        return default
    if product == "exact":
        raise ValueError(f"{name} is the step of finite differences: it needs product='difference', got 'exact'")
    return _check.number(name, value, low=0.0, open_low=True)


def check_twice(model: nn.Module | None, groups: list[Group]) -> None:
    """Raise where a second differentiation cannot work."""
    if any(is_sharded(parameter) for group in groups for parameter in group["params"]):
        raise ValueError(
            "product must be 'difference' for sharded parameters, got 'exact': FSDP2's forward hides them from a "
            "second differentiation"
        )
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        raise ValueError(
            "product must be 'difference' with static_graph=True, got 'exact': DistributedDataParallel's first "
            "iteration allows one differentiation only"
        )


class Twice:
    """A window's loss, differentiated once and ready to be differentiated again."""

    def __init__(self, window: Window, groups: list[Group], model: nn.Module | None) -> None:
        check_twice(model, groups)
        before = window.evaluations
        with _lent_buffers(model):
            self.loss = window.loss()
        # A clean pass, of which nobody has taken the gradients of other optimizers' parameters yet.
        self._is_clean_pass = window.evaluations == before
        self._window, self._groups, self._model = window, groups, model
        every = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
        self._every = list(every.values())
        self.parameters, self.grads = gradient_graph(self.loss, self._every)
        window.evaluations += 1

    def gradient(self, *, everywhere: bool = True) -> Direction:
        """The gradient; with ``everywhere`` its mean over the processes of data parallelism."""
        return self.direction(self.parameters, self.grads, everywhere=everywhere)

    def product(self, vector: Direction) -> Direction:
        """H ``vector``, and its mean over the processes of data parallelism."""
        self.count()
        grads, values = self.pairs(vector)
        products: tuple[Tensor | None, ...] = ()
        if grads:
            products = torch.autograd.grad(
                grads, self.parameters, grad_outputs=values, retain_graph=True, allow_unused=True
            )
        found = [(p, h) for p, h in zip(self.parameters, products, strict=bool(products)) if h is not None]
        return self.direction([p for p, _ in found], [h for _, h in found])

    def backward(self, vector: Direction) -> None:
        """Make every ``.grad`` the gradient plus H ``vector``.

        One ordinary backward pass from all roots together, so that the hooks of data parallelism fire once for
        each parameter and reduce the sum.
        """
        self.count()
        for parameter in self._every:
            parameter.grad = None
        own = {id(parameter) for parameter in self._every}
        foreign = [p for p in self._model.parameters() if p.requires_grad and id(p) not in own] if self._model else []
        if self._is_clean_pass and foreign:
            torch.autograd.backward(self.loss, inputs=foreign, retain_graph=True)
        grads, values = self.pairs(vector)
        # Without the model nothing is known of other optimizers' parameters; in the clean pass they need some
        # gradient, and get that of the penalised loss.
        everything = self._is_clean_pass and self._model is None
        torch.autograd.backward(
            [self.loss, *grads],
            [torch.ones_like(self.loss), *values],
            inputs=None if everything else self.parameters,
        )

    def count(self, gradients: float = 1.0) -> None:
        """Add to the window's gradient evaluations."""
        self._window.evaluations += gradients

    def pairs(self, vector: Direction, *, constant: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that depend on weights, and the vector's entries in their dtype.

        With ``constant`` those of all parameters, also where the vector has none.
        """
        known = dict(_entries(vector))
        grads, values = [], []
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            value = known.get(id(parameter))
            if value is not None:
                value = (torch.view_as_complex(value) if parameter.is_complex() else value).to(grad.dtype)
            if constant or (grad.requires_grad and value is not None):
                grads.append(grad)
                values.append(torch.zeros_like(grad) if value is None else value)
        return grads, values

    def direction(self, parameters: list[Tensor], values: Sequence[Tensor], *, everywhere: bool = True) -> Direction:
        """A vector from its entries; with ``everywhere`` its mean over the processes of data parallelism."""
        workers = self._model if everywhere and isinstance(self._model, DistributedDataParallel) else None
        for parameter in self._every:
            # Processes that reach different parameters must still reduce the same ones.
            parameter.grad = None if workers is None else torch.zeros_like(parameter, requires_grad=False)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value.detach()
        direction = Direction.take(self._groups).copy()  # what stands in the graph must not change in place
        if workers is not None:
            _average_(direction, workers)
        return direction


@contextmanager
def _lent_buffers(model: nn.Module | None) -> Iterator[None]:
    """Copies in the places of the buffers, for a graph to keep.

    BatchNorm's graph holds its running statistics and refuses to be differentiated once they have been written;
    but the window puts the model's own back right after the forward pass.
    """
    places = [(module._buffers, dict(module._buffers)) for module in modules_of(model) if module._buffers]
    copies: dict[int, Tensor] = {}
    for place, content in places:
        for name, buffer in content.items():
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                place[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for place, content in places:
            place.update(content)


def stretch_(direction: Direction, length: float, norm: Tensor) -> Direction:
    """Give ``direction``, whose norm is ``norm``, another length; zero where the norm is not finite.

    Unlike ``Direction.scale_`` it knows nothing of ``maximize``.
    """
    finite = torch.isfinite(norm)
    if norm.device.type == "cpu" and not finite:
        direction.buckets = []
    direction.mul_((length / norm.clamp(min=_TINY)).clamp(max=_HUGE))
    if norm.device.type != "cpu":
        with torch.no_grad():
            for bucket in direction:
                for value in bucket.values:
                    value.masked_fill_(~finite.to(value.device), 0.0)  # selected, since 0 * inf would be NaN
    return direction


def difference(window: Window, clean: Direction, vector: Direction, norm: Tensor, length: float) -> Direction:
    """H ``vector`` from the gradient ``length`` further along it; ``norm`` is the vector's, ``clean`` stays."""
    with window.moved(stretch_(vector, length, norm)):
        window.evaluate()
    return window.take_gradient(keep=True).add_(clean, -1.0).mul_(norm / length)


def _entries(direction: Direction) -> Iterator[tuple[int, Tensor]]:
    for bucket in direction:
        for parameter, value in zip(bucket.parameters, bucket.values, strict=True):
            yield id(parameter), value


@torch.no_grad()
def _average_(direction: Direction, workers: DistributedDataParallel) -> None:
    """Replace by the mean over processes."""
    group = workers.process_group
    for bucket in direction:
        flat = torch.cat([value.reshape(-1) for value in bucket.values])
        torch.distributed.all_reduce(flat, group=group)
        flat /= torch.distributed.get_world_size(group)
        parts = torch.split(flat, [value.numel() for value in bucket.values])
        for value, part in zip(bucket.values, parts, strict=True):
            value.copy_(part.view_as(value))
