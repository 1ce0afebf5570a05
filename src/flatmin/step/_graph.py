"""A window's loss with its graph, from loops that call ``backward`` themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class HeldLoss:
    """The sum of the losses whose ``backward`` was held back."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add one micro-batch's loss."""
        self.total = loss if self.total is None else self.total + loss


@contextmanager
def hold_backward() -> Iterator[HeldLoss]:
    """Keep every ``loss.backward()`` in the block from running and collect the losses with their graphs.

    ``backward(create_graph=True)`` would do without, but leaves reference cycles in ``.grad`` and fails under
    DistributedDataParallel, whose hooks write into the gradients. A second differentiation needs attention's
    MATH backend (the fused kernels have no second derivative) and uncompiled modules.
    """
    held = HeldLoss()
    original = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if isinstance(grad_tensors, Tensor) or grad_tensors is None:
            grad_tensors = [grad_tensors] * len(losses)
        for loss, grad in zip(losses, grad_tensors, strict=True):
            held.add(loss.sum() if grad is None else (loss * grad).sum())

    # Tensor.backward looks the function up here at every call.
    torch.autograd.backward = backward
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield held
    finally:
        torch.autograd.backward = original


def gradient_graph(loss: Tensor, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that ``loss`` reaches and its gradient in them, itself differentiable."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(wanted, grads, strict=True) if g is not None]
    return [p for p, _ in pairs], [g for _, g in pairs]
