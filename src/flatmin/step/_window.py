"""One training step's window: its clean gradient, moved weights, and evaluations at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatmin.step._direction import Bucket, Direction, Group, is_sharded
from flatmin.step._graph import hold_backward
from flatmin.step._guard import Buffers, ForeignGradients, Generators


class Backup:
    """Storage for the weights while they are moved, kept from step to step."""

    def __init__(self) -> None:
        self._store: dict[int, Tensor] = {}
        # Which copies serve which list of parameters, so that an ordinary step looks nothing up.
        self._lists: dict[tuple[int, ...], tuple[list[torch.Size], list[Tensor]]] = {}

    def copy(self, bucket: Bucket) -> list[Tensor]:
        """A copy of the bucket's weights; valid until the next call that names the same parameters."""
        key = tuple(map(id, bucket.parameters))
        shapes = [weight.shape for weight in bucket.weights]
        known_shapes, copies = self._lists.get(key, ([], []))
        # All of a bucket's weights have one dtype and device; `model.to()` changes them under the same ids.
        if known_shapes != shapes or not _alike(copies[0], bucket.weights[0]):
            copies = []
            for parameter, weight in zip(bucket.parameters, bucket.weights, strict=True):
                copy = self._store.get(id(parameter))
                if copy is None or copy.shape != weight.shape or not _alike(copy, weight):
                    copy = self._store[id(parameter)] = torch.empty_like(weight, requires_grad=False)
                copies.append(copy)
            if len(self._lists) > 64:  # gradients that come and go (routing) make many lists
                self._lists.clear()
            self._lists[key] = shapes, copies
        torch._foreach_copy_(copies, bucket.weights)
        return copies

    def keep_only(self, identities: set[int]) -> None:
        """Forget parameters that no longer belong to the optimizer."""
        if len(self._store) > len(identities):
            self._store = {key: value for key, value in self._store.items() if key in identities}
            self._lists.clear()


class Window:
    """What a method sees of one step: take the clean gradient, move, evaluate.

    ``evaluate`` recomputes the gradient of the whole window at the weights as they are; ``scale`` is the
    loss scale that all gradients carry.
    """

    def __init__(
        self,
        evaluate: Callable[[], Any],  # a closure's loss, or whatever a loop's function returns
        *,
        groups: list[Group],
        modules: list[nn.Module],
        backup: Backup,
        start: Generators | None,
        scale: float = 1.0,
        plant: bool = False,
        clean: Tensor | None = None,
    ) -> None:
        self.scale = scale
        self.evaluations = 0.0
        self._clean = clean
        self._evaluate = evaluate
        self._groups = groups
        self._backup = backup
        self._start = start
        self._after = Buffers(modules)
        own = {id(parameter) for group in groups for parameter in group["params"]}
        backup.keep_only(own)
        self._foreign = ForeignGradients(modules, own)
        self._plant = plant

    def take_gradient(self, *, keep: bool = False) -> Direction:
        """The gradient that stands in ``.grad`` now, moved out of it.

        ``keep`` makes it outlive a further evaluation: data parallelism may keep ``.grad`` in memory of its
        own, which the next backward pass writes again.
        """
        gradient = Direction.take(self._groups)
        return gradient.copy() if keep else gradient

    def gradient(self, *, keep: bool = False) -> Direction:
        """Evaluate at the weights as they are, and take the gradient."""
        self.evaluate()
        return self.take_gradient(keep=keep)

    def loss(self) -> Tensor:
        """The window's loss at the weights as they are, with its graph and without ``backward`` being run.

        It carries the loss scale. Whoever differentiates it adds to ``evaluations`` what that costs: a
        gradient and a product with the Hessian are 2 more.
        """
        if self._clean is not None:
            loss, self._clean = self._clean, None
            return loss
        with hold_backward() as held:
            self.evaluate()
        if held.total is None:
            raise RuntimeError("evaluate() must call backward() on the window's loss")
        return held.total

    @contextmanager
    def moved(self, direction: Direction, factor: float = 1.0, *, keep: bool = False) -> Iterator[None]:
        """Stand at w + factor * direction in the block; afterwards, also after an error, at w bit for bit.

        The direction is used up, so that its memory is free during the evaluation, unless ``keep``.
        """
        buckets = [bucket for bucket in direction.buckets if bucket.values]
        if not keep:
            direction.buckets = []
        moved = [bucket.weights for bucket in buckets]
        with torch.no_grad():
            copies = [self._backup.copy(bucket) for bucket in buckets]
        try:
            with torch.no_grad():
                while buckets:
                    _add(buckets.pop(), factor)
            torch.clear_autocast_cache()
            yield
        finally:
            with torch.no_grad():
                for weights, copy in zip(moved, copies, strict=True):
                    torch._foreach_copy_(weights, copy)
            # Within one autocast region the low-precision casts of the weights are cached; the cache does
            # not notice that the weights have moved.
            torch.clear_autocast_cache()

    def evaluate(self) -> Any:
        """Replace every ``.grad`` by the window's gradient at the weights as they are; what the loop returns."""
        self._foreign.clear()
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = None
        planted = _Planted(self._groups) if self._plant else None
        if self._start is not None:
            self._start.restore()
        try:
            with torch.enable_grad():
                returned = self._evaluate()
        finally:
            self._after.restore()
            self._foreign.restore()
        self.evaluations += 1
        if planted is not None:
            planted.check()
            self._plant = False
        return returned


class _Planted:
    """A mark in one small ``.grad`` that a closure which zeroes its gradients wipes out.

    A closure that does not (accumulation inside Lightning or Accelerate, a forgotten ``zero_grad``) would
    leave the perturbed gradient incomplete or wrong without a word.
    """

    def __init__(self, groups: list[Group]) -> None:
        small = [
            parameter
            for group in groups
            for parameter in group["params"]
            if parameter.requires_grad
            and parameter.is_floating_point()
            and parameter.numel() > 0
            and not is_sharded(parameter)  # has no single value to look at
        ]
        self._parameter = min(small, key=lambda parameter: int(parameter.numel()), default=None)
        if self._parameter is not None:
            self._mark = torch.finfo(self._parameter.dtype).max / 4
            self._parameter.grad = torch.full_like(self._parameter, self._mark, requires_grad=False)
            self._grad = self._parameter.grad

    def check(self) -> None:
        """Raise if the mark is still there."""
        if self._parameter is None or self._parameter.grad is not self._grad:
            return
        if bool((self._grad > self._mark / 2).all()):
            self._parameter.grad = None
            raise RuntimeError(
                "the closure does not zero the gradients: it must call zero_grad() before backward(). If the "
                "loop accumulates over several batches, use begin_window() and transform(evaluate) instead"
            )


def _alike(copy: Tensor, weight: Tensor) -> bool:
    return copy.dtype == weight.dtype and copy.device == weight.device


def _add(bucket: Bucket, factor: float) -> None:
    if bucket.weights[0].dtype == bucket.values[0].dtype:
        torch._foreach_add_(bucket.weights, bucket.values, alpha=factor)
        return
    for weight, value in zip(bucket.weights, bucket.values, strict=True):
        weight.copy_(weight.to(value.dtype).add_(value, alpha=factor))  # summed in float32, rounded once
