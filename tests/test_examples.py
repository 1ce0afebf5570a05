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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/study.md"])
def test_code_in_the_documentation_runs(page: str) -> None:
    """A page's blocks run one after another, in a process of their own: one registers a method."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    assert code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_page_with_code_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    with_code = {str(page.relative_to(ROOT)) for page in pages if "```python" in page.read_text()}
    assert with_code == {"README.md", "CONTRIBUTING.md", "docs/study.md"}
