"""What users of such optimizers report (the P cases), each with the right behaviour."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import ASAM, SAM
from tests.step import asserts
from tests.step.problems import Everything, assert_same_bits, batch, make_closure, photograph

SGD = torch.optim.SGD


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def run_with_gradients(optimizer: Any, parameters: list[torch.Tensor], passes: list[list[Any]]) -> list[list[Any]]:
    """One step whose n-th pass writes ``passes[n]`` into the gradients; the weights that each pass saw."""
    seen: list[list[Any]] = []

    def closure() -> float:
        seen.append([p.detach().clone() for p in parameters])
        for parameter, grad in zip(parameters, passes[len(seen) - 1], strict=True):
            parameter.grad = None if grad is None else grad.clone()
        return 0.0

    optimizer.step(closure)
    return seen


# --- the contract of the wrapper -------------------------------------------------------------------------


def test_p3_checkpoints_cross_between_wrapper_and_plain_base() -> None:
    model, optimizer = asserts.trained(lambda base, model: SAM(base, 0.5, model=model), 3)
    saved = optimizer.state_dict()
    plain = SGD(model.parameters(), lr=0.5)
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["momentum"] == 0.9
    again = SAM(SGD(model.parameters(), lr=0.5), 0.3, model=model)
    again.load_state_dict(plain.state_dict())
    assert again.param_groups[0]["rho"] == 0.5
    bare = SGD(model.parameters(), lr=0.25, momentum=0.9)
    wrapped = SAM(SGD(model.parameters(), lr=0.5), 0.3, model=model)
    wrapped.load_state_dict(bare.state_dict())
    assert wrapped.param_groups[0]["lr"] == 0.25
    assert wrapped.param_groups[0]["rho"] == 0.3
    wrapped.step(make_closure(wrapped, model, *batch()))


@pytest.mark.parametrize("on_base", [False, True])
@pytest.mark.parametrize("closure_style", [False, True])
def test_p4_schedulers_on_either_object_and_in_either_way(on_base: bool, closure_style: bool) -> None:
    w = leaf(1.0, 2.0)
    optimizer = SAM(SGD([w], lr=0.1, momentum=0.9), 0.1, model=None)
    target = optimizer.base if on_base else optimizer
    scheduler = torch.optim.lr_scheduler.OneCycleLR(target, max_lr=1.0, total_steps=10)

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            if closure_style:
                optimizer.step(evaluate)
            else:
                optimizer.begin_window()
                evaluate()
                optimizer.transform(evaluate)
                optimizer.base.step()
            scheduler.step()
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.1
    assert optimizer.param_groups[0]["momentum"] != 0.9


def test_shared_groups_and_state_survive_loading() -> None:
    _, optimizer = asserts.trained(lambda base, model: SAM(base, model=model), 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state is optimizer.base.state
    assert optimizer.param_groups is optimizer.base.param_groups


def test_add_param_group_is_checked_and_defaulted() -> None:
    a, b, c = leaf(1.0), leaf(1.0), leaf(1.0)
    optimizer = SAM(SGD([a], lr=0.1), 0.2, model=None)
    optimizer.add_param_group({"params": [b]})
    optimizer.add_param_group({"params": [c], "rho": 0.7})
    assert [group["rho"] for group in optimizer.param_groups] == [0.2, 0.2, 0.7]
    asserts.assert_refuses(lambda: optimizer.add_param_group({"params": [leaf(1.0)], "rho": -1}), ValueError, "rho")
    assert len(optimizer.param_groups) == 3


def test_p23_repr_pickle() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = SAM(SGD(model.parameters(), lr=0.1, momentum=0.9), 0.25, model=model)
    optimizer.step(make_closure(optimizer, model, *batch()))
    assert "SAM(rho=0.25" in repr(optimizer)
    assert "SGD" in repr(optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    state = torch.get_rng_state()
    for opt in (optimizer, twin):
        torch.set_rng_state(state)
        opt.step(make_closure(opt, opt.model, *batch(7)))
    assert_same_bits(photograph(optimizer.model, optimizer), photograph(twin.model, twin))


def test_p35_hooks_fire_once_a_step_in_both_ways() -> None:
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))

    def evaluate() -> float:
        optimizer.zero_grad()
        w.square().sum().backward()
        return 0.0

    optimizer.step(evaluate)
    assert fired == ["pre", "post"]
    optimizer.begin_window()
    evaluate()
    optimizer.transform(evaluate)
    optimizer.step()
    assert fired == ["pre", "post"] * 2


def test_step_without_closure_needs_a_transform_each_time() -> None:
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None, replay_rng=False)
    asserts.assert_refuses(optimizer.step, RuntimeError, "closure", "transform")
    w.square().sum().backward()
    optimizer.transform(lambda: w.square().sum().backward())
    optimizer.step()
    asserts.assert_refuses(optimizer.step, RuntimeError, "closure", "transform")


def test_transform_needs_begin_window_while_rng_is_replayed() -> None:
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)
    w.square().sum().backward()
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), RuntimeError, "begin_window", "replay_rng=False")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.1", None, True, [0.1]])
def test_p26_nonsense_rho_is_refused_by_name(bad: Any) -> None:
    for method in (SAM, ASAM):
        w = leaf(1.0)
        with pytest.raises((ValueError, TypeError), match="rho must be"):
            method(SGD([("weight", w)], lr=0.1), bad, model=None)
    optimizer = SAM(SGD([w], lr=0.1), model=None)
    optimizer.param_groups[0]["rho"] = bad
    w.grad = torch.ones_like(w)
    with pytest.raises((ValueError, TypeError), match="rho must be"):
        optimizer.step(lambda: 0.0)


def test_what_cannot_be_wrapped_is_refused_with_a_reason() -> None:
    w = leaf(1.0)
    asserts.assert_refuses(lambda: SAM([w], model=None), TypeError, "instance", "SGD")  # type: ignore[arg-type]
    asserts.assert_refuses(lambda: SAM(SGD, model=None), TypeError, "instance")  # type: ignore[arg-type]
    asserts.assert_refuses(lambda: SAM(torch.optim.LBFGS([w]), model=None), TypeError, "LBFGS", "closure")
    base = SGD([w], lr=0.1)
    optimizer = SAM(base, model=None)
    asserts.assert_refuses(lambda: SAM(optimizer, model=None), TypeError, "step cannot wrap a step")
    asserts.assert_refuses(lambda: SAM(base, model=None), ValueError, "wrapped", "new SGD")
    asserts.assert_refuses(
        lambda: SAM(SGD([leaf(1.0)], lr=0.1), model=nn.Linear(2, 2)),
        ValueError,
        "model must hold every parameter",
    )
    asserts.assert_refuses(lambda: SAM(SGD([leaf(1.0)], lr=0.1), model="m"), TypeError, "model must be")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model"):
        SAM(SGD([leaf(1.0)], lr=0.1))  # type: ignore[call-arg]


def test_a_failed_construction_leaves_the_base_unwrapped() -> None:
    base = SGD([leaf(1.0)], lr=0.1)
    with pytest.raises(ValueError, match="rho"):
        SAM(base, -1.0, model=None)
    assert "rho" not in base.param_groups[0]
    SAM(base, 0.1, model=None)


# --- closures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, "loss", (1.0,), torch.ones(1), True])
def test_p16_p21_a_closure_that_returns_no_loss_is_refused(bad: Any) -> None:
    w = leaf(1.0, 2.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)

    def closure() -> Any:
        w.grad = torch.ones_like(w)
        return bad

    asserts.assert_refuses(lambda: optimizer.step(closure), TypeError, "closure must return the loss")
    assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("good", [0.0, 3, torch.tensor(1.5)])
def test_p21_p31_numbers_and_zero_are_losses(good: Any) -> None:
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)

    def closure() -> Any:
        w.grad = torch.ones_like(w)
        return good

    assert optimizer.step(closure) is good
    assert w.item() == pytest.approx(0.9)


def test_p12_the_clean_gradient_is_this_steps_own() -> None:
    w = leaf(3.0, 4.0)
    optimizer = SAM(SGD([w], lr=0.0), 5.0, model=None)
    w.grad = torch.tensor([1.0, -1.0], dtype=torch.float64)  # left by an earlier step
    seen = run_with_gradients(optimizer, [w], [[torch.tensor([3.0, 4.0], dtype=torch.float64)]] * 2)
    torch.testing.assert_close(seen[1][0], torch.tensor([6.0, 8.0], dtype=torch.float64))


def test_p22_reentry_is_refused() -> None:
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)

    def closure() -> Any:
        return optimizer.step(closure)

    asserts.assert_refuses(lambda: optimizer.step(closure), RuntimeError, "inside its own closure")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_p24_zeroing_in_place_or_to_none_gives_the_same(set_to_none: bool) -> None:
    w = leaf(1.0, -2.0)
    optimizer = SAM(SGD([w], lr=0.1), 0.1, model=None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = w.pow(4).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for _ in range(3):
        g = 4 * expected**3
        expected = expected - 0.1 * 4 * (expected + 0.1 * g / g.norm()) ** 3
    torch.testing.assert_close(w.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rho", [0.05, 0.0])
def test_a_closure_that_does_not_zero_is_found_out(rho: float) -> None:
    """Lightning and Accelerate under accumulation hand over such closures; the result would be wrong."""
    model = Everything()
    optimizer = SAM(SGD(model.parameters(), lr=0.1), rho, model=model)
    x, y = batch()

    def closure() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    closure()  # a first micro-batch, whose gradient the closure is to add to
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    asserts.assert_refuses(lambda: optimizer.step(closure), RuntimeError, "zero the gradients", "transform")
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_watching_a_closure_changes_no_gradient() -> None:
    """An unused parameter keeps no gradient, or the zero that zeroing in place leaves, as without flatmin."""
    for set_to_none, expected in ((True, 1.0), (False, 1.0)):
        unused, w = leaf(1.0), leaf(1.0, 1.0, 1.0)
        optimizer = SAM(SGD([unused, w], lr=0.1, weight_decay=0.5), 0.1, model=None)

        def closure(w: Any = w, optimizer: Any = optimizer, set_to_none: bool = set_to_none) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = w.square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert unused.item() == expected


def test_a_second_pass_without_backward_is_refused() -> None:
    w = leaf(1.0, 2.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None, replay_rng=False)
    w.square().sum().backward()
    asserts.assert_refuses(
        lambda: optimizer.transform(lambda: w.square().sum()),
        RuntimeError,
        "no parameter has a gradient after a second",
    )
    assert w.tolist() == [1.0, 2.0]


def test_a_prepared_step_is_taken_once() -> None:
    """base.step() in the documented loop uses it up, and so does a new window."""
    w = leaf(1.0)
    optimizer = SAM(SGD([w], lr=0.1), model=None)

    def evaluate() -> None:
        w.square().sum().backward()

    for end in (optimizer.base.step, optimizer.begin_window):
        optimizer.zero_grad()
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate)
        end()
        asserts.assert_refuses(optimizer.step, RuntimeError, "closure", "transform")


def test_a_failed_asam_leaves_the_base_unwrapped() -> None:
    model = nn.Linear(2, 2)
    base = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="named_parameters"):
        ASAM(base, model=None)
    assert "rho" not in base.param_groups[0]
    ASAM(base, model=model)


def test_gradients_that_share_memory_are_scaled_once_each() -> None:
    a, b = leaf(0.0, 0.0), leaf(0.0, 0.0)
    shared = torch.tensor([1.0, 1.0], dtype=torch.float64)
    seen: list[list[float]] = []

    def closure() -> float:
        seen.append(a.tolist())
        a.grad = b.grad = shared.clone()
        return 0.0

    SAM(SGD([a, b], lr=0.0), 1.0, model=None).step(closure)
    assert seen[1] == pytest.approx([0.5, 0.5])
    c = leaf(0.0, 0.0)
    expanded = torch.ones((), dtype=torch.float64).expand(2)
    seen.clear()

    def expanding() -> float:
        seen.append(c.tolist())
        c.grad = expanded
        return 0.0

    SAM(SGD([c], lr=0.0), 2**0.5, model=None).step(expanding)
    assert seen[1] == pytest.approx([1.0, 1.0])


def test_an_interrupt_while_weights_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = leaf(1.0), leaf(1.0)
    optimizer = SAM(SGD([{"params": [a]}, {"params": [b]}], lr=0.0), 1.0, model=None)
    real, calls = torch._foreach_copy_, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        real(*arguments)
        if calls == 3:  # two backups, then the first of two groups put back
            raise KeyboardInterrupt

    def closure() -> float:
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        return 0.0

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert (a.item(), b.item()) == (1.0, 1.0)


def test_sixteen_bit_weights_that_rounding_holds_fast_are_reported() -> None:
    w = torch.ones(2000, dtype=torch.bfloat16, requires_grad=True)
    optimizer = SAM(SGD([w], lr=0.0), 0.05, model=None)

    def closure() -> float:
        w.grad = torch.ones_like(w)
        return 0.0

    with pytest.warns(UserWarning, match="moves only 0 of 2000 bfloat16 weights"):
        optimizer.step(closure)
    optimizer.step(closure)  # once is enough


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
def test_the_radius_is_exact_over_the_range_of_float64(scale: float) -> None:
    w = leaf(0.0, 0.0)
    grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
    seen = run_with_gradients(SAM(SGD([w], lr=0.0), 5.0, model=None), [w], [[grad], [grad]])
    assert seen[1][0].tolist() == pytest.approx([3.0, 4.0])


def test_asam_stays_in_range_where_its_perturbation_does() -> None:
    w = leaf(1e5, 1e5, dtype=torch.float32)
    grad = torch.full((2,), 1e30)
    optimizer = ASAM(SGD([w], lr=0.0), 1.0, model=None, eta=0.0, scaled="all")
    seen = run_with_gradients(optimizer, [w], [[grad], [grad]])
    assert (seen[1][0] - seen[0][0]).tolist() == pytest.approx([1e5 / 2**0.5] * 2, rel=1e-5)


def test_groups_added_to_the_base_get_the_methods_options() -> None:
    a, b = leaf(1.0), leaf(1.0)
    optimizer = SAM(SGD([a], lr=0.1), 0.3, model=None)
    optimizer.base.add_param_group({"params": [b]})
    one = torch.ones(1, dtype=torch.float64)
    run_with_gradients(optimizer, [a, b], [[one, one], [one, one]])
    assert optimizer.param_groups[1]["rho"] == 0.3


def test_model_must_hold_all_that_is_optimized() -> None:
    """What lies outside would have its buffers moved twice a step without a word."""
    a, b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = [*a.parameters(), *b.parameters()]
    asserts.assert_refuses(lambda: SAM(SGD(parameters, lr=0.1), model=a), ValueError, "4 are not in it", "ModuleList")
    optimizer = SAM(SGD(parameters, lr=0.1), model=nn.ModuleList([a, b]))
    with pytest.raises(ValueError, match="1 are not in it"):
        optimizer.add_param_group({"params": [leaf(1.0)]})
    assert len(optimizer.param_groups) == 1


def test_a_closure_without_backward_is_refused() -> None:
    w = leaf(1.0)
    asserts.assert_refuses(
        lambda: SAM(SGD([w], lr=0.1), model=None).step(lambda: w.sum()),
        RuntimeError,
        "no parameter has a gradient",
    )


# --- gradients of every kind --------------------------------------------------------------------------------


def test_p13_zero_gradient_moves_nothing_and_steps() -> None:
    w = leaf(1.0, 2.0)
    optimizer = SAM(SGD([w], lr=0.1, weight_decay=1.0), model=None)
    seen = run_with_gradients(optimizer, [w], [[torch.zeros(2, dtype=torch.float64)]] * 2)
    assert torch.equal(seen[0][0], seen[1][0])
    torch.testing.assert_close(w.detach(), torch.tensor([0.9, 1.8], dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", [SAM, ASAM])
def test_p14_a_nonfinite_first_gradient_moves_nothing_and_is_seen(bad: float, method: Any) -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0)
    optimizer = method(SGD([("a.weight", a), ("b.weight", b)], lr=0.0), model=None)
    good = [torch.ones(2, dtype=torch.float64), torch.tensor([bad], dtype=torch.float64)]
    seen = run_with_gradients(optimizer, [a, b], [good, good])
    assert seen[1][0].tolist() == [1.0, 2.0]
    assert seen[1][1].tolist() == [3.0]
    assert not torch.isfinite(b.grad).all()


def test_p15_p30_gradients_in_one_pass_only() -> None:
    a, b = leaf(1.0), leaf(1.0)
    one = torch.ones(1, dtype=torch.float64)
    optimizer = SAM(SGD([a, b], lr=0.1), 0.5, model=None)
    seen = run_with_gradients(optimizer, [a, b], [[one, None], [None, one]])
    assert seen[1][0].item() == 1.5
    assert (a.item(), b.item()) == (1.0, 0.9)


def test_tied_parameters_count_once() -> None:
    w = leaf(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself warns of the duplicate
        base = SGD([w, w], lr=0.0)
    seen = run_with_gradients(SAM(base, 0.5, model=None), [w], [[torch.ones(1, dtype=torch.float64)]] * 2)
    assert seen[1][0].item() == 1.5


def test_sparse_gradients_equal_dense_ones() -> None:
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=sparse).double()
        optimizer = SAM(SGD(table.parameters(), lr=0.1), 0.5, model=table)
        rows = torch.tensor([1, 1, 3, 7])

        def closure(table: Any = table, optimizer: Any = optimizer, rows: Any = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = table(rows).pow(3).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append(table.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_p19_odd_parameters_share_one_norm_and_keep_their_type() -> None:
    scalar = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    half = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
    phase = torch.tensor([1.0 + 2.0j], dtype=torch.complex128, requires_grad=True)
    single = torch.tensor([[1.0]], requires_grad=True)
    parameters = [scalar, half, phase, single]
    grads = [
        torch.tensor(1.0, dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.bfloat16),
        torch.tensor([2.0 + 4.0j], dtype=torch.complex128),
        torch.tensor([[0.0]]),
    ]
    seen = run_with_gradients(SAM(SGD(parameters, lr=0.0), 5.0, model=None), parameters, [grads, grads])
    assert seen[1][0].item() == pytest.approx(2.0)
    assert seen[1][1].item() == 3.0
    assert seen[1][2].item() == pytest.approx(3.0 + 6.0j)
    assert [p.dtype for p in parameters] == [torch.float64, torch.bfloat16, torch.complex128, torch.float32]
    assert [p.item() for p in parameters] == [1.0, 1.0, 1.0 + 2.0j, 1.0]


def test_fp16_gradients_do_not_overflow_the_norm() -> None:
    w = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    grad = torch.full((4,), 30000.0, dtype=torch.float16)
    seen = run_with_gradients(SAM(SGD([w], lr=0.0), 1.0, model=None), [w], [[grad], [grad]])
    assert seen[1][0].tolist() == [0.5] * 4


# --- what a second pass must not disturb ----------------------------------------------------------------------


def test_p5_buffers_stay_as_after_the_clean_pass() -> None:
    torch.manual_seed(0)
    model = Everything()
    optimizer = SAM(SGD(model.parameters(), lr=0.0), 1.0, model=model)
    x, y = batch()
    optimizer.step(make_closure(optimizer, model, x, y))
    assert int(model.norm.num_batches_tracked) == 1
    assert model.calls.item() == 1.0
    assert model.hidden_calls.tolist() == [1, 1]


def test_without_a_model_buffers_are_the_users_business() -> None:
    model = Everything()
    optimizer = SAM(SGD(model.parameters(), lr=0.0), 1.0, model=None)
    optimizer.step(make_closure(optimizer, model, *batch()))
    assert int(model.norm.num_batches_tracked) == 2


def test_dropout_masks_are_the_same_in_both_passes() -> None:
    w = leaf(*[1.0] * 50)
    masks: list[torch.Tensor] = []
    optimizer = SAM(SGD([w], lr=0.1), 0.1, model=None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        out = nn.functional.dropout(w, 0.5)
        masks.append(out.detach() != 0)
        loss = out.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(masks[0], masks[1])
    optimizer.step(closure)
    assert not torch.equal(masks[1], masks[2])


def test_both_passes_in_one_autocast_region_see_their_own_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    x = torch.randn(4, 8)
    optimizer = SAM(SGD(model.parameters(), lr=0.0), 5.0, model=model)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(closure)
        again = model(x).float().square().mean().item()
    assert losses[1] > 2 * losses[0]
    assert again == losses[0]


def test_gradients_of_another_optimizers_parameters_are_the_clean_ones() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    x = torch.randn(5, 3)
    model(x).square().mean().backward()
    expected = model[1].weight.grad.clone()
    model.zero_grad()
    optimizer = SAM(SGD(model[0].parameters(), lr=0.1), 0.5, model=model, replay_rng=False)
    model(x).square().mean().backward()
    optimizer.transform(lambda: model(x).square().mean().backward())
    assert torch.equal(model[1].weight.grad, expected)


def test_p1_grad_scaler_with_clipping_equals_fp64_and_skips_overflows() -> None:
    """fp16 scaling on the CPU: scale, transform, unscale, clip, step; a huge scale skips exactly the step."""
    w = leaf(0.5, -0.25, dtype=torch.float32)
    optimizer = SAM(SGD([w], lr=0.1), 0.1, model=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(factor: float = 1.0) -> None:
        def evaluate() -> None:
            scaler.scale(w.square().sum() * factor).backward()

        optimizer.zero_grad()
        optimizer.begin_window()
        evaluate()
        optimizer.transform(evaluate, scale=scaler.get_scale())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([w], 0.5)
        scaler.step(optimizer)
        scaler.update()

    step()
    start = torch.tensor([0.5, -0.25], dtype=torch.float64)
    g = 2 * (start + 0.1 * start / start.norm())
    torch.testing.assert_close(w.detach().double(), start - 0.1 * 0.5 * g / g.norm(), rtol=0, atol=1e-6)
    before = w.detach().clone()
    step(factor=1e37)  # overflows float32 in both passes
    assert torch.equal(w, before)
    assert scaler.get_scale() == 512.0


def test_usam_under_a_scaler_needs_the_scale() -> None:
    w = leaf(1.0, 2.0)
    optimizer = SAM(SGD([w], lr=0.0), 0.5, model=None, normalize=False, replay_rng=False)
    w.grad = torch.tensor([8.0, 0.0], dtype=torch.float64)
    asserts.assert_refuses(lambda: optimizer.transform(lambda: None), ValueError, "scale", "get_scale")
    seen: list[Any] = []

    def evaluate() -> None:
        seen.append(w.tolist())
        w.grad = torch.ones_like(w)

    optimizer.transform(evaluate, scale=8.0)
    assert seen == [[1.5, 2.0]]


def test_p2_the_whole_accumulation_window_is_moved_and_evaluated() -> None:
    """Uneven micro-batches of one window equal one big batch."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    results = []
    for cuts in ([10], [3, 5, 2]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        optimizer = SAM(SGD(model.parameters(), lr=0.1), 0.3, model=model)

        def evaluate(model: Any = model, cuts: Any = cuts) -> None:
            for part, target in zip(x.split(cuts), y.split(cuts), strict=True):
                (nn.functional.mse_loss(model(part), target, reduction="sum") / len(x)).backward()

        for _ in range(4):
            optimizer.zero_grad()
            optimizer.begin_window()
            evaluate()
            optimizer.transform(evaluate)
            optimizer.base.step()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_storage_of_parameters_is_kept() -> None:
    w = leaf(1.0, 2.0)
    view = w.detach().view(-1)
    optimizer = SAM(SGD([w], lr=0.1), model=None)
    run_with_gradients(optimizer, [w], [[torch.ones(2, dtype=torch.float64)]] * 2)
    assert torch.equal(view, w.detach())
