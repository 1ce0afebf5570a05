"""SAM on normalisation layers only against its formula, then its limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatmin import SAM
from flatmin.step._samon import SAMON
from tests.reference import family as reference
from tests.reference import steps
from tests.step import asserts, family_asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> SAMON:
    return SAMON(base, model=model, **options)


class OwnNorm(nn.Module):
    """A layer of nobody's library; its child is no part of it."""

    def __init__(self, *parts: torch.Tensor) -> None:
        super().__init__()
        for place, part in enumerate(parts):
            self.register_parameter(f"part{place}", nn.Parameter(part))
        self.child = nn.Linear(1, 1, dtype=torch.float64)


class Renamed(nn.LayerNorm):
    pass


class Split(nn.Module):
    """Five weights: the second and the last two belong to normalisation layers."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        w = [torch.tensor(part, dtype=torch.float64) for part in (start[:1], start[1:2], start[2:3], start[3:])]
        self.first, self.third = nn.Parameter(w[0]), nn.Parameter(w[2])
        self.one, self.two = OwnNorm(w[1]), nn.LayerNorm(2, bias=False, dtype=torch.float64)
        self.two.weight = nn.Parameter(w[3])

    def parts(self) -> list[nn.Parameter]:
        return [self.first, self.one.part0, self.third, self.two.weight]


MASK = np.array([0.0, 1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float) -> None:
    formula = partial(reference.masked_sam, problem.gradient, rho=0.5, mask=MASK, own_norm=True)
    model = Split(problem.start)
    optimizer = SAMON(torch.optim.SGD(model.parts(), lr=0.05, momentum=momentum), 0.5, model=model)
    closure = shared.closure_on(problem.loss, model.parts())
    for expected in steps.descend(formula, problem.start, 10, 0.05, momentum):
        optimizer.step(closure)
        np.testing.assert_allclose(torch.cat(model.parts()).detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.RMSNorm(4),
        Renamed(4),
        OwnNorm(torch.zeros(4), torch.zeros(2)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_finds_the_layers_own_parameters(layer: nn.Module) -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), layer, nn.Linear(4, 4))
    optimizer = SAMON(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert list(map(id, optimizer._affine)) == list(map(id, layer.parameters(recurse=False)))
    assert optimizer._affine


def test_where_all_layers_normalise_it_is_sam_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    found = []
    for kind in (SAM, SAMON):
        model = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4))
        optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.2, model=model)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        found.append(photograph(model, optimizer))
    assert_same_bits(*found)


def test_rho_zero_is_the_base_bit_for_bit() -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0))


@pytest.mark.parametrize("each", [make, partial(make, rho=2.0)])
def test_properties_of_every_step(each: Any) -> None:
    family_asserts.assert_all_properties(each)


def scripted(start: list[float], passes: list[list[float | None]], **sgd: Any) -> tuple[Split, list[list[float]], Any]:
    """One step with radius 1 on five weights in four tensors; entries of the last come in pairs."""
    model = Split(np.array(start))
    optimizer = SAMON(torch.optim.SGD(model.parts(), **{"lr": 0.0, **sgd}), 1.0, model=model)
    seen: list[list[float]] = []

    def closure() -> float:
        seen.append(torch.cat(model.parts()).tolist())
        for p, value in zip(model.parts(), passes[len(seen) - 1], strict=True):
            p.grad = None if value is None else torch.full_like(p, value)
        return 0.0

    optimizer.step(closure)
    return model, seen, optimizer


def test_only_normalisation_layers_move_and_their_norm_counts() -> None:
    _, seen, _ = scripted([1.0] * 5, [[9.0, 1.0, 9.0, 2.0], [1.0] * 4])
    assert seen[1] == pytest.approx([1.0, 1 + 1 / 3, 1.0, 1 + 2 / 3, 1 + 2 / 3])
    _, seen, _ = scripted([1.0] * 5, [[9.0, 1.0, 9.0, 2.0], [1.0] * 4], maximize=True)
    assert seen[1] == pytest.approx([1.0, 1 - 1 / 3, 1.0, 1 - 2 / 3, 1 - 2 / 3])


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_in_any_layer_moves_nothing_and_is_seen(place: int, bad: float) -> None:
    gradient: list[float | None] = [1.0] * 4
    gradient[place] = bad
    model, seen, _ = scripted([1.0] * 5, [gradient, gradient])
    assert seen[1] == seen[0]
    assert not torch.isfinite(model.parts()[place].grad).all()


def test_gradients_in_one_pass_only_or_none_or_zero() -> None:
    model, seen, _ = scripted([1.0] * 5, [[1.0, 3.0, None, None], [None, None, 1.0, 1.0]])
    assert seen[1] == [1.0, 2.0, 1.0, 1.0, 1.0]
    assert torch.cat(model.parts()).tolist() == [1.0] * 5
    for layers in ([None, None], [0.0, 0.0]):
        _, seen, _ = scripted([1.0] * 5, [[1.0, layers[0], 1.0, layers[1]], [1.0] * 4])
        assert seen[1] == seen[0]


def test_layers_added_later_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = SAMON(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model.append(nn.BatchNorm1d(2))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert len(optimizer._affine) == 4


def test_errors_name_the_argument() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    for lacking, parameters in ((nn.Linear(2, 2), None), (model, model[0])):
        base = torch.optim.SGD((parameters or lacking).parameters(), lr=0.1)
        asserts.assert_refuses(partial(make, base, lacking), ValueError, "model", "normalisation layer", "SAM")
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    asserts.assert_refuses(partial(make, base, None), TypeError, "model must be", "NoneType")
    asserts.assert_refuses(partial(make, base, model, rho=-1.0), ValueError, "rho", "-1.0")
