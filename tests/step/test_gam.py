"""Generalization Aware Minimization against its formulas, with known answers, limits, guards and properties."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin import SAM
from flatmin.step._gam import GeneralizationAwareMinimization
from tests.reference import gam as reference
from tests.reference.steps import logistic, quadratic
from tests.step import asserts
from tests.step.problems import Everything, assert_same_bits, batch, make_closure, photograph
from tests.step.test_distributed import LR, MOMENTUM, STEPS, halves, in_two_processes
from tests.step.test_distributed import model as small_model
from tests.step.test_faults import PLACES, FaultError, _closure

Gam = GeneralizationAwareMinimization
F64 = torch.float64
RECURSIONS: list[dict[str, Any]] = [{}, {"recursion": "walk"}, {"eps": 0.2}]
DISCREPANCIES: list[dict[str, Any]] = [
    {"discrepancy": "dot"},
    {"discrepancy": "dot", "relative": True},
    {"discrepancy": "squared"},
    {"discrepancy": "squared", "relative": True},
    {"discrepancy": "cosine"},
]


# --- against the formula ----------------------------------------------------------------------------


class Problem:
    """A loss in torch and its derivatives by hand; ``noise`` makes it another batch of the same kind."""

    def __init__(self, kind: str, noise: int = 0) -> None:
        rng = np.random.default_rng(0)
        self.start = rng.normal(size=5)
        if kind == "quadratic":
            basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
            hessian, centre = basis @ np.diag([0.1, 0.5, 1.0, 2.0, 5.0]) @ basis.T, rng.normal(size=5)
            centre = centre + 0.1 * np.random.default_rng(noise).normal(size=5)
            self.gradient, self.hessian = quadratic(hessian, centre), reference.quadratic_hessian(hessian)
            h, c = torch.from_numpy(hessian), torch.from_numpy(centre)
            self.loss: Callable[[Tensor], Tensor] = lambda w: (w - c) @ h @ (w - c) / 2
        else:
            rng = np.random.default_rng(1 + noise)
            x, y = rng.normal(size=(40, 5)), rng.choice([-1.0, 1.0], size=40)
            self.gradient, self.hessian = logistic(x, y), reference.logistic_hessian(x, y)
            tx, ty = torch.from_numpy(x), torch.from_numpy(y)
            self.loss = lambda w: nn.functional.softplus(-ty * (tx @ w)).mean()


def recur(
    problem: Problem, w: np.ndarray, gammas: list[float], *, recursion: str = "nested", eps: Any = None, normalize: bool
) -> tuple[np.ndarray, np.ndarray]:
    arguments = (problem.gradient, problem.hessian, w, gammas)
    if recursion == "walk":
        return reference.walk(*arguments, normalize=normalize)
    if eps is not None:
        return reference.finite_difference(*arguments, eps=eps, normalize=normalize)
    return reference.nested(*arguments, normalize=normalize)


def expected_run(
    kind: str, gammas: list[float], steps: int, momentum: float, rates: tuple[float, float], options: dict[str, Any]
) -> tuple[list[np.ndarray], list[list[float]]]:
    own, other = Problem(kind), Problem(kind, noise=1)
    how = {key: options.get(key, default) for key, default in (("eps", None), ("normalize", False))}
    w, buffer, weights, coefficients = own.start, np.zeros(5), [], []
    for _ in range(steps):
        d, columns = recur(own, w, gammas, recursion=options.get("recursion", "nested"), **how)
        v = other.gradient(w)
        slope = columns.T @ reference.discrepancy(options["discrepancy"], d, v)[1]
        if options.get("relative"):
            slope = slope / np.sqrt((own.gradient(w) @ own.gradient(w)) * (v @ v))
        gammas = list(np.clip(np.array(gammas) - rates[1] * slope, -1.0, 1.0))
        buffer = momentum * buffer + d
        w = w - rates[0] * buffer
        weights.append(w)
        coefficients.append(gammas)
    return weights, coefficients


def our_run(
    kind: str, gammas: list[float], steps: int, momentum: float, rates: tuple[float, float], options: dict[str, Any]
) -> tuple[list[np.ndarray], list[list[float]]]:
    own, other = Problem(kind), Problem(kind, noise=1)
    halves = [torch.tensor(part, requires_grad=True) for part in (own.start[:2], own.start[2:])]
    base = torch.optim.SGD(halves, lr=rates[0], momentum=momentum)
    opt = Gam(base, len(gammas), model=None, gamma=gammas, gamma_lr=rates[1], **options)
    weights, coefficients = [], []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = own.loss(torch.cat(halves))
        loss.backward()
        return loss

    opt.aux = lambda: other.loss(torch.cat(halves)).backward()
    for _ in range(steps):
        opt.step(closure)
        weights.append(np.concatenate([half.detach().numpy() for half in halves]))
        coefficients.append(opt.gammas)
    return weights, coefficients


@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
@pytest.mark.parametrize("how", RECURSIONS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_and_coefficients_equal_the_formula_in_float64(kind: str, how: dict[str, Any], normalize: bool) -> None:
    for (momentum, count), what in itertools.product([(0.0, 3), (0.9, 1)], DISCREPANCIES):
        options = {**how, **what, "normalize": normalize, "product": "exact"}
        run = (kind, [0.1, 0.2, 0.05][:count], 8, momentum, (0.02, 0.002), options)
        expected, got = expected_run(*run), our_run(*run)
        np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-12)
        assert np.abs(np.array(got[1][-1]) - got[1][0]).max() > 1e-5  # something was learned


@pytest.mark.parametrize("how", RECURSIONS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
def test_finite_differences_agree_with_exact_products(kind: str, how: dict[str, Any], normalize: bool) -> None:
    """On a quadratic they are the same for any step; elsewhere the error is proportional to it."""
    for what in DISCREPANCIES[-2:]:
        options = {**how, **what, "normalize": normalize}
        run = (kind, [0.1, 0.2, 0.05], 8, 0.9, (0.02, 0.002))
        exact = our_run(*run, {**options, "product": "exact"})
        difference = our_run(*run, {**options, "r": 0.1 if kind == "quadratic" else 1e-6})
        for a, b in zip(exact, difference, strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 if kind == "quadratic" else 1e-7)


# --- a network: central differences -----------------------------------------------------------------


def network() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(2, 12, 4, dtype=F64), torch.randint(0, 3, (2, 12))
    return model, (x[0], y[0]), (x[1], y[1])


def flat_gradient(model: nn.Module, w: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    shapes = {name: p.shape for name, p in model.named_parameters()}
    leaf = w.clone().requires_grad_()
    parts = leaf.split([shape.numel() for shape in shapes.values()])
    weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, data[0]), data[1])
    return torch.autograd.grad(loss, leaf)[0]


def delta(gammas: list[float], options: dict[str, Any]) -> float:
    """The discrepancy as a function of the coefficients, nothing else."""
    model, own, other = network()
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    clean, v = flat_gradient(model, w, own), flat_gradient(model, w, other)
    d, p = clean, w
    for gamma in gammas:
        q = d / d.norm() if options["normalize"] else d
        if options.get("recursion") == "walk":
            p = p + gamma * q
            d = flat_gradient(model, p, own)
        elif options.get("eps"):
            d = clean + gamma / options["eps"] * (flat_gradient(model, w + options["eps"] * q, own) - clean)
        else:
            d = flat_gradient(model, w + gamma * q, own)
    value = reference.discrepancy(options["discrepancy"], d.numpy(), v.numpy())[0]
    return value / float(clean.norm() * v.norm()) if options.get("relative") else value


def learned_slopes(gammas: list[float], options: dict[str, Any]) -> np.ndarray:
    """dDelta/dgamma, read off one update with a learning rate of 1."""
    model, own, other = network()
    options = {"gamma_max": 1e6, **options}
    opt = Gam(
        torch.optim.SGD(model.parameters(), lr=0.0), len(gammas), model=model, gamma=gammas, gamma_lr=1.0, **options
    )

    def evaluate(data: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        return loss

    def closure() -> Tensor:
        opt.zero_grad()
        return evaluate(own)

    opt.aux = lambda: evaluate(other)
    opt.step(closure)
    return np.array(gammas) - np.array(opt.gammas)


@pytest.mark.parametrize("how", RECURSIONS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_adjoint_equals_central_differences(how: dict[str, Any], normalize: bool) -> None:
    cases = [*((4, what) for what in DISCREPANCIES), *((count, DISCREPANCIES[0]) for count in (1, 2, 3))]
    for count, what in cases:
        options = {**how, **what, "normalize": normalize}
        gammas, h = [0.3, 0.5, -0.2, 0.4][:count], 1e-5
        central = []
        for t in range(count):
            up, down = list(gammas), list(gammas)
            up[t] += h
            down[t] -= h
            central.append((delta(up, options) - delta(down, options)) / (2 * h))
        np.testing.assert_allclose(learned_slopes(gammas, {**options, "product": "exact"}), central, rtol=0, atol=2e-9)
        np.testing.assert_allclose(learned_slopes(gammas, {**options, "r": 1e-6}), central, rtol=0, atol=1e-6)


# --- known answers ----------------------------------------------------------------------------------


def on_a_quadratic(
    curvatures: list[float], start: list[float], v: list[float] | None, steps: int = 1, **options: Any
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The optimizer on h w^2 / 2 at a learning rate of 0; the places it saw, and the gradients it found there."""
    h = torch.tensor(curvatures, dtype=F64)
    w = torch.tensor(start, dtype=F64, requires_grad=True)
    places: list[Tensor] = []
    found: list[Tensor] = []

    def closure() -> float:
        places.append(w.detach().clone())
        w.grad = h * w.detach()
        found.append(w.grad.clone())
        return 0.0

    def aux() -> None:
        w.grad = torch.tensor(v, dtype=F64)

    opt = Gam(torch.optim.SGD([w], lr=0.0), model=None, aux=aux if v else None, **options)
    for _ in range(steps):
        opt.step(closure)
    return opt, places, [*found, w.grad]


