"""Weight noise against its formula on noise drawn again, its statistics, then its limits and properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin.step._direction import Direction
from flatmin.step._memory import Noise
from flatmin.step._weight_noise import WeightNoise
from tests.reference import noise as reference
from tests.reference.steps import descend, logistic, quadratic
from tests.step import asserts
from tests.step.problems import assert_same_bits, photograph
from tests.step.test_faults import PLACES, FaultError, _closure

SHAPES: reference.Shapes = [(2, 2), (2,), ()]  # filters, a vector and a scalar
SIZE = 7


def problems() -> list[tuple[reference.Loss, Any, np.ndarray]]:
    """Loss, gradient and start of a quadratic and of a logistic regression."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    hessian = basis @ np.diag([0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 5.0]) @ basis.T
    centre = rng.normal(size=SIZE)
    x, y = rng.normal(size=(40, SIZE)), rng.choice([-1.0, 1.0], size=40)
    start = rng.normal(size=SIZE)
    return [
        (reference.quadratic_loss(hessian, centre), quadratic(hessian, centre), start),
        (reference.logistic_loss(x, y), logistic(x, y), start),
    ]


EACH = pytest.mark.parametrize(("loss", "gradient", "start"), problems(), ids=["quadratic", "logistic"])


def leaves(start: np.ndarray, shapes: reference.Shapes = SHAPES) -> list[torch.Tensor]:
    parts = np.split(start, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
    return [
        torch.tensor(part.reshape(shape), dtype=torch.float64, requires_grad=True)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def flat(parameters: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in parameters])


def closure_on(loss: Any, gradient: Any, parameters: list[torch.Tensor], seen: list[np.ndarray] | None = None) -> Any:
    def closure() -> float:
        w = flat(parameters)
        if seen is not None:
            seen.append(w)
        pieces = leaves(gradient(w), [tuple(p.shape) for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.detach()
        return float(loss(w))

    return closure


def walk(loss: Any, gradient: Any, start: np.ndarray, make: Any, steps: int = 10, **sgd: Any) -> list[np.ndarray]:
    """The iterates of the optimizer on a vector split over tensors of several shapes."""
    parameters = leaves(start)
    optimizer = make(torch.optim.SGD(parameters, **sgd))
    result = []
    for _ in range(steps):
        optimizer.step(closure_on(loss, gradient, parameters))
        result.append(flat(parameters))
    return result


def assert_close(expected: list[np.ndarray], got: list[np.ndarray]) -> None:
    assert len(expected) == len(got) >= 8
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def shifts_of(make: Callable[[Any], Any], parameters: list[torch.Tensor], steps: int) -> list[np.ndarray]:
    """Where the second evaluation of each step stands, relative to w."""
    start = flat(parameters)
    optimizer, seen = make(torch.optim.SGD(parameters, lr=0.0)), []
    for _ in range(steps):
        optimizer.step(closure_on(lambda w: 0.0, np.ones_like, parameters, seen))
    return [w - start for w in seen if not np.array_equal(w, start)]


def assert_mean_and_std(values: np.ndarray, mean: float, std: float) -> None:
    """Within four standard errors; the second holds for normal and for lighter tails."""
    assert abs(values.mean() - mean) <= 4 * std / np.sqrt(values.size)
    assert abs(values.std() - std) <= 4 * std / np.sqrt(2 * values.size)


def assert_a_failed_step_has_drawn_nothing(make: Any, calls: int) -> None:
    """A closure raising in each of its calls changes no bit, nor what comes after."""
    plain, plain_optimizer = asserts.trained(make, 2)
    model, optimizer = asserts.trained(make, 2)
    generator = torch.get_rng_state()
    for number in range(1, calls + 1):
        for place in PLACES:
            before, own = photograph(model, optimizer), optimizer.state_dict()["flatmin"]
            with pytest.raises((FaultError, TypeError)):
                optimizer.step(_closure(model, optimizer, 2, (number, place, FaultError())))
            assert_same_bits(before, photograph(model, optimizer))
            assert optimizer.state_dict()["flatmin"] == own
            assert all(p.grad is None for p in model.parameters())
    for each, opt in ((plain, plain_optimizer), (model, optimizer)):
        torch.set_rng_state(generator)
        for step in range(2, 4):
            opt.step(_closure(each, opt, step))
    assert_same_bits(photograph(plain, plain_optimizer), photograph(model, optimizer))


def assert_a_nonfinite_gradient_moves_nothing_and_is_seen(make: Any, bad: float) -> None:
    """``make(base, parameters)``; entries of the gradient that are finite stay so."""
    parameters = leaves(np.arange(1.0, SIZE + 1))
    gradient = np.ones(SIZE)
    gradient[-1] = bad
    seen: list[np.ndarray] = []
    optimizer = make(torch.optim.SGD(parameters, lr=0.0))
    optimizer.step(closure_on(lambda w: 1.0, lambda w: gradient, parameters, seen))
    assert len(seen) > 1
    for w in seen:
        np.testing.assert_array_equal(w, np.arange(1.0, SIZE + 1))
    final = np.concatenate([p.grad.numpy().reshape(-1) for p in parameters])
    assert np.isfinite(final[:-1]).all()
    assert not np.isfinite(final[-1])


def assert_gradients_in_one_pass_only_are_handled(make: Any) -> None:
    """A parameter with a gradient in one pass only is put back, and takes part in what is handed on."""
    parameters = leaves(np.ones(3), [(1,), (1,), (1,)])
    a, b, c = parameters
    one = torch.ones(1, dtype=torch.float64)
    optimizer = make(torch.optim.SGD(parameters, lr=0.0))
    calls = count()

    def closure() -> float:
        first = next(calls) == 0
        a.grad, b.grad, c.grad = one.clone(), one.clone() if first else None, None if first else one.clone()
        return 0.0

    optimizer.step(closure)
    assert [p.item() for p in parameters] == [1.0, 1.0, 1.0]
    assert a.grad is not None
    assert c.grad is not None


def scaled(sigma: float, scale: str, w: np.ndarray) -> np.ndarray | float:
    return sigma if scale == "absolute" else sigma * reference.filter_norms(w, SHAPES)


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "filter"},
        {"samples": 3, "seed": 5},
        {"antithetic": True},
        {"samples": 2, "antithetic": True, "mix": 0.3, "scale": "filter"},
        {"mix": 0.5},
    ],
    ids=str,
)
def test_equals_the_formula_in_float64(
    loss: Any, gradient: Any, start: np.ndarray, momentum: float, options: dict[str, Any]
) -> None:
    numbers = count()

    def formula(w: np.ndarray) -> np.ndarray:
        shifts = []
        for _ in range(options.get("samples", 1)):
            noise = reference.draw(options.get("seed", 0), next(numbers), SHAPES)
            e = scaled(0.2, options.get("scale", "absolute"), w) * noise
            shifts += [e, -e] if options.get("antithetic") else [e]
        return reference.smoothed(gradient, w, shifts, options.get("mix", 0.0))

    expected = descend(formula, start, 10, 0.05, momentum)
    make = partial(WeightNoise, sigma=0.2, model=None, **options)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05, momentum=momentum))


