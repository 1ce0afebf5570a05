"""Both methods called GAM on flat float64 vectors; coefficient derivatives by dense forward differentiation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.steps import Gradient, Vector

Hessian = Callable[[Vector], Vector]


def quadratic_hessian(hessian: Vector) -> Hessian:
    return lambda w: hessian


def logistic_hessian(x: Vector, y: Vector) -> Hessian:
    """The Hessian of mean log(1 + exp(-y x'w)), labels -1 and 1."""

    def hessian(w: Vector) -> Vector:
        s = 1 / (1 + np.exp(y * (x @ w)))
        return (x.T * (s * (1 - s))) @ x / len(y)

    return hessian


def unit(d: Vector, normalize: bool) -> tuple[Vector, Vector]:
    """q(d), that is d or d / |d|, and its Jacobian."""
    if not normalize:
        return d, np.eye(d.size)
    length = np.sqrt(d @ d)
    n = d / length
    return n, (np.eye(d.size) - np.outer(n, n)) / length


def nested(
    gradient: Gradient, hessian: Hessian, w: Vector, gammas: list[float], normalize: bool = False
) -> tuple[Vector, Vector]:
    """d_0 = G(w), d_t = G(w + gamma_t q(d_{t-1})); d_T and its derivatives, a column for each gamma."""
    d, columns = gradient(w), np.zeros((w.size, len(gammas)))
    for t, gamma in enumerate(gammas):
        q, dq = unit(d, normalize)
        inner = gamma * dq @ columns
        inner[:, t] += q
        columns = hessian(w + gamma * q) @ inner
        d = gradient(w + gamma * q)
    return d, columns


def finite_difference(
    gradient: Gradient, hessian: Hessian, w: Vector, gammas: list[float], eps: float, normalize: bool = False
) -> tuple[Vector, Vector]:
    """d_0 = G(w), d_t = d_0 + gamma_t (G(w + eps q(d_{t-1})) - d_0) / eps."""
    g = gradient(w)
    d, columns = g, np.zeros((w.size, len(gammas)))
    for t, gamma in enumerate(gammas):
        q, dq = unit(d, normalize)
        h = (gradient(w + eps * q) - g) / eps
        columns = gamma * hessian(w + eps * q) @ dq @ columns
        columns[:, t] += h
        d = g + gamma * h
    return d, columns


def walk(
    gradient: Gradient, hessian: Hessian, w: Vector, gammas: list[float], normalize: bool = False
) -> tuple[Vector, Vector]:
    """p_0 = w, p_t = p_{t-1} + gamma_t q(G(p_{t-1})); G(p_T)."""
    p, columns = w, np.zeros((w.size, len(gammas)))
    for t, gamma in enumerate(gammas):
        q, dq = unit(gradient(p), normalize)
        columns = columns + gamma * dq @ hessian(p) @ columns
        columns[:, t] += q
        p = p + gamma * q
    return gradient(p), hessian(p) @ columns


def discrepancy(kind: str, d: Vector, v: Vector) -> tuple[float, Vector]:
    """Delta(d, v) and its gradient in d."""
    if kind == "dot":
        return -d @ v, -v
    if kind == "squared":
        return (d - v) @ (d - v) / 2, d - v
    lengths = np.sqrt((d @ d) * (v @ v))
    cosine = d @ v / lengths
    return -cosine, cosine * d / (d @ d) - v / lengths


def gradient_norm_aware(
    gradient: Gradient,
    w: Vector,
    rho: float,
    r: float,
    gamma: float,
    beta1: float,
    beta2: float,
    beta3: float,
) -> Vector:
    """The accelerated update of the CVPR 2023 method."""

    def ahead(v: Vector, length: float) -> Vector:
        return length * v / np.sqrt(v @ v)

    g0 = gradient(w)
    g1 = gradient(w + ahead(g0, r))
    s = ahead(g1 - g0, rho)
    g2 = gradient(w + s)
    g3 = gradient(w + s + ahead(g2, r))
    q, p = beta1 * g1 + beta3 * g3, g0 + beta2 * g2
    return q - gamma * (p - (p @ q) / (q @ q) * q)
