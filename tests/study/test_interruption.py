"""kill -9, a full disk and Ctrl-C lose at most the runs in flight; --resume gives the undisturbed table."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

METHODS = "sgd,sam,ema,sema,sam+sema"


def command(out: Path, *more: str, seeds: int = 3, epochs: int = 60) -> list[str]:
    line = f"-m flatmin compare --task moons --methods {METHODS} --seeds {seeds} --epochs {epochs} --jobs 2"
    return [sys.executable, *line.split(), "--out", str(out), *more]


def finish(out: Path, *more: str, **study: Any) -> str:
    subprocess.run(command(out, *more, **study), check=True, capture_output=True, timeout=300)
    return (out / "results.csv").read_text()


def stored(out: Path) -> dict[tuple[str, int], str]:
    if not (out / "study.sqlite").exists():
        return {}
    try:
        with sqlite3.connect(f"file:{out / 'study.sqlite'}?mode=ro", uri=True) as db:
            return {(m, s): record for m, s, record in db.execute("SELECT method, seed, record FROM runs")}
    except sqlite3.OperationalError:  # killed before the table was made
        return {}


def kill_and_resume(out: Path, kills: int, chooser: random.Random, **study: Any) -> str:
    """Kill the whole study ``kills`` times at random moments; the finished runs must stay as they are."""
    for _ in range(kills):
        before = stored(out)
        # study.json is the first file; without it there is nothing to resume.
        more = ["--resume"] if (out / "study.json").exists() else []
        process = subprocess.Popen(command(out, *more, **study), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chooser.uniform(0.5, 9.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = stored(out)
        assert before.items() <= after.items(), "a finished run was lost or repeated"
    return finish(out, "--resume", **study)


def test_killed_twice_and_resumed(tmp_path: Path) -> None:
    expected = finish(tmp_path / "undisturbed")
    assert kill_and_resume(tmp_path / "killed", 2, random.Random(1)) == expected


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    study = {"seeds": 12, "epochs": 200}
    expected = finish(tmp_path / "undisturbed", **study)
    assert kill_and_resume(tmp_path / "killed", 20, random.Random(0), **study) == expected


def test_workers_die_with_a_killed_study(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "s", seeds=50, epochs=500), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(children := _children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children) >= 2
    process.kill()
    process.wait()
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(child) for child in children)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in text.read_text().split()] if text.exists() else []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_interrupted_from_the_keyboard(tmp_path: Path) -> None:
    out = tmp_path / "s"
    process = subprocess.Popen(
        command(out, seeds=50, epochs=500), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not stored(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error: interrupted; what had finished is kept, go on with --resume" in err
    assert "Traceback" not in err
    assert stored(out)


def test_a_full_disk_stops_with_one_line_and_loses_nothing(tmp_path: Path) -> None:
    expected = finish(tmp_path / "undisturbed", epochs=20, seeds=2)
    out = tmp_path / "full"

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, 24 * 1024))

    process = subprocess.run(
        command(out, epochs=20, seeds=2), preexec_fn=no_room, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 1
    assert "what had finished is kept, go on with --resume" in process.stderr
    assert "Traceback" not in process.stderr
    before = stored(out)
    assert finish(out, "--resume", epochs=20, seeds=2) == expected
    assert before.items() <= stored(out).items()