def test_known_answers() -> None:
    common = {"curvatures": [1.0, 2.0], "start": [1.0, 1.0], "v": [1.0, 1.0], "gamma_lr": 1.0, "gamma_max": 1e3}
    for eps in (None, 0.05, 1.0):
        _, _, found = on_a_quadratic(**common, steps=1, gamma=0.1, eps=eps)
        np.testing.assert_allclose(found[-1], [1.1, 2.4], rtol=0, atol=1e-12)
    run = partial(_two_steps, [0.1, 0.2])
    for eps in (None, 0.05, 1.0):
        final, slopes = run(eps=eps)
        np.testing.assert_allclose(final, [1.22, 2.96], rtol=0, atol=1e-12)
        np.testing.assert_allclose(slopes, [-1.8, -5.9], rtol=0, atol=1e-12)
    final, _ = run(recursion="walk")
    np.testing.assert_allclose(final, [1.32, 3.36], rtol=0, atol=1e-12)


def _two_steps(gammas: list[float], **options: Any) -> tuple[Tensor, np.ndarray]:
    h, w = torch.tensor([1.0, 2.0], dtype=F64), torch.ones(2, dtype=F64, requires_grad=True)

    def closure() -> float:
        w.grad = h * w.detach()
        return 0.0

    def aux() -> None:
        w.grad = torch.ones(2, dtype=F64)

    base = torch.optim.SGD([w], lr=0.0)
    opt = Gam(base, 2, model=None, gamma=gammas, gamma_lr=1.0, gamma_max=1e3, aux=aux, r=0.5, **options)
    opt.step(closure)
    return w.grad, np.array(gammas) - np.array(opt.gammas)


