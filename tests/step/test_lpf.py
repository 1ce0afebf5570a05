"""LPF-SGD against its formula on noise drawn again, its statistics, then its limits and properties."""

from __future__ import annotations

import math
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.step._direction import Direction
from flatmin.step._lpf import LPFSGD
from flatmin.step._noisy import scale_by_filters
from tests.reference import noise as reference
from tests.reference.steps import descend
from tests.step import asserts
from tests.step.test_distributed import in_two_processes
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
    shifts_of,
    walk,
)


def make_lpf(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> LPFSGD:
    return LPFSGD(base, model=model, **options)


ALL: list[tuple[Any, int]] = [
    (partial(make_lpf, gamma=0.1), 2),
    (partial(make_lpf, gamma=0.1, samples=3, vectors="elementwise", increase=15.0, total_steps=5), 4),
]


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("vectors", ["norm", "elementwise"])
@pytest.mark.parametrize("options", [{}, {"samples": 4, "seed": 3}, {"increase": 15.0, "total_steps": 8}], ids=str)
def test_equals_the_formula_in_float64(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, vectors: str, options: dict[str, Any]
) -> None:
    numbers, steps = count(), count()

    def formula(w: np.ndarray) -> np.ndarray:
        gamma = 0.05
        if "increase" in options:
            gamma *= 1 + 15.0 * (1 - math.cos(math.pi * min(next(steps), 8) / 8)) / 2
        norms = reference.filter_norms(w, SHAPES, vectors)
        draws = [
            reference.draw(options.get("seed", 0), next(numbers), SHAPES) for _ in range(options.get("samples", 1))
        ]
        return reference.smoothed(gradient, w, [gamma * norms * n for n in draws])

    expected = descend(formula, start, 10, 0.05, momentum)
    make = partial(LPFSGD, gamma=0.05, model=None, vectors=vectors, **options)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05, momentum=momentum))


@pytest.mark.parametrize(
    ("vectors", "norms"),
    [("norm", [5.0, 5.0, 0.1, 0.1, 10.0, 10.0, 2.0]), ("elementwise", [5.0, 5.0, 0.1, 0.1, 6.0, 8.0, 2.0])],
)
def test_noise_is_unbiased_and_follows_each_filters_norm(vectors: str, norms: list[float]) -> None:
    """Rows (3, 4) and (0, 0.1), the vector (6, 8), the scalar -2."""
    start = np.array([3.0, 4.0, 0.0, 0.1, 6.0, 8.0, -2.0])
    shifts = np.array(shifts_of(partial(LPFSGD, gamma=0.1, model=None, vectors=vectors), leaves(start), 300))
    assert shifts.shape == (300, SIZE)
    for column, norm in zip(shifts.T, norms, strict=True):
        assert_mean_and_std(column, 0.0, 0.1 * norm)
    correlations = np.corrcoef(shifts.T)[np.triu_indices(SIZE, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(300)


def test_a_filter_is_one_output_channel_of_a_convolution() -> None:
    convolution = nn.Conv2d(2, 3, 3, bias=False).double()
    with torch.no_grad():
        convolution.weight.copy_(torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 3, 3))
    shifts = np.array(shifts_of(partial(LPFSGD, gamma=0.1, model=None), list(convolution.parameters()), 100))
    for channel, part in enumerate(np.split(shifts.reshape(100, -1), 3, axis=1)):
        assert_mean_and_std(part, 0.0, 0.1 * channel * math.sqrt(18))


def test_the_schedule_rises_along_a_cosine_and_stays() -> None:
    parameters = leaves(np.ones(SIZE))
    optimizer = LPFSGD(torch.optim.SGD(parameters, lr=0.0), model=None, increase=15.0, total_steps=4)
    growth = []
    for _ in range(7):
        growth.append(optimizer.growth())
        optimizer.step(closure_on(lambda w: 0.0, np.ones_like, parameters))
    half = 1 + 15 * (1 - math.sqrt(0.5)) / 2
    assert growth == pytest.approx([1.0, half, 8.5, 17.0 - half, 16.0, 16.0, 16.0], abs=1e-12)


def test_the_schedule_goes_on_while_gamma_is_zero() -> None:
    parameters = leaves(np.ones(SIZE))
    optimizer = LPFSGD(torch.optim.SGD(parameters, lr=0.0), 0.0, model=None, increase=1.0, total_steps=2)
    for _ in range(2):
        optimizer.step(closure_on(lambda w: 0.0, np.ones_like, parameters))
    assert optimizer.growth() == pytest.approx(2.0)
    assert optimizer.evaluations == 2


@pytest.mark.parametrize("options", [{}, {"samples": 8, "increase": 15.0, "total_steps": 5}])
def test_gamma_zero_is_the_base_bit_for_bit(options: dict[str, Any]) -> None:
    asserts.assert_rho_zero_is_the_base(partial(make_lpf, gamma=0.0, **options))


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_properties_of_every_step(make: Any, gradients: int) -> None:
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, gradients)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_transform_equals_closure(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_faults_gradients_that_are_not_finite_and_gradients_in_one_pass_only(make: Any, gradients: int) -> None:
    assert_a_failed_step_has_drawn_nothing(make, gradients)
    assert_gradients_in_one_pass_only_are_handled(partial(make, model=None))
    for bad in (float("nan"), float("inf")):
        assert_a_nonfinite_gradient_moves_nothing_and_is_seen(partial(make, model=None), bad)


def test_gamma_is_per_group() -> None:
    a, b = leaves(np.ones(2), [(1,), (1,)])
    groups = [{"params": [a]}, {"params": [b], "gamma": 0.0}]
    seen: list[np.ndarray] = []
    optimizer = LPFSGD(torch.optim.SGD(groups, lr=0.0), 0.5, model=None)
    optimizer.step(closure_on(lambda w: 0.0, np.ones_like, [a, b], seen))
    assert seen[1][0] != 1.0
    assert seen[1][1] == 1.0


def _sharded(rank: int) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Linear(3, 5).double()  # uneven: 3 rows and 2
    fully_shard(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    ones = Direction.take([{"params": list(net.parameters())}])
    for bucket in ones:
        for value in bucket.values:
            value.fill_(1.0)
    scale_by_filters(ones)
    ones.put()
    return [p.grad.full_tensor() for p in net.parameters()]


def test_filters_of_sharded_weights_are_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(3, 5).double()
    rows = whole.weight.detach().norm(dim=1, keepdim=True).expand(5, 3)
    for weight, bias in in_two_processes(_sharded, tmp_path):
        torch.testing.assert_close(weight, rows, rtol=0, atol=1e-15)
        torch.testing.assert_close(bias, whole.bias.detach().norm().expand(5), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gamma": -0.1}, ValueError, ("gamma must be", ">= 0", "-0.1")),
        ({"gamma": "big"}, TypeError, ("gamma must be", "big")),
        ({"samples": 0}, ValueError, ("samples must be", ">= 1")),
        ({"increase": -1.0}, ValueError, ("increase must be", ">= 0")),
        ({"increase": 15.0}, ValueError, ("total_steps is required", "increase=15.0")),
        ({"total_steps": 0}, ValueError, ("total_steps must be", ">= 1")),
        ({"vectors": "sign"}, ValueError, ("vectors must be", "'norm', 'elementwise'", "sign")),
        ({"seed": -1}, ValueError, ("seed must be", ">= 0")),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    base = torch.optim.SGD(leaves(np.zeros(SIZE)), lr=0.1)
    asserts.assert_refuses(lambda: LPFSGD(base, model=None, **options), error, *words)
