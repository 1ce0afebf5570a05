"""WSAM, decoupled and coupled, against its formulas, then its limits and properties."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._wsam import WSAM
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, batch, make_closure, photograph

SGD = torch.optim.SGD


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> WSAM:
    return WSAM(base, model=model, **options)


coupled = partial(make, decoupled=False)
BOTH = pytest.mark.parametrize("each", [make, coupled], ids=["decoupled", "coupled"])
EACH = pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.8])
def test_coupled_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, gamma: float) -> None:
    formula = partial(reference.wsam, problem.gradient, rho=0.3, gamma=gamma)
    shared.assert_equals_formula(problem, formula, partial(coupled, rho=0.3, gamma=gamma), momentum)


@EACH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("way", ["closure", "base", "wrapper"])
def test_decoupled_equals_the_formula_in_every_way(
    problem: shared.Problem, momentum: float, gamma: float, way: str
) -> None:
    expected = reference.descend_wsam(problem.gradient, problem.start, 10, 0.05, momentum, 0.3, gamma)
    halves = shared.halves_of(problem.start)
    optimizer = WSAM(SGD(halves, lr=0.05, momentum=momentum), 0.3, model=None, gamma=gamma)
    evaluate = shared.closure_on(problem.loss, halves)
    for each in expected:
        if way == "closure":
            optimizer.step(evaluate)
        else:
            optimizer.begin_window()
            evaluate()
            optimizer.transform(evaluate, scale=1.0)
            (optimizer.base if way == "base" else optimizer).step()
        np.testing.assert_allclose(torch.cat(halves).detach().numpy(), each, rtol=0, atol=1e-12)


@BOTH
def test_known_answer(each: Any) -> None:
    """g = 1, g_p = 2, gamma .9: 1 + 9 (2 - 1) = 10."""
    w, _, _ = family_asserts.scripted(each, [[0.0]], [[[1.0]], [[2.0]]])
    assert w[0].item() == pytest.approx(-10.0)


def test_only_the_clean_gradient_meets_momentum() -> None:
    """Two steps with momentum .5 and g = 1, g_p = 2: the buffers are 1 and 1.5, the corrections 9 each."""
    w, _, _ = family_asserts.scripted(make, [[0.0]], [[[1.0]], [[2.0]]] * 2, steps=2, momentum=0.5)
    assert w[0].item() == pytest.approx(-(1.0 + 9.0 + 1.5 + 9.0))


@BOTH
def test_one_step_of_sgd_is_the_same_in_both_forms(each: Any) -> None:
    problem = shared.problems()[1]
    formula = partial(reference.wsam, problem.gradient, rho=0.3, gamma=0.7)
    shared.assert_equals_formula(problem, formula, partial(each, rho=0.3, gamma=0.7), 0.0)


def test_coupled_gamma_one_half_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(coupled, rho=0.2, gamma=0.5), 4)))


@BOTH
@pytest.mark.parametrize("options", [{"rho": 0.0}, {"gamma": 0.0}])
def test_rho_or_gamma_zero_is_the_base_bit_for_bit(each: Any, options: Any) -> None:
    asserts.assert_rho_zero_is_the_base(partial(each, **options))


@pytest.mark.parametrize(
    "each", [partial(make, gamma=0.6), partial(coupled, rho=0.2), partial(coupled, gamma=0.5)], ids=str
)
def test_properties_of_every_step(each: Any) -> None:
    family_asserts.assert_all_properties(each)
    family_asserts.assert_limits(each)


def test_rate_and_sign_are_those_of_each_group_at_the_update() -> None:
    a, b = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    base = SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 1.0, "maximize": True}], lr=0.3)
    optimizer = WSAM(base, model=None, gamma=0.75, replay_rng=False)
    a.grad, b.grad = (torch.ones(1, dtype=torch.float64) for _ in range(2))

    def evaluate() -> None:
        a.grad, b.grad = (torch.full((1,), 2.0, dtype=torch.float64) for _ in range(2))

    optimizer.transform(evaluate, scale=1.0)
    assert [a.grad.item(), b.grad.item()] == [1.0, 1.0]
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.base.step()
    assert [a.item(), b.item()] == pytest.approx([-0.2 * 4.0, 4.0])
    optimizer.base.step()  # nothing is left to correct
    assert [a.item(), b.item()] == pytest.approx([-0.2 * 5.0, 5.0])
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})  # with the base's own rate


def test_the_correction_precedes_the_users_hooks_which_fire_once() -> None:
    seen = []
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = make(SGD([w], lr=1.0))
    optimizer.register_step_post_hook(lambda *_: seen.append(w.item()))
    values = iter([1.0, 2.0])

    def closure() -> float:
        w.grad = torch.tensor([next(values)], dtype=torch.float64)
        return 0.0

    optimizer.step(closure)
    assert seen == [pytest.approx(-10.0)]


@pytest.mark.parametrize("drop", ["begin_window", "zero_grad"])
def test_a_skipped_update_leaves_nothing_behind(drop: str) -> None:
    w = torch.zeros(1, requires_grad=True)
    optimizer = WSAM(SGD([w], lr=1.0), model=None, replay_rng=False)

    def evaluate(value: float = 2.0) -> None:
        w.grad = torch.tensor([value])

    evaluate(1.0)
    optimizer.transform(evaluate, scale=1.0)
    getattr(optimizer, drop)()
    evaluate(1.0)
    optimizer.base.step()
    assert w.item() == -1.0


@pytest.mark.parametrize("bad_pass", [1, 2])
def test_a_scaler_skips_where_either_pass_overflows_and_clips_the_clean_gradient(bad_pass: int) -> None:
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = WSAM(SGD([w], lr=0.1), 0.5, model=None, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    calls = 0

    def evaluate(bad: int) -> None:
        nonlocal calls
        calls += 1
        factor = float("inf") if calls == bad else 1.0
        scaler.scale(w.square().sum() / 2 * factor).backward()

    def step(bad: int) -> None:
        nonlocal calls
        calls = 0
        optimizer.zero_grad()
        optimizer.begin_window()
        evaluate(bad)
        optimizer.transform(lambda: (optimizer.zero_grad(), evaluate(bad)), scale=scaler.get_scale())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([w], 1.0)
        scaler.step(optimizer)
        scaler.update()

    step(bad_pass)
    assert w.tolist() == [3.0, 4.0]
    assert scaler.get_scale() == 512.0
    step(0)
    # g = w is clipped to length 1; g_p - g = 0.5 w / |w| is not.
    expected = torch.tensor([3.0, 4.0]) - 0.1 * 1.5 * torch.tensor([0.6, 0.8])
    torch.testing.assert_close(w.detach(), expected, rtol=1e-5, atol=0)


def test_copies_and_pickles_correct_their_own_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = make(SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=0.5)
    optimizer.step(make_closure(optimizer, model, *batch()))
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(copy.deepcopy(optimizer))]
    optimizer.step(make_closure(optimizer, model, *batch(7)))
    expected = photograph(model, optimizer)
    for twin in twins:
        twin.step(make_closure(twin, twin.model, *batch(7)))
        assert_same_bits(expected, photograph(twin.model, twin))
    assert_same_bits(expected, photograph(model, optimizer))


def test_the_base_does_not_keep_the_wrapper_alive() -> None:
    w = torch.zeros(1, requires_grad=True)
    base = SGD([w], lr=0.1)
    optimizer = weakref.ref(make(base))
    gc.collect()
    assert optimizer() is None
    w.grad = torch.ones(1)
    base.step()
    assert w.item() == pytest.approx(-0.1)


def test_gradients_in_one_pass_only_count_as_zero_in_the_other() -> None:
    passes: Any = [[[3.0], [4.0], None], [[1.0], None, [1.0]]]
    for each in (make, coupled):
        w, seen, _ = family_asserts.scripted(partial(each, rho=1.0, gamma=0.75), [[1.0]] * 3, passes)
        assert seen[1] == [[pytest.approx(1.6)], [pytest.approx(1.8)], [1.0]]
        assert [p.item() for p in w] == pytest.approx([1.0 - 3.0 + 6.0, 1.0 - 4.0 + 12.0, 1.0 - 3.0])


def test_bfloat16_weights_keep_their_type() -> None:
    w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    optimizer = WSAM(SGD([w], lr=1.0), 0.5, model=None, gamma=0.5)
    values = iter([1.0, 1.25])

    def closure() -> float:
        w.grad = torch.tensor([next(values)], dtype=torch.bfloat16)
        return 0.0

    optimizer.step(closure)
    assert w.dtype == torch.bfloat16
    assert w.item() == -0.25


def test_a_closure_that_raises_leaves_nothing_pending() -> None:
    w = torch.zeros(1, requires_grad=True)
    optimizer = make(SGD([w], lr=1.0))
    values = iter([1.0, 2.0])

    def closure() -> float:
        w.grad = torch.tensor([next(values)])
        if w.grad.item() == 2.0:
            raise shared.FaultError
        return 0.0

    with pytest.raises(shared.FaultError):
        optimizer.step(closure)
    w.grad = torch.ones(1)
    optimizer.base.step()
    assert w.item() == -1.0


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(WSAM, {"rho": -0.5, "gamma": 1.0, "decoupled": "yes"})
    w = torch.zeros(1, requires_grad=True)
    optimizer = WSAM(SGD([w], lr=0.1), model=None)
    optimizer.begin_window()
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), ValueError, "scale", "get_scale")
