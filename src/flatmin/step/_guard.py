"""What a second evaluation must not change: random number generators, buffers, foreign gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Generators:
    """The states of torch's default generators, on the CPU and on every device in ``devices``."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._others = [
            (device, torch.get_device_module(device).get_rng_state(device))
            for device in devices
            if device.type not in ("cpu", "meta")
        ]

    def restore(self) -> None:
        """Set every generator to the recorded state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


def modules_of(model: nn.Module | None) -> list[nn.Module]:
    """Every module of ``model`` once; done once a step, since walking names costs more than small layers do."""
    if model is None:
        return []
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


class Buffers:
    """All buffers of some modules: which tensor stands under which name, and its value.

    Saving and putting back is right for any module, unlike freezing by class or by momentum: it covers
    ``num_batches_tracked``, spectral-norm vectors, custom layers and buffers that a forward replaces.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._saved: list[tuple[Tensor, Tensor]] = []
        seen: set[int] = set()
        for module in modules:
            if not isinstance(module._buffers, dict) or not module._buffers:  # TorchScript keeps its own
                continue
            self._places.append((module._buffers, dict(module._buffers)))
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in seen and _can_change(buffer):
                    seen.add(id(buffer))
                    self._saved.append((buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put every buffer back, bit for bit, into the tensor it stood in."""
        # torch.nn.functional.batch_norm writes its statistics without raising their version counter, so
        # there is no telling which buffers moved: all of them are copied.
        for buffer, value in self._saved:
            buffer.copy_(value)
        for place, content in self._places:
            if place.keys() != content.keys() or any(place[name] is not content[name] for name in content):
                place.clear()
                place.update(content)


def _can_change(buffer: Tensor) -> bool:
    if buffer.layout != torch.strided:
        return False
    # Memory that several entries share (position ids made by expand) cannot be written in place at all.
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not overlaps and not buffer.is_inference()


class ForeignGradients:
    """Gradients of parameters that another optimizer owns; a second pass must not add to them."""

    def __init__(self, modules: list[nn.Module], own: set[int]) -> None:
        # By value: data parallelism may keep gradients in memory that the next backward pass writes again.
        self._saved = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach().clone())
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad and id(parameter) not in own
        ]

    def clear(self) -> None:
        """Let the coming pass write into fresh gradients."""
        for parameter, _, _ in self._saved:
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put the clean pass's gradients back."""
        for parameter, grad, value in self._saved:
            if grad is not None and value is not None:
                grad.copy_(value)
            parameter.grad = grad
