"""What a step costs: time against the passes it needs, memory against the base optimizer's.

Run by ``make bench``. All variants take turns in one process; every round is kept. The bound of a variant is
its gradient evaluations (forward + backward) plus the base optimizer's step, timed in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatmin import ASAM, SAM, ActivationDecay
from flatmin.study._memory import peak_bytes

RESULTS = Path(__file__).parent / "results"


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.skip(x)).relu()


def resnet() -> tuple[nn.Module, str, tuple[int, ...]]:
    """ResNet-18-like, 11 M parameters, on 32 x 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_Block(inputs, outputs, stride))
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), str(len(layers) - 1), (3, 32, 32)


def small() -> tuple[nn.Module, str, tuple[int, ...]]:
    """100 linear layers of 16 units: 200 small tensors."""
    layers: list[nn.Module] = []
    for _ in range(99):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 10)), str(len(layers)), (16,)


NETWORKS = {"resnet18-like": resnet, "100 small layers": small}


class _Trainer:
    """A model of its own with one optimizer, stepped on one fixed batch."""

    def __init__(self, network: str, variant: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model, head, shape = NETWORKS[network]()
        self.x, self.y = torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
        self.base = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.penalty = ActivationDecay(self.model.get_submodule(head)) if variant == "ad" else None
        make: dict[str, Callable[[], Any]] = {
            "sam": lambda: SAM(self.base, model=self.model),
            "usam": lambda: SAM(self.base, model=self.model, normalize=False),
            "asam": lambda: ASAM(self.base, model=self.model),
            "asam(eta=0)": lambda: ASAM(self.base, model=self.model, eta=0.0),
        }
        self.optimizer = make.get(variant, lambda: self.base)()

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        if self.penalty is not None:
            loss = loss + self.penalty()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step(self.closure)

    def gradient(self) -> None:
        self.closure()

    def base_step(self) -> None:
        self.base.step()


PASSES = {"sgd": 1, "sam": 2, "usam": 2, "asam": 2, "asam(eta=0)": 2, "ad": 1}


def timed(work: Callable[[], None], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median over rounds and a 95 % bootstrap interval of it."""
    values = np.array(ratios)
    drawn = np.random.default_rng(0).choice(values, size=(2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def measure(network: str, batch: int, rounds: int, repeats: int) -> dict[str, Any]:
    trainers = {variant: _Trainer(network, variant, batch) for variant in PASSES}
    plain = trainers["sgd"]
    work: dict[str, Callable[[], None]] = {variant: trainer.step for variant, trainer in trainers.items()}
    work |= {"one gradient": plain.gradient, "one base step": plain.base_step}
    for each in work.values():
        timed(each, 2)
    kept: list[dict[str, float]] = []
    for number in range(rounds):
        # Each round in another order, so that no variant always follows the same one.
        order = np.random.default_rng(number).permutation(list(work))
        seconds = {name: timed(work[name], repeats) for name in order}
        kept.append({name: seconds[name] for name in work})
    table = {}
    for variant, passes in PASSES.items():
        bound = [passes * r["one gradient"] + r["one base step"] for r in kept]
        ratio = interval([r[variant] / b for r, b in zip(kept, bound, strict=True)])
        table[variant] = {
            "time over its passes and the base step": ratio,
            "time over the plain step": interval([r[variant] / r["sgd"] for r in kept]),
        }
    return {"batch": batch, "ratios": table, "rounds": kept}


def memory(network: str, batch: int) -> dict[str, Any]:
    """Peak live storage of two steps, model and batch included."""
    peaks = {}
    for variant in PASSES:

        def work(variant: str = variant) -> _Trainer:
            trainer = _Trainer(network, variant, batch)
            trainer.step()
            trainer.step()
            return trainer

        peaks[variant] = peak_bytes(work)
    weights = 4 * sum(p.numel() for p in NETWORKS[network]()[0].parameters())
    extra = {variant: (peak - peaks["sgd"]) / weights for variant, peak in peaks.items()}
    return {"weights": weights, "peak": peaks, "extra over the base, in copies of the weights": extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "torch": torch.__version__, "python": platform.python_version()},
        "networks": {},
    }
    for network, repeats in (("resnet18-like", 1), ("100 small layers", 20)):
        measured = measure(network, arguments.batch, arguments.rounds, repeats)
        measured["memory"] = memory(network, arguments.batch)
        result["networks"][network] = measured
        print(f"\n{network}: batch {arguments.batch}, median of {arguments.rounds} rounds [95 % interval]")
        for variant, ratios in measured["ratios"].items():
            bound, plain = ratios.values()
            extra = measured["memory"]["extra over the base, in copies of the weights"][variant]
            print(
                f"  {variant:12} {bound[0]:.3f} x its passes and the base step [{bound[1]:.3f}, {bound[2]:.3f}]"
                f"   {plain[0]:.3f} x the plain step [{plain[1]:.3f}, {plain[2]:.3f}]   memory +{extra:.3f} weights"
            )
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
