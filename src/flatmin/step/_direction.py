"""A vector in parameter space: one tensor for each parameter that received a gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]

#: The process groups over whose members a tensor is split; empty for a tensor that each process has whole.
Shards = tuple[Any, ...]

#: Below and above these norms the squares of float32 entries leave the normal range.
_SAFE_LOW, _SAFE_HIGH = 1e-15, 1e18


@dataclass
class Bucket:
    """Tensors that one foreach call can take: one parameter group, one device, one dtype.

    ``parameters`` are the leaves, ``weights`` the same tensors (a complex one as its real view, a sharded one
    as its local shard), ``values`` the direction's entries, in float32 or better, owned by the direction and
    free to be changed in place. ``shards`` are the process groups over which the tensors are split.
    """

    group: Group
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    shards: Shards = ()

    def with_values(self, values: list[Tensor]) -> Bucket:
        """A bucket of the same parameters with other entries."""
        return Bucket(self.group, self.parameters, self.weights, values, self.shards)


class Direction:
    """The clean gradient, taken out of ``.grad``, or what a method makes of it."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets

    @classmethod
    @torch.no_grad()
    def take(cls, groups: Iterable[Group]) -> Direction:
        """Move every ``.grad`` of ``groups`` into a new direction; a parameter listed twice counts once."""
        buckets: list[Bucket] = []
        seen: set[int] = set()
        pointers: set[int] = set()
        for group in groups:
            alike: dict[tuple[torch.device, torch.dtype, Shards], Bucket] = {}
            kind, bucket = None, Bucket(group)
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                weight, value, shards = _plain(parameter, grad)
                # Several .grad in one memory, or one with itself (expanded), would be scaled more than once.
                pointer = value.data_ptr()
                if pointer in pointers or (not value.is_contiguous() and 0 in value.stride()):
                    value = value.clone(memory_format=torch.contiguous_format)
                elif pointer:
                    pointers.add(pointer)
                # Mostly the bucket of the one before: comparing is cheaper than hashing.
                if (like := (weight.device, weight.dtype, shards)) != kind:
                    kind = like
                    bucket = alike.setdefault(kind, Bucket(group, shards=shards))
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
        parts = [(_norm(bucket.values), bucket.shards) for bucket in self.buckets if counts(bucket.group)]
        if len(parts) == 1 and not parts[0][1]:
            return parts[0][0]
        return _total([(norm.square(), shards) for norm, shards in parts]).sqrt()

    def copy(self) -> Direction:
        """A copy that shares nothing but the parameters."""
        return Direction([bucket.with_values([value.clone() for value in bucket.values]) for bucket in self.buckets])

    def dot(self, other: Direction) -> Tensor:
        """The inner product over the parameters that both hold, a 0-dim tensor."""
        return _total([(_dot(mine, theirs), shards) for shards, mine, theirs in self._common(other)])

    @torch.no_grad()
    def mul_(self, factor: float | Tensor) -> Direction:
        """Multiply by one number, a 0-dim tensor so that nothing waits for the device, or a float."""
        for bucket in self.buckets:
            like = bucket.values[0]
            torch._foreach_mul_(bucket.values, factor if isinstance(factor, float) else factor.to(like))
        return self

    @torch.no_grad()
    def add_(self, other: Direction, factor: float | Tensor = 1.0) -> Direction:
        """Add ``factor * other``; parameters that only ``other`` holds are taken in."""
        for _, mine, theirs in self._common(other):
            if isinstance(factor, float):
                torch._foreach_add_(mine, theirs, alpha=factor)
            else:
                torch._foreach_add_(mine, torch._foreach_mul(theirs, factor.to(mine[0])))
        known = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        for bucket in other.buckets:
            new = [index for index, parameter in enumerate(bucket.parameters) if id(parameter) not in known]
            if new:
                lists = ([each[index] for index in new] for each in (bucket.parameters, bucket.weights, bucket.values))
                parameters, weights, values = lists
                values = [value * (factor if isinstance(factor, float) else factor.to(value)) for value in values]
                self.buckets.append(Bucket(bucket.group, parameters, weights, values, bucket.shards))
        return self

    @torch.no_grad()
    def put(self) -> None:
        """Make this direction the ``.grad`` of its parameters, in their dtype; it gives its tensors away."""
        for bucket in self.buckets:
            for parameter, value in zip(bucket.parameters, bucket.values, strict=True):
                grad = torch.view_as_complex(value) if parameter.is_complex() else value
                parameter.grad = _like_parameter(grad.to(parameter.dtype), parameter)

    def _common(self, other: Direction) -> Iterator[tuple[Shards, list[Tensor], list[Tensor]]]:
        """The tensors of the parameters that both hold, in lists that foreach calls can take."""
        same = len(self.buckets) == len(other.buckets) and all(
            len(a.parameters) == len(b.parameters) and all(map(operator.is_, a.parameters, b.parameters))
            for a, b in zip(self.buckets, other.buckets, strict=True)
        )
        if same:
            for a, b in zip(self.buckets, other.buckets, strict=True):
                yield a.shards, a.values, b.values
            return
        theirs = {
            id(parameter): value
            for bucket in other.buckets
            for parameter, value in zip(bucket.parameters, bucket.values, strict=True)
        }
        for bucket in self.buckets:
            pairs = [
                (value, theirs[id(parameter)])
                for parameter, value in zip(bucket.parameters, bucket.values, strict=True)
                if id(parameter) in theirs
            ]
            if pairs:
                yield bucket.shards, [mine for mine, _ in pairs], [value for _, value in pairs]

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
                scale = (value / norm.clamp(min=limits.tiny)).clamp(limits.min, limits.max)
                torch._foreach_mul_(bucket.values, scale.to(like.device, like.dtype))
            else:
                torch._foreach_mul_(bucket.values, value)
            if norm.device.type != "cpu":
                bad = ~finite.to(like.device)
                for tensor in bucket.values:
                    tensor.masked_fill_(bad, 0.0)  # selected, since 0 * inf would be NaN


