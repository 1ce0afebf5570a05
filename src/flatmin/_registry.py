"""The registry of methods: what each is called, where it acts, what it costs, where it comes from.

The data stand next to the class, as arguments of :func:`register`; the command line, the study and the
documentation all read them from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

Place = Literal["base", "penalty", "step", "average"]
Option = float | int | bool | str | None

#: Constructor arguments that the caller's program supplies, never the method string.
SUPPLIED = frozenset({"base", "model", "layer", "steps_per_epoch", "optimizer", "replay_rng", "sync", "aux"})


@dataclass(frozen=True)
class Range:
    """A search range of one option: from ``low`` to ``high``, on a logarithmic axis if ``log``."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Method:
    """One registered method.

    ``gradients`` is the number of gradient evaluations (forward + backward = 1) that one optimizer step
    takes in all for a step, and in addition for a penalty, or a function of the options; ``copies`` the extra
    memory in copies of the parameters; ``space`` the options a tuner may vary.
    """

    name: str
    place: Place
    summary: str
    gradients: float | Callable[[Mapping[str, Any]], float]
    copies: float
    source: str
    build: Callable[..., Any]
    options: Mapping[str, Option]
    space: Mapping[str, Range] = field(default_factory=dict)

    def cost(self, options: Mapping[str, Option]) -> float:
        """Gradient evaluations with ``options``, and the defaults for what they leave out."""
        return self.gradients({**self.options, **options}) if callable(self.gradients) else self.gradients

    def make(self, supplied: Mapping[str, Any], options: Mapping[str, Option]) -> Any:
        """Build with ``options`` and with those of the ``supplied`` arguments that the constructor takes."""
        taken = inspect.signature(self.build).parameters
        return self.build(**{key: value for key, value in supplied.items() if key in taken}, **options)


_METHODS: dict[str, Method] = {}
_T = TypeVar("_T", bound=Callable[..., Any])


def register(
    name: str,
    place: Place,
    *,
    summary: str,
    source: str,
    gradients: float | Callable[[Mapping[str, Any]], float] = 0.0,
    copies: float = 0.0,
    space: Mapping[str, Range] | None = None,
) -> Callable[[_T], _T]:
    """Register a class or function under ``name``; its keyword arguments become the method's options."""

    def add(build: _T) -> _T:
        if name in _METHODS:
            raise ValueError(f"method name {name!r} is registered twice")
        options = {
            parameter.name: parameter.default
            for parameter in inspect.signature(build).parameters.values()
            if parameter.default is not inspect.Parameter.empty and parameter.name not in SUPPLIED
        }
        unknown = set(space or ()) - set(options)
        if unknown:
            raise ValueError(f"method {name!r}: search space names unknown options {sorted(unknown)}")
        _METHODS[name] = Method(
            name, place, summary, gradients, copies, source, build, MappingProxyType(options), space or {}
        )
        return build

    return add


def methods() -> Mapping[str, Method]:
    """All registered methods by name, in the order base, penalty, step, average."""
    # The rooms register their methods when imported; this module must not import them at its own import.
    import flatmin._base
    import flatmin.average
    import flatmin.penalty
    import flatmin.step  # noqa: F401

    order: list[Place] = ["base", "penalty", "step", "average"]
    return dict(sorted(_METHODS.items(), key=lambda item: order.index(item[1].place)))
