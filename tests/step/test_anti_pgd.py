"""Anti-PGD against the paper's own form of it, on noise drawn again; its statistics, limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.step._anti_pgd import AntiPGD
from flatmin.step._weight_noise import WeightNoise
from tests.reference import noise as reference
from tests.step import asserts
from tests.step.test_weight_noise import (
    EACH,
    SHAPES,
    SIZE,
    assert_a_failed_step_has_drawn_nothing,
    assert_a_nonfinite_gradient_moves_nothing_and_is_seen,
    assert_close,
    assert_gradients_in_one_pass_only_are_handled,
    assert_mean_and_std,
    closure_on,
    leaves,
    problems,
    shifts_of,
    walk,
)

STEPS, SIGMA, LR = 10, 0.2, 0.05


def make_anti(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> AntiPGD:
    return AntiPGD(base, model=model, **options)


ALL = [partial(make_anti, sigma=0.1), partial(make_anti, sigma=0.1, noise="gaussian")]


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_equals_the_papers_form_seen_without_its_noise(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, kind: str
) -> None:
    """w+ = w - lr g(w) + (xi+ - xi), of which the step knows nothing: it walks along y = w - xi."""
    draw = reference.signs if kind == "rademacher" else reference.draw
    noise = [SIGMA * draw(4, number, SHAPES) for number in range(STEPS + 1)]
    expected = reference.anti_pgd(gradient, start, noise, LR, momentum)
    make = partial(AntiPGD, sigma=SIGMA, model=None, noise=kind, seed=4)
    assert_close(expected, walk(loss, gradient, start, make, STEPS, lr=LR, momentum=momentum))


def test_gaussian_anti_pgd_is_weight_noise_bit_for_bit() -> None:
    loss, gradient, start = problems()[1]
    anti = walk(loss, gradient, start, partial(AntiPGD, sigma=0.3, model=None, noise="gaussian", seed=2), lr=0.1)
    noise = walk(loss, gradient, start, partial(WeightNoise, sigma=0.3, model=None, seed=2), lr=0.1)
    np.testing.assert_array_equal(anti, noise)


def test_rademacher_noise_has_entries_of_size_sigma_and_fair_signs() -> None:
    shifts = np.array(shifts_of(partial(AntiPGD, sigma=0.5, model=None), leaves(np.zeros(SIZE)), 300))
    assert shifts.shape == (300, SIZE)
    np.testing.assert_array_equal(np.abs(shifts), 0.5)
    for column in shifts.T:
        assert abs(column.mean()) <= 4 * 0.5 / np.sqrt(300)
    correlations = np.corrcoef(shifts.T)[np.triu_indices(SIZE, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(300)
    assert abs(np.corrcoef(shifts[:-1].reshape(-1), shifts[1:].reshape(-1))[0, 1]) < 4 / np.sqrt(299 * SIZE)


def test_gaussian_noise_is_unbiased_with_standard_deviation_sigma() -> None:
    make = partial(AntiPGD, sigma=0.5, model=None, noise="gaussian")
    assert_mean_and_std(np.array(shifts_of(make, leaves(np.zeros(SIZE)), 300)), 0.0, 0.5)


def test_increments_of_the_perturbed_iterate_are_anticorrelated() -> None:
    """What the method is named for: at a learning rate of 0, w = y + xi has increments of correlation -1/2."""
    shifts = np.array(shifts_of(partial(AntiPGD, sigma=0.5, model=None), leaves(np.zeros(SIZE)), 400))
    steps = np.diff(shifts, axis=0)
    correlation = np.corrcoef(steps[:-1].reshape(-1), steps[1:].reshape(-1))[0, 1]
    assert abs(correlation + 0.5) <= 4 / np.sqrt(398 * SIZE)


def test_the_mean_gradient_adds_the_gradient_of_half_sigma_squared_trace() -> None:
    """For w^4 with noise of two values the smoothed loss is w^4 + 6 s^2 w^2 + s^4 exactly."""
    w, sigma, draws = 0.7, 0.4, 400
    parameter = torch.tensor([w], dtype=torch.float64, requires_grad=True)
    optimizer = AntiPGD(torch.optim.SGD([parameter], lr=0.0), sigma, model=None)
    got = []
    for _ in range(draws):
        optimizer.step(closure_on(lambda v: float(v[0] ** 4), lambda v: 4 * v**3, [parameter]))
        got.append(parameter.grad.item())
    assert abs(np.mean(got) - (4 * w**3 + 12 * sigma**2 * w)) <= 4 * np.std(got) / np.sqrt(draws)


def test_sigma_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make_anti, sigma=0.0))


@pytest.mark.parametrize("make", ALL)
def test_properties_of_every_step(make: Any) -> None:
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, 2)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_transform_equals_closure(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)


@pytest.mark.parametrize("make", ALL)
def test_faults_gradients_that_are_not_finite_and_gradients_in_one_pass_only(make: Any) -> None:
    assert_a_failed_step_has_drawn_nothing(make, 2)
    assert_gradients_in_one_pass_only_are_handled(partial(make, model=None))
    for bad in (float("nan"), float("inf")):
        assert_a_nonfinite_gradient_moves_nothing_and_is_seen(partial(make, model=None), bad)


def test_equal_seeds_draw_equal_noise() -> None:
    make = partial(AntiPGD, sigma=0.1, model=None)
    runs = [np.array(shifts_of(partial(make, seed=seed), leaves(np.zeros(SIZE)), 9)) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_sigma_is_per_group() -> None:
    a, b = leaves(np.zeros(2), [(1,), (1,)])
    groups = [{"params": [a]}, {"params": [b], "sigma": 2.0}]
    seen: list[np.ndarray] = []
    optimizer = AntiPGD(torch.optim.SGD(groups, lr=0.0), 0.5, model=None)
    optimizer.step(closure_on(lambda w: 0.0, np.ones_like, [a, b], seen))
    np.testing.assert_array_equal(np.abs(seen[1]), [0.5, 2.0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sigma": -0.1}, ValueError, ("sigma must be", ">= 0", "-0.1")),
        ({"sigma": float("inf")}, ValueError, ("sigma must be",)),
        ({"noise": "uniform"}, ValueError, ("noise must be", "'rademacher', 'gaussian'", "uniform")),
        ({"seed": 1.0}, TypeError, ("seed must be", "integer")),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    base = torch.optim.SGD(leaves(np.zeros(SIZE)), lr=0.1)
    asserts.assert_refuses(lambda: AntiPGD(base, model=None, **options), error, *words)
