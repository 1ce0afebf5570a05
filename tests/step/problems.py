"""Small models that hold everything a second pass can disturb, and closures over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Everything(nn.Module):
    """BatchNorm (also cumulative), spectral norm, dropout, a tied weight and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm = nn.BatchNorm1d(8)
        self.cumulative = nn.BatchNorm1d(8, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden_calls", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.cumulative(self.tied(torch.tanh(self.second(x))))
        self.calls = self.calls + 1
        self.hidden_calls += 1
        return self.head(x)


def batch(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def make_closure(optimizer: Any, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def photograph(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every bit that a failed step must leave alone."""
    picture = {f"parameter {name}": p for name, p in model.named_parameters()}
    picture |= {f"buffer {name}": b for name, b in model.named_buffers()}
    picture |= {
        f"state {index} {key}": value
        for index, values in enumerate(optimizer.state.values())
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    picture["random generator"] = torch.get_rng_state()
    return {name: tensor.detach().clone() for name, tensor in picture.items()}


def assert_same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert tensor.shape == after[name].shape, name
        same = tensor.contiguous().reshape(-1).view(torch.uint8) == after[name].contiguous().reshape(-1).view(
            torch.uint8
        )
        assert bool(same.all()), f"{name} changed"