def test_the_products_are_taken_where_the_theory_says() -> None:
    """u_2 = H a = (1, 2), a_1 = gamma_2 u_2 = (.2, .4): the finite differences step along v and u_2."""
    h, w = torch.tensor([1.0, 2.0], dtype=F64), torch.ones(2, dtype=F64, requires_grad=True)
    places: list[Tensor] = []

    def closure() -> float:
        places.append(w.detach().clone())
        w.grad = h * w.detach()
        return 0.0

    def aux() -> None:
        w.grad = torch.ones(2, dtype=F64)

    Gam(torch.optim.SGD([w], lr=0.0), 2, model=None, gamma=[0.1, 0.2], aux=aux, r=0.5).step(closure)
    first, second = np.array([1.1, 1.2]), np.array([1.22, 1.48])
    unit = np.array([1.0, 1.0]) / np.sqrt(2)
    back = np.array([1.0, 2.0]) / np.sqrt(5)
    expected = [[1.0, 1.0], first, second, second + 0.5 * unit, first + 0.5 * back]
    np.testing.assert_allclose(np.array([p.numpy() for p in places]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", RECURSIONS, ids=str)
def test_response_is_what_happens_to_an_eigenvalue(how: dict[str, Any]) -> None:
    curvatures, gammas = [0.5, 1.0, 3.0], [0.3, -0.2, 0.7]
    w = torch.ones(3, dtype=F64, requires_grad=True)

    def closure() -> float:
        w.grad = torch.tensor(curvatures, dtype=F64) * w.detach()
        return 0.0

    opt = Gam(torch.optim.SGD([w], lr=0.0), 3, model=None, gamma=gammas, learn=False, **how)
    opt.step(closure)
    np.testing.assert_allclose(w.grad, [opt.response(h) for h in curvatures], rtol=0, atol=1e-12)
    h = 1e-7
    assert opt.response(h) / h == pytest.approx(1.0, abs=1e-6)  # f'(0) = 1
    assert Gam(torch.optim.SGD([w], lr=0.0), model=None, gamma=0.0).response(2.0) == 2.0
    normalised = Gam(torch.optim.SGD([torch.ones(1)], lr=0.0), model=None, normalize=True)
    asserts.assert_refuses(lambda: normalised.response(1.0), ValueError, "response()", "normalize=False")


# --- what the discrepancies do: guards --------------------------------------------------------------


def test_dot_is_linear_in_the_coefficient_and_drifts_to_the_clamp() -> None:
    """T = 1 on a quadratic: the slope <v, H d_0> is the same at every gamma, here 1 + 8 for v = d_0."""
    for gamma in (-0.5, 0.0, 0.3):
        opt, _, _ = on_a_quadratic([1.0, 2.0], [1.0, 1.0], [1.0, 2.0], gamma=gamma, gamma_lr=0.01, r=0.5, gamma_max=2.0)
        assert opt.gammas[0] - gamma == pytest.approx(0.01 * 9.0, abs=1e-12)
    opt, _, _ = on_a_quadratic([1.0, 2.0], [1.0, 1.0], [1.0, 2.0], steps=30, gamma=0.0, gamma_lr=0.01, r=0.5)
    assert opt.gammas == [1.0]
    opt, _, _ = on_a_quadratic(
        [1.0, 2.0], [1.0, 1.0], [-1.0, -2.0], steps=30, gamma=0.0, gamma_lr=0.01, r=0.5, gamma_max=0.25
    )
    assert opt.gammas == [-0.25]


def test_squared_has_an_optimum_inside() -> None:
    """gamma* = <H d_0, v - d_0> / |H d_0|^2."""
    d, v = np.array([1.0, 2.0]), np.array([1.5, 2.5])
    hd = np.array([1.0, 4.0])
    best = float(hd @ (v - d) / (hd @ hd))
    options = {"discrepancy": "squared", "gamma_lr": 0.02, "r": 0.5}
    opt, _, _ = on_a_quadratic([1.0, 2.0], [1.0, 1.0], v.tolist(), steps=100, gamma=0.9, **options)
    assert opt.gammas[0] == pytest.approx(best, abs=1e-10)


@pytest.mark.parametrize("what", [{"discrepancy": "cosine"}, {"relative": True}], ids=str)
def test_cosine_and_relative_know_no_scale(what: dict[str, Any]) -> None:
    """The auxiliary gradient's length is nothing to them; dot's slope is proportional to it."""
    found = []
    for factor in (1.0, 1000.0):
        v = [1.0 * factor, 3.0 * factor]
        found.append(on_a_quadratic([1.0, 2.0], [1.0, 1.0], v, gamma_lr=0.01, r=0.5, **what)[0].gammas[0])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] != 0.01


def test_gradients_of_zero_teach_nothing_and_raise_nothing() -> None:
    for what, how, normalize in itertools.product(DISCREPANCIES, RECURSIONS, [False, True]):
        options = {**what, **how, "normalize": normalize}
        opt, places, found = on_a_quadratic([1.0, 2.0], [0.0, 0.0], [1.0, 1.0], gamma=0.1, **options)
        assert opt.gammas == [0.1]
        assert all(torch.equal(p, torch.zeros(2, dtype=F64)) for p in (places[0], places[1], found[-1]))
        opt, _, _ = on_a_quadratic([1.0, 2.0], [1.0, 1.0], [0.0, 0.0], gamma=0.1, **options)
        assert np.isfinite(opt.gammas).all()


# --- limits: SAM and the base, bit for bit ----------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("recursion", ["nested", "walk"])
def test_one_step_with_a_fixed_coefficient_is_sam_bit_for_bit(normalize: bool, recursion: str) -> None:
    def make(base: torch.optim.Optimizer, model: nn.Module) -> Gam:
        return Gam(base, model=model, gamma=0.3, learn=False, normalize=normalize, recursion=recursion)

    sam, sam_optimizer = asserts.trained(lambda base, model: SAM(base, 0.3, model=model, normalize=normalize), 6)
    gam, gam_optimizer = asserts.trained(make, 6)
    assert_same_bits(photograph(sam, sam_optimizer), photograph(gam, gam_optimizer))


def test_learning_at_a_rate_of_zero_changes_no_bit_of_the_step() -> None:
    """What is kept for the coefficients must not change the direction."""
    for how, count in itertools.product(RECURSIONS, [1, 3]):
        fixed, fixed_optimizer = asserts.trained(make(steps=count, learn=False, gamma=0.3, **how), 4)
        model, optimizer = asserts.trained(make(steps=count, gamma_lr=0.0, gamma=0.3, **how), 4)
        assert_same_bits(photograph(fixed, fixed_optimizer), photograph(model, optimizer))


def test_coefficients_of_zero_are_the_base_bit_for_bit() -> None:
    for options in ({"learn": False}, {"learn": False, "normalize": True, "steps": 3}, {"learn": False, "eps": 0.1}):
        asserts.assert_rho_zero_is_the_base(make(gamma=0.0, **options))


def test_eps_equal_to_the_coefficient_is_the_nested_recursion() -> None:
    run = ("logistic", [0.2, 0.2], 8, 0.9, (0.05, 0.0))
    for normalize in (False, True):
        options = {"discrepancy": "dot", "normalize": normalize}
        np.testing.assert_allclose(our_run(*run, {**options, "eps": 0.2})[0], our_run(*run, options)[0], atol=1e-14)


# --- properties of every step -----------------------------------------------------------------------


def make(**options: Any) -> Callable[[torch.optim.Optimizer, nn.Module], Gam]:
    def build(base: torch.optim.Optimizer, model: nn.Module) -> Gam:
        opt = Gam(base, model=model, **{"gamma": 0.1, "gamma_lr": 0.01, **options})
        if opt.learn:
            opt.aux = auxiliary(model)
        return opt

    return build


def auxiliary(model: nn.Module, seed: int = 100) -> Callable[[], None]:
    x, y = batch(seed)
    return lambda: nn.functional.cross_entropy(model(x), y).backward()


FIXED: list[dict[str, Any]] = [
    {"learn": False},
    {"learn": False, "steps": 3},
    {"learn": False, "steps": 2, "recursion": "walk", "normalize": True},
    {"learn": False, "steps": 2, "eps": 0.1},
]
LEARNED: list[dict[str, Any]] = [
    {},
    {"steps": 3, "period": 2, "discrepancy": "squared"},
    {"steps": 2, "recursion": "walk", "normalize": True, "discrepancy": "cosine"},
    {"steps": 2, "eps": 0.1, "relative": True},
    {"steps": 2, "product": "exact"},
]


@pytest.mark.parametrize("options", FIXED + LEARNED, ids=str)
def test_properties_of_every_step(options: dict[str, Any]) -> None:
    asserts.assert_restores_exactly(make(**options))
    asserts.assert_returns_clean_loss(make(**options))
    asserts.assert_transform_equals_closure(make(**options))
    asserts.assert_resumes_bit_for_bit(make(**options))
    if not options.get("learn", True):
        asserts.assert_counts_evaluations(make(**options), options.get("steps", 1) + 1)
        asserts.assert_copies_go_on_alike(make(**options))


@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_copies_with_an_aux_of_their_own_go_on_alike(options: dict[str, Any]) -> None:
    model, optimizer = asserts.trained(make(**options), 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin_optimizer.aux is None
    twin_optimizer.aux = auxiliary(twin)
    generator, before = torch.get_rng_state(), optimizer.gammas
    for each, opt in ((model, optimizer), (twin, twin_optimizer)):
        torch.set_rng_state(generator)
        for step in range(2, 4):
            opt.step(make_closure(opt, each, *batch(step)))
    assert_same_bits(photograph(model, optimizer), photograph(twin, twin_optimizer))
    assert before != optimizer.gammas == twin_optimizer.gammas


def test_it_can_be_pickled_whatever_its_aux_is() -> None:
    optimizer = Gam(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), 2, model=None, gamma=0.3, aux=lambda: None)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.gammas == [0.3, 0.3]
    assert twin.aux is None
    assert optimizer.aux is not None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (lambda t: {}, lambda t: 2 * t + 2),
        (lambda t: {"recursion": "walk"}, lambda t: 2 * t + 2),
        (lambda t: {"eps": 0.1}, lambda t: 2 * t + 1),
        (lambda t: {"product": "exact"}, lambda t: 3 * t + 2),
        (lambda t: {"product": "exact", "recursion": "walk"}, lambda t: 3 * t + 2),
        (lambda t: {"product": "exact", "eps": 0.1}, lambda t: 3 * t),
        (lambda t: {"learn": False}, lambda t: t + 1),
    ],
)
def test_gradient_evaluations(options: Any, expected: Any) -> None:
    for steps, period in ((1, 1), (3, 1), (2, 3)):
        model, optimizer = asserts.trained(make(steps=steps, period=period, **options(steps)), 0)
        calls, inner, aux = 0, make_closure(optimizer, model, *batch()), optimizer.aux

        def counted(function: Any) -> Any:
            def call() -> Any:
                nonlocal calls
                calls += 1
                return function()

            return call

        optimizer.aux = counted(aux) if aux else None
        for step in range(4):
            before, called, updates = optimizer.evaluations, calls, optimizer.wants_aux
            assert updates == (optimizer.learn and step % period == 0)
            optimizer.step(counted(inner))
            taken = optimizer.evaluations - before
            assert taken == (expected(steps) if updates else steps + 1)
            if optimizer.product == "difference":
                assert calls - called == taken


