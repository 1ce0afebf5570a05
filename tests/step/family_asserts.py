"""What the tests of SAM's relatives share: all properties of a step in one call, and scripted gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from tests.step import asserts
from tests.step import second_order_problems as shared


def assert_all_properties(make: Any, calls: float = 2, *, most: int = 2, steps: int = 4) -> None:
    """``calls`` gradients a step on average over ``steps`` steps, in no step more than ``most``."""
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, calls, steps)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_transform_equals_closure(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)
    shared.assert_faults_change_nothing(make, most)


def assert_limits(make: Any) -> None:
    """``make`` wraps a base; no model."""
    shared.assert_maximizes(make)
    shared.assert_carries_the_loss_scale(make)
    shared.assert_survives_a_zero_gradient(make)
    for in_pass in (1, 2):
        shared.assert_does_not_move_on_overflow(make, in_pass)
    assert_forgets_the_loss_scale(make)


def assert_forgets_the_loss_scale(make: Any) -> None:
    """A loss scale that changes from step to step changes nothing."""
    problem = shared.problems()[1]
    found = []
    for scales in ([1.0] * 6, [1024.0, 512.0, 2.0, 4096.0, 1.0, 8.0]):
        halves = shared.halves_of(problem.start)
        optimizer = make(torch.optim.SGD(halves, lr=0.1, momentum=0.9))
        for scale in scales:
            evaluate = shared.closure_on(problem.loss, halves, scale)
            optimizer.begin_window()
            evaluate()
            optimizer.transform(evaluate, scale=scale)
            for half in halves:
                half.grad.div_(scale)
            optimizer.base.step()
        found.append(torch.cat(halves).detach().numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-13)


def scripted(
    make: Any, start: list[list[float]], passes: list[list[list[float] | None]], steps: int = 1, **sgd: Any
) -> tuple[list[torch.Tensor], list[list[list[float]]], Any]:
    """Steps whose n-th pass finds the gradients ``passes[n]``: the parameters, and what weights each pass saw."""
    w = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in start]
    optimizer = make(torch.optim.SGD(w, **{"lr": 1.0, **sgd}))
    seen: list[list[list[float]]] = []

    def closure() -> float:
        seen.append([p.tolist() for p in w])
        for parameter, grad in zip(w, passes[len(seen) - 1], strict=True):
            parameter.grad = None if grad is None else torch.tensor(grad, dtype=torch.float64)
        return 0.0

    for _ in range(steps):
        optimizer.step(closure)
    assert len(seen) == len(passes)
    return w, seen, optimizer


def grads(parameters: list[torch.Tensor]) -> list[float | None]:
    """All gradients in one list, ``None`` for a parameter that has none."""
    return [value for p in parameters for value in ([None] if p.grad is None else p.grad.tolist())]


def assert_refuses_numbers(kind: Any, bad: dict[str, Any]) -> None:
    """Each of ``bad``, alone, is refused by its name."""
    for name, value in bad.items():
        w = torch.zeros(2, requires_grad=True)
        error = ValueError if isinstance(value, (int, float)) and not isinstance(value, bool) else TypeError
        build = partial(kind, torch.optim.SGD([w], lr=0.1), model=None, **{name: value})
        asserts.assert_refuses(build, error, name, repr(value))
