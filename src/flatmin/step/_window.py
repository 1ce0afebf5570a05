"""One training step's window: its clean gradient, moved weights, and evaluations at them."""

from __future__ import annotations

import warnings
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
        self._told = False

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

    def tell_if_rounded_away(self, bucket: Bucket) -> None:
        """Warn, once, when rounding swallows most of a perturbation of 16-bit weights."""
        if self._told or bucket.weights[0].dtype.itemsize > 2:
            return
        self._told = True
        copies = [self._store[id(parameter)] for parameter in bucket.parameters]
        entries = sum(weight.numel() for weight in bucket.weights)
        moved = sum(int((weight != copy).sum()) for weight, copy in zip(bucket.weights, copies, strict=True))
        if entries > 0 and moved < entries / 2:
            dtype = str(bucket.weights[0].dtype).removeprefix("torch.")
            warnings.warn(
                f"the perturbation moves only {moved} of {entries} {dtype} weights, the others are rounded back: keep "
                "the weights in float32 (autocast casts them where it helps), or take a larger rho",
                stacklevel=2,
            )

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

    def take_gradient(self, *, keep: bool = False) -> Direction:
        """The gradient that stands in ``.grad`` now, moved out of it.

        ``keep`` makes it outlive a further evaluation: data parallelism may keep ``.grad`` in memory of its
        own, which the next backward pass writes again.
        """
        gradient = Direction.take(self._groups)
        return gradient.copy() if keep else gradient

    def gradient(self, *, keep: bool = False, function: Callable[[], Any] | None = None) -> Direction:
        """Evaluate at the weights as they are, and take the gradient; ``function`` as in :meth:`evaluate`."""
        self.evaluate(function)
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
            self.evaluate(held=True)
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
        pairs = list(zip(moved, copies, strict=True))
        try:
            with torch.no_grad():
                while buckets:
                    bucket = buckets.pop()
                    _add(bucket, factor)
                    self._backup.tell_if_rounded_away(bucket)
                    del bucket
            torch.clear_autocast_cache()
            yield
        finally:
            try:
                _put_back(pairs)
            except BaseException:  # Ctrl-C in the midst of it
                _put_back(pairs)
                raise
            # Within one autocast region the low-precision casts of the weights are cached; the cache does
            # not notice that the weights have moved.
            torch.clear_autocast_cache()

    def evaluate(self, function: Callable[[], Any] | None = None, *, held: bool = False) -> Any:
        """Replace every ``.grad`` by the window's gradient at the weights as they are; what the loop returns.

        ``function`` stands in for the loop's own: other data, on which the generators go on from where they are.
        ``held`` says that backward passes are held back, so that no gradient is to be expected.
        """
        self._foreign.clear()
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._start is not None and function is None:
            self._start.restore()
        try:
            with torch.enable_grad():
                returned = (self._evaluate if function is None else function)()
        finally:
            self._after.restore()
            self._foreign.restore()
        self.evaluations += 1
        if not held and all(parameter.grad is None for group in self._groups for parameter in group["params"]):
            raise RuntimeError("no parameter has a gradient after a second pass: it must call backward() on its loss")
        return returned


class ZeroingWatch:
    """Whether a closure zeroes the gradients before it accumulates, seen at one small ``.grad``.

    A closure that does not (accumulation inside Lightning or Accelerate, a forgotten ``zero_grad``) would have
    the clean gradient of several batches and the second gradient of one, without a word. What is watched is
    the first accumulation into a gradient that stood there before: zeroing replaces the tensor, or writes it
    once more than accumulating alone.
    """

    def __init__(self, groups: list[Group]) -> None:
        standing = [
            parameter
            for group in groups
            for parameter in group["params"]
            if parameter.requires_grad
            and parameter.is_leaf
            and parameter.grad is not None
            and parameter.grad.layout == torch.strided
            and not is_sharded(parameter)
        ]
        self.zeroes: bool | None = None
        self._hook: Any = None
        if not standing:
            return
        watched = min(standing, key=lambda parameter: int(parameter.numel()))
        before, version = watched.grad, watched.grad._version

        def accumulated(parameter: Tensor) -> None:
            if self.zeroes is None:
                self.zeroes = parameter.grad is not before or parameter.grad._version > version + 1

        self._hook = watched.register_post_accumulate_grad_hook(accumulated)

    def end(self) -> bool:
        """Stop watching; whether the closure was seen to zero. Raises if it was seen not to."""
        if self._hook is not None:
            self._hook.remove()
        if self.zeroes is False:
            raise RuntimeError(
                "the closure does not zero the gradients: it must call zero_grad() before backward(). If the "
                "loop accumulates over several batches, use begin_window() and transform(evaluate) instead"
            )
        return self.zeroes is True


@torch.no_grad()
def _put_back(pairs: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for weights, copies in pairs:
        torch._foreach_copy_(weights, copies)


def _alike(copy: Tensor, weight: Tensor) -> bool:
    return copy.dtype == weight.dtype and copy.device == weight.device


def _add(bucket: Bucket, factor: float) -> None:
    if bucket.weights[0].dtype == bucket.values[0].dtype:
        torch._foreach_add_(bucket.weights, bucket.values, alpha=factor)
        return
    for weight, value in zip(bucket.weights, bucket.values, strict=True):
        weight.copy_(weight.to(value.dtype).add_(value, alpha=factor))  # summed in float32, rounded once