# --- the auxiliary batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False])
def test_the_auxiliary_pass_leaves_no_trace(replay: bool) -> None:
    """Buffers, generators and another optimizer's gradients end as without it."""
    pictures = []
    for learn in (False, True):
        torch.manual_seed(0)
        model = Everything()
        own = [p for name, p in model.named_parameters() if not name.startswith("head")]
        opt = make(learn=learn, gamma_lr=0.0, replay_rng=replay)(torch.optim.SGD(own, lr=0.1), model)
        foreign = torch.optim.SGD(model.head.parameters(), lr=0.1)
        # With replay off every pass draws anew, so that only the coefficient's passes may differ: none here.
        opt.eps = 0.1 if not replay else None
        for step in range(3):
            foreign.zero_grad()
            opt.step(make_closure(opt, model, *batch(step)))
            foreign.step()
        pictures.append(photograph(model, opt))
    assert_same_bits(*pictures)


def test_the_auxiliary_pass_draws_masks_of_its_own_and_sees_the_clean_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    masks: list[Tensor] = []
    weights: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        masks.append(output.detach() == 0)
        weights.append(model[0].weight.detach().clone())

    model[1].register_forward_hook(note)
    optimizer = make(learn=True)(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.step(make_closure(optimizer, model, *batch()))
    clean, aux, perturbed, product = masks
    assert torch.equal(clean, perturbed)
    assert torch.equal(clean, product)
    assert not torch.equal(clean, aux)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_missing_or_wrong_aux_is_refused_and_nothing_has_happened() -> None:
    model, optimizer = asserts.trained(make(), 1)
    cases: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
        (None, RuntimeError, ("aux is missing", "opt.aux", "learn=False")),
        ("no function", TypeError, ("aux must be a function", "no function")),
        (lambda: None, RuntimeError, ("aux left no gradient",)),
    ]
    for aux, error, words in cases:
        optimizer.aux = aux
        before, own = photograph(model, optimizer), optimizer.state_dict()["flatmin"]
        asserts.assert_refuses(lambda: optimizer.step(make_closure(optimizer, model, *batch())), error, *words)
        assert_same_bits(before, photograph(model, optimizer))
        assert optimizer.state_dict()["flatmin"] == own
        assert all(p.grad is None for p in model.parameters())
    optimizer.aux = None
    optimizer.learn = False
    optimizer.step(make_closure(optimizer, model, *batch()))


