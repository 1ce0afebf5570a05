"""Gradient penalties against formulas computed by hand, then their limits and properties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatmin import SAM
from flatmin._registry import _METHODS
from flatmin.step._penalty_sam import PenaltySAM
from tests.reference import second_order as reference
from tests.step import asserts
from tests.step import second_order_problems as shared
from tests.step.problems import assert_same_bits, photograph


def make(base: torch.optim.Optimizer, model: nn.Module, **options: Any) -> PenaltySAM:
    return PenaltySAM(base, model=model, **options)


EXACT = [partial(make, rho=0.3), partial(make, rho=0.05, power=2)]
DIFFERENCE = [partial(make, rho=0.08, product="difference"), partial(make, power=2, product="difference", r=0.3)]
ALL = EXACT + DIFFERENCE


@pytest.mark.parametrize("problem", shared.problems(), ids=["quadratic", "logistic"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_formula_in_float64(problem: shared.Problem, momentum: float) -> None:
    for power in (1, 2):
        shared.assert_equals_formula(
            problem,
            partial(reference.gradient_penalty, problem.gradient, problem.hessian, rho=0.2, power=power),
            lambda base, power=power: PenaltySAM(base, 0.2, model=None, power=power),
            momentum,
        )
        shared.assert_equals_formula(
            problem,
            partial(reference.difference_penalty, problem.gradient, rho=0.2, r=0.4, power=power),
            lambda base, power=power: PenaltySAM(base, 0.2, model=None, power=power, product="difference", r=0.4),
            momentum,
        )


def test_penalty_of_a_quadratic_is_exact_either_way() -> None:
    """A finite difference of a linear gradient has no error; with p = 2 the Hessian becomes H + 2 rho H^2."""
    problem = shared.problems()[0]
    for power in (1, 2):
        exact, difference = (
            shared.iterates(
                problem.loss, problem.start, partial(PenaltySAM, rho=0.1, model=None, power=power, **kind), lr=0.05
            )
            for kind in ({}, {"product": "difference", "r": 0.7})
        )
        for a, b in zip(exact, difference, strict=True):
            assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("rho", [0.07, 0.1, 0.3])
def test_difference_with_r_equal_to_rho_is_sam_bit_for_bit(rho: float) -> None:
    model, optimizer = asserts.trained(partial(make, rho=rho, product="difference", r=rho), 4)
    expected, sam = asserts.trained(lambda base, model: SAM(base, rho, model=model), 4)
    assert_same_bits(photograph(expected, sam), photograph(model, optimizer))


@pytest.mark.parametrize("product", ["exact", "difference"])
def test_rho_zero_is_the_base_bit_for_bit(product: str) -> None:
    asserts.assert_rho_zero_is_the_base(partial(make, rho=0.0, product=product))


@pytest.mark.parametrize("each", ALL)
def test_properties_of_every_step(each: Any) -> None:
    asserts.assert_restores_exactly(each)
    asserts.assert_returns_clean_loss(each)
    asserts.assert_resumes_bit_for_bit(each)
    asserts.assert_copies_go_on_alike(each)
    shared.assert_maximizes(partial(each, model=None))
    shared.assert_carries_the_loss_scale(partial(each, model=None))
    shared.assert_survives_a_zero_gradient(partial(each, model=None))
    shared.assert_does_not_move_on_overflow(partial(each, model=None))


@pytest.mark.parametrize("each", ALL)
def test_transform_equals_closure(each: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if each in EXACT:
        # transform evaluates the clean window once more, step differentiates the first evaluation.
        monkeypatch.setattr(asserts, "Everything", shared.WithoutPowerIteration)
    asserts.assert_transform_equals_closure(each)


@pytest.mark.parametrize("each", DIFFERENCE)
def test_difference_costs_two_gradients(each: Any) -> None:
    asserts.assert_counts_evaluations(each, 2)
    shared.assert_faults_change_nothing(each, 2)
    shared.assert_does_not_move_on_overflow(partial(each, model=None), in_pass=2)


@pytest.mark.parametrize("each", EXACT)
def test_exact_costs_one_call_and_three_gradients(each: Any) -> None:
    shared.assert_counts(each, [1] * 4, 12.0)
    shared.assert_faults_change_nothing(each, 1)
    assert _METHODS["psam"].cost({}) == 3


def test_exact_in_transform_costs_four_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net)
    calls = []

    def evaluate() -> None:
        calls.append(None)
        net(torch.ones(1, 3)).square().sum().backward()

    optimizer.begin_window()
    evaluate()
    optimizer.transform(evaluate, scale=1.0)
    assert len(calls) == 2
    assert optimizer.evaluations == 4


def test_a_radius_that_a_scheduler_raises_from_zero_is_used() -> None:
    w = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = PenaltySAM(torch.optim.SGD([w], lr=0.1), 0.0, model=None)
    optimizer.step(shared.closure_on(lambda v: v.square().sum(), [w]))
    assert w.item() == pytest.approx(1.6)
    optimizer.param_groups[0]["rho"] = 0.5
    optimizer.step(shared.closure_on(lambda v: v.square().sum(), [w]))
    assert w.item() == pytest.approx(1.6 - 0.1 * (3.2 + 0.5 * 2.0))


@pytest.mark.parametrize("product", ["exact", "difference"])
@pytest.mark.parametrize("power", [1, 2])
def test_rho_is_per_group_with_one_norm(product: str, power: int) -> None:
    """L = a^2 / 2 + a b + b^2: v = rho p |g|^(p-2) g with each group's rho."""
    a = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    base = torch.optim.SGD([{"params": [a]}, {"params": [b], "rho": 0.3}], lr=1.0)
    optimizer = PenaltySAM(base, 0.1, model=None, power=power, product=product)
    optimizer.step(shared.closure_on(lambda w: w[0] ** 2 / 2 + w[0] * w[1] + w[1] ** 2, [a, b]))
    h = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    g = torch.tensor([3.0, 5.0], dtype=torch.float64)
    expected = g + h @ (torch.tensor([0.1, 0.3], dtype=torch.float64) * power * g.norm() ** (power - 2) * g)
    start = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(torch.cat([a, b]).detach(), start - expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exponent", [-30, -15, 15, 30])
@pytest.mark.parametrize("product", ["exact", "difference"])
def test_penalty_is_right_at_any_gradient_scale(exponent: int, product: str) -> None:
    """P20, P27: L = s (w1^2 + w2^2) / 2 has g = s w and H g / |g| = s w / |w|, in float32."""
    scale = 10.0**exponent
    w = torch.tensor([0.3, 0.4], requires_grad=True)
    optimizer = PenaltySAM(torch.optim.SGD([w], lr=0.0), 0.5, model=None, product=product)
    optimizer.step(shared.closure_on(lambda v: (scale * v * v / 2).sum(), [w]))
    assert w.grad is not None
    torch.testing.assert_close(w.grad / scale, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_parameters_with_a_gradient_in_one_pass_only_are_restored() -> None:
    w = [torch.tensor([1.0], requires_grad=True) for _ in range(3)]
    passes = [[1.0, 2.0, None], [3.0, None, 4.0]]
    calls = iter(passes)

    def closure() -> float:
        for parameter, value in zip(w, next(calls), strict=True):
            parameter.grad = None if value is None else torch.tensor([value])
        return 0.0

    PenaltySAM(torch.optim.SGD(w, lr=1.0), 0.25, model=None, product="difference", r=1.0).step(closure)
    assert [p.item() for p in w] == pytest.approx([1 - (0.75 + 0.75), 1 - 1.5, 1 - 1.0])


def test_other_optimizers_parameters_keep_the_clean_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(0, 2, (5,))
    nn.functional.cross_entropy(net(x), y).backward()
    clean = net[2].weight.grad.clone()
    for way in ("closure", "transform"):
        net.zero_grad()
        optimizer = PenaltySAM(torch.optim.SGD(net[0].parameters(), lr=0.0), 0.5, model=net)

        def closure(optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(closure)
        else:
            optimizer.begin_window()
            closure()
            optimizer.transform(closure)
        torch.testing.assert_close(net[2].weight.grad, clean, rtol=0, atol=1e-15)
    assert net[0].weight.grad is not None


def test_frozen_complex_and_scalar_parameters() -> None:
    """L = |z|^2 + s^2 with z complex: H is 2 everywhere, so that g is stretched by 1 + 2 rho / |g|."""
    z = torch.tensor([1.0 + 2.0j], dtype=torch.complex128, requires_grad=True)
    s = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    frozen = torch.tensor([1.0], dtype=torch.float64)
    optimizer = PenaltySAM(torch.optim.SGD([z, s, frozen], lr=0.1), 0.5, model=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (z * z.conj()).real.sum() + s**2 + frozen.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    stretch = 0.2 * (1 + 2 * 0.5 / (2 * 14**0.5))
    assert z.item() == pytest.approx((1 + 2j) * (1 - stretch))
    assert s.item() == pytest.approx(3 * (1 - stretch))


@pytest.mark.parametrize("way", ["closure", "transform"])
@pytest.mark.parametrize("kind", ["attention", "compiled", "checkpoint"])
def test_models_whose_fast_paths_cannot_be_differentiated_twice(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model: nn.Module
    if kind == "attention":
        model, x = shared.Attention().double(), torch.randn(6, 4, 8, dtype=torch.float64)
    else:
        model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)).double()
        x = torch.randn(6, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (6,))
    forward: Any = model
    if kind == "compiled":
        forward = torch.compile(model, backend="eager")
    if kind == "checkpoint":
        forward = partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
    got = shared.gradients_of(partial(make, rho=0.4), model, forward, x, y, way)
    g, h = shared.dense(model, x, y)
    torch.testing.assert_close(shared.flat(got), g + 0.4 * h @ g / g.norm(), rtol=0, atol=1e-12)


def test_relu_has_no_penalty_on_its_kinks_but_differences_see_them() -> None:
    """L = relu(w): the gradient is 1 for w > 0, its derivative 0; 0.05 below the kink the step crosses it."""
    for product, expected in (("exact", 0.0), ("difference", 0.5)):
        w = torch.tensor([-0.05, 1.0], dtype=torch.float64, requires_grad=True)
        optimizer = PenaltySAM(
            torch.optim.SGD([w], lr=0.0), 0.1, model=None, product=product, **{"r": 0.2} if expected else {}
        )
        optimizer.step(shared.closure_on(lambda v: torch.relu(v[0] + 0.1 * v[1]) - torch.relu(v[0]), [w]))
        assert w.grad is not None
        assert w.grad[0].item() == pytest.approx(1.0 - expected, abs=1e-12)


def test_sparse_embeddings_equal_dense_ones() -> None:
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)).double()
        x, y = torch.randint(0, 10, (6, 2)), torch.randint(0, 3, (6,))
        results.append(shared.flat(shared.gradients_of(partial(make, rho=0.5), net, net, x, y, "closure")))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-15)


