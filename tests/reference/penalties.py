"""Penalties in float64 as their formulas say."""

from __future__ import annotations

import torch
from torch import Tensor


def activation_decay(inputs: list[Tensor], sigma: float) -> float:
    norms = [float((row**2).sum()) for z in inputs for row in z.double().reshape(-1, z.shape[-1])]
    return sigma**2 / 2 * sum(norms) / len(norms)


def activation_decay_gradient(weight: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Gradient with respect to A of the penalty of z = A x (one x a row): sigma^2 A mean(x x^T)."""
    return sigma**2 * weight.double() @ (x.double().T @ x.double() / x.shape[0])


def smoothed_cross_entropy(z: Tensor, weight: Tensor, label: int, noise: Tensor) -> Tensor:
    """Cross-entropies under each of the noises (samples, classes, features) on the last layer's weights."""
    logits = (weight + noise) @ z
    return torch.logsumexp(logits, dim=-1) - logits[:, label]
