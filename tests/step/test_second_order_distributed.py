"""Methods that use the Hessian in two gloo processes, each against its own reference with dense Hessians."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin.step._crsam import CRSAM
from flatmin.step._direction import Direction
from flatmin.step._eigensam import EigenSAM
from flatmin.step._full_sam import FullSAM
from flatmin.step._memory import Noise
from flatmin.step._penalty_sam import PenaltySAM
from tests.reference import second_order as reference
from tests.step import second_order_problems as shared
from tests.step.test_distributed import LR, MOMENTUM, STEPS, halves, in_two_processes, model

EIGEN = {"alpha": 0.5, "period": 2, "iterations": 3}

#: The step, how the loop runs, and what DistributedDataParallel is told.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("psam", {"sync": "per_worker"}, "closure", {"gradient_as_bucket_view": True}),
    ("psam", {"sync": "per_worker", "power": 2}, "accumulate", {}),
    ("psam", {"sync": "per_worker"}, "transform", {}),
    ("psam", {"sync": "global"}, "accumulate", {"gradient_as_bucket_view": True}),
    ("psam", {"sync": "global", "power": 2}, "transform", {"find_unused_parameters": True}),
    ("psam", {"product": "difference"}, "closure", {"gradient_as_bucket_view": True}),
    ("psam", {"mask": "off_diagonal", "sync": "per_worker"}, "closure", {"gradient_as_bucket_view": True}),
    ("psam", {"mask": "off_diagonal"}, "transform", {"find_unused_parameters": True}),
    ("sam_full", {}, "closure", {"gradient_as_bucket_view": True}),
    ("sam_full", {}, "accumulate", {"find_unused_parameters": True}),
    ("sam_full", {"product": "difference", "r": 1e-5}, "transform", {"gradient_as_bucket_view": True}),
    ("crsam", {"gamma": 0.3, "beta": 0.1}, "accumulate", {"gradient_as_bucket_view": True}),
    ("eigensam", {"product": "exact", **EIGEN}, "closure", {"find_unused_parameters": True}),
    ("eigensam", {"r": 1e-5, **EIGEN}, "transform", {"gradient_as_bucket_view": True}),
]
MAKE: dict[str, Any] = {"psam": PenaltySAM, "sam_full": FullSAM, "crsam": CRSAM, "eigensam": EigenSAM}


def flat_weights(net: nn.Module) -> np.ndarray:
    return shared.flat([p.detach() for p in net.parameters()]).numpy()


def set_weights(net: nn.Module, flat: np.ndarray) -> None:
    parts = torch.from_numpy(flat).split([p.numel() for p in net.parameters()])
    with torch.no_grad():
        for p, part in zip(net.parameters(), parts, strict=True):
            p.copy_(part.view_as(p))


def first_vector(net: nn.Module) -> np.ndarray:
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    noise = Noise(0).normal(Direction.take([{"params": list(net.parameters())}]))
    return shared.flat([value for bucket in noise for value in bucket.values]).numpy()


def trajectory(kind: str, options: dict[str, Any]) -> np.ndarray:
    """The weights at the end, all workers in one process."""
    net = model()
    options = {key: value for key, value in options.items() if key != "product"} | {"rho": 0.3}
    sync, mask = options.pop("sync", "global"), options.pop("mask", None)
    now = 0

    def worker(part: int, order: int, w: np.ndarray) -> np.ndarray:
        x, y = (each.numpy() for each in halves(now)[part])
        if order == 0:
            return reference.mlp([5, 7, 3], x, y)(w)
        if mask:
            return reference.jacobian(reference.mlp([5, 7, 3], x, y, frozen=w), w)
        set_weights(net, w)
        return shared.dense(net, *halves(now)[part])[1].numpy()

    def mean(order: int, w: np.ndarray) -> np.ndarray:
        return (worker(0, order, w) + worker(1, order, w)) / 2

    pairs = [(partial(mean, 0), partial(mean, 1))]
    if sync == "per_worker":
        pairs = [(partial(worker, part, 0), partial(worker, part, 1)) for part in (0, 1)]
    formulas: list[Any]
    if kind == "psam":
        power = options.get("power", 1)
        formulas = [partial(reference.gradient_penalty, g, h, rho=0.3, power=power) for g, h in pairs]
        if sync == "difference":
            formulas = [partial(reference.difference_penalty, pairs[0][0], rho=0.3, r=0.1)]
    elif kind == "sam_full":
        formulas = [partial(reference.full_sam, *pairs[0], rho=0.3)]
    elif kind == "crsam":
        formulas = [partial(reference.crsam, pairs[0][0], **options)]
    else:
        options.pop("r", None)
        formulas = [reference.EigenSAM(*pairs[0], first_vector(model()), **options)]
    w, buffer = flat_weights(net), np.zeros(1)
    for step in range(STEPS):
        now = step
        buffer = MOMENTUM * buffer + sum(formula(w) for formula in formulas) / len(formulas)
        w = w - LR * buffer
    return w


def train(rank: int, net: Any, optimizer: Any, way: str) -> Tensor:
    for step in range(STEPS):
        x, y = halves(step)[rank]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            if way == "accumulate":
                with net.no_sync():
                    (nn.functional.cross_entropy(net(x[:3]), y[:3], reduction="sum") / 8).backward()
                loss = nn.functional.cross_entropy(net(x[3:]), y[3:], reduction="sum") / 8
            else:
                loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        if way == "transform":
            with optimizer.clean_pass():
                closure()
            optimizer.transform(closure, scale=1.0)
            optimizer.base.step()
        else:
            optimizer.step(closure)
    return shared.flat([p.full_tensor() if way == "fsdp" else p.detach() for p in net.parameters()]).detach()


def _ddp(rank: int) -> list[Tensor]:
    results = []
    for kind, options, way, ddp in CASES:
        plain = model()
        if ddp.get("find_unused_parameters"):
            plain.register_parameter("idle", nn.Parameter(torch.ones(1, dtype=torch.float64)))
        net = DistributedDataParallel(plain, **ddp)
        base = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        trained = train(rank, net, MAKE[kind](base, rho=0.3, model=net, **options), way)
        results.append(trained[-sum(p.numel() for p in model().parameters()) :])
    results.append(_foreign(rank))
    return results


def _foreign(rank: int) -> Tensor:
    """Two optimizers on one model: the other's gradients are reduced too, and are those of the loss alone."""
    net = DistributedDataParallel(model())
    other = torch.optim.SGD(net.module[2].parameters(), lr=LR)
    optimizer = PenaltySAM(torch.optim.SGD(net.module[0].parameters(), lr=0.0), 0.3, model=net)
    for step in range(2):
        x, y = halves(step)[rank]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            other.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        other.step()
    return shared.flat([p.detach() for p in net.module[2].parameters()])


