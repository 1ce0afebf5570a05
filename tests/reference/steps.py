"""The steps' formulas on flat float64 vectors, with gradients written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Vector = np.ndarray
Gradient = Callable[[Vector], Vector]


def quadratic(hessian: Vector, centre: Vector) -> Gradient:
    """The gradient of (w - c)' H (w - c) / 2."""
    return lambda w: hessian @ (w - centre)


def logistic(x: Vector, y: Vector) -> Gradient:
    """The gradient of mean log(1 + exp(-y x'w)), labels -1 and 1."""
    return lambda w: -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0)


def sam(gradient: Gradient, w: Vector, rho: float) -> Vector:
    """The gradient at w + rho g / |g|."""
    g = gradient(w)
    return gradient(w + rho * g / np.sqrt((g**2).sum()))


def usam(gradient: Gradient, w: Vector, rho: float) -> Vector:
    """The gradient at w + rho g."""
    return gradient(w + rho * gradient(w))


def asam(gradient: Gradient, w: Vector, rho: float, eta: float) -> Vector:
    """The gradient at w + rho T^2 g / |T g|, T = |w| + eta."""
    g = gradient(w)
    t = np.abs(w) + eta
    return gradient(w + rho * t**2 * g / np.sqrt(((t * g) ** 2).sum()))


def descend(
    gradient: Callable[[Vector], Vector], w: Vector, steps: int, lr: float, momentum: float = 0.0
) -> list[Vector]:
    """The iterates of torch's SGD with momentum along ``gradient``."""
    buffer = np.zeros_like(w)
    iterates = []
    for _ in range(steps):
        buffer = momentum * buffer + gradient(w)
        w = w - lr * buffer
        iterates.append(w)
    return iterates