# --- faults, and gradients that are not finite -------------------------------------------------------


@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_a_step_that_fails_has_learned_nothing(options: dict[str, Any]) -> None:
    plain, plain_optimizer = asserts.trained(make(**options), 2)
    model, optimizer = asserts.trained(make(**options), 2)
    generator = torch.get_rng_state()
    calls = 2 * options.get("steps", 1) + 1 - ("eps" in options)
    faults: list[Any] = [
        _closure(model, optimizer, 2, (n, place, FaultError())) for n in range(1, calls + 1) for place in PLACES
    ]

    def broken() -> None:
        auxiliary(model)()
        raise FaultError

    for index, closure in enumerate([*faults, _closure(model, optimizer, 2)]):
        good = optimizer.aux
        if index == len(faults):
            optimizer.aux = broken
        before, own = photograph(model, optimizer), optimizer.state_dict()["flatmin"]
        with pytest.raises((FaultError, TypeError)):
            optimizer.step(closure)
        optimizer.aux = good
        assert_same_bits(before, photograph(model, optimizer))
        assert torch.equal(optimizer.state_dict()["flatmin"]["gammas"], own["gammas"])
        assert optimizer.state_dict()["flatmin"]["count"] == own["count"] == 2
        assert all(p.grad is None for p in model.parameters())
    for each, opt in ((plain, plain_optimizer), (model, optimizer)):
        torch.set_rng_state(generator)
        for step in range(2, 4):
            opt.step(_closure(each, opt, step))
    assert_same_bits(photograph(plain, plain_optimizer), photograph(model, optimizer))
    assert plain_optimizer.gammas == optimizer.gammas


