"""Two gloo processes: DDP in both sync modes, FSDP2, each against its own reference in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin import ASAM, SAM
from tests.step import asserts

STEPS, LR, MOMENTUM = 4, 0.1, 0.9
MAKE: dict[str, Any] = {
    "sam": partial(SAM, rho=0.3),
    "usam": partial(SAM, rho=0.3, normalize=False),
    "asam": partial(ASAM, rho=0.7, scaled="all"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def halves(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (16,), generator=generator)
    return [(x[:8], y[:8]), (x[8:], y[8:])]


def gradient(net: nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    names = [name for name, _ in net.named_parameters()]
    leaves = [w.clone().requires_grad_() for w in weights]
    loss = nn.functional.cross_entropy(torch.func.functional_call(net, dict(zip(names, leaves, strict=True)), x), y)
    return list(torch.autograd.grad(loss, leaves))


def ascent(kind: str, weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    if kind == "usam":
        return [0.3 * g for g in grads]
    scale = [torch.ones_like(w) if kind == "sam" else w.abs() + 0.01 for w in weights]
    norm = sum((s * g).square().sum() for s, g in zip(scale, grads, strict=True)).sqrt()
    return [{"sam": 0.3, "asam": 0.7}[kind] * s * s * g / norm for s, g in zip(scale, grads, strict=True)]


def reference(kind: str, sync: str) -> list[Tensor]:
    """The trajectory written out, all workers in one process."""
    net = model()
    weights = [p.detach().clone() for p in net.parameters()]
    buffers = [torch.zeros_like(w) for w in weights]
    for step in range(STEPS):
        parts = halves(step)
        clean = [gradient(net, weights, *part) for part in parts]
        mean = [(a + b) / 2 for a, b in zip(*clean, strict=True)]
        moved = [ascent(kind, weights, g) for g in (clean if sync == "per_worker" else [mean, mean])]
        at = [[w + e for w, e in zip(weights, es, strict=True)] for es in moved]
        final = [gradient(net, ws, *part) for ws, part in zip(at, parts, strict=True)]
        buffers = [MOMENTUM * m + (a + b) / 2 for m, a, b in zip(buffers, *final, strict=True)]
        weights = [w - LR * m for w, m in zip(weights, buffers, strict=True)]
    return weights


def in_two_processes(work: Callable[..., None], folder: Path, *arguments: Any) -> list[Any]:
    mp.spawn(_start, args=(work, str(folder), arguments), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _start(rank: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _ddp(rank: int, kind: str, sync: str, way: str, view: bool) -> list[Tensor]:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=view)
    optimizer = MAKE[kind](torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM), model=net, sync=sync)
    for step in range(STEPS):
        x, y = halves(step)[rank]

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            if way == "accumulate":
                with net.no_sync():
                    (nn.functional.cross_entropy(net(x[:3]), y[:3], reduction="sum") / 8).backward()
                (nn.functional.cross_entropy(net(x[3:]), y[3:], reduction="sum") / 8).backward()
                return torch.zeros(())
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        def closure(evaluate: Any = evaluate) -> Tensor:
            optimizer.zero_grad()
            return evaluate()

        if way == "closure":
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        with optimizer.clean_pass():
            evaluate()
        optimizer.transform(evaluate, scale=1.0)
        optimizer.base.step()
    return [p.detach() for p in net.module.parameters()]


@pytest.mark.parametrize(
    ("kind", "sync", "way", "view"),
    [
        ("sam", "global", "closure", False),
        ("sam", "per_worker", "closure", True),
        ("asam", "global", "accumulate", True),
        ("asam", "per_worker", "accumulate", False),
        ("usam", "per_worker", "transform", False),
    ],
)
def test_ddp_equals_its_reference(kind: str, sync: str, way: str, view: bool, tmp_path: Path) -> None:
    expected = reference(kind, sync)
    for weights in in_two_processes(_ddp, tmp_path, kind, sync, way, view):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_two_sync_modes_differ() -> None:
    pairs = zip(reference("sam", "global"), reference("sam", "per_worker"), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-4


def _fsdp(rank: int, kind: str) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    optimizer = MAKE[kind](torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM), model=net)
    for step in range(STEPS):
        x, y = halves(step)[rank]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    with pytest.raises(ValueError, match="FSDP2"):
        MAKE[kind](torch.optim.SGD(net.parameters(), lr=LR), model=net, sync="per_worker")
    return [p.full_tensor().detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["sam", "asam"])
def test_fsdp2_equals_the_global_reference(kind: str, tmp_path: Path) -> None:
    """Uneven shards too: 7 rows over two processes."""
    expected = reference(kind, "global")
    for weights in in_two_processes(_fsdp, tmp_path, kind):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def _foreign(rank: int) -> list[Tensor]:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = SAM(torch.optim.SGD(net.module[0].parameters(), lr=LR), 0.5, model=net, replay_rng=False)
    for step in range(2):
        x, y = halves(step)[rank]

        def evaluate(x: Tensor = x, y: Tensor = y) -> None:
            nn.functional.cross_entropy(net(x), y).backward()

        net.zero_grad()
        evaluate()
        clean = net.module[2].weight.grad.clone()
        optimizer.transform(evaluate)
    return [clean, net.module[2].weight.grad]


def test_foreign_gradients_stay_clean_in_bucket_views(tmp_path: Path) -> None:
    for clean, kept in in_two_processes(_foreign, tmp_path):
        assert torch.equal(clean, kept)


def test_per_worker_needs_ddp() -> None:
    net = model()
    asserts.assert_refuses(
        lambda: SAM(torch.optim.SGD(net.parameters(), lr=0.1), model=net, sync="per_worker"),
        ValueError,
        "needs model= the DistributedDataParallel module",
    )
