"""Methods that use the Hessian, on flat float64 vectors, with gradients and Hessians written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

Vector = np.ndarray
Gradient = Callable[[Vector], Vector]
Hessian = Callable[[Vector], Vector]


def norm(x: Vector) -> float:
    return float(np.sqrt((x**2).sum()))


def logistic_hessian(x: Vector, y: Vector) -> Hessian:
    """The Hessian of mean log(1 + exp(-y x'w)), labels -1 and 1."""

    def hessian(w: Vector) -> Vector:
        p = 1 / (1 + np.exp(y * (x @ w)))
        return (x * (p * (1 - p))[:, None]).T @ x / len(x)

    return hessian


def gradient_penalty(gradient: Gradient, hessian: Hessian, w: Vector, rho: float, power: int) -> Vector:
    """The gradient of L + rho |g|^p."""
    g = gradient(w)
    return g + rho * power * norm(g) ** (power - 2) * hessian(w) @ g


def difference_penalty(gradient: Gradient, w: Vector, rho: float, r: float, power: int = 1) -> Vector:
    """The same with a finite difference for H g: (1 - a) g + a g(w + r g / |g|)."""
    g = gradient(w)
    a = rho * power * norm(g) ** (power - 1) / r
    return (1 - a) * g + a * gradient(w + r * g / norm(g))


def full_sam(gradient: Gradient, hessian: Hessian, w: Vector, rho: float) -> Vector:
    """The gradient of w -> L(w + rho g / |g|): the perturbation's Jacobian is rho (I - u u') H / |g|."""
    g = gradient(w)
    u = g / norm(g)
    jacobian = rho * (np.eye(len(w)) - np.outer(u, u)) @ hessian(w) / norm(g)
    return gradient(w + rho * u) + jacobian.T @ gradient(w + rho * u)


def crsam(gradient: Gradient, w: Vector, rho: float, gamma: float, beta: float) -> Vector:
    """g+ + gamma (g+ + g- - 2 g) + beta (g+ - g-)."""
    g = gradient(w)
    e = rho * g / norm(g)
    ahead, behind = gradient(w + e), gradient(w - e)
    return ahead + gamma * (ahead + behind - 2 * g) + beta * (ahead - behind)


def lean(g: Vector, v: Vector, rho: float, alpha: float) -> Vector:
    """Eigen-SAM's perturbation: SAM's, and a part of v at right angles to it, on its side."""
    u = g / norm(g)
    return rho * (u + alpha * np.sign(u @ v) * (v - (u @ v) * u))


def power_iteration(hessian: Vector, v: Vector, iterations: int, shift: float = 0.0) -> tuple[Vector, float]:
    """The vector after so many products, and the shift that negative Rayleigh quotients have called for."""
    v = v / norm(v)
    for _ in range(iterations):
        shift = max(shift, -2 * v @ hessian @ v)
        v = (hessian + shift * np.eye(len(v))) @ v
        v = v / norm(v)
    return v, shift


class EigenSAM:
    """Eigen-SAM's gradient, with the eigenvector it remembers."""

    def __init__(self, gradient: Gradient, hessian: Hessian, start: Vector, **options: float) -> None:
        self.gradient, self.hessian, self.options = gradient, hessian, options
        self.v, self.shift, self.calls = start, 0.0, 0

    def __call__(self, w: Vector) -> Vector:
        if self.calls % self.options["period"] == 0:
            iterations = int(self.options["iterations"])
            self.v, self.shift = power_iteration(self.hessian(w), self.v, iterations, self.shift)
        self.calls += 1
        return self.gradient(w + lean(self.gradient(w), self.v, self.options["rho"], self.options["alpha"]))


def mlp(widths: list[int], x: Vector, y: Vector, frozen: Vector | None = None) -> Gradient:
    """The gradient of cross-entropy for tanh layers with biases, by back-propagation.

    Weights and biases are taken layer by layer from one vector. With ``frozen``, the activations' slopes are those
    at the weights ``frozen``: what remains of the second derivatives is what does not come from theirs.
    """

    def layers(w: Vector) -> list[tuple[Vector, Vector]]:
        result, at = [], 0
        for n, m in pairwise(widths):
            result.append((w[at : at + n * m].reshape(m, n), w[at + n * m : at + n * m + m]))
            at += n * m + m
        return result

    def forward(w: Vector) -> list[Vector]:
        activations = [x]
        for number, (weight, bias) in enumerate(layers(w), 1):
            h = activations[-1] @ weight.T + bias
            activations.append(h if number == len(widths) - 1 else np.tanh(h))
        return activations

    def gradient(w: Vector) -> Vector:
        activations = forward(w)
        slopes = [1 - a**2 for a in (activations if frozen is None else forward(frozen))]
        z = np.exp(activations[-1] - activations[-1].max(1, keepdims=True))
        delta = (z / z.sum(1, keepdims=True) - np.eye(widths[-1])[y]) / len(x)
        parts: list[Vector] = []
        for number in reversed(range(len(widths) - 1)):
            parts = [(delta.T @ activations[number]).reshape(-1), delta.sum(0), *parts]
            delta = (delta @ layers(w)[number][0]) * slopes[number]
        return np.concatenate(parts)

    return gradient


def jacobian(function: Gradient, w: Vector, h: float = 1e-6) -> Vector:
    """Central differences, a column for each weight."""
    columns = [(function(w + h * e) - function(w - h * e)) / (2 * h) for e in np.eye(len(w))]
    return np.stack(columns, axis=1)
