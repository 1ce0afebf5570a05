"""A vector in parameter space: one tensor for each parameter that received a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]

#: Below and above these norms the squares of float32 entries leave the normal range.
_SAFE_LOW, _SAFE_HIGH = 1e-15, 1e18


@dataclass
class Bucket:
    """Tensors that one foreach call can take: one parameter group, one device, one dtype.

    ``parameters`` are the leaves, ``weights`` the same tensors (a complex one as its real view), ``values``
    the direction's entries, in float32 or better, owned by the direction and free to be changed in place.
    """

    group: Group
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Direction:
    """The clean gradient, taken out of ``.grad``, or what a method makes of it."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets

    @classmethod
    def take(cls, groups: Iterable[Group]) -> Direction:
        """Move every ``.grad`` of ``groups`` into a new direction; a parameter listed twice counts once."""
        buckets: list[Bucket] = []
        seen: set[int] = set()
        for group in groups:
            alike: dict[tuple[torch.device, torch.dtype], Bucket] = {}
            kind, bucket = None, Bucket(group)
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                weight, value = _real_pair(parameter, grad)
                # Mostly the bucket of the one before: comparing is cheaper than hashing.
                if (device_and_type := (weight.device, weight.dtype)) != kind:
                    kind = device_and_type
                    bucket = alike.setdefault(kind, Bucket(group))
                bucket.parameters.append(parameter)
                bucket.weights.append(weight)
                bucket.values.append(value)
                parameter.grad = None
            buckets.extend(alike.values())
        return cls(buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def norm(self, counts: Callable[[Group], bool] = lambda group: True) -> Tensor:
        """The Euclidean norm over all groups for which ``counts`` holds, a 0-dim tensor.

        Right from 1e-38 to 1e38 in float32: no entry is lost to under- or overflow of its square.
        """
        parts = [_norm(bucket.values) for bucket in self.buckets if counts(bucket.group)]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        if len(parts) == 1:
            return parts[0]
        home = parts[0]
        return _length([part.to(home.device, home.dtype) for part in parts])

    @torch.no_grad()
    def scale_(self, factor: Callable[[Group], float], norm: Tensor, *, divide: bool = True) -> None:
        """Multiply by ``factor(group)``, divided by ``norm`` unless told otherwise.

        A non-finite ``norm`` makes the direction zero, so that the weights stay where they are and the
        second pass shows the non-finite gradient to a loss scaler. ``maximize`` groups point downhill.
        """
        finite = torch.isfinite(norm)
        if norm.device.type == "cpu" and not finite:
            self.buckets = []
        for bucket in self.buckets:
            sign = -1.0 if bucket.group.get("maximize") else 1.0
            value = sign * factor(bucket.group)
            like = bucket.values[0]
            limits = torch.finfo(like.dtype)
            if divide:
                # The norm is clamped, not padded: rho g / (|g| + 1e-12) halves the radius at |g| = 1e-12.
                scale = (value / norm.clamp(min=torch.finfo(torch.float32).tiny)).clamp(limits.min, limits.max)
                torch._foreach_mul_(bucket.values, scale.to(like.device, like.dtype))
            else:
                torch._foreach_mul_(bucket.values, value)
            if norm.device.type != "cpu":
                bad = ~finite.to(like.device)
                for tensor in bucket.values:
                    tensor.masked_fill_(bad, 0.0)  # selected, since 0 * inf would be NaN


def _real_pair(parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if grad.dtype == parameter.dtype == torch.float32 and grad.layout == torch.strided and not grad.requires_grad:
        return parameter, grad
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    weight: Tensor = parameter
    if parameter.is_complex():
        weight, grad = torch.view_as_real(parameter.detach()), torch.view_as_real(grad.detach())
    # A perturbation in bfloat16 would lose most of its entries to rounding before it is added.
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight, grad.detach().to(wide)


def _norm(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if first.device.type == "mps":  # has no float64
        return _length(torch._foreach_norm(tensors))
    if first.device.type != "cpu":
        return _length(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    # On the CPU float64 norms of float32 tensors take 25 times as long, so they are the exception.
    norm = _length(torch._foreach_norm(tensors), torch.float64)
    if first.dtype == torch.float64 or _SAFE_LOW < norm < _SAFE_HIGH:
        return norm
    return _length(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def _length(norms: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    stacked = torch.stack(list(norms))
    length: Tensor = torch.linalg.vector_norm(stacked if dtype is None else stacked.to(dtype))
    return length
