"""SAM's relatives in two gloo processes, DDP and FSDP2, against the whole batch in one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatmin.step._fsam import FriendlySAM
from flatmin.step._gsam import GSAM
from flatmin.step._looksam import LookSAM
from flatmin.step._samon import SAMON
from flatmin.step._ssam import SparseSAM
from flatmin.step._vasso import VaSSO
from flatmin.step._wsam import WSAM
from tests.step.test_distributed import LR, MOMENTUM, halves, in_two_processes

STEPS = 5
KINDS: dict[str, Any] = {
    "gsam": partial(GSAM, rho_min=0.1, lr_max=0.2),
    "looksam": partial(LookSAM, k=2),
    "fsam": FriendlySAM,
    "vasso": partial(VaSSO, theta=0.4),
    "wsam": partial(WSAM, gamma=0.6),
    "wsam coupled": partial(WSAM, gamma=0.6, decoupled=False),
    "samon": SAMON,
    "ssam": partial(SparseSAM, every=2),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).double()


def train(kind: str, net: nn.Module, way: str, rank: int | None = None) -> list[Tensor]:
    """The weights at the end; both halves of the batch without a rank."""
    optimizer = KINDS[kind](torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM), 0.3, model=net)
    for step in range(STEPS):
        parts = halves(step)
        x, y = (torch.cat(both) for both in zip(*parts, strict=True)) if rank is None else parts[rank]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(closure)
        else:
            optimizer.begin_window()
            closure()
            optimizer.transform(closure, scale=1.0)
            optimizer.base.step()
    return [(p.full_tensor() if way == "fsdp" else p).detach() for p in net.parameters()]


@cache
def expected(kind: str) -> list[Tensor]:
    return train(kind, model(), "closure")


def _ddp(rank: int, view: bool) -> list[list[Tensor]]:
    way = "closure" if view else "transform"
    return [train(kind, DistributedDataParallel(model(), gradient_as_bucket_view=view), way, rank) for kind in KINDS]


def _fsdp(rank: int) -> list[list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    found = []
    for kind in KINDS:
        net = model()
        for layer in (net[0], net[1], net[3], net):
            fully_shard(layer)
        if kind == "ssam":
            with pytest.raises(ValueError, match="sharded"):
                train(kind, net, "fsdp", rank)
            found.append([])
        else:
            found.append(train(kind, net, "fsdp", rank))
    return found


def _all(rank: int) -> list[list[list[Tensor]]]:
    return [_ddp(rank, view=False), _ddp(rank, view=True), _fsdp(rank)]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """In one test, since starting the processes takes most of the time."""
    for rank, ways in enumerate(in_two_processes(_all, tmp_path)):
        for way, found in zip(("ddp", "ddp with bucket views", "fsdp2"), ways, strict=True):
            for kind, weights in zip(KINDS, found, strict=True):
                for a, b in zip(weights, expected(kind), strict=bool(weights)):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=f"{kind}, {way}, process {rank}")
