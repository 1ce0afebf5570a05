"""LookSAM against its formula, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._looksam import LookSAM
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> LookSAM:
    return LookSAM(base, model=model, **options)


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("k", "alpha"), [(1, 0.7), (2, 0.7), (3, 0.0), (5, 0.7), (4, 1.5)])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float, k: int, alpha: float) -> None:
    formula = reference.remembering(reference.looksam, problem.gradient, rho=0.3, k=k, alpha=alpha)
    shared.assert_equals_formula(problem, formula, partial(make, rho=0.3, k=k, alpha=alpha), momentum)


def test_known_answer_with_one_projection_over_all_tensors() -> None:
    """P8: on a step that reuses it the gradient differs from the plain one by alpha |g| / |g_v| g_v."""
    passes: Any = [[[1.0], [0.0]], [[1.0], [1.0]], [[2.0], [0.0]]]
    w, _, _ = family_asserts.scripted(make, [[0.0], [0.0]], passes, steps=2, lr=0.0)
    assert family_asserts.grads(w) == pytest.approx([2.0, 1.4], abs=1e-15)


@pytest.mark.parametrize(("k", "calls"), [(1, 20), (5, 12), (10, 11), (20, 11)])
def test_p29_passes_in_ten_steps(k: int, calls: int) -> None:
    asserts.assert_counts_evaluations(partial(make, k=k), calls / 10, steps=10)


def test_k_one_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(make, rho=0.2, k=1), 4)))


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize(
    ("each", "calls", "steps"), [(make, 1.2, 5), (partial(make, rho=0.3, k=2, alpha=1.5), 1.5, 4)], ids=["5", "2"]
)
def test_properties_of_every_step(each: Any, calls: float, steps: int) -> None:
    family_asserts.assert_all_properties(each, calls, most=1, steps=steps)
    family_asserts.assert_limits(each)


@pytest.mark.parametrize("each", [partial(make, k=1), partial(make, k=2)])
def test_faults_in_steps_that_refresh(each: Any) -> None:
    """After two steps, with k = 1 and 2, the next one refreshes."""
    shared.assert_faults_change_nothing(each, 2)


def test_resumes_between_two_refreshes() -> None:
    for k in (2, 3, 4):
        asserts.assert_resumes_bit_for_bit(partial(make, rho=0.3, k=k))
        asserts.assert_copies_go_on_alike(partial(make, rho=0.3, k=k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_gradients_leave_nothing_to_reuse(dtype: torch.dtype) -> None:
    """On an isotropic quadratic g_s is a multiple of g; rounding errors are not a direction."""
    torch.manual_seed(0)
    w = torch.randn(1000, dtype=dtype, requires_grad=True)
    optimizer = LookSAM(torch.optim.SGD([w], lr=0.0), 0.1, model=None, k=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.35 * w.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    torch.testing.assert_close(w.grad, 0.7 * w.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("in_pass", [0, 1])
def test_an_overflow_leaves_the_reused_part_as_it_was(in_pass: int) -> None:
    bad = [float("inf"), 1.0]
    third: Any = [[1.0, 3.0], [2.0, 2.0]]
    third[in_pass] = bad
    gradients: Any = [[1.0, 0.0], [1.0, 1.0], [5.0, 0.0], *third, [2.0, 0.0]]
    w, _, optimizer = family_asserts.scripted(
        partial(make, k=2), [[0.0, 0.0]], [[each] for each in gradients], steps=4, lr=0.0
    )
    assert family_asserts.grads(w) == pytest.approx([2.0, 1.4])
    assert optimizer.evaluations == 6


def test_gradients_in_one_pass_only() -> None:
    passes: Any = [
        [[3.0], [4.0], None],
        [[1.0], None, [1.0]],
        [[5.0], [0.0], None],
        [None, None, [2.0]],
    ]
    w, seen, _ = family_asserts.scripted(partial(make, rho=1.0, k=3), [[1.0]] * 3, passes, steps=3, lr=0.0)
    assert seen[1] == [[pytest.approx(1.6)], [pytest.approx(1.8)], [1.0]]
    assert [p.item() for p in w] == [1.0] * 3
    # g_v = (1, 0, 1) - 0.6 (0.6, 0.8, 0)
    aside = torch.tensor([0.64, -0.48, 1.0])
    assert family_asserts.grads(w) == [None, None, pytest.approx(2.0 + 0.7 * 2.0 / aside.norm().item())]


def test_state_is_of_plain_tensors_and_numbers() -> None:
    _, optimizer = asserts.trained(make, 3)
    state = optimizer.state_dict()["flatmin"]
    assert state["count"] == 3
    assert sum(value.square().sum() for value in state["vectors"]["aside"].values()).item() == pytest.approx(1.0)


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(LookSAM, {"rho": -0.5, "alpha": -0.1, "k": 0})
    family_asserts.assert_refuses_numbers(LookSAM, {"k": "five"})