def test_noise_is_unbiased_with_standard_deviation_sigma() -> None:
    shifts = np.array(shifts_of(partial(WeightNoise, sigma=0.3, model=None), leaves(np.arange(7.0)), 300))
    assert shifts.shape == (300, SIZE)
    assert_mean_and_std(shifts, 0.0, 0.3)
    for column in shifts.T:
        assert_mean_and_std(column, 0.0, 0.3)
    correlations = np.corrcoef(shifts.T)[np.triu_indices(SIZE, 1)]
    assert np.abs(correlations).max() < 4 / np.sqrt(300)
    assert abs(np.corrcoef(shifts[:-1].reshape(-1), shifts[1:].reshape(-1))[0, 1]) < 4 / np.sqrt(299 * SIZE)


def test_filter_noise_follows_each_filters_norm() -> None:
    """Rows (3, 4) and (0, 0.1), the vector (6, 8), the scalar -2."""
    start = np.array([3.0, 4.0, 0.0, 0.1, 6.0, 8.0, -2.0])
    shifts = np.array(shifts_of(partial(WeightNoise, sigma=0.1, model=None, scale="filter"), leaves(start), 300))
    for column, norm in zip(shifts.T, [5.0, 5.0, 0.1, 0.1, 10.0, 10.0, 2.0], strict=True):
        assert_mean_and_std(column, 0.0, 0.1 * norm)


