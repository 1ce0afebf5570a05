"""What the methods that average gradients over random shifts of the weights share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flatmin.step._direction import Bucket, Direction
from flatmin.step._memory import Noise
from flatmin.step._window import Window


@contextmanager
def drawing(noise: Noise) -> Iterator[None]:
    """One step's draws: a step that fails has drawn nothing."""
    drawn = noise.drawn
    try:
        yield
    except BaseException:
        noise.drawn = drawn
        raise


def noise_state(noise: Noise) -> dict[str, Any]:
    """For a checkpoint; with the seed, so that a run resumed under another goes on as it would have."""
    return {"seed": noise.seed, "drawn": noise.drawn}


def load_noise_state(noise: Noise, state: dict[str, Any]) -> None:
    """Take back what :func:`noise_state` gave."""
    noise.seed, noise.drawn = int(state["seed"]), int(state["drawn"])


def rademacher(noise: Noise, like: Direction) -> Direction:
    """A vector of independent entries -1 and 1 with equal probability on the parameters of ``like``."""
    signs = noise.uniform(like)
    with torch.no_grad():
        for bucket in signs:
            for value in bucket.values:
                value.copy_(torch.where(value < 0.5, -1.0, 1.0))
    return signs


def smooth(
    window: Window,
    draw: Callable[[Direction, Tensor], Direction],
    *,
    samples: int = 1,
    antithetic: bool = False,
    mix: float = 0.0,
) -> None:
    """Make the gradient ``mix`` g(w) + (1 - ``mix``) mean g(w + e) over shifts e.

    ``draw(like, norm)`` gives a shift on the parameters of ``like``; it must be zero where ``norm``, that of the
    clean gradient, is not finite, so that the weights stay where they are. ``antithetic`` takes -e with every e.
    """
    clean = window.take_gradient(keep=mix != 0.0)
    norm = clean.norm()
    signs = (1.0, -1.0) if antithetic else (1.0,)
    number = samples * len(signs)
    total: Direction | None = None
    for sample in range(samples):
        shift = draw(clean, norm)
        if sample == samples - 1 and mix == 0.0:
            clean.buckets = []  # not needed any more: free during the evaluation
        for sign in signs:
            with window.moved(shift, sign, keep=sign != signs[-1]):
                window.evaluate()
            if number == 1 and mix == 0.0:
                return  # the gradient stands where it belongs, in the layout that the loop gave it
            gradient = window.take_gradient(keep=number > 1)
            total = gradient if total is None else total.add_(gradient)
    if total is not None:
        total.mul_((1.0 - mix) / number)
        if mix != 0.0:  # 0 * inf would be NaN
            total.add_(clean, mix)
        total.put()


@torch.no_grad()
def scale_by_filters(direction: Direction, *, vectors: str = "norm") -> None:
    """Multiply each entry by the norm of the filter (row of the first dimension) that its weight belongs to.

    Tensors with fewer than two dimensions have no filters: with ``vectors="norm"`` they count as one, with
    ``"elementwise"`` each entry is multiplied by its own weight's size.
    """
    for bucket in direction:
        for parameter, weight, value in zip(bucket.parameters, bucket.weights, bucket.values, strict=True):
            wide = weight.detach().to(value.dtype)
            if parameter.ndim > 1:
                norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
                norms = _over_shards(norms, bucket, parameter, whole_rows=True)
                value.mul_(norms.view(-1, *[1] * (value.ndim - 1)))
            elif vectors == "norm":
                value.mul_(_over_shards(torch.linalg.vector_norm(wide), bucket, parameter, whole_rows=False))
            else:
                value.mul_(wide.abs())


def _over_shards(norms: Tensor, bucket: Bucket, parameter: Any, *, whole_rows: bool) -> Tensor:
    """Norms of the whole filters, of which each process may hold a part."""
    if not bucket.shards:
        return norms
    split = [place.dim for place in parameter.placements if place.is_shard()]
    squares = norms.square()
    for group, dimension in zip(bucket.shards, split, strict=True):
        if not (whole_rows and dimension == 0):  # split along the first dimension, rows stay whole
            torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt()
