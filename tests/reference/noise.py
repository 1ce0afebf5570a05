"""Steps with random shifts on flat float64 vectors; the shifts are drawn again from their seed and number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from tests.reference.steps import Gradient, Vector

Loss = Callable[[Vector], float]
Shapes = list[tuple[int, ...]]


def quadratic_loss(hessian: Vector, centre: Vector) -> Loss:
    """(w - c)' H (w - c) / 2."""
    return lambda w: float((w - centre) @ hessian @ (w - centre) / 2)


def logistic_loss(x: Vector, y: Vector) -> Loss:
    """The mean of log(1 + exp(-y x'w)), labels -1 and 1."""
    return lambda w: float(np.log1p(np.exp(-y * (x @ w))).mean())


def draw(seed: int, number: int, shapes: Shapes, kind: str = "normal") -> Vector:
    """The ``number``-th draw of ``flatmin``'s noise for float64 tensors of one parameter group."""
    generator = torch.Generator()
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**63)
    parts = []
    for shape in shapes:
        part = torch.empty(shape, dtype=torch.float64)
        (part.normal_ if kind == "normal" else part.uniform_)(generator=generator)
        parts.append(part.flatten().numpy())
    return np.concatenate(parts)


def signs(seed: int, number: int, shapes: Shapes) -> Vector:
    return np.where(draw(seed, number, shapes, "uniform") < 0.5, -1.0, 1.0)


def filter_norms(w: Vector, shapes: Shapes, vectors: str = "norm") -> Vector:
    """For every weight the norm of its filter: row of a matrix or more, whole vector, or the entry itself."""
    scales, start = [], 0
    for shape in shapes:
        part = w[start : start + int(np.prod(shape))]
        start += part.size
        if len(shape) > 1:
            for row in part.reshape(shape[0], -1):
                scales.append(np.full(row.size, np.sqrt((row**2).sum())))
        elif vectors == "norm":
            scales.append(np.full(part.size, np.sqrt((part**2).sum())))
        else:
            scales.append(np.abs(part))
    return np.concatenate(scales)


def smoothed(gradient: Gradient, w: Vector, shifts: list[Vector], mix: float = 0.0) -> Vector:
    """mix g(w) + (1 - mix) mean g(w + e)."""
    return mix * gradient(w) + (1 - mix) * np.mean([gradient(w + e) for e in shifts], axis=0)


def anti_pgd(gradient: Gradient, w: Vector, noise: list[Vector], lr: float, momentum: float = 0.0) -> list[Vector]:
    """The paper's form, w+ = w - lr g(w) + (xi+ - xi) from w = y + xi_0; the iterates without their noise."""
    w, buffer, clean = w + noise[0], np.zeros_like(w), []
    for old, new in pairwise(noise):
        buffer = momentum * buffer + gradient(w)
        w = w - lr * buffer + (new - old)
        clean.append(w - new)
    return clean


def det_sam(loss: Loss, gradient: Gradient, w: Vector, shifts: list[Vector], rho: float, lam: float) -> Vector:
    """phi(x) = x^-2, psi(x) = exp(-x/2); the shifts are the v, without rho."""
    d = [(loss(w + rho * v) - loss(w)) / rho**2 for v in shifts]
    outer = -2 * np.mean([np.exp(-x / 2) for x in d]) ** -3
    inner = [-0.5 * np.exp(-x / 2) * (gradient(w + rho * v) - gradient(w)) for x, v in zip(d, shifts, strict=True)]
    return gradient(w) + lam * outer * np.mean(inner, axis=0)


def frob_sam(loss: Loss, gradient: Gradient, w: Vector, shifts: list[Vector], rho: float, lam: float) -> Vector:
    """g + lam / rho^2 times the sample covariance of loss and gradient."""
    losses = np.array([loss(w + rho * v) for v in shifts])
    grads = np.array([gradient(w + rho * v) for v in shifts])
    covariance = ((losses - losses.mean())[:, None] * (grads - grads.mean(0))).sum(0) / (len(shifts) - 1)
    return gradient(w) + lam / rho**2 * covariance
