"""Checks of arguments; each raises one clear line that names the argument, what came, and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any


def show(value: object) -> str:
    """``value`` for an error message, cut to a readable length, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def number(
    name: str,
    value: Any,  # whatever a caller may hand over is judged here
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return ``value`` as a float if it is a finite real number in the range, else raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {show(value)} of type {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    above = result > low if open_low else result >= low
    below = result < high if open_high else result <= high
    if not math.isfinite(result) or not (above and below):
        allowed = _range(low, high, open_low, open_high)
        raise ValueError(f"{name} must be a finite number{allowed}, got {show(value)}")
    return result


def _range(low: float, high: float, open_low: bool, open_high: bool) -> str:
    parts = []
    if low != -math.inf:
        parts.append(f"{'>' if open_low else '>='} {low:g}")
    if high != math.inf:
        parts.append(f"{'<' if open_high else '<='} {high:g}")
    return " " + " and ".join(parts) if parts else ""


def integer(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` if it is an int (not a bool) in the range, else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {show(value)} of type {type(value).__name__}")
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = " and ".join(text for text, bound in ((f">= {low}", low), (f"<= {high}", high)) if bound is not None)
        raise ValueError(f"{name} must be an integer {allowed}, got {show(value)}")
    return value


def boolean(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool, else raise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {show(value)} of type {type(value).__name__}")
    return value


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """Return ``value`` if it is one of ``allowed``, else raise."""
    listed = ", ".join(repr(item) for item in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {listed}, got {show(value)} of type {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {listed}, got {show(value)}")
    return value
