"""Losses with a graph, for steps that differentiate twice, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.reference import second_order as reference
from tests.reference import steps
from tests.step.problems import Everything, assert_same_bits, batch, make_closure, photograph

Loss = Callable[[Tensor], Tensor]


@dataclass
class Problem:
    loss: Loss
    gradient: reference.Gradient
    hessian: reference.Hessian
    start: np.ndarray


def problems() -> list[Problem]:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    h = basis @ np.diag([0.1, 0.5, 1.0, 2.0, 5.0]) @ basis.T
    centre = rng.normal(size=5)
    x, y = rng.normal(size=(40, 5)), rng.choice([-1.0, 1.0], size=40)
    start = rng.normal(size=5)
    ht, ct, xt, yt = (torch.from_numpy(each) for each in (h, centre, x, y))
    return [
        Problem(lambda w: (w - ct) @ ht @ (w - ct) / 2, steps.quadratic(h, centre), lambda w: h, start),
        Problem(
            lambda w: nn.functional.softplus(-yt * (xt @ w)).mean(),
            steps.logistic(x, y),
            reference.logistic_hessian(x, y),
            start,
        ),
    ]


def halves_of(start: np.ndarray, split: int = 2) -> list[Tensor]:
    return [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in (start[:split], start[split:])]


def closure_on(loss: Loss, halves: list[Tensor], factor: float = 1.0) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        for half in halves:
            half.grad = None
        value = factor * loss(torch.cat(halves))
        value.backward()
        return value

    return closure


def iterates(loss: Loss, start: np.ndarray, make: Any, count: int = 10, factor: float = 1.0, **sgd: Any) -> Any:
    """The weights after each step, on a vector split over two parameters."""
    halves = halves_of(start)
    optimizer = make(torch.optim.SGD(halves, **sgd))
    result = []
    for _ in range(count):
        optimizer.step(closure_on(loss, halves, factor))
        result.append(torch.cat(halves).detach().numpy().copy())
    return result


def assert_equals_formula(problem: Problem, formula: Any, make: Any, momentum: float, atol: float = 1e-12) -> None:
    expected = steps.descend(formula, problem.start, 10, 0.05, momentum)
    got = iterates(problem.loss, problem.start, make, lr=0.05, momentum=momentum)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=atol)


def assert_maximizes(make: Any) -> None:
    """To maximize -L is to minimize L."""
    problem = problems()[1]
    down = iterates(problem.loss, problem.start, make, 4, lr=0.05)
    up = iterates(problem.loss, problem.start, make, 4, factor=-1.0, lr=0.05, maximize=True)
    for a, b in zip(down, up, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-13)


def assert_carries_the_loss_scale(make: Any, rtol: float = 1e-12) -> None:
    """A loss scaled by 1024 gives 1024 times the gradient."""
    problem = problems()[1]
    found = []
    for scale in (1.0, 1024.0):
        halves = halves_of(problem.start)
        optimizer = make(torch.optim.SGD(halves, lr=0.0))
        evaluate = closure_on(problem.loss, halves, scale)
        for _ in range(2):
            optimizer.begin_window()
            evaluate()
            optimizer.transform(evaluate, scale=scale)
        found.append(torch.cat([half.grad / scale for half in halves if half.grad is not None]))
    torch.testing.assert_close(found[0], found[1], rtol=rtol, atol=0)


def assert_survives_a_zero_gradient(make: Any, *, still: bool = True) -> None:
    """P13: no NaN, no move (``still``) unless to measure the Hessian; the base takes its step."""
    w = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    optimizer = make(torch.optim.SGD([w], lr=0.1, weight_decay=0.5))

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(w.detach().clone())
        loss = (torch.relu(w - 10.0) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(w.detach(), seen[0] * 0.95, rtol=0, atol=1e-15)
    assert not still or all(torch.equal(each, seen[0]) for each in seen)


def assert_does_not_move_on_overflow(make: Any, in_pass: int = 1) -> None:
    """P14: a clean gradient with one infinite entry moves nothing, and what is handed on is not finite."""
    w = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    seen: list[Tensor] = []
    optimizer = make(torch.optim.SGD(w, lr=0.0))

    def evaluate() -> Tensor:
        seen.append(torch.cat(w).detach().clone())
        factor = torch.tensor([1.0, float("inf") if len(seen) >= in_pass else 1.0])
        loss = (torch.sin(w[0]) * factor).sum() + torch.sin(w[1]).sum()
        loss.backward()
        return loss

    optimizer.begin_window()
    evaluate()
    optimizer.transform(evaluate, scale=1.0)
    assert not bool(torch.isfinite(torch.cat([each.grad for each in w if each.grad is not None])).all())
    if in_pass == 1:
        assert all(torch.equal(each, seen[0]) for each in seen)
    assert torch.equal(torch.cat(w).detach(), seen[0])


class WithoutPowerIteration(Everything):
    """Without spectral norm, whose vectors each forward pass in training mode improves.

    A window that is evaluated once more, at the same weights, then has another loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)


