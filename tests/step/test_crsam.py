"""CR-SAM against its formula, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._crsam import CRSAM
from tests.reference import second_order as reference
from tests.step import asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> CRSAM:
    return CRSAM(base, model=model, **options)


ALL = [make, partial(make, rho=0.3, gamma=0.2, beta=0.5), partial(make, gamma=0.1, beta=0.1)]


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("gamma", "beta"), [(0.1, 0.01), (0.3, 0.3), (0.0, 0.4), (0.5, 0.0)])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, gamma: float, beta: float) -> None:
    shared.assert_equals_formula(
        problem,
        partial(reference.crsam, problem.gradient, rho=0.3, gamma=gamma, beta=beta),
        lambda base: CRSAM(base, 0.3, model=None, gamma=gamma, beta=beta),
        momentum,
    )


def test_known_answer() -> None:
    """Gradients 1, 3 and 2 at w, w + e and w - e, with gamma .5 and beta .25: 3 + .5 * 3 + .25 * 1."""
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    answers = {1.0: 1.0, 1.5: 3.0, 0.5: 2.0}

    def closure() -> float:
        w.grad = torch.tensor([answers[w.item()]], dtype=torch.float64)
        return 0.0

    CRSAM(torch.optim.SGD([w], lr=1.0), 0.5, model=None, gamma=0.5, beta=0.25).step(closure)
    assert w.item() == 1.0 - 4.75


def test_on_a_quadratic_the_second_difference_vanishes() -> None:
    problem = shared.problems()[0]
    pair = [
        shared.iterates(problem.loss, problem.start, partial(kind, rho=0.3, model=None, **options), lr=0.05)
        for kind, options in ((SAM, {}), (CRSAM, {"gamma": 0.7, "beta": 0.0}))
    ]
    for a, b in zip(*pair, strict=True):
        assert a == pytest.approx(b, abs=1e-12)


def test_gamma_and_beta_zero_are_sam_bit_for_bit() -> None:
    each = partial(make, rho=0.2, gamma=0.0, beta=0.0)
    model, optimizer = asserts.trained(each, 4)
    expected, sam = asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4)
    assert_same_bits(photograph(expected, sam), photograph(model, optimizer))
    asserts.assert_counts_evaluations(each, 2)


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", ALL)
def test_properties_of_every_step(each: Any) -> None:
    asserts.assert_restores_exactly(each)
    asserts.assert_counts_evaluations(each, 3)
    asserts.assert_returns_clean_loss(each)
    asserts.assert_transform_equals_closure(each)
    asserts.assert_resumes_bit_for_bit(each)
    asserts.assert_copies_go_on_alike(each)
    shared.assert_faults_change_nothing(each, 3)
    shared.assert_maximizes(partial(each, model=None))
    shared.assert_carries_the_loss_scale(partial(each, model=None))
    shared.assert_survives_a_zero_gradient(partial(each, model=None))
    for in_pass in (1, 2, 3):
        shared.assert_does_not_move_on_overflow(partial(each, model=None), in_pass)


def test_radius_is_per_group_with_one_norm_and_one_pass_gradients_are_restored() -> None:
    w = [torch.tensor([1.0], dtype=torch.float64, requires_grad=True) for _ in range(3)]
    calls = iter([[3.0, 4.0, None], [1.0, None, 1.0], [1.0, 1.0, None]])
    seen = []

    def closure() -> float:
        seen.append([p.item() for p in w])
        for parameter, value in zip(w, next(calls), strict=True):
            parameter.grad = None if value is None else torch.tensor([value], dtype=torch.float64)
        return 0.0

    base = torch.optim.SGD([{"params": [w[0]]}, {"params": w[1:], "rho": 2.0}], lr=0.0)
    CRSAM(base, 1.0, model=None, gamma=0.5, beta=0.25).step(closure)
    assert [value for weights in seen for value in weights] == pytest.approx(
        [1.0, 1.0, 1.0, 1.6, 2.6, 1.0, 0.4, -0.6, 1.0]
    )
    assert [p.item() for p in w] == [1.0] * 3
    assert [p.grad.item() for p in w if p.grad is not None] == [1.75 + 0.25 - 3.0, 0.25 - 4.0, 1.75]


def test_errors_name_the_argument() -> None:
    w = torch.zeros(2, requires_grad=True)
    for name in ("rho", "gamma", "beta"):
        asserts.assert_refuses(
            lambda name=name: CRSAM(torch.optim.SGD([w], lr=0.1), model=None, **{name: -0.5}), ValueError, name, "-0.5"
        )
