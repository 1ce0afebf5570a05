"""Gradient norm aware minimization against its formula; its limits and properties."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatmin import SAM
from flatmin.step._gradient_norm_aware import GradientNormAware
from tests.reference import gam as reference
from tests.reference.steps import descend
from tests.step import asserts
from tests.step.problems import assert_same_bits, photograph
from tests.step.test_faults import PLACES, FaultError, _closure
from tests.step.test_sam import iterates, problems

RELEASED: dict[str, float] = {"rho": 0.2, "r": 0.02, "gamma": 0.03, "beta1": 0.6, "beta2": 0.5, "beta3": 0.4}
#: Also the released command line's own default, whose weights do not sum to 1, and values at which all terms count.
SETTINGS: list[dict[str, float]] = [
    RELEASED,
    {"rho": 0.2, "r": 0.03, "gamma": 0.03, "beta1": 1.0, "beta2": 1.0, "beta3": 1.0},
    {"rho": 0.7, "r": 0.4, "gamma": 0.5, "beta1": 0.3, "beta2": 0.8, "beta3": 0.6},
]


def make(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> GradientNormAware:
    return GradientNormAware(base, model=model, **options)


@pytest.mark.parametrize(("gradient", "start"), problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("options", SETTINGS)
def test_equals_the_formula_in_float64(
    gradient: Any, start: np.ndarray, momentum: float, options: dict[str, float]
) -> None:
    formula = partial(reference.gradient_norm_aware, gradient, **options)
    expected = descend(formula, start, 12, 0.05, momentum)
    got = iterates(gradient, start, partial(make, model=None, **options), lr=0.05, momentum=momentum)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_the_defaults_are_the_released_ones() -> None:
    gradient, start = problems()[1]
    default, released = (iterates(gradient, start, partial(make, model=None, **o), lr=0.1) for o in ({}, RELEASED))
    np.testing.assert_array_equal(default, released)


def seen_from(start: list[float], curvature: list[float], **options: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Where the gradients of h w^2 / 2 are taken, and what is handed on."""
    h = torch.tensor(curvature, dtype=torch.float64)
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    places: list[np.ndarray] = []

    def closure() -> float:
        places.append(w.detach().numpy().copy())
        w.grad = h * w.detach()
        return 0.0

    make(torch.optim.SGD([w], lr=0.0), None, **options).step(closure)
    return places, w.grad.numpy()


def test_places_and_update_by_hand() -> None:
    """h = (1, 2), w = (3, 2): g_0 = (3, 4), g_1 - g_0 = r (.6, 1.6), all else follows."""
    options = {"rho": 0.5, "r": 0.1, "gamma": 0.2, "beta1": 0.6, "beta2": 0.5, "beta3": 0.4}
    places, final = seen_from([3.0, 2.0], [1.0, 2.0], **options)
    h, w = np.array([1.0, 2.0]), np.array([3.0, 2.0])
    s = 0.5 * np.array([0.6, 1.6]) / np.sqrt(0.36 + 2.56)
    g2 = h * (w + s)
    expected = [w, w + np.array([0.06, 0.08]), w + s, w + s + 0.1 * g2 / np.sqrt((g2**2).sum())]
    np.testing.assert_allclose(places, expected, rtol=0, atol=1e-14)
    q = 0.6 * h * expected[1] + 0.4 * h * expected[3]
    p = np.array([3.0, 4.0]) + 0.5 * g2
    across = np.array([-q[1], q[0]]) / np.sqrt((q**2).sum())
    np.testing.assert_allclose(final, q - 0.2 * (p @ across) * across, rtol=0, atol=1e-14)


def test_the_part_taken_away_is_orthogonal_to_the_rest() -> None:
    places, plain = seen_from([3.0, 2.0], [1.0, 2.0], gamma=0.0)
    again, final = seen_from([3.0, 2.0], [1.0, 2.0], gamma=0.3)
    np.testing.assert_array_equal(places, again)
    assert abs((final - plain) @ plain) < 1e-13
    assert np.abs(final - plain).max() > 1e-3


def test_r_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, r=0.0))


def test_r_zero_with_other_weights_is_the_gradient_times_their_sum() -> None:
    places, final = seen_from([3.0, 2.0], [1.0, 2.0], r=0.0, beta1=0.5, beta3=0.25)
    assert len(places) == 1
    np.testing.assert_array_equal(final, [2.25, 3.0])