def _plain(parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Shards]:
    """The parameter and its gradient as plain real tensors, and the groups they are split over."""
    if is_sharded(parameter):
        return _local(parameter, grad)
    if grad.dtype == parameter.dtype == torch.float32 and grad.layout == torch.strided and not grad.requires_grad:
        return parameter, grad, ()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    weight: Tensor = parameter
    if parameter.is_complex():
        weight, grad = torch.view_as_real(parameter.detach()), torch.view_as_real(grad.detach())
    # A perturbation in bfloat16 would lose most of its entries to rounding before it is added.
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight, grad.detach().to(wide), ()


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, without importing what plain training does not need."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "to_local")


def _local(parameter: Any, grad: Any) -> tuple[Tensor, Tensor, Shards]:
    mesh = parameter.device_mesh
    if grad.placements != parameter.placements:
        grad = grad.redistribute(mesh, parameter.placements)
    shards = tuple(mesh.get_group(axis) for axis, place in enumerate(parameter.placements) if place.is_shard())
    weight, value, _ = _plain(parameter.to_local(), grad.to_local())
    return weight, value, shards


def _like_parameter(grad: Tensor, parameter: Any) -> Tensor:
    if is_sharded(parameter):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            grad,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return grad


def _total(parts: list[tuple[Tensor, Shards]]) -> Tensor:
    """The sum of 0-dim tensors, those of sharded tensors over all shards."""
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    home = parts[0][0]
    sums: dict[Shards, Tensor] = {}
    for part, shards in parts:
        part = part.to(home.device, home.dtype)
        sums[shards] = sums[shards] + part if shards in sums else part
    for shards, part in sums.items():
        for group in shards:
            torch.distributed.all_reduce(part, group=group)
    return torch.stack(list(sums.values())).sum()


def _dot(mine: list[Tensor], theirs: list[Tensor]) -> Tensor:
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(mine, theirs, strict=True)]
    stacked = torch.stack(parts)
    total: Tensor = (stacked if stacked.device.type == "mps" else stacked.double()).sum()
    return total


def _norm(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if first.device.type == "mps":  # has no float64
        return _length(torch._foreach_norm(tensors))
    if first.device.type != "cpu":
        return _length(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    # On the CPU float64 norms of float32 tensors take 25 times as long, so they are the exception.
    norm = _length(torch._foreach_norm(tensors), torch.float64)
    if _SAFE_LOW < norm < _SAFE_HIGH:
        return norm
    largest = float(torch.stack(list(torch._foreach_norm(tensors, torch.inf))).max())
    if not 0 < largest < math.inf:
        return norm if math.isnan(largest) else torch.tensor(largest, dtype=torch.float64)
    scaled = [tensor.double() / largest for tensor in tensors]
    return _length(torch._foreach_norm(scaled)) * largest


def _length(norms: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    stacked = torch.stack(list(norms))
    length: Tensor = torch.linalg.vector_norm(stacked if dtype is None else stacked.to(dtype))
    return length
