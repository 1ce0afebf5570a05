"""One run: paired by seed, counted, isolated, honest about divergence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from flatmin import parse_method
from flatmin.average import switch_rate
from flatmin.study import Data, Record, Task
from flatmin.study._memory import peak_bytes
from flatmin.study._train import Budget, evaluate, run, stream


def data(seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(95, 4, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Data((x[:55], y[:55]), (x[55:75], y[55:75]), (x[75:], y[75:]))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))


TASK = Task(
    "xor",
    data,
    model,
    "3",
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    epochs=3,
    batch_size=10,
)


def train(method: str, seed: int = 0, budget: str = "epochs", **changes: Any) -> Record:
    task = dataclasses.replace(TASK, **changes)
    return run(task, parse_method(method), seed, Budget(budget, task.epochs))


@pytest.mark.parametrize("same", ["sam(rho=0)", "ad(sigma=0)", "base", "base(lr_scale=1)", "asam(rho=0)"])
def test_limits_of_the_methods_give_the_base_runs_numbers(same: str) -> None:
    expected, got = train("sgd"), train(same)
    assert got.metrics == expected.metrics
    assert [h["train_loss"] for h in got.history] == [h["train_loss"] for h in expected.history]


def test_the_same_seed_gives_every_method_the_same_start_order_and_augmentation() -> None:
    seen: dict[str, list[Any]] = {}
    for method in ("sgd", "sam", "ad+ema", "sema"):
        batches: list[torch.Tensor] = []
        starts: list[torch.Tensor] = []

        def augment(x: torch.Tensor, generator: torch.Generator, batches: Any = batches) -> torch.Tensor:
            batches.append(x + torch.randn(x.shape, generator=generator))
            return batches[-1]

        def build(starts: Any = starts) -> nn.Module:
            made = model()
            starts.append(nn.utils.parameters_to_vector(made.parameters()).detach().clone())
            return made

        train(method, augment=augment, model=build)
        # The first model and its two batches were built to measure memory.
        seen[method] = [*starts[-1:], *batches[-18:]]
    for method in seen:
        assert all(torch.equal(a, b) for a, b in zip(seen[method], seen["sgd"], strict=True)), method


def test_equal_epochs_and_equal_gradients() -> None:
    assert (train("sgd").steps, train("sgd").gradients) == (18, 18)
    assert (train("sam").steps, train("sam").gradients) == (18, 36)
    short = train("sam", budget="gradients")
    assert (short.steps, short.gradients) == (9, 18)
    assert train("ema", budget="gradients").gradients == 18


def test_the_schedule_is_stretched_over_the_steps_taken() -> None:
    """Under either budget the rate's factors run from progress 0 to 1 in equal strides."""
    for budget, steps in (("epochs", 18), ("gradients", 9)):
        asked: list[float] = []

        def schedule(progress: float, asked: list[float] = asked) -> float:
            asked.append(progress)
            return 1.0

        train("sam", budget=budget, schedule=schedule)
        assert asked[-steps - 1 :] == pytest.approx([step / steps for step in range(steps + 1)])


def test_the_control_of_switch_ema_scales_the_rate_by_r() -> None:
    rates: list[float] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_post_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
        return made

    train("base(lr_scale=sema)", optimizer=optimizer, schedule=lambda progress: 1.0, batch_size=2)
    assert rates[-1] == pytest.approx(0.1 * switch_rate(1 - 5 / 28, 28))
    train("base(lr_scale=0.25)", optimizer=optimizer, schedule=lambda progress: 1.0)
    assert rates[-1] == pytest.approx(0.025)


def test_a_diverged_run_is_a_result() -> None:
    record = train("sgd", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    assert record.status == "diverged"
    assert record.metrics == {}
    assert "not finite" in record.message
    assert record.steps < 18


def test_the_callers_generators_threads_and_settings_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    first = train("sam+sema")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(4)
    again = train("sam+sema")
    assert first.metrics == again.metrics


def test_the_average_is_what_is_measured() -> None:
    """ema(decay=1, warmup=false) keeps the initial weights, so the trained model is not looked at."""
    torch.manual_seed(stream(0, "model"))
    initial = model()
    record = train("ema(decay=1,warmup=false)")
    assert record.metrics["test_nll"] == evaluate(initial, data(0).test)[1]
    assert train("ema(decay=0,warmup=false)").metrics == train("sgd").metrics


def test_evaluate_against_numbers_by_hand() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    logits = torch.log(torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]))
    accuracy, nll, ece = evaluate(Fixed(), (logits, torch.tensor([0, 1, 1, 0])))
    assert accuracy == 75.0
    assert nll == pytest.approx(-sum(map(math.log, (0.8, 0.2, 0.7, 0.6))) / 4, abs=1e-7)
    assert ece == pytest.approx(100 * (2 * abs(0.5 - 0.8) + 0.3 + 0.4) / 4, abs=1e-4)


def test_peak_memory_counts_live_storage() -> None:
    def work() -> torch.Tensor:
        keep = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(500)
        return keep

    assert peak_bytes(work) == 4 * 1500


def test_sams_memory_is_one_more_copy_of_the_weights() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 2))

    plain, sam = (train(m, model=wide, head="4", epochs=1).peak_bytes for m in ("sgd", "sam"))
    weights = 4 * sum(p.numel() for p in wide().parameters())
    assert sam <= plain + 1.05 * weights + 3 * torch.get_rng_state().numel()
    assert sam >= plain + 0.95 * weights


def test_gam_learns_from_independent_batches_and_leaves_the_pairing_alone() -> None:
    record = train("gam")
    assert (record.steps, record.gradients) == (18, 72)
    assert record.status == "ok"
    assert train("gam", budget="gradients").gradients <= 18
    assert train("gam(learn=false,gamma=0.05)").metrics == train("sam(normalize=false,rho=0.05)").metrics
    assert train("gam(gamma=0,learn=false)").metrics == train("sgd").metrics
