"""Switch EMA: the moving average becomes the live weights at the end of every epoch."""

from __future__ import annotations

import math
import warnings
from collections.abc import MutableMapping
from typing import Any

from torch import nn

from flatmin import _check
from flatmin._registry import Range, register
from flatmin.average._average import Average, Settings

#: Below so many steps between switches a window of a fifth of them averages nothing.
_SHORT = 20
_SHORT_DECAY = 0.9
_SHORT_EVERY = 50


def switch_rate(decay: float, steps: int) -> float:
    r"""Return the share of the way that the average has travelled after ``steps`` steps from a common start.

    .. math:: r(m, K) = 1 - \frac{m}{1 - m} \cdot \frac{1 - m^K}{K}

    The rest is thrown away by a switch, so on directions of constant gradient Switch EMA trains with r times
    the learning rate.

    Args:
        decay: share m of the old average that is kept, in [0, 1].
        steps: optimizer steps K between two switches, at least 1.

    >>> round(switch_rate(0.999, 500), 3)
    0.214
    """
    decay = _check.number("decay", decay, low=0.0, high=1.0)
    steps = _check.integer("steps", steps, low=1)
    if decay in (0.0, 1.0):
        return 1.0 - decay
    a = -math.log(decay)
    x = steps * a
    if x > 0.1:
        return 1.0 + math.expm1(-x) * decay / (1.0 - decay) / steps
    # 1 - (nearly 1) loses the digits of a small rate; the series of (K expm1(a) + expm1(-K a)) / K does not.
    terms = ((a**n + (-x) ** n / steps) / math.factorial(n) for n in range(2, 15))
    return math.fsum(terms) / math.expm1(a)


@register(
    "sema",
    "average",
    summary="Moving average that replaces the live weights at every epoch's end.",
    source="Li, Liu, Tian, et al., 2024, arXiv:2402.09240",
    copies=1.0,
    space={"decay": Range(0.5, 0.99)},
)
class SwitchEMA(Average):
    r"""Moving average that is copied over the live weights at the end of every epoch.

    .. math::
        e_0 = w_0, \qquad e \leftarrow m e + (1 - m) w \text{ after each step}, \qquad
        w \leftarrow e \text{ at each switch}

    The average is kept at a switch; the learning rate, the random numbers and the buffers are left alone. The
    final model is the average: end with :meth:`switch` or :meth:`copy_to`. Under data parallelism every rank
    must switch.

    Let K be the number of steps between switches, ``every`` or else ``steps_per_epoch``. The default decay is
    1 - 5/K for K >= 20 and 0.9 below. **Short epochs**: with ``steps_per_epoch`` < 20 and neither ``decay``
    nor ``every`` given, the cadence is ``every=50`` steps instead, and :meth:`switch` does nothing, so that a
    loop which calls it at each epoch's end stays right.

    Args:
        model: the module whose parameters are averaged and switched.
        decay: share m of the old average that is kept, in [0, 1]; required if K is unknown.
        steps_per_epoch: optimizer steps in an epoch, where :meth:`switch` is called at each epoch's end.
        every: switch inside :meth:`update`, after this many updates and every multiple.
        optimizer: the optimizer whose state ``"reset"`` clears.
        optimizer_state: ``"keep"`` (as the authors' code does) or ``"reset"``: forget momentum at a switch.

    Raises:
        ValueError: a value outside its range, K and ``decay`` both unknown, or ``"reset"`` without an
            ``optimizer``.
        TypeError: an argument of another type.

    Warns:
        UserWarning: the average travels less than half the way between switches (:func:`switch_rate` < 0.5).

    Source: S. Li, Z. Liu, J. Tian, et al., Switch EMA: A Free Lunch for Better Flatness and Sharpness, 2024,
    arXiv:2402.09240. The rate rule r(m, K) and the default decay are ours.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> average = SwitchEMA(model, decay=0.9)
    >>> _ = torch.nn.init.ones_(model.weight)  # stands for an epoch of optimizer steps
    >>> average.update()
    >>> average.switch()
    True
    >>> round(model.weight.item(), 2)
    0.1
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | None = None,
        *,
        steps_per_epoch: int | None = None,
        every: int | None = None,
        optimizer: Any = None,  # anything with torch.optim.Optimizer's `state`, wrappers included
        optimizer_state: str = "keep",
    ) -> None:
        _check.choice("optimizer_state", optimizer_state, ("keep", "reset"))
        if optimizer_state == "reset" and optimizer is None:
            raise ValueError("optimizer_state='reset' must come with optimizer=, whose state it clears")
        if optimizer is not None and not isinstance(getattr(optimizer, "state", None), MutableMapping):
            raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._optimizer_state = optimizer_state
        self._adopt(_resolve(decay, steps_per_epoch, every))
        super().__init__(model)
        rate = self.effective_rate
        if rate is not None and rate < 0.5:
            fit = max(0.0, 1.0 - 5.0 / (self._steps or 1))
            warnings.warn(
                f"decay={self._decay:g} with {self._steps} steps between switches keeps only {rate:.3f} of"
                f" the learning rate; decay={fit:.6g} would fit",
                stacklevel=2,
            )

    @property
    def decay(self) -> float:
        """The share of the old average that is kept."""
        return self._decay

    @property
    def every(self) -> int | None:
        """The number of updates after which :meth:`update` switches by itself, if it does."""
        return self._every

    @property
    def effective_rate(self) -> float | None:
        """The factor r(m, K) on the learning rate, or None if K is unknown."""
        return None if self._steps is None else switch_rate(self._decay, self._steps)

    def update(self) -> None:
        """Take the live weights into the average, after every optimizer step; switch if it is the turn."""
        self._follow(self._decay)
        if self._every is not None and self._updates % self._every == 0:
            self._switch()

    def switch(self) -> bool:
        """Copy the average over the live weights, at the end of an epoch; return whether it was done.

        It is not done, and False returned, in the one case of short epochs that the class describes.

        Raises:
            RuntimeError: before the first update or inside :meth:`applied`.
        """
        self._require_live("switch()")
        if not self._by_hand:
            return False
        self._require_updates("switch()")
        self._switch()
        return True

    def _switch(self) -> None:
        self._shadow.write()
        if self._optimizer_state == "reset":
            self._optimizer.state.clear()

    def _settings(self) -> Settings:
        return {"decay": self._decay, "every": self._every, "steps": self._steps, "by_hand": self._by_hand}

    def _adopt(self, settings: Settings) -> None:
        decay = _check.number("decay", settings["decay"], low=0.0, high=1.0)
        every, steps = (
            None if settings[name] is None else _check.integer(name, settings[name], low=1)
            for name in ("every", "steps")
        )
        by_hand = _check.boolean("by_hand", settings["by_hand"])
        self._decay, self._every, self._steps, self._by_hand = decay, every, steps, by_hand


def _resolve(decay: float | None, steps_per_epoch: int | None, every: int | None) -> Settings:
    for name, value in (("steps_per_epoch", steps_per_epoch), ("every", every)):
        if value is not None:
            _check.integer(name, value, low=1)
    short = decay is None and every is None and steps_per_epoch is not None and steps_per_epoch < _SHORT
    every = _SHORT_EVERY if short else every
    steps = steps_per_epoch if every is None else every
    if decay is None:
        if steps is None:
            raise ValueError("decay must be given when neither steps_per_epoch nor every says how often to switch")
        decay = _SHORT_DECAY if short or steps < _SHORT else 1.0 - 5.0 / steps
    return {"decay": decay, "every": every, "steps": steps, "by_hand": not short}
