"""VaSSO against its formula, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._vasso import VaSSO
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> VaSSO:
    return VaSSO(base, model=model, **options)


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("theta", [0.9, 0.4, 1.0])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, theta: float) -> None:
    formula = reference.remembering(reference.vasso, problem.gradient, rho=0.3, theta=theta)
    shared.assert_equals_formula(problem, formula, partial(make, rho=0.3, theta=theta), momentum)


def test_known_answer_with_one_norm_over_all_tensors() -> None:
    """Gradients (3, 4), (3, 0) and (0, -2) with theta .5: d = (3, 4), (3, 2) and (1.5, 0)."""
    passes: Any = [[[3.0], [4.0]], None, [[3.0], [0.0]], None, [[0.0], [-2.0]], None]
    passes = [each or [[1.0], [1.0]] for each in passes]
    _, seen, _ = family_asserts.scripted(partial(make, rho=1.0, theta=0.5), [[0.0], [0.0]], passes, steps=3, lr=0.0)
    expected = ([0.6, 0.8], [3 / 13**0.5, 2 / 13**0.5], [1.0, 0.0])
    assert [[*each[0], *each[1]] for each in seen[1::2]] == [pytest.approx(p) for p in expected]


def test_theta_one_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(make, rho=0.2, theta=1.0), 4)))


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", [make, partial(make, rho=0.3, theta=0.2), partial(make, theta=1.0)])
def test_properties_of_every_step(each: Any) -> None:
    family_asserts.assert_all_properties(each)
    family_asserts.assert_limits(each)


def test_an_overflow_leaves_the_mean_as_it_was() -> None:
    _, seen, optimizer = family_asserts.scripted(
        partial(make, theta=0.5, rho=1.0),
        [[0.0, 0.0]],
        [[each] for each in ([3.0, 4.0], [1.0, 1.0], [float("inf"), 1.0], [1.0, 1.0], [3.0, 0.0], [1.0, 1.0])],
        steps=3,
        lr=0.0,
    )
    assert seen[3] == [[0.0, 0.0]]
    assert seen[5][0] == pytest.approx([3 / 13**0.5, 2 / 13**0.5])
    assert optimizer.state_dict()["flatmin"]["vectors"]["mean"][0].tolist() == [3.0, 2.0]


def test_a_parameter_without_a_gradient_keeps_its_mean() -> None:
    one = [[1.0], [1.0]]
    passes: Any = [[[3.0], None], one, [None, [5.0]], one, [[6.0], [5.0]], one]
    w, seen, optimizer = family_asserts.scripted(
        partial(make, theta=0.5, rho=1.0), [[0.0], [0.0]], passes, steps=3, lr=0.0
    )
    assert [[*each[0], *each[1]] for each in seen[1::2]] == [
        [1.0, 0.0],
        [0.0, 1.0],
        [pytest.approx(4.5 / 45.25**0.5), pytest.approx(5.0 / 45.25**0.5)],
    ]
    mean = optimizer.state_dict()["flatmin"]["vectors"]["mean"]
    assert [mean[0].item(), mean[1].item()] == [4.5, 5.0]
    assert [p.item() for p in w] == [0.0, 0.0]


def test_a_loss_scale_must_be_known() -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = make(torch.optim.SGD([w], lr=0.1))
    optimizer.begin_window()
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), ValueError, "scale", "get_scale")


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(VaSSO, {"theta": 1.5})
    family_asserts.assert_refuses_numbers(VaSSO, {"rho": -0.5, "theta": 0.0})