def test_no_second_point_and_no_decomposition_is_sam() -> None:
    gradient, start = problems()[1]
    ours = iterates(gradient, start, partial(make, model=None, rho=0.0, r=0.3, gamma=0.0), lr=0.1, momentum=0.9)
    sam = iterates(gradient, start, partial(SAM, rho=0.3, model=None), lr=0.1, momentum=0.9)
    np.testing.assert_allclose(ours, sam, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", SETTINGS)
def test_properties_of_every_step(options: dict[str, float]) -> None:
    ours = partial(make, **options)
    asserts.assert_restores_exactly(ours)
    asserts.assert_counts_evaluations(ours, 4)
    asserts.assert_returns_clean_loss(ours)
    asserts.assert_transform_equals_closure(ours)
    asserts.assert_resumes_bit_for_bit(ours)
    asserts.assert_copies_go_on_alike(ours)


def test_a_step_that_fails_has_not_happened() -> None:
    model, optimizer = asserts.trained(make, 2)
    for number in range(1, 5):
        for place in PLACES:
            before = photograph(model, optimizer)
            with pytest.raises((FaultError, TypeError)):
                optimizer.step(_closure(model, optimizer, 2, (number, place, FaultError())))
            assert_same_bits(before, photograph(model, optimizer))
            assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("broken", range(4))
def test_what_is_not_finite_moves_nothing_and_is_passed_on(broken: int, bad: float) -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    places: list[Tensor] = []

    def closure() -> float:
        places.append(w.detach().clone())
        # A gradient that overflows at a place does so again at the same place.
        lost = len(places) > broken and torch.equal(places[-1], places[broken])
        w.grad = torch.tensor([1.0, bad], dtype=torch.float64) if lost else w.detach() ** 3
        return 0.0

    make(torch.optim.SGD([w], lr=0.0), None).step(closure)
    assert len(places) == 4
    assert all(torch.isfinite(place).all() for place in places)
    assert not torch.isfinite(w.grad).all()
    if broken == 0:
        assert all(torch.equal(place, places[0]) for place in places)
        assert w.grad[0] == 1.0 - 0.03 * 1.5  # what is finite stays so


def test_gradients_in_some_passes_only() -> None:
    parameters = [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    a, b, c = parameters
    one = torch.ones(1, dtype=torch.float64)
    for pattern in range(16):
        calls = count()

        def closure(calls: Any = calls, pattern: int = pattern) -> float:
            there = bool(pattern >> next(calls) & 1)
            a.grad, b.grad, c.grad = one.clone(), one.clone() if there else None, None if there else one.clone()
            return 0.0

        make(torch.optim.SGD(parameters, lr=0.0), None).step(closure)
        assert [p.item() for p in parameters] == [1.0, 1.0, 1.0]
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in parameters)


def test_a_gradient_of_zero_moves_nothing() -> None:
    places, final = seen_from([0.0, 0.0], [1.0, 2.0])
    assert not np.any(places)
    np.testing.assert_array_equal(final, [0.0, 0.0])


@pytest.mark.parametrize("exponent", [-30, 30])
def test_gradients_at_the_ends_of_float32(exponent: int) -> None:
    """Their squares are out of range; the update is that of ordinary size, times the scale."""
    updates = []
    for scale in (1.0, 10.0**exponent):
        w = torch.tensor([3.0, 2.0], requires_grad=True)

        def closure(w: Tensor = w, scale: float = scale) -> float:
            w.grad = (torch.tensor([1.0, 2.0]) * w.detach()).double().mul(scale).float()
            return 0.0

        make(torch.optim.SGD([w], lr=0.0), None, gamma=0.5).step(closure)
        updates.append(w.grad.double() / scale)
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-5, atol=0)


def test_maximizing_the_negative_loss_is_minimizing() -> None:
    gradient, start = problems()[1]
    ours = partial(make, model=None, **SETTINGS[2])
    down = iterates(gradient, start, ours, lr=0.1, momentum=0.9)
    up = iterates(lambda w: -gradient(w), start, ours, lr=0.1, momentum=0.9, maximize=True)
    np.testing.assert_allclose(up, down, rtol=0, atol=1e-15)


def test_radii_are_per_group_with_global_norms() -> None:
    """One weight a group at h = 1: g_1 - g_0 is r g_0 / |g_0| entry by entry."""
    a, b = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (3.0, 4.0))
    seen: list[tuple[float, float]] = []

    def closure() -> float:
        seen.append((a.item(), b.item()))
        a.grad, b.grad = a.detach().clone(), b.detach().clone()
        return 0.0

    groups = [{"params": [a]}, {"params": [b], "r": 0.2, "rho": 0.0}]
    make(torch.optim.SGD(groups, lr=0.0), None, r=0.1, rho=1.0).step(closure)
    assert seen[1] == pytest.approx((3.06, 4.16), abs=1e-14)
    assert seen[2] == pytest.approx((3.0 + 0.06 / np.hypot(0.06, 0.16), 4.0), abs=1e-12)
    length = np.hypot(*seen[2])
    assert seen[3] == pytest.approx((seen[2][0] * (1 + 0.1 / length), 4.0 * (1 + 0.2 / length)), abs=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rho": -0.1}, ValueError, ("rho must be", ">= 0", "-0.1")),
        ({"rho": "big"}, TypeError, ("rho must be", "big")),
        ({"r": float("nan")}, ValueError, ("r must be",)),
        ({"gamma": -1.0}, ValueError, ("gamma must be", ">= 0")),
        ({"beta1": float("inf")}, ValueError, ("beta1 must be",)),
        ({"beta2": -0.5}, ValueError, ("beta2 must be", ">= 0", "-0.5")),
        ({"beta3": True}, TypeError, ("beta3 must be", "True")),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    base = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    asserts.assert_refuses(lambda: make(base, None, **options), error, *words)
