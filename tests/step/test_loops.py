"""Every registered step in every kind of loop: the same gradient, whichever way the loop computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatmin import parse_method
from flatmin._registry import methods
from tests.step.problems import assert_same_bits, photograph

STEPS = [name for name, method in methods().items() if method.place == "step"]

#: Options without which a method needs more than these loops have.
WITH = {"gam": "gam(learn=false)"}

SIZE = 10


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, parse_method(WITH.get(name, name)).build("step", base=base, model=model)[0]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SIZE, 4, dtype=torch.float64, generator=generator), torch.randint(
        0, 3, (SIZE,), generator=generator
    )


def evaluate(model: nn.Module, step: int, cuts: list[int], scale: float = 1.0) -> Tensor:
    """One window: uneven micro-batches, each weighted by its samples, under a loss scale."""
    total = torch.zeros((), dtype=torch.float64)
    x, y = batch(step)
    for part, target in zip(x.split(cuts), y.split(cuts), strict=True):
        loss = nn.functional.cross_entropy(model(part), target, reduction="sum") / SIZE
        (scale * loss).backward()
        total += loss.detach()
    return total


def transformed(model: nn.Module, optimizer: Any, step: int, cuts: list[int], scale: float = 1.0) -> None:
    optimizer.zero_grad()
    with optimizer.clean_pass():
        evaluate(model, step, cuts, scale)
    optimizer.transform(lambda: evaluate(model, step, cuts, scale), scale=scale)


def by_closure(model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return evaluate(model, step, [SIZE])

    optimizer.step(closure)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("name", STEPS)
def test_uneven_micro_batches_equal_one_batch(name: str) -> None:
    model, optimizer = build(name)
    twin, twin_optimizer = build(name)
    for step in range(6):
        by_closure(model, optimizer, step)
        transformed(twin, twin_optimizer, step, [3, 5, 2])
        twin_optimizer.base.step()
        torch.testing.assert_close(weights(twin), weights(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", STEPS)
def test_under_a_loss_scale(name: str) -> None:
    """The gradient handed on carries the scale, and nothing else differs."""
    model, optimizer = build(name)
    twin, twin_optimizer = build(name)
    for step in range(6):
        transformed(model, optimizer, step, [SIZE])
        transformed(twin, twin_optimizer, step, [SIZE], scale=1024.0)
        for parameter in twin.parameters():
            parameter.grad /= 1024.0
        optimizer.base.step()
        twin_optimizer.base.step()
        torch.testing.assert_close(weights(twin), weights(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", STEPS)
def test_clipping_sees_the_final_gradient_only(name: str) -> None:
    model, optimizer = build(name)
    twin, twin_optimizer = build(name)
    transformed(model, optimizer, 0, [SIZE])
    transformed(twin, twin_optimizer, 0, [SIZE])
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    got = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(got, expected * (0.01 / (expected.norm() + 1e-6)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_frozen_parameters_stay_and_can_be_unfrozen(name: str) -> None:
    model, optimizer = build(name)
    frozen = model[0].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    for step in range(3):
        by_closure(model, optimizer, step)
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    by_closure(model, optimizer, 3)
    assert not torch.equal(frozen, before)


@pytest.mark.parametrize("name", STEPS)
def test_a_group_may_be_added_midway(name: str) -> None:
    model, optimizer = build(name)
    by_closure(model, optimizer, 0)
    extra = nn.Linear(3, 3).double()
    model.append(extra)
    optimizer.add_param_group(
        {"params": extra.parameters()} if name != "asam" else {"params": list(extra.parameters())}
    )
    before = extra.weight.detach().clone()
    by_closure(model, optimizer, 1)
    assert not torch.equal(extra.weight, before)


@pytest.mark.parametrize("bad_call", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_an_overflow_in_any_pass_moves_nothing_and_is_skipped(name: str, bad_call: int) -> None:
    model, optimizer = build(name)
    for step in range(2):
        by_closure(model, optimizer, step)
    before = photograph(model, optimizer)
    calls = 0

    def overflowing() -> Tensor:
        nonlocal calls
        calls += 1
        # From the bad call on, as a scale that is too large stays too large within the step.
        return evaluate(model, 2, [SIZE], torch.inf if calls >= bad_call else 1.0)

    optimizer.zero_grad()
    with optimizer.clean_pass():
        overflowing()
    optimizer.transform(overflowing, scale=1.0)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if calls >= bad_call:
        assert not all(bool(torch.isfinite(grad).all()) for grad in grads), "a loss scaler would not skip this step"
    assert_same_bits(before, photograph(model, optimizer))
