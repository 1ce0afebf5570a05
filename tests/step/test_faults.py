"""A step that fails has not happened: 1,000 random faults inside closures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import ASAM, SAM
from tests.step.problems import Everything, assert_same_bits, batch, photograph


class FaultError(Exception):
    pass


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ctx.error


def _build(kind: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(kind)
    model = Everything()
    bases = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.parameters(), lr=0.01),
    ]
    base = bases[kind % 2]
    options: list[Any] = [
        lambda: SAM(base, 0.5, model=model),
        lambda: SAM(base, 0.5, model=model, normalize=False),
        lambda: ASAM(base, 1.0, model=model),
    ]
    optimizer = options[kind % 3]()
    for step in range(2):
        optimizer.step(_closure(model, optimizer, step))
    return model, optimizer


def _closure(model: nn.Module, optimizer: Any, step: int, fault: tuple[int, str, BaseException] | None = None) -> Any:
    """A closure that raises in its ``fault[0]``-th call at the place ``fault[1]``."""
    x, y = batch(step)
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        place = fault[1] if fault is not None and calls == fault[0] else ""
        error = fault[2] if fault is not None else FaultError()

        def hook(*_: Any) -> None:
            raise error

        if place == "before":
            raise error
        optimizer.zero_grad()
        if place == "between layers":
            handle = model.second.register_forward_pre_hook(hook)
            try:
                model(x)
            finally:
                handle.remove()
        out = model(x)
        if place == "after forward":
            raise error
        if place == "in backward":
            out = _RaisingBackward.apply(out, error)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        if place == "after backward":
            raise error
        if place == "bad return":
            return "not a loss"
        return loss

    return closure


PLACES = ("before", "between layers", "after forward", "in backward", "after backward", "bad return")


def test_a_thousand_faults_leave_no_bit_changed() -> None:
    chooser = random.Random(0)
    raised: set[tuple[int, str]] = set()
    objects = [_build(kind) for kind in range(6)]
    for trial in range(1000):
        model, optimizer = chooser.choice(objects)
        error = chooser.choice([FaultError("fault"), RuntimeError("fault"), KeyboardInterrupt(), MemoryError()])
        fault = (chooser.choice([1, 2]), chooser.choice(PLACES), error)
        before = photograph(model, optimizer)
        identities = [id(b) for b in model.buffers()]
        with pytest.raises((type(error), TypeError)):
            optimizer.step(_closure(model, optimizer, trial, fault))
        raised.add(fault[:2])
        assert_same_bits(before, photograph(model, optimizer))
        assert [id(b) for b in model.buffers()] == identities
        assert all(p.grad is None for p in model.parameters())
    assert len(raised) == 2 * len(PLACES)  # every kind of fault has been met


def test_training_goes_on_after_faults_as_if_they_had_not_been() -> None:
    model, optimizer = _build(0)
    twin, twin_optimizer = _build(0)
    start = torch.get_rng_state()
    for step in range(5):
        optimizer.step(_closure(model, optimizer, step))
    torch.set_rng_state(start)
    for step in range(5):
        with pytest.raises(FaultError):
            twin_optimizer.step(_closure(twin, twin_optimizer, step, (2, "after forward", FaultError())))
        twin_optimizer.step(_closure(twin, twin_optimizer, step))
    assert_same_bits(photograph(model, optimizer), photograph(twin, twin_optimizer))


def test_a_fault_in_transform_leaves_the_state_after_the_clean_pass_and_no_gradient() -> None:
    model, optimizer = _build(0)
    optimizer.zero_grad()
    optimizer.begin_window()
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    before = photograph(model, optimizer)

    def evaluate() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        raise FaultError

    with pytest.raises(FaultError):
        optimizer.transform(evaluate)
    assert_same_bits(before, photograph(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