class Overflowing:
    """The gradient w, of which an entry is lost in the ``broken``-th call, and always where that was."""

    def __init__(self, broken: int, bad: float) -> None:
        self.w = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
        self.broken, self.bad = broken, bad
        self.places: list[Tensor] = []

    def closure(self) -> float:
        self.places.append(self.w.detach().clone())
        lost = len(self.places) > self.broken and torch.equal(self.places[-1], self.places[self.broken])
        self.w.grad = torch.tensor([1.0, self.bad], dtype=F64) if lost else self.w.detach().clone()
        return 0.0

    def aux(self) -> None:
        self.w.grad = torch.tensor([1.0, 1.0], dtype=F64)


@pytest.mark.parametrize("how", RECURSIONS, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("learn", [False, True])
def test_what_is_not_finite_moves_nothing_teaches_nothing_and_is_passed_on(
    how: dict[str, Any], bad: float, learn: bool
) -> None:
    steps = 3
    for broken, normalize in itertools.product(range(2 * steps + 2), [False, True]):
        it = Overflowing(broken, bad)
        base = torch.optim.SGD([it.w], lr=0.0)
        opt = Gam(base, steps, model=None, gamma=0.1, learn=learn, normalize=normalize, aux=it.aux, **how)
        opt.step(it.closure)
        assert all(torch.isfinite(place).all() for place in it.places)
        assert np.isfinite(opt.gammas).all()
        if broken == 0:
            assert all(torch.equal(place, it.places[0]) for place in it.places[: steps + 1])
            assert it.w.grad[0] == 1.0  # what is finite is passed on as it is
        if broken <= steps:
            assert not torch.isfinite(it.w.grad).all()
            assert opt.gammas == [0.1] * steps
        else:
            assert torch.isfinite(it.w.grad).all()


@pytest.mark.parametrize("how", RECURSIONS, ids=str)
def test_an_auxiliary_gradient_that_is_not_finite_leaves_the_step_alone(how: dict[str, Any]) -> None:
    for bad, what in itertools.product([float("inf"), float("nan")], DISCREPANCIES):
        opt, places, found = on_a_quadratic([1.0, 2.0], [1.0, 1.0], [1.0, bad], gamma=0.1, **how, **what)
        assert opt.gammas == [0.1]
        assert all(torch.isfinite(place).all() for place in places)
        assert torch.isfinite(found[-1]).all()


@pytest.mark.parametrize("options", [{}, *({"steps": 3, **how} for how in RECURSIONS)], ids=str)
def test_gradients_in_some_passes_only(options: dict[str, Any]) -> None:
    parameters = [torch.ones(1, dtype=F64, requires_grad=True) for _ in range(3)]
    a, b, c = parameters
    calls = itertools.count()
    one = torch.ones(1, dtype=F64)

    def closure() -> float:
        even = next(calls) % 2 == 0
        a.grad, b.grad, c.grad = one.clone(), one.clone() if even else None, None if even else one.clone()
        return 0.0

    def aux() -> None:
        a.grad, b.grad, c.grad = one.clone(), None, one.clone()

    opt = Gam(torch.optim.SGD(parameters, lr=0.0), model=None, gamma=0.1, aux=aux, **options)
    for _ in range(3):
        opt.step(closure)
        assert [p.item() for p in parameters] == [1.0, 1.0, 1.0]
    assert np.isfinite(opt.gammas).all()
    assert a.grad is not None


# --- scale, sign, several groups ---------------------------------------------------------------------


@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_a_loss_scale_changes_nothing(options: dict[str, Any]) -> None:
    """Powers of two are exact, so that weights and coefficients agree to rounding of their own."""
    runs = []
    for scale in (1.0, 1024.0):
        model, own, other = network()
        opt = Gam(
            torch.optim.SGD(model.parameters(), lr=0.1), model=model, **{"gamma": 0.3, "gamma_lr": 0.1, **options}
        )

        def evaluate(data: tuple[Tensor, Tensor], scale: float = scale, model: nn.Module = model) -> None:
            (scale * nn.functional.cross_entropy(model(data[0]), data[1])).backward()

        opt.aux = partial(evaluate, other)
        for _ in range(3):
            opt.zero_grad()
            opt.begin_window()
            evaluate(own)
            opt.transform(partial(evaluate, own), scale=scale)
            for p in model.parameters():
                p.grad /= scale
            opt.base.step()
        runs.append([*opt.gammas, *nn.utils.parameters_to_vector(model.parameters()).tolist()])
    np.testing.assert_allclose(runs[1], runs[0], rtol=0, atol=1e-10)
    assert runs[0][0] != 0.3


def test_the_scale_is_asked_for_where_it_matters() -> None:
    model = nn.Linear(6, 3)
    for options, needed in (({}, True), ({"normalize": True}, True), ({"normalize": True, "learn": False}, False)):
        opt = Gam(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
        assert opt.needs_true_gradient == needed


@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_maximizing_the_negative_loss_is_minimizing(options: dict[str, Any]) -> None:
    """Finite differences step the other way, and agree as far as they are exact."""
    options = options if options.get("product") == "exact" else {**options, "r": 1e-6}
    runs = [
        trained_network(lambda loss: loss, options),
        trained_network(lambda loss: -loss, options, maximize=True),
    ]
    np.testing.assert_allclose(runs[1], runs[0], rtol=0, atol=1e-12 if options.get("product") == "exact" else 1e-7)
    assert runs[0][0] != 0.3


def trained_network(
    objective: Callable[[Tensor], Tensor], options: dict[str, Any], *, split: bool = False, maximize: bool = False
) -> list[float]:
    """Coefficients and weights after three steps."""
    model, own, other = network()
    parameters = list(model.parameters())
    groups: Any = [{"params": parameters[:1]}, {"params": parameters[1:]}] if split else parameters
    base = torch.optim.SGD(groups, lr=0.1, maximize=maximize)
    opt = Gam(base, model=model, **{"gamma": 0.3, "gamma_lr": 0.1, **options})

    def evaluate(data: tuple[Tensor, Tensor]) -> Tensor:
        loss = objective(nn.functional.cross_entropy(model(data[0]), data[1]))
        loss.backward()
        return loss

    def closure() -> Tensor:
        opt.zero_grad()
        return evaluate(own)

    opt.aux = partial(evaluate, other)
    for _ in range(3):
        opt.step(closure)
    return [*opt.gammas, *nn.utils.parameters_to_vector(model.parameters()).tolist()]


def test_groups_do_not_matter() -> None:
    """One set of coefficients and one norm for all groups."""
    for options in ({"steps": 2, "normalize": True}, {"steps": 2, "recursion": "walk"}):
        runs = [trained_network(lambda loss: loss, options, split=split) for split in (False, True)]
        np.testing.assert_allclose(runs[1], runs[0], rtol=0, atol=1e-13)


# --- state and arguments -----------------------------------------------------------------------------


def test_a_checkpoint_holds_coefficients_in_double_precision_counter_and_rate() -> None:
    _, optimizer = asserts.trained(make(steps=2, period=2), 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["flatmin"]["gammas"].dtype == F64
    assert state["flatmin"]["gammas"].device.type == "cpu"
    assert state["flatmin"]["gammas"].tolist() == optimizer.gammas
    _, other = asserts.trained(make(steps=2, period=2, gamma=0.5, gamma_lr=0.3), 0)
    other.load_state_dict(state)
    assert (other.gammas, other.gamma_lr, other.wants_aux) == (optimizer.gammas, 0.01, False)
    _, wrong = asserts.trained(make(steps=1), 0)
    asserts.assert_refuses(lambda: wrong.load_state_dict(state), ValueError, "steps must be 2", "is 1")
    _, plain = asserts.trained(None, 1)
    other.load_state_dict(plain.state_dict())
    assert other.gammas == optimizer.gammas


def test_repr_shows_coefficients_and_base() -> None:
    text = repr(Gam(torch.optim.SGD([torch.ones(1)], lr=0.1), 2, model=None, gamma=0.5))
    assert text.startswith("GeneralizationAwareMinimization(gammas=[0.5, 0.5], learn=True, base=SGD (")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 0}, ValueError, ("steps must be", ">= 1", "0")),
        ({"steps": 1.0}, TypeError, ("steps must be", "integer")),
        ({"gamma": float("nan")}, ValueError, ("gamma must be",)),
        ({"gamma": 1.5}, ValueError, ("gamma must be", "<= 1", "1.5")),
        ({"gamma": "small"}, TypeError, ("gamma must be", "small")),
        ({"gamma": [0.1, 0.2]}, ValueError, ("gamma must be one number or steps=1", "[0.1, 0.2]")),
        ({"gamma_lr": -1.0}, ValueError, ("gamma_lr must be", ">= 0")),
        ({"recursion": "A"}, ValueError, ("recursion must be", "'nested', 'walk'")),
        ({"eps": 0.0}, ValueError, ("eps must be", "> 0")),
        ({"eps": 0.1, "recursion": "walk"}, ValueError, ("eps must be None", "walk", "0.1")),
        ({"discrepancy": "l1"}, ValueError, ("discrepancy must be", "'cosine'")),
        ({"relative": 1}, TypeError, ("relative must be",)),
        ({"relative": True, "discrepancy": "cosine"}, ValueError, ("relative must be false", "cosine")),
        ({"normalize": "yes"}, TypeError, ("normalize must be",)),
        ({"period": 0}, ValueError, ("period must be", ">= 1")),
        ({"gamma_max": 0.0}, ValueError, ("gamma_max must be", "> 0")),
        ({"learn": 1}, TypeError, ("learn must be",)),
        ({"product": "hvp"}, ValueError, ("product must be", "'exact', 'difference'")),
        ({"product": "exact", "r": 0.1}, ValueError, ("r is the step", "product='difference'")),
        ({"aux": 3}, TypeError, ("aux must be a function", "3")),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    base = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    asserts.assert_refuses(lambda: Gam(base, model=None, **options), error, *words)


def test_a_fixed_coefficient_may_be_larger_than_gamma_max() -> None:
    base = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    assert Gam(base, model=None, gamma=2.0, learn=False).gammas == [2.0]


# --- two processes -----------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"steps": 2, "r": 1e-5},
    {"steps": 2, "normalize": True, "recursion": "walk", "discrepancy": "cosine", "product": "exact"},
]


