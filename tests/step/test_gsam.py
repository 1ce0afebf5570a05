"""GSAM against its formula, then its schedule, limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._gsam import GSAM, radius
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> GSAM:
    return GSAM(base, model=model, **options)


SCHEDULE = {"rho": 0.3, "rho_min": 0.1, "lr_max": 0.2, "lr_min": 0.05}
ALL = [make, partial(make, **SCHEDULE, alpha=2.0), partial(make, alpha=0.0)]


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.5])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, alpha: float) -> None:
    shared.assert_equals_formula(
        problem,
        partial(reference.gsam, problem.gradient, rho=0.3, alpha=alpha),
        partial(make, rho=0.3, alpha=alpha),
        momentum,
    )
    scheduled = partial(make, rho=0.3, rho_min=0.1, lr_max=0.2, lr_min=0.02, alpha=alpha)
    rho = reference.radius(0.05, 0.3, 0.1, 0.2, 0.02)
    formula = partial(reference.gsam, problem.gradient, rho=rho, alpha=alpha)
    shared.assert_equals_formula(problem, formula, scheduled, momentum)


def test_known_answer() -> None:
    w, _, _ = family_asserts.scripted(make, [[0.0], [0.0]], [[[1.0], [0.0]], [[1.0], [1.0]]])
    assert [p.item() for p in w] == pytest.approx([-0.8, -1.2], abs=1e-15)


def test_radius_follows_the_actual_rate_of_each_group() -> None:
    """P9: through a OneCycle schedule, whose rate is not relative to anything."""
    a, b = (torch.tensor([0.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    base = torch.optim.SGD([{"params": [a]}, {"params": [b], "rho": 2.0, "rho_min": None}], lr=0.1)
    optimizer = GSAM(base, 1.0, model=None, rho_min=0.2, lr_max=0.5, alpha=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)
    seen, rates = [], []

    def closure() -> float:
        seen.append((a.item(), b.item()))
        a.grad, b.grad = (torch.ones(1, dtype=torch.float64) for _ in range(2))
        return 0.0

    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(closure)
        scheduler.step()
    assert max(rates) > 0.49
    assert min(rates) < 0.05
    moved = [(y[0] - x[0], y[1] - x[1]) for x, y in zip(seen[::2], seen[1::2], strict=True)]
    for rate, (first, second) in zip(rates, moved, strict=True):
        assert first == pytest.approx(reference.radius(rate, 1.0, 0.2, 0.5, 0.0) / 2**0.5, abs=1e-14)
        assert second == pytest.approx(2.0 / 2**0.5, abs=1e-14)


@pytest.mark.parametrize(("lr", "expected"), [(0.0, 0.1), (0.05, 0.1), (0.125, 0.2), (0.2, 0.3), (9.0, 0.3)])
def test_radius_stays_between_its_extremes(lr: float, expected: float) -> None:
    assert radius({"lr": lr, **SCHEDULE}) == pytest.approx(expected, abs=1e-15)
    assert radius({"lr": torch.tensor(lr, dtype=torch.float64), **SCHEDULE}) == pytest.approx(expected, abs=1e-15)


def test_a_group_added_without_a_rate_gets_the_bases() -> None:
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = GSAM(torch.optim.SGD([a], lr=0.1), 0.2, model=None, rho_min=0.0, lr_max=0.4)
    optimizer.add_param_group({"params": [b]})
    assert [radius(group) for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])


def test_alpha_zero_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(make, rho=0.2, alpha=0.0), 4)))


@pytest.mark.parametrize("options", [{}, {"rho_min": 0.0, "lr_max": 1.0}])
def test_rho_zero_is_the_base_bit_for_bit(options: Any) -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0, **options))


@pytest.mark.parametrize("each", ALL)
def test_properties_of_every_step(each: Any) -> None:
    family_asserts.assert_all_properties(each)
    family_asserts.assert_limits(each)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
def test_the_projection_is_right_at_any_scale_of_the_gradient(size: float) -> None:
    w = torch.zeros(2, requires_grad=True)
    passes = iter([[1.0, 0.0], [1.0, 1.0]])
    optimizer = GSAM(torch.optim.SGD([w], lr=0.0), model=None)

    def closure() -> float:
        w.grad = torch.tensor(next(passes)) * size
        return 0.0

    optimizer.step(closure)
    torch.testing.assert_close(w.grad / size, torch.tensor([0.8, 1.2]), rtol=1e-5, atol=0)


def test_gradients_in_one_pass_only_count_as_zero_in_the_other() -> None:
    passes: Any = [[[3.0], [4.0], None], [[1.0], None, [1.0]]]
    w, seen, _ = family_asserts.scripted(partial(make, rho=1.0), [[1.0], [1.0], [1.0]], passes, lr=0.0)
    assert seen[1] == [[pytest.approx(1.6)], [pytest.approx(1.8)], [1.0]]
    assert [p.item() for p in w] == [1.0] * 3
    # <g, g_p> / |g_p|^2 = 3/2
    assert family_asserts.grads(w) == pytest.approx([1.6 - 1.2, -1.6, 1.6])


def test_a_perturbed_gradient_of_zero_has_no_direction() -> None:
    w, _, _ = family_asserts.scripted(make, [[1.0, 1.0]], [[[1.0, 2.0]], [[0.0, 0.0]]], lr=0.0)
    assert family_asserts.grads(w) == [-0.4, -0.8]


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(
        GSAM, {"rho": -0.5, "alpha": -0.1, "lr_min": -1.0, "lr_max": 0.0, "rho_min": "x"}
    )

    def build(**options: Any) -> Any:
        return lambda: GSAM(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), 0.1, model=None, **options)

    asserts.assert_refuses(build(rho_min=0.05), ValueError, "lr_max is required", "None")
    asserts.assert_refuses(build(rho_min=0.2, lr_max=1.0), ValueError, "rho_min", "<= 0.1", "0.2")
    asserts.assert_refuses(build(rho_min=0.05, lr_max=0.1, lr_min=0.1), ValueError, "lr_max", "> 0.1")
