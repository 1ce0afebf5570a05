"""Sparse sharpness-aware minimization, with a mask that drops and regrows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.step._direction import Direction, Group, is_sharded
from flatmin.step._lasting import Lasting
from flatmin.step._memory import Noise
from flatmin.step._noisy import drawing, load_noise_state, noise_state
from flatmin.step._optimizer import Step
from flatmin.step._window import Window


@register(
    "ssam",
    "step",
    summary="SAM that moves a changing part of the weights: the least promising are dropped, others grown at random.",
    source="Mi, Shen, Ren, Zhou, Sun, Ji, Tao 2022, arXiv:2210.05177",
    gradients=2,
    copies=1.25,
    space={"rho": Range(0.01, 0.5, log=True), "sparsity": Range(0.2, 0.9)},
)
class SparseSAM(Step):
    r"""Sparse SAM with dynamic masks (SSAM-D): only the weights in a mask are perturbed.

    .. math:: w \leftarrow \text{base}\big(w, \nabla L(w + m \odot \rho \, g / \lVert g \rVert_2)\big), \qquad
              g = \nabla L(w)

    The norm is over all entries, in the mask m or not. The mask holds the fraction 1 - s of all weights, at first a
    random one. In every so many steps the entries in it with the smallest :math:`|g_i|`, a fraction

    .. math:: \tfrac{1}{2} \, \text{drop} \, \big(1 + \cos(\pi \min(t, T) / T)\big)

    at step t of T, give their places to as many random entries that were not in it. Choices are over all tensors
    together.

    The paper's other kind of mask (SSAM-F, by Fisher information) needs gradients of single samples, which no
    closure gives; the square of a batch's gradient is not a substitute, so it is left out.

    Args:
        base: an instance of any first-order ``torch.optim.Optimizer``; it makes the update at w.
        rho: radius of the perturbation before it is masked, >= 0; a group's own ``"rho"`` overrides it. 0
            everywhere is the base optimizer, bit for bit, at one gradient a step.
        model: the model whose buffers stay as after the clean pass; ``None`` declares that there are none to
            protect.
        sparsity: the fraction s of weights that are not perturbed, >= 0 and < 1. 0 is SAM, bit for bit.
        drop: the fraction of the mask that is exchanged at first, between 0 and 1.
        every: steps from one exchange to the next, >= 1; the paper exchanges once an epoch.
        total_steps: T; ``None`` keeps the fraction at ``drop``.
        seed: of the random choices.
        replay_rng: draw the same dropout masks in both passes.

    Parameters that are added later have no entries in the mask before the next exchange, in which they take part. A
    parameter without a gradient in a step keeps its part of the mask.

    Raises:
        TypeError, ValueError: for an argument outside what is allowed, naming it; for sharded parameters, whose
            entries no process can rank together.

    Source: Mi, Shen, Ren, Zhou, Sun, Ji, Tao 2022, "Make Sharpness-Aware Minimization Stronger: A Sparsified
    Perturbation Approach", arXiv:2210.05177, and its released code.

    Example:
        >>> import torch
        >>> from flatmin.step import SparseSAM
        >>> model = torch.nn.Linear(3, 1)
        >>> opt = SparseSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, sparsity=0.5, model=model)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float = 0.1,
        *,
        model: nn.Module | None,
        sparsity: float = 0.5,
        drop: float = 0.5,
        every: int = 100,
        total_steps: int | None = None,
        seed: int = 0,
        replay_rng: bool = True,
    ) -> None:
        self.sparsity = _check.number("sparsity", sparsity, low=0.0, high=1.0, open_high=True)
        self.drop = _check.number("drop", drop, low=0.0, high=1.0)
        self.every = _check.integer("every", every, low=1)
        self.total_steps = None if total_steps is None else _check.integer("total_steps", total_steps, low=1)
        self._noise = Noise(_check.integer("seed", seed, low=0))
        self._count = 0
        self._memory = Lasting()
        super().__init__(base, model=model, defaults={"rho": rho}, replay_rng=replay_rng)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if any(is_sharded(parameter) for parameter in group["params"]):
            raise ValueError("base must have whole parameters, got sharded ones: no process can rank their entries")

    def _replace_gradient(self, window: Window) -> None:
        if not any(group["rho"] for group in self.param_groups):
            return
        ascent = window.take_gradient()
        norm = ascent.norm()
        due = self.sparsity > 0.0 and self._count % self.every == 0
        mask = None
        with drawing(self._noise):
            if due:
                mask = self._exchanged(ascent, norm) if "mask" in self._memory else self._first(ascent)
            ascent.scale_(lambda group: group["rho"], norm)
            if self.sparsity > 0.0:
                self._cover(ascent, mask)
            with window.moved(ascent):
                window.evaluate()
        if mask is not None:
            self._memory.keep("mask", mask)
        self._count += 1

    @torch.no_grad()
    def _cover(self, ascent: Direction, new: Direction | None) -> None:
        """Make zero what is not in the mask; what was not finite is zero by now."""
        if not ascent.buckets:
            return
        mask = self._memory.get("mask", ascent) if new is None else new
        for bucket, chosen in zip(ascent, mask, strict=True):
            torch._foreach_mul_(bucket.values, chosen.values)

    @torch.no_grad()
    def _first(self, like: Direction) -> Direction:
        noise = _flat(self._noise.uniform(like))
        live = noise.numel() - math.ceil(noise.numel() * self.sparsity)
        return _like(_largest(noise, live), like)

    @torch.no_grad()
    def _exchanged(self, gradient: Direction, norm: Tensor) -> Direction | None:
        """The next mask; none where the gradient is not finite. Waits for the device, in an exchange only."""
        noise = _flat(self._noise.uniform(gradient))
        if not bool(torch.isfinite(norm)):
            return None
        old = _flat(self._memory.get("mask", gradient)) != 0
        size, now = old.numel(), int(old.sum())
        live = size - math.ceil(size * self.sparsity)
        # So many stay; fewer than ``live`` are in the mask where parameters have come since.
        stay = min(now, live)
        stay -= min(int(stay * self._fraction()), size - now)
        kept = _largest(_flat(gradient).abs().masked_fill_(~old, -1.0), stay)
        grown = _largest(noise.masked_fill_(old, -1.0), min(live - stay, size - now))
        return _like(kept | grown, gradient)

    def _fraction(self) -> float:
        if self.total_steps is None:
            return self.drop
        return self.drop * (1.0 + math.cos(math.pi * min(self._count, self.total_steps) / self.total_steps)) / 2.0

    def _method_state(self) -> dict[str, Any]:
        vectors = self._memory.state(self.param_groups)
        return {"vectors": vectors, "count": self._count, "noise": noise_state(self._noise)}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self._memory.load(state["vectors"], self.param_groups)
        self._count = int(state["count"])
        load_noise_state(self._noise, state["noise"])


def _values(direction: Direction) -> list[Tensor]:
    return [value for bucket in direction for value in bucket.values]


def _flat(direction: Direction) -> Tensor:
    """All entries in one new vector, on the first tensor's device."""
    values = _values(direction)
    kind = torch.float64 if any(value.dtype == torch.float64 for value in values) else values[0].dtype
    return torch.cat([value.reshape(-1).to(values[0].device, kind) for value in values])


def _largest(scores: Tensor, number: int) -> Tensor:
    """Where the ``number`` largest entries are."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    chosen[torch.topk(scores, number, sorted=False).indices] = True
    return chosen


def _like(flat: Tensor, direction: Direction) -> Direction:
    """``flat`` in the shapes of ``direction``."""
    masks = Direction([])
    start = 0
    for bucket in direction:
        values = []
        for value in bucket.values:
            part = flat[start : start + value.numel()]
            values.append(part.view(value.shape).to(value.device))
            start += value.numel()
        masks.buckets.append(bucket.with_values(values))
    return masks
