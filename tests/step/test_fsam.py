"""Friendly SAM against its formula, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._fsam import FriendlySAM
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> FriendlySAM:
    return FriendlySAM(base, model=model, **options)


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("sigma", "lam"), [(1.0, 0.9), (1.0, 0.6), (0.0, 0.9), (0.5, 0.0)])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, sigma: float, lam: float) -> None:
    formula = reference.remembering(reference.friendly, problem.gradient, rho=0.3, sigma=sigma, lam=lam)
    shared.assert_equals_formula(problem, formula, partial(make, rho=0.3, sigma=sigma, lam=lam), momentum)


def test_known_answer_the_mean_takes_in_the_raw_gradient_after_use() -> None:
    """P11. Gradients (3, 4) and (3, 0) with lam .5: d = (0, -4); then m = (3, 2), and (4, 2) gives d = (1, 0)."""
    passes: Any = [[[3.0], [4.0]], None, [[3.0], [0.0]], None, [[4.0], [2.0]], None]
    passes = [each or [[1.0], [1.0]] for each in passes]
    _, seen, _ = family_asserts.scripted(partial(make, rho=1.0, lam=0.5), [[0.0], [0.0]], passes, steps=3, lr=0.0)
    assert [[*each[0], *each[1]] for each in seen[1::2]] == [
        pytest.approx(p) for p in ([0.6, 0.8], [0.0, -1.0], [1.0, 0.0])
    ]


def test_sigma_zero_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(make, rho=0.2, sigma=0.0), 4)))


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", [make, partial(make, rho=0.3, sigma=0.7, lam=0.6), partial(make, sigma=0.0)])
def test_properties_of_every_step(each: Any) -> None:
    family_asserts.assert_all_properties(each)
    family_asserts.assert_limits(each)


def test_a_constant_gradient_leaves_no_direction() -> None:
    w, seen, _ = family_asserts.scripted(make, [[1.0, 2.0]], [[[0.3, 0.7]]] * 6, steps=3, lr=0.0)
    assert seen[1] != seen[0]
    assert seen[2:] == [[[1.0, 2.0]]] * 4
    assert family_asserts.grads(w) == [0.3, 0.7]


def test_an_overflow_leaves_the_mean_as_it_was() -> None:
    _, seen, optimizer = family_asserts.scripted(
        partial(make, lam=0.5, rho=1.0),
        [[0.0, 0.0]],
        [[each] for each in ([3.0, 4.0], [1.0, 1.0], [float("inf"), 1.0], [1.0, 1.0], [3.0, 0.0], [1.0, 1.0])],
        steps=3,
        lr=0.0,
    )
    assert seen[3] == [[0.0, 0.0]]
    assert seen[5] == [[0.0, -1.0]]
    assert optimizer.state_dict()["flatmin"]["vectors"]["mean"][0].tolist() == [3.0, 2.0]


def test_a_parameter_without_a_gradient_keeps_its_mean() -> None:
    one = [[1.0], [1.0]]
    passes: Any = [[[3.0], None], one, [None, [5.0]], one, [[6.0], [5.0]], one]
    w, seen, optimizer = family_asserts.scripted(
        partial(make, lam=0.5, rho=1.0), [[0.0], [0.0]], passes, steps=3, lr=0.0
    )
    assert [[*each[0], *each[1]] for each in seen[1::2]] == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    mean = optimizer.state_dict()["flatmin"]["vectors"]["mean"]
    assert [mean[0].item(), mean[1].item()] == [4.5, 5.0]
    assert [p.item() for p in w] == [0.0, 0.0]


def test_a_loss_scale_must_be_known() -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = make(torch.optim.SGD([w], lr=0.1))
    optimizer.begin_window()
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), ValueError, "scale", "get_scale")


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(FriendlySAM, {"rho": -0.5, "sigma": -1.0, "lam": 1.0})