def _train(net: nn.Module, options: dict[str, Any], data: Callable[[int], tuple[Tensor, Tensor]]) -> list[Tensor]:
    base = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    opt = Gam(base, model=net, gamma=0.3, gamma_lr=10.0, **options)

    def evaluate(step: int) -> Tensor:
        x, y = data(step)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            opt.zero_grad()
            return evaluate(step)

        opt.aux = partial(evaluate, 50 + step)
        opt.step(closure)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [torch.tensor(opt.gammas, dtype=F64), *(p.detach() for p in weights)]


def _parallel(rank: int) -> list[list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    def data(step: int) -> tuple[Tensor, Tensor]:
        return halves(step)[rank]

    sharded = small_model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    return [
        _train(DistributedDataParallel(small_model(), gradient_as_bucket_view=True), CASES[0], data),
        _train(DistributedDataParallel(small_model()), CASES[1], data),
        _train(sharded, CASES[0], data),
    ]


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """DistributedDataParallel twice and FSDP2, against the whole batches in one process."""

    def whole(step: int) -> tuple[Tensor, Tensor]:
        (x, y), (u, v) = halves(step)
        return torch.cat([x, u]), torch.cat([y, v])

    both = in_two_processes(_parallel, tmp_path)
    for number, case in enumerate([*CASES, CASES[0]]):
        expected = _train(small_model(), case, whole)
        assert (expected[0] - 0.3).abs().max() > 1e-4
        assert torch.equal(both[0][number][0], both[1][number][0])  # to the last bit
        for run in both:
            for a, b in zip(run[number], expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-8 if "r" in case else 1e-12)
