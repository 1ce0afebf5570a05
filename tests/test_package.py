"""What importing flatmin brings, and the walls between its rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import flatmin

ROOT = Path(flatmin.__file__).parent
CORE = ("step", "penalty", "average")


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from flatmin import _check` names a module of the package.
            names |= {f"flatmin.{alias.name}" for alias in node.names} if node.module == "flatmin" else {node.module}
    return names


def test_import_brings_torch_and_nothing_heavier() -> None:
    code = "import flatmin, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"scipy", "pandas", "plotly", "sklearn", "rich", "typer", "torchmetrics", "statsmodels", "mnist1d"}
    assert not heavy & set(loaded)
    assert "torch" in loaded


def test_core_rooms_import_torch_and_shared_helpers_only() -> None:
    """study imports the rooms and never the reverse; no room imports another's insides."""
    standard = set(sys.stdlib_module_names)
    for room in CORE:
        for path in (ROOT / room).glob("*.py"):
            for name in _imports(path):
                top = name.partition(".")[0]
                if top == "flatmin":
                    inside = name.split(".")[1]
                    assert inside == room or inside.startswith("_"), f"{path.name} imports {name}"
                else:
                    assert top in standard | {"torch", "numpy"}, f"{path.name} imports {name}"


def test_public_names_are_documented() -> None:
    for name in flatmin.__all__:
        value = getattr(flatmin, name)
        if name != "__version__":
            assert value.__doc__
            assert ">>>" in value.__doc__, f"{name} has no runnable example"
    assert (ROOT / "py.typed").exists()
