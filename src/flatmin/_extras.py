"""Optional dependencies, with a clear message where one is missing."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import ``module``, or say which extra of flatmin brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise ModuleNotFoundError(
            f"{missing} is not installed; it comes with flatmin's extra: pip install 'flatmin[{extra}]'",
            name=error.name,
        ) from None
