"""Activation Decay: the squared norm of the last layer's input, as a penalty."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flatmin import _check
from flatmin._registry import Range, register

_LIMIT = 64


class _Capture:
    """Forward pre-hook that hands the layer's input to its penalty; inert on copies of the layer."""

    def __init__(self, penalty: ActivationDecay | None = None) -> None:
        self._penalty = None if penalty is None else weakref.ref(penalty)

    def __reduce__(self) -> tuple[type[_Capture], tuple[()]]:
        return _Capture, ()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        penalty = None if self._penalty is None else self._penalty()
        # A forward inside a backward pass recomputes a checkpointed block, which was counted before.
        if penalty is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        penalty._keep(args, kwargs)


@register(
    "ad",
    "penalty",
    summary="Squared norm of the classification layer's input.",
    source="Activation Decay by Loss Smoothing to Enhance Generalization, ICLR 2025 submission InRaT76E2S",
    space={"sigma": Range(0.01, 1.0, log=True)},
)
class ActivationDecay:
    r"""Penalty on the squared norm of the classification layer's input z.

    .. math:: \frac{\sigma^2}{2} \cdot \frac{1}{N} \sum_{i=1}^{N} \lVert z_i \rVert^2

    Added to the cross-entropy it bounds the cross-entropy smoothed by noise N(0, sigma^2) on the layer's
    weights. A forward pre-hook keeps z; :meth:`penalty`, or calling the object, uses it up. Of several
    forward passes before one call the mean runs over all samples. Nothing is kept while gradients are off,
    nor when a checkpointed block is recomputed.

    An input kept before the layer's weights last changed is dropped. A step that failed with the weights
    unchanged cannot be told from accumulation, and fused optimizers do not mark the change: call
    :meth:`clear` after a step that failed.

    It works under autocast (computed in fp32 or better), DistributedDataParallel (each process takes the mean
    over its own samples, so equal shards give the gradient of the union) and ``torch.compile`` if it is made
    before the first compiled forward: the graph breaks at the layer, and ``fullgraph=True`` is refused.

    Args:
        layer: the module that maps features (N, ..., F) to logits; one tensor input, features last.
        sigma: standard deviation of the weight noise, in units of the layer's weights; finite, >= 0. It may
            be changed between calls.

    Raises:
        TypeError: ``layer`` is no module, or a convolution, whose features are not the last dimension.
        ValueError: ``sigma`` negative or not finite.

    Source: Activation Decay by Loss Smoothing to Enhance Generalization, ICLR 2025 submission,
    openreview.net/forum?id=InRaT76E2S.

    >>> import torch
    >>> head = torch.nn.Linear(2, 3)
    >>> decay = ActivationDecay(head, sigma=0.1)
    >>> logits = head(torch.tensor([[3.0, 4.0]], requires_grad=True))
    >>> round(decay.penalty().item(), 4)
    0.125
    """

    def __init__(self, layer: nn.Module, sigma: float = 0.1) -> None:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer must be a torch.nn.Module, got {type(layer).__name__}")
        if isinstance(layer, _ConvNd):
            raise TypeError(
                f"layer must take features in its last dimension, got {type(layer).__name__}, which takes"
                " them in its second; give the linear layer behind the pooling"
            )
        self.sigma = sigma
        self._layer = layer
        self._kept: list[tuple[Tensor, tuple[tuple[int, int], ...], bool]] = []
        handle = layer.register_forward_pre_hook(_Capture(self), with_kwargs=True)
        self._remove = weakref.finalize(self, handle.remove)
        self._remove.atexit = False

    @property
    def sigma(self) -> float:
        """The standard deviation of the weight noise."""
        return self._sigma

    @sigma.setter
    def sigma(self, value: float) -> None:
        self._sigma = _check.number("sigma", value, low=0.0)

    def __repr__(self) -> str:
        return f"ActivationDecay({type(self._layer).__name__}, sigma={self._sigma:g})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._layer, self._sigma, self._remove.alive)

    def __call__(self) -> Tensor:
        """Return :meth:`penalty`."""
        return self.penalty()

    def penalty(self) -> Tensor:
        """Return the penalty of the forward passes since the last call, as a 0-dim tensor, and forget them.

        Raises:
            RuntimeError: nothing was kept, or after :meth:`detach`.
        """
        if not self._remove.alive:
            raise RuntimeError("this ActivationDecay was detached from its layer; make a new one")
        self._drop_stale()
        if not self._kept:
            raise RuntimeError(
                "ActivationDecay has no activations: run the model's forward pass first, with gradients"
                " enabled, once for every call of penalty(); in evaluation leave the penalty out"
            )
        # A forward in evaluation mode with gradients on (a check in between) is no part of the training loss,
        # unless the layer is being trained in that mode.
        modes = [training for _, _, training in self._kept]
        inputs = [z for z, _, training in self._kept if training or not any(modes)]
        self._kept.clear()
        rows = sum(z.shape[:-1].numel() for z in inputs)
        # Without features the sum is exactly zero, and so is its gradient; 0 * inf would be NaN.
        used = inputs if self._sigma > 0 else [z[..., :0] for z in inputs]
        total = sum((_square_sum(z) for z in used[1:]), _square_sum(used[0]))
        return total * (self._sigma**2 / 2 / max(rows, 1))

    def clear(self) -> None:
        """Forget the activations kept so far, as after a step that was given up."""
        self._kept.clear()

    def detach(self) -> None:
        """Remove the hook from the layer and forget the activations; harmless when repeated."""
        self._remove()
        self._kept.clear()

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(inputs) != 1 or not inputs[0].is_floating_point() or inputs[0].ndim == 0:
            got = [f"{str(z.dtype).removeprefix('torch.')} {tuple(z.shape)}" for z in inputs]
            raise TypeError(f"layer must be called with one floating tensor (N, ..., F), got {got}")
        self._drop_stale()
        if len(self._kept) >= _LIMIT:
            raise RuntimeError(
                f"{_LIMIT} forward passes are waiting for penalty(): call it in every step, clear() after a"
                " step that was given up, and evaluate under torch.no_grad()"
            )
        self._kept.append((inputs[0], self._versions(), self._layer.training))

    def _versions(self) -> tuple[tuple[int, int], ...]:
        return tuple((id(weight), weight._version) for weight in self._layer.parameters())

    def _drop_stale(self) -> None:
        if self._kept:
            now = self._versions()
            self._kept = [entry for entry in self._kept if entry[1] == now]


def _square_sum(z: Tensor) -> Tensor:
    wide = z if z.dtype == torch.float64 else z.float()
    return wide.square().sum()


def _revive(layer: nn.Module, sigma: float, attached: bool) -> ActivationDecay:
    penalty = ActivationDecay(layer, sigma)
    if not attached:
        penalty.detach()
    return penalty
