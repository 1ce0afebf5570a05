"""Averaged copies of a module's tensors, kept beside it as cached flat lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

#: Elements cast at a time when weights are narrower than their average; bounds the scratch to 64 MiB of fp32.
_CHUNK = 1 << 24

_Rule = Literal["lerp", "steady", "copy"]


def named_tensors(model: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    """Return parameters (and buffers) by name, each object once, without the names of wrappers.

    ``torch.compile`` inserts ``_orig_mod.`` at any depth; DataParallel and DistributedDataParallel put
    ``module.`` before every name.
    """
    found: dict[str, Tensor] = dict(model.named_parameters())
    if buffers:
        found.update(model.named_buffers())
    cleaned = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    every = [*cleaned, *(name.replace("_orig_mod.", "") for name, _ in model.named_buffers())]
    while every and all(name.startswith("module.") for name in every):
        cleaned = {name.removeprefix("module."): tensor for name, tensor in cleaned.items()}
        every = [name.removeprefix("module.") for name in every]
    return cleaned


def mismatch(expected: Mapping[str, Tensor], given: Mapping[str, Any]) -> str | None:
    """Say in one line how names or shapes differ, or return None."""
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    if missing or extra:
        parts = [f"{word} {_few(names)}" for word, names in (("missing", missing), ("unknown", extra)) if names]
        return "names differ: " + ", ".join(parts)
    for name, tensor in expected.items():
        other = given[name]
        if not isinstance(other, Tensor):
            return f"{name} is a {type(other).__name__}, not a tensor"
        if other.shape != tensor.shape:
            return f"{name} has shape {tuple(other.shape)}, not {tuple(tensor.shape)}"
        if (_averaged(other.dtype), other.dtype.is_complex) != (
            _averaged(tensor.dtype),
            tensor.dtype.is_complex,
        ):
            return f"{name} is {other.dtype}, not {tensor.dtype}"
    return None


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _averaged(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _wide(dtype: torch.dtype) -> torch.dtype:
    # (1 - d) (w - e) is below half an ulp of a 16-bit average for the usual decays: it would stand still.
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


@dataclass
class _Group:
    """Tensors that one fused call can treat: same devices, dtypes and rule."""

    rule: _Rule
    means: list[Tensor] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)

    def follow(self, weight: float) -> None:
        if self.rule == "copy":
            torch._foreach_copy_(self.means, self.live)
            return
        for means, values in self._cast():
            if self.rule == "lerp":
                torch._foreach_lerp_(means, values, weight)
                continue
            # What does not move must keep its bits: lerp makes NaN of infinities (masks) and +0 of -0.
            for mean, value in zip(means, values, strict=True):
                mean.copy_(torch.where(mean == value, value, torch.lerp(mean, value, weight)))

    def _cast(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        dtype = self.means[0].dtype
        if self.live[0].dtype == dtype:
            yield self.means, self.live
            return
        # Cast before the arithmetic, or the difference is rounded in the narrow type.
        for part in _chunks([tensor.numel() for tensor in self.live]):
            scratch = [torch.empty_like(mean) for mean in self.means[part]]
            torch._foreach_copy_(scratch, self.live[part])
            yield self.means[part], scratch


def _chunks(sizes: list[int]) -> Iterator[slice]:
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _CHUNK:
            yield slice(start, index)
            start, total = index, 0
        total += size
    yield slice(start, len(sizes))


@dataclass
class _Plan:
    """The groups, and the marks by which a change of the module's tensors is noticed."""

    modules: list[nn.Module]
    groups: list[_Group]
    marks: list[object]


class Shadow:
    """Averages of a module's tensors by name, each tensor object once.

    Averages are at least fp32 and live on their tensor's device. The flat lists are built once and again only
    when the module holds other tensor objects, because walking modules costs more than the arithmetic.
    """

    def __init__(self, model: nn.Module, *, buffers: bool) -> None:
        self.model = model
        self.buffers = buffers
        live = named_tensors(model, buffers=buffers)
        if next(model.parameters(), None) is None:
            raise ValueError(f"model must have parameters to average, got {type(model).__name__} without any")
        for name, tensor in live.items():
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise ValueError(f"model must have its shapes: {name} is uninitialized; run one forward pass first")
        self.means = {name: tensor.detach().to(_wide(tensor.dtype), copy=True) for name, tensor in live.items()}
        self._parameters = frozenset(named_tensors(model, buffers=False))
        self._plan: _Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The plan knows tensors by their addresses, which a copy does not share.
        return {**self.__dict__, "_plan": None}

    def live(self) -> list[Tensor]:
        """Return the module's own tensors that are averaged."""
        return [tensor for group in self._current() for tensor in group.live]

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move every average: e <- decay e + (1 - decay) w; integer tensors are copied."""
        for group in self._current():
            group.follow(1.0 - decay)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the averages into the module's own tensors."""
        for group in self._current():
            torch._foreach_copy_(group.live, group.means)

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Copy the averages, and the live buffers where those are not averaged, into another module."""
        source = named_tensors(self.model, buffers=True) | self.means
        target = named_tensors(model, buffers=True)
        if (problem := mismatch(source, target)) is not None:
            raise ValueError(f"model must have the tensors that are averaged: {problem}")
        for name, tensor in target.items():
            tensor.copy_(source[name])

    def split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the averages of the parameters and those of the buffers."""
        parameters = {name: mean for name, mean in self.means.items() if name in self._parameters}
        return parameters, {name: mean for name, mean in self.means.items() if name not in self._parameters}

    @torch.no_grad()
    def load(self, means: Mapping[str, Tensor]) -> None:
        """Take over averages that :func:`mismatch` found nothing against, in this shadow's own precision."""
        for name, mean in self.means.items():
            mean.copy_(means[name])

    def _current(self) -> list[_Group]:
        plan = self._plan
        if plan is None or plan.marks != self._marks(plan.modules, plan.groups):
            plan = self._plan = self._build()
        return plan.groups

    def _marks(self, modules: Iterable[nn.Module], groups: Iterable[_Group]) -> list[object]:
        # `model.to(...)` keeps the parameter objects and changes all of them, so one of each group tells.
        marks: list[object] = [(group.live[0].device, group.live[0].dtype) for group in groups]
        for module in modules:
            marks += map(id, module._parameters.values())
            marks += map(id, module._modules.values())
            if self.buffers:
                marks += map(id, module._buffers.values())
        return marks

    def _build(self) -> _Plan:
        live = named_tensors(self.model, buffers=self.buffers)
        if (problem := mismatch(self.means, live)) is not None:
            raise RuntimeError(f"the model changed since its average was made, make a new average: {problem}")
        groups: dict[object, _Group] = {}
        for name, tensor in live.items():
            mean = self.means[name]
            dtype = torch.promote_types(mean.dtype, _wide(tensor.dtype))
            mean = self.means[name] = mean.to(tensor.device, dtype)
            rule: _Rule = "copy"
            if _averaged(dtype):
                rule = "lerp" if tensor.requires_grad else "steady"
            key = (tensor.device, dtype, tensor.dtype, rule)
            group = groups.setdefault(key, _Group(rule))
            group.means.append(mean)
            group.live.append(tensor)
        modules = list(self.model.modules())
        return _Plan(modules, list(groups.values()), self._marks(modules, groups.values()))
