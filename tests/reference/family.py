"""Relatives of SAM on flat float64 vectors; where a method remembers, its memory is a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.reference.steps import Gradient, Vector


def norm(x: Vector) -> float:
    return float(np.sqrt((x**2).sum()))


def gsam(gradient: Gradient, w: Vector, rho: float, alpha: float) -> Vector:
    """g_p less alpha times the part of g that is orthogonal to g_p."""
    g = gradient(w)
    p = gradient(w + rho * g / norm(g))
    return p - alpha * (g - (g @ p) / (p @ p) * p)


def radius(lr: float, rho: float, rho_min: float, lr_max: float, lr_min: float) -> float:
    """GSAM's radius, linear in the learning rate."""
    return rho_min + (rho - rho_min) * (lr - lr_min) / (lr_max - lr_min)


def looksam(gradient: Gradient, w: Vector, memory: dict[str, Any], rho: float, k: int, alpha: float) -> Vector:
    """Every k-th step SAM's gradient; in between g + alpha |g| / |g_v| g_v."""
    g, count = gradient(w), memory.get("count", 0)
    memory["count"] = count + 1
    if count % k == 0:
        s = gradient(w + rho * g / norm(g))
        memory["v"] = s - (s @ g) / (g @ g) * g
        return s
    return g + alpha * norm(g) / norm(memory["v"]) * memory["v"]


def friendly(gradient: Gradient, w: Vector, memory: dict[str, Any], rho: float, sigma: float, lam: float) -> Vector:
    """Ascent along g less the mean of the steps before."""
    g = gradient(w)
    d = g - sigma * memory["m"] if "m" in memory else g
    memory["m"] = lam * memory["m"] + (1 - lam) * g if "m" in memory else g
    return gradient(w + rho * d / norm(d))


def vasso(gradient: Gradient, w: Vector, memory: dict[str, Any], rho: float, theta: float) -> Vector:
    """Ascent along the mean of this and the steps before."""
    g = gradient(w)
    memory["d"] = (1 - theta) * memory["d"] + theta * g if "d" in memory else g
    return gradient(w + rho * memory["d"] / norm(memory["d"]))


def wsam(gradient: Gradient, w: Vector, rho: float, gamma: float) -> Vector:
    """The coupled form's gradient."""
    a, g = gamma / (1 - gamma), gradient(w)
    return a * gradient(w + rho * g / norm(g)) + (1 - a) * g


def descend_wsam(
    gradient: Gradient, w: Vector, steps: int, lr: float, momentum: float, rho: float, gamma: float
) -> list[Vector]:
    """The decoupled form: SGD with g, then w -= lr a (g_p - g)."""
    a, buffer, iterates = gamma / (1 - gamma), np.zeros_like(w), []
    for _ in range(steps):
        g = gradient(w)
        p = gradient(w + rho * g / norm(g))
        buffer = momentum * buffer + g
        w = w - lr * buffer - lr * a * (p - g)
        iterates.append(w)
    return iterates


def masked_sam(gradient: Gradient, w: Vector, rho: float, mask: Vector, *, own_norm: bool) -> Vector:
    """SAM that moves only where ``mask`` is 1; the norm is over these entries only, or over all."""
    g = gradient(w)
    return gradient(w + rho * mask * g / norm(mask * g if own_norm else g))


def uniform(seed: int, number: int, sizes: list[int]) -> Vector:
    """The ``number``-th draw of ``flatmin``'s noise for float64 vectors of one parameter group."""
    generator = torch.Generator()
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**63)
    parts = [torch.empty(size, dtype=torch.float64).uniform_(generator=generator) for size in sizes]
    return torch.cat(parts).numpy()


def first_mask(noise: Vector, sparsity: float) -> Vector:
    """The entries with the largest noise."""
    mask, live = np.zeros(noise.size), noise.size - int(np.ceil(noise.size * sparsity))
    mask[sorted(range(noise.size), key=lambda i: -noise[i])[:live]] = 1.0
    return mask


def next_mask(mask: Vector, g: Vector, noise: Vector, drop: float) -> Vector:
    """Drop the smallest gradients in the mask and take in as many of the others, by the largest noise."""
    live = [i for i in range(mask.size) if mask[i]]
    idle = [i for i in range(mask.size) if not mask[i]]
    change = min(int(len(live) * drop), len(idle))
    new = np.zeros(mask.size)
    new[sorted(live, key=lambda i: -abs(g[i]))[: len(live) - change]] = 1.0
    new[sorted(idle, key=lambda i: -noise[i])[:change]] = 1.0
    return new


def remembering(step: Callable[..., Vector], gradient: Gradient, **options: Any) -> Callable[[Vector], Vector]:
    """A gradient function with a memory of its own."""
    memory: dict[str, Any] = {}
    return lambda w: step(gradient, w, memory, **options)