def test_ddp_equals_its_references(tmp_path: Path) -> None:
    """One backward pass for loss and penalty: the mean of the penalties' gradients reaches every process."""
    processes = in_two_processes(_ddp, tmp_path)
    for place, (kind, options, _, _) in enumerate(CASES):
        difference = options.get("product") == "difference" or "r" in options
        known = {**options, "sync": "difference"} if kind == "psam" and difference else options
        expected = trajectory(kind, known)
        for weights in processes:
            atol = 1e-5 if "r" in options else 1e-8 if "mask" in options else 1e-12
            np.testing.assert_allclose(weights[place].numpy(), expected, rtol=0, atol=atol, err_msg=str(CASES[place]))
    net = model()
    for step in range(2):
        net.zero_grad()
        sum(nn.functional.cross_entropy(net(x), y) / 2 for x, y in halves(step)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in net[2].parameters():
                p -= LR * p.grad
    for weights in processes:
        expected = shared.flat([p.detach() for p in net[2].parameters()])
        torch.testing.assert_close(weights[-1], expected, rtol=0, atol=1e-12)


def test_per_worker_and_global_penalties_differ() -> None:
    pair = [trajectory("psam", {"sync": sync}) for sync in ("per_worker", "global")]
    assert np.abs(pair[0] - pair[1]).max() > 1e-4


FSDP: list[tuple[str, dict[str, Any]]] = [
    ("psam", {"product": "difference"}),
    ("sam_full", {"product": "difference", "r": 1e-5}),
    ("crsam", {"gamma": 0.3, "beta": 0.1}),
]


def _sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def _fsdp(rank: int) -> list[Tensor]:
    results = []
    for kind, options in FSDP:
        net = _sharded()
        base = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        results.append(train(rank, net, MAKE[kind](base, rho=0.3, model=net, **options), "fsdp"))
    for kind in ("psam", "sam_full", "eigensam"):
        net = _sharded()
        with pytest.raises(ValueError, match="FSDP2"):
            MAKE[kind](torch.optim.SGD(net.parameters(), lr=LR), model=net, product="exact")
    net = _sharded()
    optimizer = EigenSAM(torch.optim.SGD(net.parameters(), lr=0.0), model=net, iterations=40, r=1e-4, period=100)
    train(rank, net, optimizer, "fsdp")
    assert optimizer.eigenvalue is not None
    results.append(optimizer.eigenvalue)
    return results


def test_fsdp2_equals_the_global_references(tmp_path: Path) -> None:
    processes = in_two_processes(_fsdp, tmp_path)
    for place, (kind, options) in enumerate(FSDP):
        expected = trajectory(kind, {**options, "sync": "difference"} if kind == "psam" else options)
        for weights in processes:
            atol = 1e-5 if "r" in options else 1e-12
            np.testing.assert_allclose(weights[place].numpy(), expected, rtol=0, atol=atol, err_msg=str(FSDP[place]))
    h = sum(shared.dense(model(), *part)[1] for part in halves(0)) / 2
    for weights in processes:
        assert weights[-1].item() == pytest.approx(torch.linalg.eigvalsh(h)[-1].item(), rel=1e-2)
