"""Every example runs, and the README's code is one of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


PAGES = [page for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if "```python" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_in_the_documentation_runs(page: Path) -> None:
    """A page's blocks run one after another, in a process of their own: one registers a method."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