@pytest.mark.parametrize("antithetic", [False, True])
def test_the_mean_gradient_is_that_of_the_smoothed_loss(antithetic: bool) -> None:
    """For w^4 the smoothed loss is w^4 + 6 s^2 w^2 + 3 s^4 exactly."""
    w, sigma, draws = 0.7, 0.4, 400
    parameter = torch.tensor([w], dtype=torch.float64, requires_grad=True)
    base = torch.optim.SGD([parameter], lr=0.0)
    optimizer = WeightNoise(base, sigma, model=None, antithetic=antithetic)
    got = []
    for _ in range(draws):
        optimizer.step(closure_on(lambda v: float(v[0] ** 4), lambda v: 4 * v**3, [parameter]))
        got.append(parameter.grad.item())
    error = np.std(got) / np.sqrt(draws)
    assert abs(np.mean(got) - (4 * w**3 + 12 * sigma**2 * w)) <= 4 * error


def test_antithetic_pairs_give_the_quadratics_own_gradient() -> None:
    loss, gradient, start = problems()[0]
    expected = descend(gradient, start, 10, 0.05)
    make = partial(WeightNoise, sigma=0.5, model=None, antithetic=True)
    assert_close(expected, walk(loss, gradient, start, make, lr=0.05))


def make_noise(base: torch.optim.Optimizer, model: nn.Module | None, **options: Any) -> WeightNoise:
    return WeightNoise(base, model=model, **options)


ALL: list[tuple[Any, int]] = [
    (partial(make_noise, sigma=0.1), 2),
    (partial(make_noise, sigma=0.1, scale="filter"), 2),
    (partial(make_noise, sigma=0.1, samples=3), 4),
    (partial(make_noise, sigma=0.1, samples=2, antithetic=True, mix=0.3), 5),
]


