"""Switch EMA against its plain reference, the published rate table, and known faults of other versions.

The tags N27 to N38 number known faults of weight averages elsewhere.
"""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatmin._registry import methods
from flatmin.average import SwitchEMA, switch_rate
from tests.reference import averages
from tests.reference.averages import set_to


def scalar(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    set_to(model, value)
    return model


def descend(model: nn.Linear, optimizer: torch.optim.Optimizer, average: SwitchEMA, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model.weight**2 / 2).sum().backward()
        optimizer.step()
        average.update()


# The rule


@pytest.mark.parametrize(
    ("optimizer_state", "right", "momentum"),
    [
        ("keep", [0.835, 0.510925, 0.13692587], [1.8, 2.799, 2.934945]),
        ("reset", [0.835, 0.697225, 0.58218287], None),
    ],
)
def test_n33_three_epochs_with_momentum(optimizer_state: str, right: list[float], momentum: list[float] | None) -> None:
    model = scalar(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = SwitchEMA(model, 0.5, optimizer=sgd, optimizer_state=optimizer_state)
    weights, buffers = [], []
    for _ in range(3):
        descend(model, sgd, average, 2)
        buffers.append(sgd.state[model.weight]["momentum_buffer"].item())
        assert average.switch()
        weights.append(model.weight.item())
    reset = optimizer_state == "reset"
    plain = averages.switch_sgd(1.0, lr=0.1, momentum=0.9, decay=0.5, steps=2, epochs=3, reset=reset)
    # The published decimals end at the eighth; the reference has them all.
    assert weights == pytest.approx(right, abs=5e-9)
    assert weights == pytest.approx(plain, abs=1e-12)
    assert weights[:2] == pytest.approx(right[:2], abs=1e-12)
    if momentum is not None:
        assert buffers == pytest.approx(momentum, abs=1e-12)
    assert bool(sgd.state) is not reset


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.9), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_equals_the_reference(decay: float, lr: float, momentum: float, steps: int, epochs: int, reset: bool) -> None:
    model = scalar(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    average = SwitchEMA(model, decay, optimizer=sgd, optimizer_state="reset" if reset else "keep")
    right = averages.switch_sgd(1.0, lr=lr, momentum=momentum, decay=decay, steps=steps, epochs=epochs, reset=reset)
    for w in right:
        descend(model, sgd, average, steps)
        average.switch()
        assert model.weight.item() == pytest.approx(w, rel=1e-12, abs=1e-12)


def test_the_average_is_kept_at_a_switch_and_is_the_final_model() -> None:
    model = scalar(0.0)
    average = SwitchEMA(model, 0.5)
    set_to(model, 1.0)
    average.update()
    average.switch()
    assert model.weight.item() == 0.5
    set_to(model, 1.0)
    average.update()
    assert average.state_dict()["averages"]["weight"].item() == 0.75
    average.copy_to()
    assert model.weight.item() == 0.75


def test_decay_zero_is_the_base_optimizer() -> None:
    model, plain = scalar(1.0), scalar(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = SwitchEMA(model, 0.0, every=1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        descend(model, sgd, average, 1)
        other.zero_grad()
        (plain.weight**2 / 2).sum().backward()
        other.step()
    assert torch.equal(model.weight, plain.weight)


# When it switches


@pytest.mark.parametrize("every", [1, 3, 4])
def test_n27_n31_switches_after_exact_multiples(every: int) -> None:
    model = scalar(0.0)
    average = SwitchEMA(model, 0.0 if every == 1 else 0.25, every=every)
    switched = []
    for step in range(1, 13):
        set_to(model, 100.0 + step)
        average.update()
        if model.weight.item() == average.state_dict()["averages"]["weight"].item():
            switched.append(step)
    assert switched == list(range(every, 13, every))


def test_n27_switching_by_hand_happens_every_time() -> None:
    model = scalar(0.0)
    average = SwitchEMA(model, 0.5)
    seen = []
    for _ in range(5):
        for _ in range(3):
            set_to(model, model.weight.item() + 1)
            average.update()
        average.switch()
        seen.append(model.weight.item())
    assert seen == [2.125, 4.25, 6.375, 8.5, 10.625]


def test_every_and_by_hand_together() -> None:
    model = scalar(0.0)
    average = SwitchEMA(model, 0.25, every=2)
    set_to(model, 4.0)
    average.update()
    assert average.switch()
    assert model.weight.item() == 3.0
    set_to(model, 7.0)
    average.update()
    assert model.weight.item() == 6.0


def test_short_epochs_switch_every_fifty_steps_and_not_by_hand() -> None:
    model = scalar(0.0)
    average = SwitchEMA(model, steps_per_epoch=5)
    assert (average.decay, average.every) == (0.9, 50)
    assert average.effective_rate == switch_rate(0.9, 50)
    switched = []
    for step in range(1, 101):
        set_to(model, float(step))
        average.update()
        if model.weight.item() != step:
            switched.append(step)
        if step % 5 == 0:
            before = model.weight.item()
            assert average.switch() is False
            assert model.weight.item() == before
    assert switched == [50, 100]


def test_a_given_decay_keeps_short_epochs_by_hand() -> None:
    average = SwitchEMA(scalar(), 0.3, steps_per_epoch=5)
    assert average.every is None
    assert average.effective_rate == switch_rate(0.3, 5)


@pytest.mark.parametrize(
    ("given", "decay", "every", "steps"),
    [
        ({"steps_per_epoch": 500}, 0.99, None, 500),
        ({"steps_per_epoch": 20}, 0.75, None, 20),
        ({"steps_per_epoch": 19}, 0.9, 50, 50),
        ({"every": 100}, 0.95, 100, 100),
        ({"every": 19}, 0.9, 19, 19),
        ({"every": 100, "steps_per_epoch": 5}, 0.95, 100, 100),
        ({"every": 100, "steps_per_epoch": 500, "decay": 0.5}, 0.5, 100, 100),
        ({"decay": 0.97}, 0.97, None, None),
    ],
)
def test_default_decay(given: dict[str, int], decay: float, every: int | None, steps: int | None) -> None:
    average = SwitchEMA(scalar(), **given)
    assert average.decay == pytest.approx(decay, abs=1e-15)
    assert average.every == every
    assert average.effective_rate == (None if steps is None else switch_rate(average.decay, steps))


def test_warns_when_little_of_the_learning_rate_is_left() -> None:
    with pytest.warns(UserWarning, match=r"keeps only 0.025 of the learning rate; decay=0.99 would fit"):
        SwitchEMA(scalar(), 0.9999, steps_per_epoch=500)
    with pytest.warns(UserWarning, match=r"decay=0.5 would fit"):
        SwitchEMA(scalar(), every=10)


# What a switch leaves alone


def test_a_switch_touches_nothing_but_the_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
    average = SwitchEMA(model, 0.5, optimizer=adam)
    model(torch.randn(4, 2)).square().sum().backward()
    adam.step()
    schedule.step()
    average.update()
    objects = [(p, p.grad) for p in model.parameters()]
    before = copy.deepcopy((adam.state_dict(), schedule.state_dict(), dict(model.named_buffers())))
    rng = torch.get_rng_state()
    average.switch()
    assert torch.equal(rng, torch.get_rng_state())
    after = (adam.state_dict(), schedule.state_dict(), dict(model.named_buffers()))
    torch.testing.assert_close(after[0]["state"], before[0]["state"], rtol=0, atol=0)
    assert after[0]["param_groups"] == before[0]["param_groups"]
    assert after[1] == before[1]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert all(p is q and p.grad is g for (p, g), q in zip(objects, model.parameters(), strict=True))


def test_refuses_to_switch_too_early_or_inside_applied() -> None:
    average = SwitchEMA(scalar(), 0.5)
    with pytest.raises(RuntimeError, match=r"switch\(\) before the first update"):
        average.switch()
    average.update()
    with average.applied():
        with pytest.raises(RuntimeError, match=r"switch\(\) inside applied"):
            average.switch()
        with pytest.raises(RuntimeError, match=r"update\(\) inside applied"):
            average.update()


# Checkpoints


def test_n38_resumes_bit_for_bit_in_the_middle_of_a_period() -> None:
    model = scalar(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = SwitchEMA(model, 0.5, every=4)
    descend(model, sgd, average, 6)
    live, momentum = copy.deepcopy(model.state_dict()), copy.deepcopy(sgd.state_dict())
    file = io.BytesIO()
    with average.applied():
        torch.save(average.state_dict(), file)
    descend(model, sgd, average, 5)

    file.seek(0)
    again = scalar()
    again.load_state_dict(live)
    fresh = SwitchEMA(again, 0.5, every=4)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    resumed = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    resumed.load_state_dict(momentum)
    descend(again, resumed, fresh, 5)
    assert torch.equal(model.weight, again.weight)
    assert fresh.updates == 11


def test_settings_of_the_file_are_taken_over_with_a_warning() -> None:
    state = SwitchEMA(scalar(), 0.5, every=8).state_dict()
    average = SwitchEMA(scalar(), 0.5)
    with pytest.warns(UserWarning, match="of the state replaces") as caught:
        average.load_state_dict(state)
    texts = [str(warning.message) for warning in caught]
    assert texts == ["every=8 of the state replaces every=None", "steps=8 of the state replaces steps=None"]
    assert average.every == 8


def test_wrong_settings_change_nothing() -> None:
    average = SwitchEMA(scalar(), 0.5, every=8)
    state = average.state_dict()
    for name, wrong in (("every", 0), ("steps", 0), ("decay", 2.0)):
        with pytest.raises(ValueError, match=name):
            average.load_state_dict({**state, name: wrong})
    with pytest.raises(TypeError, match="by_hand"):
        average.load_state_dict({**state, "by_hand": 1})
    assert (average.decay, average.every) == (0.5, 8)


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_with_model_and_optimizer_go_their_own_way(through: str) -> None:
    model = scalar(0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = SwitchEMA(model, 0.5, optimizer=sgd, optimizer_state="reset")
    descend(model, sgd, average, 1)
    trio = (model, sgd, average)
    twin, other, mean = copy.deepcopy(trio) if through == "deepcopy" else pickle.loads(pickle.dumps(trio))
    set_to(twin, 1.0)
    mean.update()
    mean.switch()
    assert (twin.weight.item(), model.weight.item()) == (0.5, 0.0)
    assert not other.state
    assert sgd.state


# The rate


def test_switch_rate_table() -> None:
    decays = (0.9, 0.99, 0.999, 0.9999, 0.99996)
    table = {
        40: (0.778, 0.181, 0.020, 0.002, 0.001),
        98: (0.908, 0.367, 0.048, 0.005, 0.002),
        390: (0.977, 0.751, 0.172, 0.019, 0.008),
        500: (0.982, 0.803, 0.214, 0.025, 0.010),
        1252: (0.993, 0.921, 0.430, 0.060, 0.025),
        5005: (0.998, 0.980, 0.802, 0.213, 0.094),
    }
    for steps, row in table.items():
        assert [round(switch_rate(decay, steps), 3) for decay in decays] == pytest.approx(row, abs=1e-9)
    assert [min(k for k in range(1, 6000) if switch_rate(m, k) >= 0.8) for m in (0.9, 0.99, 0.999)] == [
        45,
        492,
        4961,
    ]


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.integers(1, 300))
def test_switch_rate_is_the_share_of_the_way(decay: float, steps: int) -> None:
    rate = switch_rate(decay, steps)
    assert 0 <= rate <= 1
    assert rate == pytest.approx(averages.switch_rate(decay, steps), abs=1e-12)


def test_switch_rate_at_its_limits() -> None:
    assert switch_rate(0.0, 7) == 1.0
    assert switch_rate(1.0, 7) == 0.0
    assert switch_rate(5e-324, 7) == 1.0
    assert switch_rate(0.3, 1) == pytest.approx(0.7, rel=1e-14)
    assert switch_rate(0.99, 10**9) == pytest.approx(1 - 99e-9, rel=1e-14)
    # The mean of 1 - m^j over the steps is the same number without the cancellation.
    for steps in (1, 2, 40, 999):
        for gap in (1e-1, 1e-2, 1e-4, 1e-5, 1e-9, 1e-15):
            m = 1 - gap
            right = math.fsum(-math.expm1(j * math.log(m)) for j in range(1, steps + 1)) / steps
            assert switch_rate(m, steps) == pytest.approx(right, rel=1e-12, abs=0)


# Arguments


def test_wrong_arguments() -> None:
    model = scalar()
    with pytest.raises(ValueError, match="decay must be given when neither steps_per_epoch nor every"):
        SwitchEMA(model)
    for decay in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="decay must be a finite number >= 0 and <= 1"):
            SwitchEMA(model, decay)
    with pytest.raises(TypeError, match="decay must be a number"):
        SwitchEMA(model, True)
    for name in ("every", "steps_per_epoch"):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
            SwitchEMA(model, 0.5, **{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            SwitchEMA(model, 0.5, **{name: 2.5})
    with pytest.raises(ValueError, match="optimizer_state must be one of 'keep', 'reset', got 'drop'"):
        SwitchEMA(model, 0.5, optimizer_state="drop")
    with pytest.raises(ValueError, match="must come with optimizer="):
        SwitchEMA(model, 0.5, optimizer_state="reset")
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, got list"):
        SwitchEMA(model, 0.5, optimizer=[], optimizer_state="reset")
    with pytest.raises(ValueError, match="model must have parameters"):
        SwitchEMA(nn.GELU(), 0.5)
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        switch_rate(0.5, 0)
    with pytest.raises(ValueError, match="decay must be"):
        switch_rate(2.0, 5)


def test_decay_is_read_only() -> None:
    average = SwitchEMA(scalar(), 0.5)
    with pytest.raises(AttributeError):
        average.decay = 0.1


def test_is_registered() -> None:
    method = methods()["sema"]
    assert (method.place, method.gradients, method.copies) == ("average", 0.0, 1.0)
    assert dict(method.options) == {"decay": None, "every": None, "optimizer_state": "keep"}
