"""Sparse SAM against its formula on random choices drawn again, then its limits and properties."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._ssam import SparseSAM
from tests.reference import family as reference
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, batch, make_closure, photograph


def make(base: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> SparseSAM:
    return SparseSAM(base, model=model, **options)


def mask_of(optimizer: SparseSAM) -> np.ndarray:
    vectors = optimizer.state_dict()["flatmin"]["vectors"]["mask"]
    return np.concatenate([vectors[place].numpy().reshape(-1) for place in sorted(vectors)])


SETTINGS = [(0.5, 0.5, None), (0.2, 1.0, 6), (0.6, 1.0, 12), (0.4, 0.0, 1)]


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("sparsity", "drop", "total"), SETTINGS)
def test_equals_the_formula_in_float64(
    problem: shared.Problem, momentum: float, sparsity: float, drop: float, total: int | None
) -> None:
    steps, state = 0, {"mask": np.zeros(5), "draws": 0}

    def formula(w: np.ndarray) -> np.ndarray:
        nonlocal steps
        if steps % 2 == 0:
            noise = reference.uniform(3, state["draws"], [2, 3])
            share = drop if total is None else drop * (1 + np.cos(np.pi * min(steps / total, 1.0))) / 2
            state["mask"] = (
                reference.next_mask(state["mask"], problem.gradient(w), noise, share)
                if steps
                else reference.first_mask(noise, sparsity)
            )
            state["draws"] += 1
        steps += 1
        return reference.masked_sam(problem.gradient, w, 0.3, state["mask"], own_norm=False)

    options = {"sparsity": sparsity, "drop": drop, "every": 2, "total_steps": total, "seed": 3}
    shared.assert_equals_formula(problem, formula, partial(make, rho=0.3, **options), momentum)


def test_known_answer_the_smallest_leaves_and_another_enters_over_all_tensors() -> None:
    """Two of four entries; then half of them, the one with the smaller gradient, gives its place away."""
    gradients = {0: [1.0, 2.0, 3.0, 4.0], 1: [4.0, 3.0, 2.0, 1.0]}
    passes: Any = [[[g[0]], g[1:]] for step in (0, 1) for g in (gradients[step], [1.0] * 4)]
    _, seen, optimizer = family_asserts.scripted(
        partial(make, rho=1.0, every=1), [[0.0], [0.0] * 3], passes, steps=2, lr=0.0
    )
    first, second = ([*each[0], *each[1]] for each in seen[1::2])
    norm = 30.0**0.5
    start = [entry for entry in range(4) if first[entry]]
    assert len(start) == 2
    assert [first[entry] for entry in start] == pytest.approx([gradients[0][entry] / norm for entry in start])
    stays = max(start, key=lambda entry: gradients[1][entry])
    now = [entry for entry in range(4) if second[entry]]
    assert len(now) == 2
    assert stays in now
    assert min(start, key=lambda entry: gradients[1][entry]) not in now
    assert mask_of(optimizer).nonzero()[0].tolist() == now


@pytest.mark.parametrize(("sparsity", "live"), [(0.0, None), (0.25, 75), (0.5, 50), (0.505, 49), (0.99, 1)])
def test_the_mask_holds_the_stated_number_always(sparsity: float, live: int | None) -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(10, 9, requires_grad=True), torch.randn(10, requires_grad=True)]
    optimizer = make(torch.optim.SGD(parameters, lr=0.1), sparsity=sparsity, every=1, total_steps=8)
    masks = []
    for _ in range(8):
        optimizer.step(lambda: (optimizer.zero_grad(), sum(p.square().sum() for p in parameters).backward(), 0.0)[-1])
        masks.append(mask_of(optimizer) if live is not None else np.zeros(0))
    assert all(mask.sum() == (live or 0) for mask in masks)
    if live == 50:
        changed = [int((a & ~b).sum()) for a, b in pairwise(masks)]
        assert changed == [int(50 * 0.25 * (1 + np.cos(np.pi * step / 8))) for step in range(1, 8)]


def test_random_choices_are_uniform_and_follow_the_seed() -> None:
    counts, first = np.zeros(20), []
    for seed in range(200):
        w = torch.ones(20, requires_grad=True)
        optimizer = make(torch.optim.SGD([w], lr=0.0), sparsity=0.7, seed=seed)
        optimizer.step(lambda w=w: (w.grad is None or w.grad.zero_(), w.sum().backward(), 0.0)[-1])
        counts += mask_of(optimizer)
        first.append(tuple(mask_of(optimizer)))
    assert len(set(first)) > 190
    assert np.abs(counts / 200 - 0.3).max() < 4 * (0.3 * 0.7 / 200) ** 0.5


def test_sparsity_zero_is_sam_bit_for_bit() -> None:
    expected = photograph(*asserts.trained(lambda base, model: SAM(base, 0.2, model=model), 4))
    assert_same_bits(expected, photograph(*asserts.trained(partial(make, rho=0.2, sparsity=0.0), 4)))


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", [make, partial(make, rho=0.5, sparsity=0.8, every=2, total_steps=5)])
def test_properties_of_every_step(each: Any) -> None:
    """With ``every=2`` the third step, in which the faults are, exchanges."""
    family_asserts.assert_all_properties(each)
    family_asserts.assert_limits(each)


def test_another_seed_goes_on_as_the_checkpoint_says() -> None:
    found = []
    for seed in (1, 5):
        model, optimizer = asserts.trained(partial(make, every=1, seed=1), 2)
        other = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, every=1, seed=seed)
        other.load_state_dict(optimizer.state_dict())
        for step in range(2, 4):
            other.step(make_closure(other, model, *batch(step)))
        found.append(photograph(model, other))
    assert_same_bits(*found)


def test_an_overflow_in_an_exchange_leaves_the_mask_as_it_was() -> None:
    passes: Any = [[[1.0, 2.0, 3.0, 4.0]]] * 2 + [[[float("inf"), 1.0, 1.0, 1.0]]] * 2
    w, seen, optimizer = family_asserts.scripted(partial(make, every=1), [[0.0] * 4], passes, steps=2, lr=0.0)
    assert seen[3] == [[0.0] * 4]
    assert not torch.isfinite(w[0].grad).all()
    assert mask_of(optimizer).tolist() == [value != 0 for value in seen[1][0]]


def test_parameters_that_come_later_enter_in_the_next_exchange() -> None:
    old, new = (torch.ones(10, requires_grad=True) for _ in range(2))
    optimizer = make(torch.optim.SGD([old], lr=0.0), every=2)
    seen = []

    def closure() -> float:
        seen.append(new.detach().clone())
        old.grad, new.grad = torch.ones(10), torch.ones(10)
        return 0.0

    optimizer.step(closure)
    optimizer.add_param_group({"params": [new]})
    optimizer.step(closure)
    assert torch.equal(seen[3], seen[0])
    optimizer.step(closure)
    assert not torch.equal(seen[5], seen[0])
    assert mask_of(optimizer).sum() == 10


def test_a_parameter_without_a_gradient_keeps_its_part_of_the_mask() -> None:
    one: Any = [1.0] * 4
    passes = [[one, one], [one, one], [one, None], [one, one]]
    w, _, optimizer = family_asserts.scripted(partial(make, every=1), [[0.0] * 4] * 2, passes, steps=2, lr=0.0)
    _, _, before = family_asserts.scripted(partial(make, every=1), [[0.0] * 4] * 2, passes[:2], lr=0.0)
    assert mask_of(optimizer)[4:].tolist() == mask_of(before)[4:].tolist()
    assert mask_of(optimizer)[:4].sum() == 2
    assert [p.tolist() for p in w] == [[0.0] * 4] * 2


def test_errors_name_the_argument() -> None:
    family_asserts.assert_refuses_numbers(
        SparseSAM,
        {"rho": -0.5, "sparsity": 1.0, "drop": 1.5, "every": 0, "total_steps": 0, "seed": -1},
    )
