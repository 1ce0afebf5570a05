"""Eigen-SAM against its formula, its eigenvector against dense ones, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatmin import SAM
from flatmin._registry import _METHODS
from flatmin.step._direction import Direction
from flatmin.step._eigensam import EigenSAM
from flatmin.step._memory import Noise
from tests.reference import second_order as reference
from tests.reference import steps
from tests.step import asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> EigenSAM:
    return EigenSAM(base, model=model, **options)


ALL = [partial(make, period=2, iterations=3), partial(make, period=2, iterations=3, product="exact", alpha=0.6)]


def first_vector(start: np.ndarray) -> np.ndarray:
    """The vector that the first estimate starts from, normalised."""
    halves = shared.halves_of(start)
    for half in halves:
        half.grad = torch.ones_like(half)
    noise = Noise(0).normal(Direction.take([{"params": halves}]))
    v = np.concatenate([value.numpy() for bucket in noise for value in bucket.values])
    return v / reference.norm(v)


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float) -> None:
    for product, r, atol in (("exact", None, 1e-12), ("difference", 1e-5, 1e-6)):
        options = {"period": 3, "iterations": 2, "alpha": 0.4}
        formula = reference.EigenSAM(problem.gradient, problem.hessian, first_vector(problem.start), rho=0.3, **options)
        shared.assert_equals_formula(
            problem,
            formula,
            lambda base, product=product, r=r, options=options: EigenSAM(
                base, 0.3, model=None, product=product, r=r, **options
            ),
            momentum,
            atol,
        )


def test_difference_is_exact_on_a_quadratic() -> None:
    problem = shared.problems()[0]
    options = {"period": 3, "iterations": 2, "alpha": 0.4}
    formula = reference.EigenSAM(problem.gradient, problem.hessian, first_vector(problem.start), rho=0.3, **options)
    shared.assert_equals_formula(problem, formula, lambda base: EigenSAM(base, 0.3, model=None, **options), 0.9)


def test_known_answer() -> None:
    """g = (1, 0) and the remembered v = (-.6, .8): on the side of g it is (.6, -.8), at right angles (0, -.8) .8."""
    e = reference.lean(np.array([1.0, 0.0]), np.array([-0.6, 0.8]), rho=0.5, alpha=0.2)
    # v - (u v) u = (-.6, .8) + .6 (1, 0) = (0, .8), with the sign of u v = -.6: minus.
    np.testing.assert_allclose(e, [0.5, -0.08], rtol=0, atol=1e-15)


def saddle(low: float, size: int = 6) -> Tensor:
    """A symmetric matrix with eigenvalues 3, 1, .5, ... and ``low``."""
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return torch.from_numpy(basis @ np.diag([3.0, 1.0, 0.5, 0.2, 0.1, low][:size]) @ basis.T)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("low", [0.0, -2.0, -9.0])
@pytest.mark.parametrize("product", ["exact", "difference"])
def test_finds_the_largest_eigenvalue_also_where_one_below_zero_is_larger_in_size(
    low: float, product: str, maximize: bool
) -> None:
    h = saddle(low)
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    sign = -1.0 if maximize else 1.0
    optimizer = EigenSAM(
        torch.optim.SGD([w], lr=0.0, maximize=maximize), model=None, period=1, iterations=20, product=product
    )
    for _ in range(15):
        optimizer.step(shared.closure_on(lambda v: sign * (v @ h @ v) / 2, [w]))
    assert optimizer.eigenvalue is not None
    assert optimizer.eigenvalue.item() == pytest.approx(3.0, abs=1e-6)


def test_leaves_an_eigenvector_of_a_negative_eigenvalue() -> None:
    """Without a margin the shifted product would map it to zero."""
    h = torch.diag(torch.tensor([-4.0, 1.0], dtype=torch.float64))
    w = torch.tensor([1.0, 1e-3], dtype=torch.float64, requires_grad=True)
    optimizer = EigenSAM(torch.optim.SGD([w], lr=0.0), model=None, period=1, iterations=5)
    optimizer.step(shared.closure_on(lambda v: (v @ h @ v) / 2, [w]))
    optimizer._memory._vectors["top"][w] = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    for _ in range(12):
        optimizer.step(shared.closure_on(lambda v: (v @ h @ v) / 2, [w]))
    assert optimizer.eigenvalue is not None
    assert optimizer.eigenvalue.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_a_linear_loss_keeps_its_first_vector(product: str) -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = EigenSAM(torch.optim.SGD([w], lr=0.1), model=None, period=1, product=product)
    for _ in range(3):
        optimizer.step(shared.closure_on(lambda v: (v * torch.tensor([1.0, 2.0, 3.0])).sum(), [w]))
    assert bool(torch.isfinite(w).all())
    assert optimizer._memory._vectors["top"][w].norm().item() == pytest.approx(1.0)


def test_an_estimate_that_is_not_finite_is_made_again_in_the_next_step() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    optimizer = EigenSAM(torch.optim.SGD([w], lr=0.0), model=None, period=50, iterations=4)
    for factor, expected in ((float("inf"), None), (1.0, 6.0), (float("nan"), 6.0)):
        evaluate = shared.closure_on(lambda v, f=factor: f * (v * v * torch.tensor([3.0, 1e-3])).sum(), [w])
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, scale=1.0)
        assert w.tolist() == [1.0, 2.0]
        found = optimizer.eigenvalue
        assert found is None if expected is None else found.item() == pytest.approx(expected, rel=1e-3)
    assert optimizer.evaluations == 6 + 6 + 2


def test_an_overflow_later_in_the_estimate_discards_it() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    optimizer = EigenSAM(torch.optim.SGD([w], lr=0.0), model=None, iterations=4)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        w.grad = w.detach() * (float("inf") if calls == 3 else 1.0)
        return 0.0

    optimizer.step(closure)
    assert calls == 6
    assert optimizer.eigenvalue is None
    assert "top" not in optimizer._memory
    optimizer.step(closure)
    assert optimizer.eigenvalue is not None


def test_alpha_zero_is_sam_bit_for_bit_and_looks_for_nothing() -> None:
    each = partial(make, rho=0.2, alpha=0.0)
    model, optimizer = asserts.trained(each, 4)
    expected, sam = asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4)
    assert_same_bits(photograph(expected, sam), photograph(model, optimizer))
    asserts.assert_counts_evaluations(each, 2)


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", ALL)
def test_properties_of_every_step(each: Any) -> None:
    asserts.assert_restores_exactly(each)
    asserts.assert_returns_clean_loss(each)
    asserts.assert_transform_equals_closure(each)
    asserts.assert_resumes_bit_for_bit(each)
    asserts.assert_copies_go_on_alike(each)
    shared.assert_maximizes(partial(each, model=None))
    shared.assert_carries_the_loss_scale(partial(each, model=None), rtol=1e-7)
    shared.assert_survives_a_zero_gradient(partial(each, model=None), still=False)
    shared.assert_does_not_move_on_overflow(partial(each, model=None))


def test_costs() -> None:
    shared.assert_counts(partial(make, period=3, iterations=4), [6, 2, 2, 6, 2], 18.0)
    shared.assert_counts(partial(make, period=3, iterations=4, product="exact"), [3, 2, 2, 3, 2], 22.0)
    assert _METHODS["eigensam"].cost({}) == pytest.approx(2 + 5 / 100)


def test_faults_leave_the_estimate_as_it_was() -> None:
    """The third step estimates again: the clean pass, three products, the perturbed pass."""
    shared.assert_faults_change_nothing(ALL[0], 5)
    shared.assert_faults_change_nothing(ALL[1], 3)


@pytest.mark.parametrize("way", ["closure", "transform"])
@pytest.mark.parametrize("kind", ["attention", "compiled"])
def test_models_whose_fast_paths_cannot_be_differentiated_twice(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = shared.Attention().double()
    x, y = torch.randn(6, 4, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    if kind == "compiled":
        model, x = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)).double(), x[:, 0]
    forward: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    found: list[EigenSAM] = []

    def keeping(base: torch.optim.Optimizer, model: nn.Module) -> EigenSAM:
        found.append(EigenSAM(base, model=model, iterations=150, product="exact"))
        return found[-1]

    shared.gradients_of(keeping, model, forward, x, y, way)
    _, h = shared.dense(model, x, y)
    assert found[0].eigenvalue is not None
    assert found[0].eigenvalue.item() == pytest.approx(torch.linalg.eigvalsh(h)[-1].item(), rel=1e-3)


def test_formula_with_the_reference_descending() -> None:
    """The reference's own state is used: it must differ from one without an eigenvector."""
    problem = shared.problems()[1]
    options = {"period": 3, "iterations": 2, "rho": 0.3}
    v = first_vector(problem.start)
    runs = [
        steps.descend(
            reference.EigenSAM(problem.gradient, problem.hessian, v, alpha=alpha, **options), problem.start, 5, 0.05
        )[-1]
        for alpha in (0.0, 0.4)
    ]
    assert np.abs(runs[0] - runs[1]).max() > 1e-5


def test_errors_name_the_argument() -> None:
    w, u = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def build(**options: Any) -> Any:
        return lambda: EigenSAM(torch.optim.SGD([w], lr=0.1), model=None, **options)

    asserts.assert_refuses(build(rho=-1), ValueError, "rho")
    asserts.assert_refuses(build(alpha=-1), ValueError, "alpha")
    asserts.assert_refuses(build(period=0), ValueError, "period", ">= 1")
    asserts.assert_refuses(build(iterations=2.0), TypeError, "iterations", "2.0")
    asserts.assert_refuses(build(product="lanczos"), ValueError, "product")
    asserts.assert_refuses(build(r=0.5, product="exact"), ValueError, "product='difference'")
    base = torch.optim.SGD([{"params": [w]}, {"params": [u], "maximize": True}], lr=0.1)
    optimizer = EigenSAM(base, model=None)
    closure = shared.closure_on(lambda v: v.square().sum(), [w, u])
    asserts.assert_refuses(lambda: optimizer.step(closure), ValueError, "maximize", "all groups")