class FaultError(Exception):
    pass


def own_state(optimizer: Any) -> str:
    return repr(optimizer.state_dict().get("flatmin"))


def assert_faults_change_nothing(make: Any, calls: int) -> None:
    """A closure that raises in any of its ``calls`` calls leaves every bit, the method's own state included."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(2):
        optimizer.step(make_closure(optimizer, model, *batch(step)))
    for fault in range(1, calls + 1):
        before, state, count = photograph(model, optimizer), own_state(optimizer), 0
        inner = make_closure(optimizer, model, *batch(7))

        def closure(fault: int = fault, inner: Any = inner) -> Tensor:
            nonlocal count
            count += 1
            loss = inner()
            if count == fault:
                raise FaultError
            return loss

        with pytest.raises(FaultError):
            optimizer.step(closure)
        assert count == fault
        assert_same_bits(before, photograph(model, optimizer))
        assert own_state(optimizer) == state
        assert all(p.grad is None for p in model.parameters())
    twin, twin_optimizer = Everything(), None
    torch.manual_seed(0)
    twin = Everything()
    twin_optimizer = make(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), twin)
    for step in range(2):
        twin_optimizer.step(make_closure(twin_optimizer, twin, *batch(step)))
    generator = torch.get_rng_state()
    for each, opt in ((model, optimizer), (twin, twin_optimizer)):
        torch.set_rng_state(generator)
        opt.step(make_closure(opt, each, *batch(2)))
    assert_same_bits(photograph(twin, twin_optimizer), photograph(model, optimizer))


def assert_counts(make: Any, calls: list[int], evaluations: float) -> None:
    """Closure calls in each step, and gradient evaluations in all (two differentiations are not calls)."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1), model)
    inner = make_closure(optimizer, model, *batch())
    counted: list[int] = []

    def closure() -> Tensor:
        counted[-1] += 1
        return inner()

    for _ in calls:
        counted.append(0)
        optimizer.step(closure)
    assert counted == calls
    assert optimizer.evaluations == evaluations


class Attention(nn.Module):
    """A layer whose fused kernels have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def gradients_of(make: Any, model: nn.Module, forward: nn.Module, x: Tensor, y: Tensor, way: str) -> list[Tensor]:
    """What one step hands to its base, at float64."""
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.0), model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        return loss

    if way == "closure":
        optimizer.step(closure)
    else:
        optimizer.begin_window()
        closure()
        optimizer.transform(closure, scale=1.0)
    return [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]


def dense(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient and the whole Hessian, as one vector and one matrix, by torch.func."""
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach() for p in model.parameters()]
    sizes = [w.numel() for w in weights]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view_as(w) for part, w in zip(flat.split(sizes), weights, strict=True)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), x)
        return nn.functional.cross_entropy(out, y)

    flat = torch.cat([w.reshape(-1) for w in weights])
    return torch.func.grad(loss)(flat), torch.autograd.functional.hessian(loss, flat)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
