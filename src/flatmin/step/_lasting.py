"""Memory of gradients over many steps, in which not every parameter has one."""

from __future__ import annotations

import torch
from torch import Tensor

from flatmin.step._direction import Direction
from flatmin.step._memory import Memory


class Lasting(Memory):
    """Named vectors; a parameter without a gradient keeps what is remembered of it."""

    def mixed(self, name: str, gradient: Direction, weight: float) -> Direction:
        """(1 - weight) times what is remembered plus weight times ``gradient``, which alone counts at first."""
        known = self._vectors.get(name, {})
        buckets = []
        for bucket in gradient:
            pairs = zip(bucket.parameters, bucket.values, strict=True)
            old = [known[p].to(value.device, value.dtype) if p in known else value for p, value in pairs]
            buckets.append(bucket.with_values(list(torch._foreach_lerp(old, bucket.values, weight))))
        return Direction(buckets)

    @torch.no_grad()
    def keep(self, name: str, direction: Direction, norm: Tensor | None = None) -> None:
        """Remember ``direction``, whose tensors are kept, unless its ``norm`` is given and not finite."""
        finite = None if norm is None else torch.isfinite(norm)
        if finite is not None and finite.device.type == "cpu":
            if not finite:
                return
        elif finite is not None:
            for bucket, old in zip(direction, self.get(name, direction), strict=True):
                bucket.values = [
                    torch.where(finite.to(new.device), new, value)
                    for new, value in zip(bucket.values, old.values, strict=True)
                ]
        self._vectors.setdefault(name, {}).update(
            (parameter, value)
            for bucket in direction
            for parameter, value in zip(bucket.parameters, bucket.values, strict=True)
        )