@pytest.mark.parametrize("options", [{"sigma": 0.0}, {"sigma": 0.0, "samples": 3, "antithetic": True}, {"mix": 1.0}])
def test_without_noise_it_is_the_base_bit_for_bit(options: dict[str, Any]) -> None:
    asserts.assert_rho_zero_is_the_base(partial(make_noise, **options))


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_properties_of_every_step(make: Any, gradients: int) -> None:
    asserts.assert_restores_exactly(make)
    asserts.assert_counts_evaluations(make, gradients)
    asserts.assert_returns_clean_loss(make)
    asserts.assert_transform_equals_closure(make)
    asserts.assert_resumes_bit_for_bit(make)
    asserts.assert_copies_go_on_alike(make)


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_a_failed_step_has_drawn_nothing(make: Any, gradients: int) -> None:
    assert_a_failed_step_has_drawn_nothing(make, gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_a_nonfinite_gradient_moves_nothing_and_is_seen(make: Any, gradients: int, bad: float) -> None:
    assert_a_nonfinite_gradient_moves_nothing_and_is_seen(partial(make, model=None), bad)


@pytest.mark.parametrize(("make", "gradients"), ALL)
def test_gradients_in_one_pass_only(make: Any, gradients: int) -> None:
    assert_gradients_in_one_pass_only_are_handled(partial(make, model=None))


def test_the_mean_counts_a_missing_gradient_as_zero() -> None:
    parameters = leaves(np.ones(2), [(1,), (1,)])
    optimizer = WeightNoise(torch.optim.SGD(parameters, lr=0.0), 0.1, model=None, samples=2, mix=0.25)
    passes: Iterator[tuple[float, float | None]] = iter([(1.0, 4.0), (2.0, None), (3.0, 5.0)])

    def closure() -> float:
        for parameter, value in zip(parameters, next(passes), strict=True):
            parameter.grad = None if value is None else torch.tensor([value], dtype=torch.float64)
        return 0.0

    optimizer.step(closure)
    assert parameters[0].grad.item() == pytest.approx(0.25 * 1.0 + 0.75 * 2.5, abs=1e-15)
    assert parameters[1].grad.item() == pytest.approx(0.25 * 4.0 + 0.75 * 2.5, abs=1e-15)


def test_equal_seeds_draw_equal_noise_and_others_do_not() -> None:
    make = partial(WeightNoise, sigma=0.1, model=None)
    runs = [np.array(shifts_of(partial(make, seed=seed), leaves(np.zeros(SIZE)), 5)) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.abs(runs[0] - runs[2]).max() > 0.01
    assert np.abs(runs[0][0] - runs[0][1]).max() > 0.01  # and every step its own


def test_a_resumed_run_keeps_the_seed_it_was_started_with() -> None:
    parameter = leaves(np.zeros(1), [(1,)])
    first = WeightNoise(torch.optim.SGD(parameter, lr=0.1), model=None, seed=3)
    second = WeightNoise(torch.optim.SGD(parameter, lr=0.1), model=None, seed=4)
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["flatmin"] == {"seed": 3, "drawn": 0}


def test_the_reference_draws_what_the_memory_draws() -> None:
    """Or the comparisons above would say little about long runs."""
    parameters = leaves(np.zeros(40), [(8, 4), (8,)])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    like = Direction.take([{"params": parameters}])
    noise = Noise(9)
    noise.drawn = 12
    values = [value.numpy().reshape(-1) for bucket in noise.normal(like) for value in bucket.values]
    np.testing.assert_array_equal(np.concatenate(values), reference.draw(9, 12, [(8, 4), (8,)]))


def test_sigma_is_per_group() -> None:
    a, b = leaves(np.zeros(2), [(1,), (1,)])
    groups = [{"params": [a]}, {"params": [b], "sigma": 0.0}]
    seen: list[np.ndarray] = []
    optimizer = WeightNoise(torch.optim.SGD(groups, lr=0.0), 0.5, model=None)
    optimizer.step(closure_on(lambda w: 0.0, np.ones_like, [a, b], seen))
    assert seen[1][0] != 0.0
    assert seen[1][1] == 0.0


def test_complex_and_half_precision_weights_are_put_back() -> None:
    parameters = [
        torch.tensor([1.0 + 2.0j, 3.0j], dtype=torch.complex128, requires_grad=True),
        torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True),
    ]
    before = [p.detach().clone() for p in parameters]
    seen: list[list[torch.Tensor]] = []

    def closure() -> float:
        seen.append([p.detach().clone() for p in parameters])
        for p in parameters:
            p.grad = torch.ones_like(p)
        return 0.0

    base = torch.optim.SGD(parameters, lr=0.0)
    WeightNoise(base, 0.5, model=None, scale="filter", samples=2).step(closure)
    assert all(not torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))
    assert [p.grad.dtype for p in parameters] == [torch.complex128, torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sigma": -0.1}, ValueError, ("sigma must be", ">= 0", "-0.1")),
        ({"sigma": float("nan")}, ValueError, ("sigma must be",)),
        ({"sigma": "big"}, TypeError, ("sigma must be", "big")),
        ({"scale": "layer"}, ValueError, ("scale must be", "'absolute', 'filter'", "layer")),
        ({"mix": 1.5}, ValueError, ("mix must be", "<= 1")),
        ({"samples": 0}, ValueError, ("samples must be", ">= 1")),
        ({"samples": 1.5}, TypeError, ("samples must be",)),
        ({"antithetic": 1}, TypeError, ("antithetic must be",)),
        ({"seed": -1}, ValueError, ("seed must be", ">= 0")),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    base = torch.optim.SGD(leaves(np.zeros(SIZE)), lr=0.1)
    asserts.assert_refuses(lambda: WeightNoise(base, model=None, **options), error, *words)
