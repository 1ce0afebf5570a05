"""The comparison's baseline: the task's own optimizer with nothing added."""

from __future__ import annotations

from dataclasses import dataclass

from flatmin import _check
from flatmin._registry import register


@register("base", "base", summary="The task's base optimizer, unchanged.", source="the task")
@dataclass(frozen=True)
class Base:
    """The task's base optimizer with its learning rate multiplied by ``lr_scale``.

    ``lr_scale="sema"`` is the control of Switch EMA: the rate times r(m, K), the share of the way that the
    average travels between two switches (see :func:`flatmin.average.switch_rate`).
    """

    lr_scale: float | str = 1.0

    def __post_init__(self) -> None:
        if self.lr_scale != "sema":
            if isinstance(self.lr_scale, str):
                raise ValueError(f"lr_scale must be a number > 0 or sema, got {self.lr_scale!r}")
            _check.number("lr_scale", self.lr_scale, low=0.0, open_low=True)