def test_grad_scaler_skips_an_overflow_and_trains_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), 0.2, model=net, power=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    for overflow in (True, False):
        before = [p.detach().clone() for p in net.parameters()]

        def evaluate(factor: float = float("inf") if overflow else 1.0) -> None:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss * factor).backward()

        optimizer.zero_grad()
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, scale=scaler.get_scale())
        scaler.step(optimizer.base)
        scaler.update()
        same = [torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
        assert all(same) if overflow else not any(same)
    assert scaler.get_scale() == 2.0**9


# --- parts of the Hessian --------------------------------------------------------------------------------


def deep() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return net, torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 3, (6,))


def parts_of_the_hessian(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g, G and N as dense arrays: G = J' H_z J by dense Jacobians, N what is left of H."""
    g, h = shared.dense(net, x, y)
    names, weights = zip(*net.named_parameters(), strict=True)

    def logits(flat: Tensor) -> Tensor:
        parts = flat.split([w.numel() for w in weights])
        named = {name: part.view_as(w) for name, part, w in zip(names, parts, weights, strict=True)}
        return torch.func.functional_call(net, named, x).reshape(-1)

    flat = shared.flat([w.detach() for w in weights])
    j = torch.func.jacrev(logits)(flat)
    z = logits(flat).detach()
    h_z = torch.autograd.functional.hessian(lambda z: nn.functional.cross_entropy(z.view(len(x), -1), y), z)
    gauss_newton = j.T @ h_z @ j
    return g, gauss_newton, h - gauss_newton


def layer_blocks(net: nn.Module) -> Tensor:
    """1 where two parameters stand in one layer."""
    numbers = [n for n, layer in enumerate(net) for p in layer.parameters() for _ in range(p.numel())]
    layer = torch.tensor(numbers)
    return (layer[:, None] == layer[None, :]).double()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("way", ["closure", "transform"])
def test_the_diagonal_mask_keeps_layer_blocks_of_the_dense_rest(power: int, way: str) -> None:
    net, x, y = deep()
    got = shared.gradients_of(partial(make, rho=0.3, power=power, mask="diagonal"), net, net, x, y, way)
    g, gauss_newton, rest = parts_of_the_hessian(net, x, y)
    v = 0.3 * power * g.norm() ** (power - 2) * g
    expected = g + gauss_newton @ v + (rest * layer_blocks(net)) @ v
    torch.testing.assert_close(shared.flat(got), expected, rtol=0, atol=1e-12)
    assert (rest @ v).norm() > 1e-3
    assert ((rest * layer_blocks(net)) @ v).norm() > 1e-4


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("way", ["closure", "transform"])
def test_the_off_diagonal_mask_freezes_the_activations_slopes(power: int, way: str) -> None:
    """Against central differences of a back-propagation whose slopes are held at the weights."""
    net, x, y = deep()
    got = shared.gradients_of(partial(make, rho=0.3, power=power, mask="off_diagonal"), net, net, x, y, way)
    w = shared.flat([p.detach() for p in net.parameters()]).numpy()
    g = reference.mlp([3, 4, 5, 3], x.numpy(), y.numpy())(w)
    h = reference.jacobian(reference.mlp([3, 4, 5, 3], x.numpy(), y.numpy(), frozen=w), w)
    expected = g + h @ (0.3 * power * reference.norm(g) ** (power - 2) * g)
    assert shared.flat(got).numpy() == pytest.approx(expected, abs=1e-8)


def test_the_off_diagonal_mask_leaves_gauss_newton_and_nothing_within_a_layer() -> None:
    """All of N within a layer passes through the activations' second derivative (the paper's observation)."""
    net, x, y = deep()
    w = shared.flat([p.detach() for p in net.parameters()]).numpy()
    frozen = torch.from_numpy(reference.jacobian(reference.mlp([3, 4, 5, 3], x.numpy(), y.numpy(), frozen=w), w))
    _, gauss_newton, rest = parts_of_the_hessian(net, x, y)
    within = layer_blocks(net).bool()
    torch.testing.assert_close(frozen[within], gauss_newton[within], rtol=0, atol=1e-8)
    assert (frozen - gauss_newton).norm() > 1e-2
    assert rest[within].norm() > 1e-2


ACTIVATIONS = [nn.ReLU(inplace=True), nn.GELU("tanh"), nn.GELU(), nn.SiLU(inplace=True), nn.Softplus(2.0), nn.Sigmoid()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_masks_of_a_convolutional_network(activation: nn.Module) -> None:
    """Two layers: without phi'' there remain G and the blocks between different layers that hold phi'."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), activation, nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 1, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
    g, gauss_newton, rest = parts_of_the_hessian(net, x, y)
    v, within = 0.3 * g / g.norm(), layer_blocks(net)
    for mask, part in (("diagonal", rest * within), ("off_diagonal", rest * (1 - within))):
        for forward in (net, torch.compile(net, backend="eager")):
            got = shared.gradients_of(partial(make, rho=0.3, mask=mask), net, forward, x, y, "closure")
            torch.testing.assert_close(shared.flat(got), g + (gauss_newton + part) @ v, rtol=0, atol=1e-12)
    assert all("forward" not in vars(module) for module in net)


def test_masks_add_up_over_micro_batches() -> None:
    for mask in ("diagonal", "off_diagonal"):
        net, x, y = deep()
        whole = shared.gradients_of(partial(make, rho=0.3, mask=mask), net, net, x, y, "closure")
        optimizer = PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.0), 0.3, model=net, mask=mask)

        def evaluate(net: Any = net, x: Tensor = x, y: Tensor = y) -> None:
            for rows in (slice(0, 2), slice(2, 6)):
                (nn.functional.cross_entropy(net(x[rows]), y[rows], reduction="sum") / 6).backward()

        net.zero_grad()
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, scale=1.0)
        got = [p.grad for p in net.parameters() if p.grad is not None]
        torch.testing.assert_close(shared.flat(got), shared.flat(whole), rtol=0, atol=1e-13)


MASKED = [partial(make, rho=0.3, mask="off_diagonal"), partial(make, rho=0.05, mask="diagonal", power=2)]


@pytest.mark.parametrize("each", MASKED)
def test_properties_with_a_mask(each: Any) -> None:
    asserts.assert_restores_exactly(each)
    asserts.assert_returns_clean_loss(each)
    asserts.assert_resumes_bit_for_bit(each)
    asserts.assert_copies_go_on_alike(each)
    asserts.assert_transform_equals_closure(each)
    asserts.assert_rho_zero_is_the_base(partial(each, rho=0.0))
    shared.assert_faults_change_nothing(each, 2)


def test_costs_with_a_mask() -> None:
    """At w twice, the gradient's graph and the product; "diagonal" takes two more products for each layer."""
    shared.assert_counts(MASKED[0], [2] * 3, 12.0)
    net, x, y = deep()
    optimizer = PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net, mask="diagonal")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.evaluations == 4 + 2 * 3


def test_masks_that_cannot_be_had_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Softmax(1))

    def build(**options: Any) -> Any:
        return lambda: PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), **{"model": net, **options})

    asserts.assert_refuses(build(mask="block"), ValueError, "mask", "'whole', 'diagonal', 'off_diagonal'", "'block'")
    asserts.assert_refuses(build(mask="diagonal", product="difference"), ValueError, "mask", "product='exact'")
    asserts.assert_refuses(build(mask="diagonal", model=None), ValueError, "mask", "model=")
    asserts.assert_refuses(build(mask="off_diagonal"), ValueError, "mask", "GELU", "got Softmax")


# --- errors ----------------------------------------------------------------------------------------------


def test_errors_name_the_argument() -> None:
    net = nn.Linear(2, 2)

    def build(**options: Any) -> Any:
        return lambda: PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net, **options)

    asserts.assert_refuses(build(rho=-1.0), ValueError, "rho", ">= 0", "-1.0")
    asserts.assert_refuses(build(power=3), ValueError, "power", "3")
    asserts.assert_refuses(build(power=1.5), TypeError, "power", "1.5")
    asserts.assert_refuses(build(product="hvp"), ValueError, "product", "'exact'", "'difference'", "'hvp'")
    asserts.assert_refuses(build(r=0.1), ValueError, "r is", "product='difference'", "'exact'")
    asserts.assert_refuses(build(r=0.0, product="difference"), ValueError, "r must", "> 0")
    asserts.assert_refuses(build(sync="per_worker", product="difference"), ValueError, "sync", "product='exact'")
    asserts.assert_refuses(build(sync="per_worker"), ValueError, "DistributedDataParallel")


def test_squared_norm_needs_the_loss_scale() -> None:
    net = nn.Linear(2, 2)
    optimizer = PenaltySAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net, power=2)
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), ValueError, "scale is required")
