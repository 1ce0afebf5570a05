"""Lengths and angles of gradients, for the methods that take one gradient apart along another."""

from __future__ import annotations

import torch
from torch import Tensor

from flatmin.step._direction import Direction

_TINY = torch.finfo(torch.float32).tiny


def normalize_(direction: Direction) -> Tensor:
    """Divide by the norm and return it, so that inner products stay in range at any scale of the gradient.

    Zero stays zero. What is not finite stays as it is and counts as of length 1.
    """
    norm = direction.norm()
    norm = torch.where(torch.isfinite(norm), norm, 1.0)
    direction.mul_(1.0 / norm.clamp(min=_TINY))
    return norm


def along(direction: Direction, unit: Direction) -> Tensor:
    """The length of ``direction`` along the unit vector, 0 where that is not finite."""
    length = direction.dot(unit)
    return torch.where(torch.isfinite(length), length, 0.0)
