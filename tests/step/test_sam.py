"""SAM and ASAM against formulas computed by hand, then their limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatmin import ASAM, SAM
from tests.reference import steps as reference
from tests.step import asserts


def make_sam(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> SAM:
    return SAM(base, model=model, **options)


def make_asam(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> ASAM:
    return ASAM(base, model=model, **options)


ALL = [make_sam, partial(make_sam, normalize=False), make_asam, partial(make_asam, eta=0.0, scaled="all")]


def iterates(
    gradient: Any, start: np.ndarray, make: Any, steps: int = 12, split: int = 2, **sgd: Any
) -> list[np.ndarray]:
    """Run the optimizer on a vector that is split over two parameters (the norm must be global)."""
    halves = [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in (start[:split], start[split:])]
    optimizer = make(torch.optim.SGD(halves, **sgd))
    result = []
    for _ in range(steps):

        def closure() -> float:
            w = np.concatenate([half.detach().numpy() for half in halves])
            g = torch.from_numpy(gradient(w))
            halves[0].grad, halves[1].grad = g[:split].clone(), g[split:].clone()
            return 0.0

        optimizer.step(closure)
        result.append(np.concatenate([half.detach().numpy() for half in halves]))
    return result


def problems() -> list[tuple[Any, np.ndarray]]:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    hessian = basis @ np.diag([0.1, 0.5, 1.0, 2.0, 5.0]) @ basis.T
    x, y = rng.normal(size=(40, 5)), rng.choice([-1.0, 1.0], size=40)
    start = rng.normal(size=5)
    return [(reference.quadratic(hessian, rng.normal(size=5)), start), (reference.logistic(x, y), start)]


@pytest.mark.parametrize(("gradient", "start"), problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_formula_in_float64(gradient: Any, start: np.ndarray, momentum: float) -> None:
    cases = [
        (lambda base: SAM(base, 0.3, model=None), partial(reference.sam, gradient, rho=0.3)),
        (
            lambda base: SAM(base, 0.3, model=None, normalize=False),
            partial(reference.usam, gradient, rho=0.3),
        ),
        (
            lambda base: ASAM(base, 0.7, model=None, eta=0.01, scaled="all"),
            partial(reference.asam, gradient, rho=0.7, eta=0.01),
        ),
        (
            lambda base: ASAM(base, 0.7, model=None, eta=0.0, scaled="all"),
            partial(reference.asam, gradient, rho=0.7, eta=0.0),
        ),
    ]
    for make, formula in cases:
        expected = reference.descend(formula, start, 12, 0.05, momentum)
        got = iterates(gradient, start, make, lr=0.05, momentum=momentum)
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def test_sam_with_adamw_equals_adamw_on_the_formula() -> None:
    gradient, start = problems()[1]
    ours = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    sam = SAM(torch.optim.AdamW([ours], lr=0.05, weight_decay=0.1), 0.2, model=None)
    adamw = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1)

    def closure() -> float:
        ours.grad = torch.from_numpy(gradient(ours.detach().numpy()))
        return 0.0

    for _ in range(10):
        sam.step(closure)
        theirs.grad = torch.from_numpy(reference.sam(gradient, theirs.detach().numpy(), 0.2))
        adamw.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("eta", "expected"), [(0.0, (0.7071068, 0.3535534)), (0.01, (0.7088768, 0.3579739))])
def test_asam_known_answer(eta: float, expected: tuple[float, float]) -> None:
    w = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    seen: list[torch.Tensor] = []

    def closure() -> float:
        seen.append(w.detach().clone())
        w.grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return 0.0

    ASAM(torch.optim.SGD([w], lr=0.1), 0.5, model=None, eta=eta, scaled="all").step(closure)
    torch.testing.assert_close(seen[1] - seen[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-8)


def test_asam_rescales_weights_and_not_biases() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved: list[dict[str, torch.Tensor]] = []
    optimizer = ASAM(torch.optim.SGD(model.parameters(), lr=0.0), 0.5, model=model, eta=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    model.zero_grad()
    model(x).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    t = {"weight": before["weight"].abs() + 0.1, "bias": torch.ones(2, dtype=torch.float64)}
    norm = sum((t[name] * grads[name]).square().sum() for name in t).sqrt()
    for name in t:
        torch.testing.assert_close(moved[1][name], 0.5 * t[name] ** 2 * grads[name] / norm, rtol=0, atol=1e-12)


def test_asam_is_invariant_under_rescaling_when_eta_is_zero() -> None:
    """f = a b x: scaling a by c and b by 1/c moves the product by the same amount."""
    moved = []
    for c in (1.0, 7.0):
        a = torch.tensor(2.0 * c, dtype=torch.float64, requires_grad=True)
        b = torch.tensor(3.0 / c, dtype=torch.float64, requires_grad=True)
        products: list[float] = []
        optimizer = ASAM(torch.optim.SGD([a, b], lr=0.0), 0.1, model=None, eta=0.0, scaled="all")

        def closure(a: Any = a, b: Any = b, optimizer: Any = optimizer, products: Any = products) -> torch.Tensor:
            optimizer.zero_grad()
            products.append((a * b).item())
            loss = (a * b - 1.0).square()
            loss.backward()
            return loss

        optimizer.step(closure)
        moved.append(products[1] - products[0])
    assert moved[0] == pytest.approx(moved[1], abs=1e-12)


def test_asam_without_names_is_refused() -> None:
    w = torch.zeros(2, requires_grad=True)
    asserts.assert_refuses(
        lambda: ASAM(torch.optim.SGD([w], lr=0.1), model=None),
        ValueError,
        "scaled='weights'",
        "named_parameters",
    )
    base = torch.optim.SGD([("layer.weight", w)], lr=0.1)
    ASAM(base, model=None)


def test_a_copied_asam_still_knows_its_biases() -> None:
    asserts.assert_copies_go_on_alike(make_asam)


@pytest.mark.parametrize("make", [partial(make_sam, rho=0.0), partial(make_asam, rho=0.0)])
def test_rho_zero_is_the_base_bit_for_bit(make: Any) -> None:
    asserts.assert_rho_zero_is_the_base(make)


@pytest.mark.parametrize("make", ALL)
def test_properties_of_every_step(make: Any) -> None:
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, 2)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_transform_equals_closure(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)


def test_radius_is_per_group_with_one_global_norm() -> None:
    a = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    seen: list[tuple[float, float]] = []

    def closure() -> float:
        seen.append((a.item(), b.item()))
        a.grad = torch.tensor([3.0], dtype=torch.float64)
        b.grad = torch.tensor([4.0], dtype=torch.float64)
        return 0.0

    SAM(torch.optim.SGD([{"params": [a]}, {"params": [b], "rho": 2.0}], lr=0.1), 1.0, model=None).step(closure)
    assert seen[1] == pytest.approx((0.6, 1.6), abs=1e-15)


def test_maximize_groups_move_downhill() -> None:
    """Ascent in -L is descent in L."""
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    seen: list[float] = []

    def closure() -> float:
        seen.append(w.item())
        w.grad = torch.tensor([2.0], dtype=torch.float64)
        return 0.0

    SAM(torch.optim.SGD([w], lr=0.1, maximize=True), 0.5, model=None).step(closure)
    assert seen == [1.0, 0.5]


@given(
    exponent=st.integers(-30, 30),
    rho=st.floats(1e-3, 10.0),
    values=st.lists(st.floats(-1, 1).filter(lambda v: abs(v) > 1e-3), min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_radius_is_exact_at_any_gradient_scale(exponent: int, rho: float, values: list[float]) -> None:
    """Neither an epsilon beside the norm nor under- or overflow of float32 squares changes |e|."""
    w = torch.zeros(len(values), requires_grad=True)
    gradient = torch.tensor(values, dtype=torch.float64) * 10.0**exponent
    seen: list[torch.Tensor] = []

    def closure() -> float:
        seen.append(w.detach().clone())
        w.grad = gradient.float()
        return 0.0

    SAM(torch.optim.SGD([w], lr=0.0), rho, model=None).step(closure)
    assert seen[1].double().norm().item() == pytest.approx(rho, rel=1e-5)
