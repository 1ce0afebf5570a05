"""A whole study: stored as it goes, resumed, refused where it would be wrong."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatmin.study import Record, Task, compare, load_task
from flatmin.study._pool import run_jobs
from flatmin.study._store import Store
from flatmin.study._tasks import TASKS

METHODS = ["sgd", "sam", "ad+sema"]
FAST: dict[str, Any] = {"epochs": 2, "seeds": 2}


def test_methods_seeds_and_files(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    result = compare(
        "moons", METHODS, out=tmp_path / "s", progress=lambda r, n: seen.append((r.method, n)), epochs=2, seeds=[4, 1]
    )
    assert [(r.method, r.seed) for r in result.records] == [(m, s) for m in METHODS for s in (1, 4)]
    assert seen == [(m, 6) for m in METHODS * 2]
    assert {p.name for p in (tmp_path / "s").iterdir()} - {".lock"} == {
        "study.sqlite",
        "study.json",
        "results.csv",
        "costs.csv",
        "report.html",
    }
    settings = json.loads((tmp_path / "s" / "study.json").read_text())
    assert settings["task"] == "moons"
    assert settings["versions"]["torch"] == torch.__version__
    assert "seconds" not in (tmp_path / "s" / "results.csv").read_text()
    assert "seconds" in (tmp_path / "s" / "costs.csv").read_text()


def test_processes_and_this_process_give_the_same_table(tmp_path: Path) -> None:
    alone = compare("moons", METHODS, **FAST)
    pool = compare("moons", METHODS, jobs=2, **FAST)
    assert alone.results_csv() == pool.results_csv()


def test_resume_does_the_rest_and_gives_the_same_table(tmp_path: Path) -> None:
    whole = compare("moons", METHODS, **FAST)

    class StopError(Exception):
        pass

    def stop(record: Record, total: int) -> None:
        if record.method == "sam":
            raise StopError

    with pytest.raises(StopError):
        compare("moons", METHODS, out=tmp_path, progress=stop, **FAST)
    assert len(Store(tmp_path / "study.sqlite").load()) == 2
    done: list[Any] = []
    again = compare("moons", METHODS, out=tmp_path, resume=True, progress=lambda r, n: done.append(r), **FAST)
    assert len(done) == 6
    assert again.results_csv() == whole.results_csv() == (tmp_path / "results.csv").read_text()


def test_resume_with_more_methods_and_seeds_keeps_what_is_there(tmp_path: Path) -> None:
    compare("moons", ["sgd"], seeds=1, epochs=1, out=tmp_path)
    with sqlite3.connect(tmp_path / "study.sqlite") as db:
        before = db.execute("SELECT * FROM runs").fetchall()
    compare("moons", ["sgd", "ema"], seeds=2, epochs=1, out=tmp_path, resume=True)
    with sqlite3.connect(tmp_path / "study.sqlite") as db:
        after = db.execute("SELECT * FROM runs").fetchall()
    assert before[0] in after
    assert len(after) == 4


def test_what_would_not_be_comparable_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    compare("moons", ["sgd"], seeds=1, epochs=1, out=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "holds a study"),
        ({"resume": True, "epochs": 3}, "has epochs 1, not 3"),
        ({"resume": True, "budget": "gradients"}, "has budget 'epochs'"),
        ({"resume": True, "task": "circles"}, "has task 'moons'"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ]
    for changes, words in cases:
        arguments: dict[str, Any] = {"task": "moons", "seeds": 1, "epochs": 1, "out": tmp_path, **changes}
        with pytest.raises(ValueError, match=words):
            compare(methods=["sgd"], **arguments)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"} == before
    settings = json.loads(before["study.json"])
    settings["versions"]["torch"] = "1.0"
    (tmp_path / "study.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="versions"):
        compare("moons", ["sgd"], seeds=1, epochs=1, out=tmp_path, resume=True)
    compare("circles", ["sgd"], seeds=1, epochs=1, out=tmp_path, overwrite=True)
    assert json.loads((tmp_path / "study.json").read_text())["task"] == "circles"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task": "mnist"}, "task must be one of"),
        ({"task": 3}, "task must be"),
        ({"methods": "sgd"}, "methods must be a non-empty list"),
        ({"methods": []}, "methods must be a non-empty list"),
        ({"methods": ["sgd", "sgd"]}, "methods must differ, got 'sgd' twice"),
        ({"methods": ["sam", "sam(rho=0.05)"]}, "methods must differ, got 'sam' twice"),
        ({"methods": ["sgb"]}, "unknown method 'sgb'"),
        ({"seeds": 0}, "seeds must be an integer >= 1"),
        ({"seeds": 1.5}, "seeds must be an integer"),
        ({"seeds": [1, 1]}, "seeds must be distinct"),
        ({"seeds": [-1]}, "seeds must be an integer >= 0"),
        ({"seeds": "abc"}, "seeds must be an integer"),
        ({"budget": "time"}, "budget must be one of 'epochs', 'gradients', got 'time'"),
        ({"epochs": 0}, "epochs must be an integer >= 1"),
        ({"jobs": 0}, "jobs must be an integer >= 1"),
        ({"resume": True}, "resume needs out"),
        ({"resume": True, "out": "/nonexistent/study"}, "there is no study"),
        ({"out": "/proc/study"}, "out: cannot write to"),
        ({"out": " "}, "out must name a folder"),
        ({"methods": ["base", "sgd"]}, "two names of one method"),
        ({"out": __file__}, "out must be a folder"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    complete: dict[str, Any] = {"task": "moons", "methods": ["sgd"], "seeds": 1, "epochs": 1, **arguments}
    with pytest.raises((ValueError, TypeError)) as caught:
        compare(**complete)
    assert words in str(caught.value)


def test_sgd_is_refused_where_the_base_is_another() -> None:
    moons = TASKS["moons"]
    task = Task("t", moons.data, moons.model, "2", lambda p: torch.optim.AdamW(p), epochs=1, batch_size=10)
    with pytest.raises(ValueError, match="base optimizer is AdamW: write 'base'"):
        compare(task, ["sgd"], seeds=1)
    assert compare(task, ["base", "sam"], seeds=1).records[1].status == "ok"
    with pytest.raises(ValueError, match="jobs must be 1 for a task that cannot be pickled"):
        compare(task, ["base"], seeds=1, jobs=2)


def test_a_run_that_raises_is_recorded_as_failed_and_the_others_go_on() -> None:
    moons = TASKS["moons"]

    def data(seed: int) -> Any:
        if seed == 1:
            raise OSError("no such disk")
        return moons.data(seed)

    task = Task("t", data, moons.model, "2", moons.optimizer, epochs=1, batch_size=10)
    result = compare(task, ["sgd"], seeds=3)
    assert [r.status for r in result.records] == ["ok", "failed", "ok"]
    assert result.records[1].message.startswith("OSError: no such disk (test_compare.py, line ")


def test_a_task_that_reaches_for_a_missing_layer_is_refused_before_any_run(tmp_path: Path) -> None:
    moons = load_task("moons")
    task = Task("t", moons.data, moons.model, "fc", moons.optimizer, epochs=1, batch_size=10)
    with pytest.raises(ValueError, match="head of task"):
        compare(task, ["sgd"], out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def _job(action: str) -> str:
    import os
    import signal

    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise ValueError("bad job")
    return action


def test_a_worker_that_dies_is_replaced_and_its_job_tried_once_more() -> None:
    jobs: list[tuple[Any, ...]] = [("a",), ("die",), ("raise",), ("b",), ("c",)]
    ended = {index: (result, error) for index, result, error in run_jobs(_job, jobs, 2)}
    assert ended[0] == ("a", "")
    assert ended[1] == (None, "its process ended with exit code -9")
    assert ended[2] == (None, "ValueError: bad job")
    assert ended[3] == ("b", "")
    assert ended[4] == ("c", "")


def test_a_store_keeps_the_first_record_of_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.sqlite")
    first = Record("t", "sam", 0, "ok", {"test_accuracy": 1.5}, [{"gradients": 1}], 1, 2, 0.5, 10)
    store.add(first)
    store.add(Record("t", "sam", 0, "failed"))
    assert store.load() == {("sam", 0): first}
    store.close()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"out": tmp_path, "seeds": 1, "epochs": 1}
    compare("moons", ["sgd"], **arguments)
    (tmp_path / "study.sqlite").write_text("not a database, " * 100)
    with pytest.raises(ValueError, match=r"study.sqlite' is damaged \(file is not a database\)"):
        compare("moons", ["sgd"], resume=True, **arguments)
    for text in ("[]", "{}", "no json"):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(ValueError, match="there is no study"):
            compare("moons", ["sgd"], resume=True, **arguments)


def test_a_users_own_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("mine")
    with pytest.raises(ValueError, match=r"holds a study \(results.csv\)"):
        compare("moons", ["sgd"], seeds=1, epochs=1, out=tmp_path)
    assert (tmp_path / "results.csv").read_text() == "mine"


def test_two_studies_in_one_folder_are_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"seeds": 2, "epochs": 1, "out": tmp_path}

    def second(record: Record, total: int) -> None:
        with pytest.raises(ValueError, match="another study is running"):
            compare("moons", ["sgd"], overwrite=True, **arguments)

    assert len(compare("moons", ["sgd"], progress=second, **arguments).records) == 2


def test_failed_runs_are_tried_again_on_resuming(tmp_path: Path) -> None:
    file, flag = tmp_path / "task.py", tmp_path / "broken"
    file.write_text(
        "from pathlib import Path\nfrom dataclasses import replace\nfrom flatmin.study import load_task\n"
        "moons = load_task('moons')\n"
        f"def data(seed):\n    if seed == 1 and Path({str(flag)!r}).exists(): raise OSError('no space')\n"
        "    return moons.data(seed)\ntask = replace(moons, name='mine', data=data)\n"
    )
    flag.touch()
    arguments: dict[str, Any] = {"seeds": 2, "epochs": 1, "out": tmp_path / "s"}
    first = compare(f"{file}:task", ["sgd", "ema"], **arguments)
    assert [r.status for r in first.records] == ["ok", "failed", "ok", "failed"]
    flag.unlink()
    again = compare(f"{file}:task", ["sgd"], resume=True, **arguments)
    assert [(r.method, r.status) for r in again.records] == [("sgd", "ok")] * 2 + [("ema", "ok")] * 2


def test_a_task_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    text = "from dataclasses import replace\nfrom flatmin.study import load_task\ntask = replace(load_task('moons'))\n"
    file.write_text(text)

    def edit(record: Record, total: int) -> None:
        file.write_text(text + "# edited\n")

    arguments: dict[str, Any] = {"seeds": 2, "epochs": 1, "out": tmp_path / "s"}
    result = compare(f"{file}:task", ["sgd", "ema"], progress=edit, **arguments)
    assert [r.status for r in result.records] == ["ok"] * 4  # read once
    with pytest.raises(ValueError, match="has task_file"):
        compare(f"{file}:task", ["sgd"], resume=True, **arguments)
    with pytest.raises(ValueError, match="needs task by name"):
        compare(load_task("moons"), ["sgd"], resume=True, **arguments)


def test_a_task_that_always_gives_the_same_model_is_refused() -> None:
    model = TASKS["moons"].model()
    with pytest.raises(ValueError, match="model must make a new model at every call"):
        compare(dataclasses.replace(TASKS["moons"], model=lambda: model), ["sgd"], seeds=1)


def test_a_task_with_wrong_labels_is_refused_before_any_run() -> None:
    moons = TASKS["moons"]

    def data(seed: int) -> Any:
        made = moons.data(seed)
        return dataclasses.replace(made, train=(made.train[0], made.train[1].float()))

    with pytest.raises(ValueError, match=r"task 'moons' does not work: RuntimeError: .*\(.*, line \d+\)"):
        compare(dataclasses.replace(moons, data=data), ["sgd"], seeds=1)
    empty = dataclasses.replace(moons, data=lambda seed: dataclasses.replace(moons.data(seed), validation=([], [])))
    with pytest.raises(ValueError, match="data must have samples to validation"):
        compare(empty, ["sgd"], seeds=1)


@pytest.mark.parametrize("guard", [True, False])
def test_a_script_needs_its_guard(guard: bool, tmp_path: Path) -> None:
    call = f"compare('moons', ['sgd'], seeds=2, epochs=1, jobs=2, out={str(tmp_path / 's')!r}, overwrite=True)"
    script = tmp_path / "script.py"
    script.write_text(
        "from flatmin.study import compare\n" + (f"if __name__ == '__main__':\n    {call}\n" if guard else call)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (0 if guard else 1)
    if not guard:
        assert "a script that uses jobs > 1 must call compare under" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("RuntimeError: a worker process did not start")
