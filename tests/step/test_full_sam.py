"""SAM with its Hessian term against formulas and central differences, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatmin import SAM
from flatmin._registry import _METHODS
from flatmin.step._full_sam import FullSAM
from tests.reference import second_order as reference
from tests.step import asserts
from tests.step import second_order_problems as shared


def make(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> FullSAM:
    return FullSAM(base, model=model, **options)


ALL = [partial(make, rho=0.3), partial(make, rho=0.3, product="difference")]


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float) -> None:
    formula = partial(reference.full_sam, problem.gradient, problem.hessian, rho=0.3)
    shared.assert_equals_formula(problem, formula, lambda base: FullSAM(base, 0.3, model=None), momentum)
    shared.assert_equals_formula(
        problem,
        formula,
        lambda base: FullSAM(base, 0.3, model=None, product="difference", r=1e-5),
        momentum,
        atol=1e-5,
    )


def perturbed_loss(problem: shared.Problem, w: np.ndarray, rho: np.ndarray) -> float:
    g = problem.gradient(w)
    return problem.loss(torch.from_numpy(w + rho * g / np.linalg.norm(g))).item()


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("maximize", [False, True])
def test_is_the_gradient_of_the_perturbed_loss(problem: shared.Problem, maximize: bool) -> None:
    """Central differences of w -> L(w + R g / |g|), with a radius of its own for each group."""
    halves = shared.halves_of(problem.start)
    base = torch.optim.SGD([{"params": halves[:1]}, {"params": halves[1:], "rho": 0.5}], lr=0.0, maximize=maximize)
    FullSAM(base, 0.2, model=None).step(shared.closure_on(problem.loss, halves))
    rho = np.array([0.2, 0.2, 0.5, 0.5, 0.5]) * (-1 if maximize else 1)
    h = 1e-6
    expected = [
        (perturbed_loss(problem, problem.start + e, rho) - perturbed_loss(problem, problem.start - e, rho)) / (2 * h)
        for e in h * np.eye(5)
    ]
    got = torch.cat([half.grad for half in halves if half.grad is not None]).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_along_an_eigenvector_it_is_sam(product: str) -> None:
    """There the perturbed gradient is parallel to the clean one, and nothing is left for H."""
    w = torch.tensor([2.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = FullSAM(torch.optim.SGD([w], lr=0.1), 0.5, model=None, product=product)
    optimizer.step(shared.closure_on(lambda v: (v * v * torch.tensor([1.5, 1.0])).sum(), [w]))
    assert w.tolist() == pytest.approx([2.0 - 0.1 * 3.0 * 2.5, 0.0], abs=1e-15)


def test_approaches_sam_as_rho_shrinks_no_faster_than_rho() -> None:
    problem = shared.problems()[1]
    gaps = []
    for rho in (1e-2, 1e-3):
        full, sam = (
            shared.iterates(problem.loss, problem.start, partial(kind, rho=rho, model=None), 1, lr=1.0)[0]
            for kind in (FullSAM, SAM)
        )
        gaps.append(np.linalg.norm(full - sam))
    # g_p lies within O(rho) of g, and the term is multiplied by rho: the gap is of second order.
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_rho_zero_is_the_base_bit_for_bit(product: str) -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0, product=product))


@pytest.mark.parametrize("each", ALL)
def test_properties_of_every_step(each: Any) -> None:
    asserts.assert_restores_exactly(each)
    asserts.assert_returns_clean_loss(each)
    asserts.assert_transform_equals_closure(each)
    asserts.assert_resumes_bit_for_bit(each)
    asserts.assert_copies_go_on_alike(each)
    shared.assert_faults_change_nothing(each, 3)
    shared.assert_maximizes(partial(each, model=None))
    shared.assert_carries_the_loss_scale(partial(each, model=None), rtol=1e-9)
    shared.assert_survives_a_zero_gradient(partial(each, model=None))
    for in_pass in (1, 2, 3):
        shared.assert_does_not_move_on_overflow(partial(each, model=None), in_pass)


def test_costs() -> None:
    shared.assert_counts(ALL[0], [3] * 4, 20.0)  # the third call's loss is differentiated twice
    asserts.assert_counts_evaluations(ALL[1], 3)
    assert _METHODS["sam_full"].cost({}) == 5


@pytest.mark.parametrize("way", ["closure", "transform"])
@pytest.mark.parametrize("kind", ["attention", "compiled"])
def test_models_whose_fast_paths_cannot_be_differentiated_twice(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = shared.Attention().double()
    x, y = torch.randn(6, 4, 8, dtype=torch.float64), torch.randint(0, 3, (6,))
    if kind == "compiled":
        model, x = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)).double(), x[:, 0]
    forward: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    got = shared.gradients_of(partial(make, rho=0.2), model, forward, x, y, way)
    g, h = shared.dense(model, x, y)
    with torch.no_grad():
        start = [p.clone() for p in model.parameters()]
        parts = (0.2 * g / g.norm()).split([p.numel() for p in start])
        for p, part in zip(model.parameters(), parts, strict=True):
            p += part.view_as(p)
    gp, _ = shared.dense(model, x, y)
    unit = g / g.norm()
    expected = gp + 0.2 / g.norm() * h @ (gp - unit * (unit @ gp))
    torch.testing.assert_close(shared.flat(got), expected, rtol=0, atol=1e-12)


def test_parameters_with_a_gradient_in_one_pass_only_are_restored() -> None:
    w = [torch.tensor([1.0], requires_grad=True) for _ in range(3)]
    calls = iter([[1.0, 2.0, None], [3.0, None, 4.0], [1.0, 2.0, 2.0]])
    seen = []

    def closure() -> float:
        seen.append([p.item() for p in w])
        for parameter, value in zip(w, next(calls), strict=True):
            parameter.grad = None if value is None else torch.tensor([value])
        return 0.0

    FullSAM(torch.optim.SGD(w, lr=0.0), 0.25, model=None, product="difference").step(closure)
    assert [p.item() for p in w] == [1.0] * 3
    assert seen[1][2] == 1.0
    assert seen[2][2] != 1.0


def test_errors_name_the_argument() -> None:
    w = torch.zeros(2, requires_grad=True)

    def build(**options: Any) -> Any:
        return lambda: FullSAM(torch.optim.SGD([w], lr=0.1), model=None, **options)

    asserts.assert_refuses(build(rho=float("nan")), ValueError, "rho")
    asserts.assert_refuses(build(product="vjp"), ValueError, "product", "'vjp'")
    asserts.assert_refuses(build(r=0.1), ValueError, "product='difference'")
    asserts.assert_refuses(build(r=-0.1, product="difference"), ValueError, "r must", "-0.1")


def test_static_graph_is_refused_with_the_reason(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
        asserts.assert_refuses(
            lambda: FullSAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net), ValueError, "product", "static_graph"
        )
    finally:
        torch.distributed.destroy_process_group()


def test_a_sum_of_squares_at_its_minimum_has_no_nan() -> None:
    w = torch.zeros(2, requires_grad=True)

    def closure() -> Tensor:
        w.grad = None
        loss = w.square().sum()
        loss.backward()
        return loss

    FullSAM(torch.optim.SGD([w], lr=0.1), 0.5, model=None).step(closure)
    assert w.tolist() == [0.0, 0.0]
