"""EMA against its plain reference, at its limits, and under the faults that other averages have had.

The tags N1 to N45 number known faults of weight averages elsewhere.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatmin._registry import methods
from flatmin.average import EMA
from tests.reference import averages
from tests.reference.averages import set_to


def scalar(value: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    set_to(model, value)
    return model


def value(average: EMA, name: str = "weight") -> float:
    return float(average.state_dict()["averages"][name])


def roundtrip(state: dict[str, object]) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2)).to(dtype)


def train(model: nn.Module, average: EMA, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        average.update()


def fail(seen: float) -> None:
    raise ArithmeticError(seen)


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.reshape(-1), b.reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# The formula


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
    st.floats(-1e3, 1e3),
    st.floats(0, 1),
    st.booleans(),
)
def test_equals_the_reference(weights: list[float], start: float, decay: float, warmup: bool) -> None:
    model = scalar(start)
    average = EMA(model, decay, warmup=warmup)
    for w in weights:
        set_to(model, w)
        average.update()
    series = [torch.tensor(w, dtype=torch.float64) for w in weights]
    right = averages.ema(torch.tensor(start, dtype=torch.float64), series, decay, warmup=warmup)
    assert value(average) == pytest.approx(float(right), rel=1e-12, abs=1e-9)
    assert average.updates == len(weights)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_equals_the_reference_on_a_trained_network(buffers: str) -> None:
    model = network(torch.float64)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = EMA(model, 0.5, buffers=buffers)
    seen: list[dict[str, Tensor]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        average.update()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, mean in average.state_dict()["averages"].items():
        right = averages.ema(start[name], [w[name] for w in seen], 0.5, warmup=True)
        torch.testing.assert_close(mean, right, rtol=1e-12, atol=1e-12)


def test_n18_starts_as_a_copy_of_the_weights() -> None:
    model = scalar(0.0)
    average = EMA(model, 0.9, warmup=False)
    found = []
    for w in (1.0, 2.0):
        set_to(model, w)
        average.update()
        found.append(value(average))
    assert found == pytest.approx([0.1, 0.29], abs=1e-15)


def test_n8_warmup_keeps_its_maximum() -> None:
    model = scalar(1.0)
    average = EMA(model, 0.9999)
    set_to(model, 0.0)
    decays, before = [], 1.0
    for _ in range(3):
        average.update()
        decays.append(value(average) / before)
        before = value(average)
    assert decays == pytest.approx([2 / 11, 3 / 12, 4 / 13], rel=1e-13)
    assert average.decay == 0.9999


def test_n9_sign_of_the_update() -> None:
    model = scalar(1.0)
    average = EMA(model, 0.99, warmup=False)
    set_to(model, 0.0)
    for _ in range(250):
        average.update()
    assert value(average) == pytest.approx(0.99**250, rel=1e-12)


def test_n12_one_update_per_optimizer_step() -> None:
    model = scalar(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = EMA(model, 0.9, warmup=False)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            (-model(torch.ones(1, 1, dtype=torch.float64)).sum() / 4).backward()
        optimizer.step()
        average.update()
    assert model.weight.item() == 3.0
    assert value(average) == pytest.approx(0.561, abs=1e-15)


@pytest.mark.parametrize(("decay", "right"), [(0.0, 2.0), (1.0, 1.0)])
def test_limits_of_the_decay(decay: float, right: float) -> None:
    model = scalar(1.0)
    average = EMA(model, decay, warmup=False)
    set_to(model, 2.0)
    average.update()
    assert value(average) == right


# Precision


def test_n1_average_of_bf16_weights_moves() -> None:
    model = scalar(1.0, torch.bfloat16)
    average = EMA(model, 0.999, warmup=False)
    set_to(model, 1.5)
    for _ in range(2000):
        average.update()
    assert value(average) == pytest.approx(1.4324, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_n3_low_precision_is_cast_before_the_arithmetic(dtype: torch.dtype) -> None:
    model = scalar(1.0, dtype)
    average = EMA(model, 0.9, warmup=False)
    set_to(model, 2.0)
    average.update()
    mean = average.state_dict()["averages"]["weight"]
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1.1, abs=2e-7)


def test_n4_precision_survives_save_and_load() -> None:
    model = scalar(1.0, torch.bfloat16)
    average = EMA(model, 0.999, warmup=False)
    set_to(model, 2.0)
    average.update()
    state = roundtrip(average.state_dict())
    state["averages"]["weight"].fill_(1.0009765625)
    fresh = EMA(model, 0.999, warmup=False)
    fresh.load_state_dict(state)
    mean = fresh.state_dict()["averages"]["weight"]
    assert mean.dtype == torch.float32
    assert mean.item() == 1.0009765625


def test_casts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatmin.average._shadow._CHUNK", 5)
    model = network(torch.bfloat16)
    start = {name: p.detach().float() for name, p in model.named_parameters()}
    average = EMA(model, 0.5, warmup=False)
    set_to(model, 1.0)
    average.update()
    for name, mean in average.state_dict()["averages"].items():
        torch.testing.assert_close(mean, (start[name] + 1) / 2)


@pytest.mark.parametrize("grad", [True, False])
def test_complex_weights(grad: bool) -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.tensor([0 + 0j]), requires_grad=grad))
    average = EMA(model, 0.75, warmup=False)
    with torch.no_grad():
        model.w.fill_(4 + 8j)
    average.update()
    with average.applied():
        assert model.w.tolist() == [1 + 2j]


def test_frozen_weights_keep_their_bits() -> None:
    bits = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan, 1e-45, 0.1])
    model = nn.Linear(7, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(bits)
    model.weight.requires_grad_(False)
    before = model.weight.detach().clone()
    average = EMA(model, 0.9)
    for _ in range(5):
        average.update()
    average.copy_to()
    assert same_bits(model.weight.detach(), before)


def test_integer_parameters_are_copied() -> None:
    model = nn.Linear(1, 1)
    model.register_parameter("table", nn.Parameter(torch.tensor([1, 2]), requires_grad=False))
    average = EMA(model)
    model.table.add_(5)
    average.update()
    assert average.state_dict()["averages"]["table"].tolist() == [6, 7]


# Evaluation with the average


@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_applied_puts_the_live_state_back_bit_for_bit(buffers: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    average = EMA(model, 0.9, buffers=buffers)
    set_to(model, 0.3)
    model[1].running_mean.fill_(2.0)
    average.update()
    objects = list(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with average.applied():
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        for name, mean in average.state_dict()["averages"].items():
            assert torch.equal(model.get_parameter(name), mean.to(dtype))
        assert not torch.equal(model[0].weight, before["0.weight"])
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, before[name]), name


def test_n39_live_weights_return_after_an_error() -> None:
    model = scalar(1.0)
    average = EMA(model, 0.5, warmup=False)
    set_to(model, 2.0)
    average.update()
    with pytest.raises(ArithmeticError, match=r"1\.5"), average.applied():
        fail(model.weight.item())
    assert model.weight.item() == 2.0
    average.update()


def test_n39_nested_contexts() -> None:
    model = scalar(1.0)
    average = EMA(model, 0.5, warmup=False)
    set_to(model, 5.0)
    average.update()
    with average.applied():
        with average.applied():
            assert model.weight.item() == 3.0
        assert model.weight.item() == 3.0
    assert model.weight.item() == 5.0


def test_refuses_before_the_first_update() -> None:
    average = EMA(scalar())
    with pytest.raises(RuntimeError, match="before the first update"), average.applied():
        pass
    with pytest.raises(RuntimeError, match="before the first update"):
        average.copy_to()


def test_refuses_to_move_inside_applied() -> None:
    model = scalar(1.0)
    average = EMA(model)
    average.update()
    state = average.state_dict()
    with average.applied():
        for call in (average.update, average.copy_to, lambda: average.load_state_dict(state)):
            with pytest.raises(RuntimeError, match="inside applied"):
                call()
        with pytest.raises(RuntimeError, match="inside applied"):
            copy.deepcopy(average)
    assert average.updates == 1


def test_copy_to_the_live_model_and_to_another() -> None:
    model, other = network(), network()
    average = EMA(model, 0.5, warmup=False)
    set_to(model, 1.0)
    model[1].running_mean.fill_(3.0)
    average.update()
    average.copy_to(other)
    assert torch.equal(model[0].weight, torch.ones(4, 3))
    assert torch.equal(other[1].running_mean, torch.full((4,), 3.0))
    average.copy_to()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_copy_to_refuses_another_shape() -> None:
    model = network()
    average = EMA(model)
    average.update()
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 3))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"3.weight has shape \(3, 4\), not \(2, 4\)"):
        average.copy_to(other)
    with pytest.raises(ValueError, match="names differ"):
        average.copy_to(nn.Linear(3, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


# Buffers


def test_n23_integer_buffers_are_followed_not_averaged() -> None:
    model = network()
    average = EMA(model, 0.9, buffers="average")
    train(model, average, torch.optim.SGD(model.parameters(), lr=0.01), range(5))
    assert average.state_dict()["buffers"]["1.num_batches_tracked"].item() == 5
    with average.applied():
        assert model[1].num_batches_tracked.item() == 5


def test_n24_copied_buffers_are_the_live_ones() -> None:
    model = network()
    average = EMA(model)
    average.update()
    model[1].running_mean.fill_(3.0)
    with average.applied():
        assert model[1].running_mean.tolist() == [3.0] * 4
    assert average.state_dict()["buffers"] is None


def test_averaged_buffers_use_the_decay() -> None:
    model = network(torch.bfloat16)
    average = EMA(model, 0.9, warmup=False, buffers="average")
    model[1].running_mean.fill_(1.0)
    average.update()
    mean = average.state_dict()["buffers"]["1.running_mean"]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.full((4,), 0.1))
    other = network(torch.bfloat16)
    average.copy_to(other)
    assert torch.equal(other[1].running_mean, mean.bfloat16())


def test_infinite_masks_stay_infinite() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    average = EMA(model, buffers="average")
    average.update()
    assert average.state_dict()["buffers"]["mask"].tolist() == [0.0, -math.inf]


def test_n29_averaged_buffers_are_no_aliases() -> None:
    model = network()
    average = EMA(model, buffers="average")
    average.update()
    model[1].running_mean.fill_(9.0)
    model[1].num_batches_tracked.fill_(9)
    buffers = average.state_dict()["buffers"]
    assert buffers["1.running_mean"].tolist() == [0.0] * 4
    assert buffers["1.num_batches_tracked"].item() == 0


def test_n30_buffers_outside_the_state_dict_are_averaged() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("scale", torch.zeros(1), persistent=False)
    average = EMA(model, 0.5, warmup=False, buffers="average")
    model.scale.fill_(1.0)
    average.update()
    with average.applied():
        assert model.scale.item() == 0.5
    assert model.scale.item() == 1.0


def test_a_buffer_that_is_assigned_anew_is_followed() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("scale", torch.zeros(1))
    average = EMA(model, 0.5, warmup=False, buffers="average")
    average.update()
    model.scale = torch.ones(1)
    average.update()
    assert average.state_dict()["buffers"]["scale"].item() == 0.5


# Checkpoints


def test_n10_counter_is_saved() -> None:
    model = scalar(0.0)
    average = EMA(model, 0.9999)
    for _ in range(1000):
        average.update()
    fresh = EMA(model, 0.9999)
    fresh.load_state_dict(roundtrip(average.state_dict()))
    assert type(fresh.updates) is int
    assert fresh.updates == 1000
    set_to(model, 1.0)
    fresh.update()
    assert 1 - value(fresh) == pytest.approx(1002 / 1011, rel=1e-13)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_n38_resumes_bit_for_bit_from_a_state_taken_inside_applied(buffers: str) -> None:
    model = network()
    average = EMA(model, 0.9, buffers=buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, average, optimizer, range(4))
    live, momentum = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with average.applied():
        state = roundtrip(average.state_dict())
    train(model, average, optimizer, range(4, 8))

    again = network()
    again.load_state_dict(live)
    fresh = EMA(again, 0.9, buffers=buffers)
    fresh.load_state_dict(state)
    resumed = torch.optim.SGD(again.parameters(), lr=0.05, momentum=0.9)
    resumed.load_state_dict(momentum)
    train(again, fresh, resumed, range(4, 8))
    left, right = average.state_dict(), fresh.state_dict()
    for kind in ("averages", "buffers"):
        for name, mean in (left[kind] or {}).items():
            assert same_bits(mean, right[kind][name]), name


def test_n40_state_shares_no_storage() -> None:
    model = scalar(1.0)
    average = EMA(model, 0.5, warmup=False)
    average.update()
    state = average.state_dict()
    set_to(model, 9.0)
    average.update()
    with average.applied():
        pass
    assert state["averages"]["weight"].item() == 1.0
    average.load_state_dict(state)
    average.update()
    assert state["averages"]["weight"].item() == 1.0


def test_n41_loading_leaves_the_live_model_alone() -> None:
    model = scalar(1.0)
    average = EMA(model)
    average.update()
    state = average.state_dict()
    set_to(model, 7.0)
    average.load_state_dict(state)
    assert model.weight.item() == 7.0
    assert value(average) == 1.0


def test_settings_of_the_file_are_taken_over_with_a_warning() -> None:
    model = scalar()
    state = EMA(model, 0.9, warmup=False).state_dict()
    average = EMA(model, 0.99, warmup=False)
    with pytest.warns(UserWarning, match=r"decay=0.9 of the state replaces decay=0.99"):
        average.load_state_dict(state)
    assert average.decay == 0.9


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = network()
    average = EMA(model, 0.9)
    average.update()
    good = average.state_dict()
    changes = [
        ("missing 0.bias", {"averages": {k: v for k, v in good["averages"].items() if k != "0.bias"}}),
        ("unknown extra", {"averages": {**good["averages"], "extra": torch.ones(1)}}),
        (r"0.bias has shape \(3,\), not \(4,\)", {"averages": {**good["averages"], "0.bias": torch.ones(3)}}),
        (
            "0.bias is torch.int64",
            {"averages": {**good["averages"], "0.bias": torch.ones(4, dtype=torch.long)}},
        ),
        ("0.bias is a float", {"averages": {**good["averages"], "0.bias": 1.0}}),
        ("state must be of a EMA", {"method": "SwitchEMA"}),
        ("state must have the keys", {"surplus": 1}),
        ("buffers='average'", {"buffers": {}}),
        ("updates must be", {"updates": -1}),
        ("decay must be", {"decay": 2.0}),
    ]
    set_to(model, 5.0)
    for text, change in changes:
        with pytest.raises(ValueError, match=text):
            average.load_state_dict({**good, **change})
    with pytest.raises(TypeError, match="updates must be an integer"):
        average.load_state_dict({**good, "updates": torch.tensor(3)})
    with pytest.raises(TypeError, match="must be a mapping"):
        average.load_state_dict([])
    now = average.state_dict()
    assert now["updates"] == 1
    assert all(same_bits(now["averages"][name], mean) for name, mean in good["averages"].items())


@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_of_model_and_average_go_their_own_way(through: str, buffers: str) -> None:
    model = network()
    average = EMA(model, 0.5, warmup=False, buffers=buffers)
    average.update()
    pair = (model, average)
    twin, mean = copy.deepcopy(pair) if through == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = average.state_dict()
    set_to(twin, 1.0)
    mean.update()
    with mean.applied():
        torch.testing.assert_close(twin[0].weight.detach(), (before["averages"]["0.weight"] + 1) / 2)
    assert torch.equal(average.state_dict()["averages"]["0.weight"], before["averages"]["0.weight"])
    assert (average.updates, mean.updates) == (1, 2)


# The structure of the model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 1)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.embed.weight


def test_n43_tied_weights_count_once() -> None:
    model = Tied()
    set_to(model, 0.0)
    average = EMA(model, 0.9, warmup=False)
    set_to(model, 1.0)
    average.update()
    assert list(average.state_dict()["averages"]) == ["embed.weight"]
    assert value(average, "embed.weight") == pytest.approx(0.1, abs=1e-7)
    with average.applied():
        assert model.head.weight is model.embed.weight
        assert model.head.weight.item() == pytest.approx(0.1, abs=1e-7)
    assert model.head.weight.item() == 1.0


def test_n44_compiled_models_keep_plain_names() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    average = EMA(compiled, 0.5, warmup=False, buffers="average")
    before = average.state_dict()["averages"]["0.weight"]
    assert list(average.state_dict()["averages"]) == [name for name, _ in model.named_parameters()]
    set_to(model, 1.0)
    average.update()
    torch.testing.assert_close(average.state_dict()["averages"]["0.weight"], (before + 1) / 2)
    model[3] = torch.compile(model[3], backend="eager")
    assert list(EMA(model).state_dict()["averages"])[-1] == "3.bias"


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_n45_names_are_the_same_before_and_after_wrapping() -> None:
    model = network()
    plain = EMA(model, buffers="average")
    wrapped = EMA(nn.parallel.DistributedDataParallel(model), buffers="average")
    wrapped.update()
    plain.load_state_dict(wrapped.state_dict())
    assert list(plain.state_dict()["averages"]) == [name for name, _ in model.named_parameters()]
    both = EMA(torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"), buffers="average")
    both.load_state_dict(wrapped.state_dict())
    wrapped.copy_to(network())


def test_a_submodule_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    names = ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert list(EMA(model).state_dict()["averages"]) == names


def test_parameters_replaced_by_others_of_the_same_shape_are_followed() -> None:
    model = scalar(0.0)
    average = EMA(model, 0.5, warmup=False)
    average.update()
    model.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    average.update()
    assert value(average) == 0.5
    with average.applied():
        assert model.weight.item() == 0.5
    assert model.weight.item() == 1.0


def test_parameters_replaced_by_other_shapes_or_names_are_refused() -> None:
    model = network()
    average = EMA(model)
    average.update()
    model[3] = nn.Linear(4, 5)
    with pytest.raises(RuntimeError, match=r"make a new average: 3.weight has shape \(5, 4\), not \(2, 4\)"):
        average.update()
    with pytest.raises(RuntimeError, match="make a new average"), average.applied():
        pass
    model[3] = nn.Linear(4, 2, bias=False)
    with pytest.raises(RuntimeError, match=r"missing 3.bias"):
        average.update()
    model[3] = nn.Linear(4, 2)
    model.append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"unknown 4.weight, 4.bias"):
        average.update()
    assert average.updates == 1


def test_follows_a_model_that_changes_its_dtype() -> None:
    model = scalar(0.0, torch.float32)
    average = EMA(model, 0.9, warmup=False)
    average.update()
    model.bfloat16()
    set_to(model, 1.0)
    average.update()
    assert average.state_dict()["averages"]["weight"].dtype == torch.float32
    model.double()
    average.update()
    mean = average.state_dict()["averages"]["weight"]
    assert mean.dtype == torch.float64
    assert mean.item() == pytest.approx(0.19, abs=1e-7)
    with average.applied():
        assert model.weight.dtype == torch.float64


# Arguments


def test_n20_decay_outside_its_range() -> None:
    for decay in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"decay must be a finite number >= 0 and <= 1, got"):
            EMA(scalar(), decay)
    for wrong in (True, "0.9", None):
        with pytest.raises(TypeError, match="decay must be a number"):
            EMA(scalar(), wrong)


def test_other_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="warmup must be true or false"):
        EMA(scalar(), warmup=1)
    with pytest.raises(ValueError, match="buffers must be one of 'copy', 'average', got 'both'"):
        EMA(scalar(), buffers="both")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        EMA([torch.ones(1)])
    with pytest.raises(ValueError, match="model must have parameters to average, got GELU without any"):
        EMA(nn.GELU())
    with pytest.raises(ValueError, match="run one forward pass first"):
        EMA(nn.LazyLinear(1))


def test_decay_is_read_only() -> None:
    average = EMA(scalar())
    with pytest.raises(AttributeError):
        average.decay = 0.5


def test_shows_itself() -> None:
    assert repr(EMA(scalar(), 0.9)) == "EMA(decay=0.9, warmup=True, buffers='copy', updates=0)"


def test_is_registered() -> None:
    method = methods()["ema"]
    assert (method.place, method.gradients, method.copies) == ("average", 0.0, 1.0)
    assert dict(method.options) == {"decay": 0.999, "warmup": True, "buffers": "copy"}
