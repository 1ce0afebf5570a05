"""The universal class against its formulas on noise drawn again, its limits, losses and properties."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flatmin.step._universal import DetSAM, FrobSAM, TraceSAM, _loss
from flatmin.step._weight_noise import WeightNoise
from tests.reference import noise as reference
from tests.reference.steps import descend
from tests.step import asserts
from tests.step.problems import Everything, assert_same_bits, batch, photograph
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
    flat,
    leaves,
    problems,
    shifts_of,
    walk,
)


def make_trace(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> TraceSAM:
    return TraceSAM(base, model=model, **options)


def make_det(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> DetSAM:
    return DetSAM(base, model=model, **options)


def make_frob(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> FrobSAM:
    return FrobSAM(base, model=model, **options)


ALL: list[tuple[Any, int]] = [
    (partial(make_trace, rho=0.1), 2),
    (partial(make_trace, rho=0.1, lam=1.5, samples=2, sampler="sphere"), 3),
    (partial(make_det, half_length=0.1), 2),
    (partial(make_det, half_length=0.1, samples=3, lam=0.5), 4),
    (partial(make_frob, rho=0.1, lam=0.1), 3),
    (partial(make_frob, rho=0.1, lam=0.1, samples=4), 5),
]
USE_LOSSES = ALL[2:]


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sampler", ["gaussian", "sphere"])
@pytest.mark.parametrize(("lam", "samples"), [(1.0, 1), (0.4, 1), (1.7, 3)])
def test_trace_equals_the_formula_in_float64(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, sampler: str, lam: float, samples: int
) -> None:
    numbers = count()

    def formula(w: np.ndarray) -> np.ndarray:
        vs = [reference.draw(1, next(numbers), SHAPES) for _ in range(samples)]
        if sampler == "sphere":
            vs = [v / np.sqrt((v**2).sum()) for v in vs]
        g = gradient(w)
        return g + lam * np.mean([gradient(w + 0.3 * v) - g for v in vs], axis=0)

    expected = descend(formula, start, 10, 0.05, momentum)
    make = partial(TraceSAM, rho=0.3, model=None, lam=lam, samples=samples, sampler=sampler, seed=1)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05, momentum=momentum))


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("rho", "lam", "samples"), [(1.0, 1.0, 1), (0.5, 0.3, 1), (1.0, 0.7, 3)])
def test_det_equals_the_formula_in_float64(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, rho: float, lam: float, samples: int
) -> None:
    numbers = count()

    def formula(w: np.ndarray) -> np.ndarray:
        vs = [0.05 * (2 * reference.draw(1, next(numbers), SHAPES, "uniform") - 1) for _ in range(samples)]
        return reference.det_sam(loss, gradient, w, vs, rho, lam)

    expected = descend(formula, start, 10, 0.05, momentum)
    make = partial(DetSAM, rho=rho, model=None, lam=lam, half_length=0.05, samples=samples, seed=1)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05, momentum=momentum))


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("samples", [2, 5])
def test_frob_equals_the_formula_in_float64(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, samples: int
) -> None:
    numbers = count()

    def formula(w: np.ndarray) -> np.ndarray:
        vs = [reference.draw(1, next(numbers), SHAPES) for _ in range(samples)]
        return reference.frob_sam(loss, gradient, w, vs, 0.1, 0.02)

    expected = descend(formula, start, 10, 0.05, momentum)
    make = partial(FrobSAM, rho=0.1, model=None, lam=0.02, samples=samples, seed=1)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05, momentum=momentum))


def test_trace_with_gaussian_shifts_is_weight_noise_bit_for_bit() -> None:
    loss, gradient, start = problems()[1]
    for lam in (1.0, 0.25):
        trace = walk(loss, gradient, start, partial(TraceSAM, rho=0.3, model=None, lam=lam), lr=0.1)
        noise = walk(loss, gradient, start, partial(WeightNoise, sigma=0.3, model=None, mix=1.0 - lam), lr=0.1)
        np.testing.assert_array_equal(trace, noise)


def test_det_with_one_sample_weighs_by_the_exponential_of_the_difference() -> None:
    """psi' phi' of one sample: -e^(-d/2)/2 * -2 e^(3d/2) = e^d."""
    parameter = leaves(np.zeros(1), [(1,)])
    values = iter([(2.0, 1.0), (2.5, 4.0)])

    def closure() -> float:
        loss, gradient = next(values)
        parameter[0].grad = torch.tensor([gradient], dtype=torch.float64)
        return loss

    DetSAM(torch.optim.SGD(parameter, lr=0.0), model=None, lam=0.3).step(closure)
    assert parameter[0].grad.item() == pytest.approx(1.0 + 0.3 * np.exp(0.5) * 3.0, abs=1e-14)


def test_frob_known_answer() -> None:
    """Two samples: half the product of the differences."""
    parameter = leaves(np.zeros(1), [(1,)])
    values = iter([(9.0, 1.0), (2.0, 4.0), (5.0, 10.0)])

    def closure() -> float:
        loss, gradient = next(values)
        parameter[0].grad = torch.tensor([gradient], dtype=torch.float64)
        return loss

    FrobSAM(torch.optim.SGD(parameter, lr=0.0), 0.5, model=None, lam=0.1).step(closure)
    assert parameter[0].grad.item() == pytest.approx(1.0 + 0.1 / 0.25 * 0.5 * 3.0 * 6.0, abs=1e-14)


def test_det_stays_right_where_a_single_exponential_would_overflow() -> None:
    """exp(-d/2) of d = -3,000 is infinite in float64, the ratio of two of them is not."""
    parameter = leaves(np.zeros(1), [(1,)])
    values = iter([(0.0, 1.0), (-3000.0, 2.0), (-2999.0, 3.0)])

    def closure() -> float:
        loss, gradient = next(values)
        parameter[0].grad = torch.tensor([gradient], dtype=torch.float64)
        return loss

    DetSAM(torch.optim.SGD(parameter, lr=0.0), model=None, samples=2).step(closure)
    assert parameter[0].grad.item() == pytest.approx(1.0, abs=1e-14)  # their weight, about e^-3000, is nothing


def test_trace_in_expectation_is_the_traces_gradient() -> None:
    """For w^4, E g(w + rho v) - g(w) = 12 rho^2 w."""
    parameter = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    optimizer = TraceSAM(torch.optim.SGD([parameter], lr=0.0), 0.3, model=None)
    got = []
    for _ in range(400):
        optimizer.step(closure_on(lambda v: float(v[0] ** 4), lambda v: 4 * v**3, [parameter]))
        got.append(parameter.grad.item() - 4 * 0.7**3)
    assert abs(np.mean(got) - 12 * 0.09 * 0.7) <= 4 * np.std(got) / 20


def test_frob_in_expectation_is_the_covariance_of_loss_and_gradient() -> None:
    """For h w^2 / 2 at w, Cov(L, g) = E[(h w e + h e^2 / 2) h e] = rho^2 h^2 w with e = rho v."""
    parameter = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    optimizer = FrobSAM(torch.optim.SGD([parameter], lr=0.0), 0.3, model=None, lam=1.0)
    got = []
    for _ in range(400):
        optimizer.step(closure_on(lambda v: float(v[0] ** 2), lambda v: 2 * v, [parameter]))
        got.append(parameter.grad.item() - 2 * 0.7)
    assert abs(np.mean(got) - 4 * 0.7) <= 4 * np.std(got) / 20


def test_samplers_statistics() -> None:
    start = np.zeros(SIZE)
    gaussian = np.array(shifts_of(partial(TraceSAM, rho=0.3, model=None), leaves(start), 300))
    assert_mean_and_std(gaussian, 0.0, 0.3)
    sphere = np.array(shifts_of(partial(TraceSAM, rho=0.3, model=None, sampler="sphere"), leaves(start), 300))
    np.testing.assert_allclose((sphere**2).sum(1), 0.09, rtol=1e-12)
    assert_mean_and_std(sphere.reshape(-1), 0.0, 0.3 / np.sqrt(SIZE))
    cube = np.array(shifts_of(partial(DetSAM, rho=2.0, model=None, half_length=0.1), leaves(start), 300))
    assert np.abs(cube).max() <= 0.2
    assert_mean_and_std(cube, 0.0, 0.2 / np.sqrt(3))


ZERO = [
    partial(make_trace, rho=0.0),
    partial(make_trace, lam=0.0),
    partial(make_det, rho=0.0),
    partial(make_det, lam=0.0),
    partial(make_frob, rho=0.0),
    partial(make_frob, lam=0.0),
]


@pytest.mark.parametrize("make", ZERO)
def test_without_sharpness_it_is_the_base_bit_for_bit(make: Any) -> None:
    asserts.assert_rho_zero_is_the_base(make)


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_properties_of_every_step(make: Any, gradients: int) -> None:
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, gradients)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_faults_gradients_that_are_not_finite_and_gradients_in_one_pass_only(make: Any, gradients: int) -> None:
    assert_a_failed_step_has_drawn_nothing(make, gradients)
    assert_gradients_in_one_pass_only_are_handled(partial(make, model=None))
    for bad in (float("nan"), float("inf")):
        assert_a_nonfinite_gradient_moves_nothing_and_is_seen(partial(make, model=None), bad)


# --- the losses -------------------------------------------------------------------------------------------


def test_trace_needs_no_loss_in_transform() -> None:
    for make, _ in ALL[:2]:
        asserts.assert_transform_equals_closure(make)


@pytest.mark.parametrize(("make", "gradients"), USE_LOSSES)
def test_transform_equals_closure_where_evaluate_returns_the_loss(make: Any, gradients: int) -> None:
    model, optimizer = asserts.trained(make, 4)
    expected = photograph(model, optimizer)
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(4):
        x, y = batch(step)

        def evaluate(x: Any = x, y: Any = y) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        optimizer.zero_grad()
        optimizer.begin_window()
        loss = evaluate()
        known = {"loss": loss} if isinstance(optimizer, DetSAM) else {}
        optimizer.transform(evaluate, scale=1.0, **known)
        optimizer.base.step()
    assert_same_bits(expected, photograph(model, optimizer))
    assert optimizer.evaluations == 4 * gradients


def test_det_evaluates_at_w_once_more_where_transform_is_not_told_the_loss() -> None:
    loss, gradient, start = problems()[1]
    results = []
    for known in ({"loss": loss(start)}, {}):
        parameters, seen = leaves(start), []
        optimizer = DetSAM(torch.optim.SGD(parameters, lr=0.1), model=None)
        evaluate = closure_on(loss, gradient, parameters, seen)
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, **known)
        optimizer.step()
        results.append(flat(parameters))
        assert optimizer.evaluations == len(seen) == (2 if known else 3)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("make", [make_det, make_frob])
@pytest.mark.parametrize("bad", [None, "loss", torch.ones(1), True, (1.0,)])
def test_evaluate_without_a_loss_is_refused_and_nothing_has_happened(make: Any, bad: Any) -> None:
    parameters = leaves(np.ones(SIZE))
    optimizer = make(torch.optim.SGD(parameters, lr=0.1), None)

    def evaluate() -> Any:
        closure_on(lambda w: 0.0, np.ones_like, parameters)()
        return bad

    optimizer.begin_window()
    evaluate()
    asserts.assert_refuses(lambda: optimizer.transform(evaluate), TypeError, "evaluate must return", "loss scale")
    np.testing.assert_array_equal(flat(parameters), np.ones(SIZE))
    assert all(p.grad is None for p in parameters)
    assert optimizer.state_dict()["flatmin"] == {"seed": 0, "drawn": 0}


@pytest.mark.parametrize("make", [make_det, make_frob])
def test_gradients_with_a_loss_scale_and_losses_without_give_the_scaled_result(make: Any) -> None:
    loss, gradient, start = problems()[1]
    results = []
    for scale in (1.0, 1024.0):
        parameters = leaves(start)
        optimizer = make(torch.optim.SGD(parameters, lr=0.1), None)
        evaluate = closure_on(loss, lambda w, scale=scale: scale * gradient(w), parameters)
        optimizer.begin_window()
        first = evaluate()
        known = {"loss": first} if make is make_det else {}
        optimizer.transform(evaluate, scale=scale, **known)
        results.append(np.concatenate([p.grad.numpy().reshape(-1) for p in parameters]) / scale)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12)


@pytest.mark.parametrize("make", [partial(make_det, half_length=0.1), partial(make_frob, rho=0.1, lam=0.1)])
def test_maximizing_is_minimizing_the_negative_loss(make: Any) -> None:
    """Shifts of maximize groups point the other way; on the mirrored problem both runs are the same."""
    loss, gradient, start = problems()[1]
    down = walk(loss, gradient, start, partial(make, model=None), lr=0.1)

    def mirrored(w: np.ndarray) -> np.ndarray:
        return gradient(-w)  # of -L(-w)

    up = walk(lambda w: -loss(-w), mirrored, -start, partial(make, model=None), lr=0.1, maximize=True)
    np.testing.assert_allclose(np.array(up), -np.array(down), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [make_det, make_frob])
def test_groups_must_agree_on_rho_and_on_maximize(make: Any) -> None:
    a, b = leaves(np.zeros(2), [(1,), (1,)])
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "rho": 3.0}]
    asserts.assert_refuses(lambda: make(torch.optim.SGD(groups, lr=0.1), None), ValueError, "rho must be the same")
    groups = [{"params": [a]}, {"params": [b], "maximize": True}]
    optimizer = make(torch.optim.SGD(groups, lr=0.1), None)
    step = partial(optimizer.step, closure_on(lambda w: 0.0, np.ones_like, [a, b]))
    asserts.assert_refuses(step, ValueError, "maximize must be the same")
    optimizer = make(torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1), None)
    optimizer.param_groups[1]["rho"] = 0.3
    step = partial(optimizer.step, closure_on(lambda w: 0.0, np.ones_like, [a, b]))
    asserts.assert_refuses(step, ValueError, "rho must be the same")


def test_rho_of_trace_is_per_group() -> None:
    a, b = leaves(np.zeros(2), [(1,), (1,)])
    seen: list[np.ndarray] = []
    optimizer = TraceSAM(torch.optim.SGD([{"params": [a]}, {"params": [b], "rho": 0.0}], lr=0.0), 0.5, model=None)
    optimizer.step(closure_on(lambda w: 0.0, np.ones_like, [a, b], seen))
    assert seen[1][0] != 0.0
    assert seen[1][1] == 0.0


@pytest.mark.parametrize("make", [make_trace, make_det, make_frob])
def test_equal_seeds_draw_equal_noise(make: Any) -> None:
    runs = [
        np.array(shifts_of(lambda base, seed=seed: make(base, None, seed=seed), leaves(np.zeros(SIZE)), 3))
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def _weights(make: Any, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    optimizer = make(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return [p.detach() for p in net.parameters()]


def _data(rank: int | None = None) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = batch()
    part = slice(None) if rank is None else slice(8 * rank, 8 * rank + 8)
    return net, x.double()[part], y[part]


def make_noise(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> WeightNoise:
    return WeightNoise(base, model=model, **options)


_PARALLEL: list[Any] = [
    partial(make_noise, sigma=0.1, scale="filter", samples=2),
    partial(make_trace, rho=0.1, lam=0.5),
    partial(make_det, half_length=0.3, samples=2),
    partial(make_frob, rho=0.1, lam=0.1),
]


def _parallel(rank: int) -> list[list[torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(nn.Linear(6, 4))
    optimizer = make_det(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)
    assert _loss(optimizer, 1.0 + rank).item() == 1.5
    results = []
    for make in _PARALLEL:
        net, x, y = _data(rank)
        # Gradients that are views of the reduction's memory are overwritten by the next evaluation.
        results.append(_weights(make, DistributedDataParallel(net, gradient_as_bucket_view=True), x, y))
    return results


def test_two_processes_equal_one_with_the_whole_batch(tmp_path: Path) -> None:
    """The losses differ between the processes; the weights must not."""
    first, second = in_two_processes(_parallel, tmp_path)
    for make, mine, theirs in zip(_PARALLEL, first, second, strict=True):
        alone = _weights(make, *_data())
        for a, b, c in zip(alone, mine, theirs, strict=True):
            assert torch.equal(b, c)
            torch.testing.assert_close(b, a, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (TraceSAM, {"rho": -0.1}, ValueError, ("rho must be", ">= 0", "-0.1")),
        (TraceSAM, {"lam": -1.0}, ValueError, ("lam must be", ">= 0")),
        (TraceSAM, {"samples": 0}, ValueError, ("samples must be", ">= 1")),
        (TraceSAM, {"sampler": "cube"}, ValueError, ("sampler must be", "'gaussian', 'sphere'", "cube")),
        (DetSAM, {"rho": float("nan")}, ValueError, ("rho must be",)),
        (DetSAM, {"half_length": 0.0}, ValueError, ("half_length must be", "> 0")),
        (DetSAM, {"seed": "a"}, TypeError, ("seed must be",)),
        (FrobSAM, {"samples": 1}, ValueError, ("samples must be", ">= 2")),
        (FrobSAM, {"rho": "big"}, TypeError, ("rho must be", "big")),
    ],
)
def test_nonsense_is_refused(make: Any, options: dict[str, Any], error: type[Exception], words: Any) -> None:
    base = torch.optim.SGD(leaves(np.zeros(SIZE)), lr=0.1)
    asserts.assert_refuses(lambda: make(base, model=None, **options), error, *words)
