"""Properties that every step must have, each under its name; applied to each method in the test files."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.step.problems import Everything, assert_same_bits, batch, make_closure, photograph

#: Builds the step around a base for a model.
Make = Callable[[torch.optim.Optimizer, nn.Module], Any]


def trained(make: Make | None, steps: int, seed: int = 0, **sgd: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Everything()
    base = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **sgd})
    optimizer = make(base, model) if make else base
    for step in range(steps):
        optimizer.step(make_closure(optimizer, model, *batch(step)))
    return model, optimizer


def assert_restores_exactly(make: Make) -> None:
    """With a learning rate of 0 a step changes no weight, and buffers and generators move as in one pass."""
    plain, plain_opt = trained(None, 3, lr=0.0)
    plain_bits = photograph(plain, plain_opt)
    model, optimizer = trained(make, 3, lr=0.0)
    bits = photograph(model, optimizer)
    for key in [k for k in bits if k.startswith("state")]:
        del bits[key], plain_bits[key]  # momentum holds the method's gradient
    assert_same_bits(plain_bits, bits)


def assert_counts_evaluations(make: Make, expected: float, steps: int = 4) -> None:
    """The closure is called as often as the registry says, and ``evaluations`` counts it."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), model)
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        return inner()

    inner = make_closure(optimizer, model, *batch())
    for _ in range(steps):
        optimizer.step(closure)
    assert calls == optimizer.evaluations == expected * steps


def assert_returns_clean_loss(make: Make) -> None:
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), model)
    losses = []

    def closure() -> Any:
        losses.append(inner())
        return losses[-1]

    inner = make_closure(optimizer, model, *batch())
    assert optimizer.step(closure) is losses[0]


def assert_transform_equals_closure(make: Make) -> None:
    """The two ways in give the same bits, also for generators and buffers."""
    model, optimizer = trained(make, 5)
    expected = photograph(model, optimizer)
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(5):
        x, y = batch(step)

        def evaluate(x: Any = x, y: Any = y) -> None:
            nn.functional.cross_entropy(model(x), y).backward()

        optimizer.zero_grad()
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, scale=1.0)
        optimizer.base.step()
    assert_same_bits(expected, photograph(model, optimizer))


def assert_resumes_bit_for_bit(make: Make) -> None:
    """Save after 3 of 6 steps, load into fresh objects, go on: the bits of the undisturbed run."""
    model, optimizer = trained(make, 6)
    expected = photograph(model, optimizer)
    model, optimizer = trained(make, 3)
    file = io.BytesIO()
    hidden = model.hidden_calls.clone()
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
    file.seek(0)
    weights, state, generator = torch.load(file, weights_only=True)
    torch.manual_seed(99)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.1), model)
    model.load_state_dict(weights)
    model.hidden_calls.copy_(hidden)
    optimizer.load_state_dict(state)
    torch.set_rng_state(generator)
    for step in range(3, 6):
        optimizer.step(make_closure(optimizer, model, *batch(step)))
    assert_same_bits(expected, photograph(model, optimizer))


def assert_copies_go_on_alike(make: Make) -> None:
    """A deep copy made midway steps as the original does."""
    model, optimizer = trained(make, 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    generator = torch.get_rng_state()
    for each, opt in ((model, optimizer), (twin, twin_optimizer)):
        torch.set_rng_state(generator)
        for step in range(2, 4):
            opt.step(make_closure(opt, each, *batch(step)))
    assert_same_bits(photograph(model, optimizer), photograph(twin, twin_optimizer))


def assert_rho_zero_is_the_base(make: Make) -> None:
    """``make`` sets rho to 0: bit for bit the base optimizer, at one gradient a step."""
    plain, plain_opt = trained(None, 6)
    expected = photograph(plain, plain_opt)
    model, optimizer = trained(make, 6)
    assert_same_bits(expected, photograph(model, optimizer))
    assert optimizer.evaluations == 6


def assert_refuses(make: Callable[[], Any], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
