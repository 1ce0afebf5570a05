"""The comparison: every method on every seed, stored as they finish, and what comes out."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pickle
import platform
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch

from flatmin import _check
from flatmin._extras import need
from flatmin._grammar import parse_method
from flatmin._version import __version__
from flatmin.study._files import write_atomic
from flatmin.study._pool import run_jobs
from flatmin.study._record import Record
from flatmin.study._result import StudyResult
from flatmin.study._store import Store
from flatmin.study._task import Task, TaskError, describe, fingerprint, load_task
from flatmin.study._train import Budget, run

BUDGETS = ("epochs", "gradients")
DEFAULT_TASK, DEFAULT_SEEDS = "mnist1d", 5
DEFAULT_METHODS = ["base", "sam", "asam", "ad", "ema", "sema", "sam+sema"]
OUTPUTS = ("study.sqlite", "study.json", "results.csv", "costs.csv", "report.html")

#: Called with every record as it finishes and the number of runs in all.
Progress = Callable[[Record, int], None]


def compare(
    task: Task | str,
    methods: Sequence[str],
    seeds: int | Iterable[int] = 5,
    *,
    budget: str = "epochs",
    epochs: int | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> StudyResult:
    """Train every method on every seed of a task and compare them, paired by seed.

    The same seed gives every method the same split, initial weights, batch order and augmentation.

    Args:
        task: a :class:`Task`, the name of a built-in one, or ``"file.py:attribute"``.
        methods: method strings; the first is the one that the others are compared to.
        seeds: how many (0, 1, ...) or which.
        budget: ``"epochs"``: equal epochs. ``"gradients"``: equal gradient evaluations, as many as the base
            optimizer takes in ``epochs``; a method that takes two a step gets half of the steps.
        epochs: instead of the task's own number.
        out: folder for the store, the report and the tables; nothing is written without it.
        jobs: worker processes; 1 runs in this process. More need a task by name or one that can be pickled,
            and, in a script, the usual ``if __name__ == "__main__":``.
        resume: go on with the study in ``out``. Methods and seeds may be added; its own stay. Runs that had
            failed are tried again. It needs a task by name.
        overwrite: replace a study in ``out``.
        progress: called with each record as it finishes, and the number of runs in all.

    Returns:
        The result, with ``.table()``, ``.to_pandas()``, ``.to_html(path)``.

    Raises:
        ValueError, TypeError: for an argument outside what is allowed, naming it. Nothing is written then.
        RuntimeError: for a script without the guard that ``jobs`` needs.

    Example:
        >>> from flatmin.study import compare
        >>> result = compare("moons", ["sgd", "sam(rho=0.1)"], seeds=2, epochs=1)
        >>> len(result.records)
        4
    """
    with Study(
        task, methods, seeds, budget=budget, epochs=epochs, out=out, jobs=jobs, resume=resume, overwrite=overwrite
    ) as study:
        return study.run(progress)


class Study:
    """A comparison: its arguments checked and its folder locked on entry, its runs done by :meth:`run`.

    What is ``None`` comes from the study that is resumed, or is the default.
    """

    def __init__(
        self,
        task: Task | str | None,
        methods: Sequence[str] | None,
        seeds: int | Iterable[int] | None,
        *,
        budget: str | None,
        epochs: int | None,
        out: str | Path | None,
        jobs: int,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A worker process imports the script it was started from; running the study again there would
            # replace the study that it is to serve.
            raise RuntimeError("a script that uses jobs > 1 must call compare under 'if __name__ == \"__main__\":'")
        need("torchmetrics", "study")
        _check.boolean("resume", resume)
        _check.boolean("overwrite", overwrite)
        if resume and overwrite:
            raise ValueError("resume and overwrite exclude each other: give one of them")
        if (resume or overwrite) and out is None:
            raise ValueError(f"{'resume' if resume else 'overwrite'} needs out, the folder of the study")
        if out is not None and not str(out).strip():
            raise ValueError("out must name a folder, got an empty name")
        self.folder = None if out is None else Path(out)
        self.resume, self.overwrite = resume, overwrite
        self.jobs = _check.integer("jobs", jobs, low=1, high=1024)
        before = self._read() if resume else {}
        task = task if task is not None else before.get("reference", DEFAULT_TASK)
        self.reference = task if isinstance(task, str) else ""
        if resume and not self.reference:
            raise ValueError(
                "resume needs task by name or as 'file.py:attribute': whether a Task object is the one that the study "
                "began with cannot be told"
            )
        self.task = task if isinstance(task, Task) else load_task(task)
        methods = methods if methods is not None else before.get("methods", DEFAULT_METHODS)
        if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
            raise TypeError(f"methods must be a non-empty list of method strings, got {_check.show(methods)}")
        self.recipes = [parse_method(text) for text in methods]
        self._check_methods()
        self.seeds = _seeds(seeds if seeds is not None else before.get("seeds", DEFAULT_SEEDS))
        kind = _check.choice("budget", budget if budget is not None else before.get("budget", BUDGETS[0]), BUDGETS)
        epochs = epochs if epochs is not None else before.get("epochs", self.task.epochs)
        self.budget = Budget(kind, _check.integer("epochs", epochs, low=1))
        self.digest = fingerprint(self.reference)
        if resume:
            self._check_same(before)
            # What the study has stays in it, whatever this call asks for: first its methods, then new ones.
            names = [*before["methods"], *map(str, self.recipes)]
            self.recipes = [parse_method(name) for name in dict.fromkeys(names)]
            self.seeds = sorted({*before["seeds"], *self.seeds})
        self._check_task()
        if self.jobs > 1 and not self.reference:
            self._check_picklable()
        self._check_folder()
        self.settings = self._settings()
        self._lock: Any = None
        self._peaks: dict[str, int] = {}

    def _check_methods(self) -> None:
        names = [str(recipe) for recipe in self.recipes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"methods must differ, got {name!r} twice")
        if {"base", "sgd"} <= set(names):
            raise ValueError("methods must differ, got 'base' and 'sgd', two names of one method")

    def _check_task(self) -> None:
        """Use the task's parts once, so that a mistake in it is found before anything runs."""
        task = self.task
        with torch.random.fork_rng():
            try:
                torch.manual_seed(0)
                data = task.data(self.seeds[0])
                model, other = task.model(), task.model()
                head = task.head_of(model)
                base = task.optimizer(model.parameters())
                x, y = data.train
                loss = task.loss(model.eval()(x[:2]), y[:2])
            except TaskError:
                raise
            except (Exception, SystemExit) as error:
                raise ValueError(f"task {task.name!r} does not work: {describe(error)}") from error
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            raise ValueError(f"task {task.name!r}: loss must give a 0-dim tensor, got {_check.show(loss)}")
        if {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}:
            raise ValueError(
                f"task {task.name!r}: model must make a new model at every call, got the same weights twice"
            )
        for name in ("train", "validation", "test"):
            if len(getattr(data, name)[1]) == 0:
                raise ValueError(f"task {task.name!r}: data must have samples to {name}, got none")
        del head
        for part in (part for recipe in self.recipes for part in recipe.parts):
            if part.label == "sgd" and not isinstance(base, torch.optim.SGD):
                raise ValueError(
                    f"method 'sgd' is not true of task {task.name!r}, whose base optimizer is "
                    f"{type(base).__name__}: write 'base'"
                )

    def _check_picklable(self) -> None:
        try:
            pickle.dumps(self.task)
        except Exception as error:
            raise ValueError(
                f"jobs must be 1 for a task that cannot be pickled ({_check.show(error)}); name it "
                "'file.py:attribute' to use more processes"
            ) from None

    def _settings(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "reference": self.reference,
            "task_file": self.digest,
            "methods": [str(recipe) for recipe in self.recipes],
            "seeds": self.seeds,
            "budget": self.budget.kind,
            "epochs": self.budget.epochs,
            "batch_size": self.task.batch_size,
            "versions": {
                "flatmin": __version__,
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
        }

    # --- the folder --------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """The settings of the study that is to be resumed."""
        assert self.folder is not None
        try:
            before = json.loads((self.folder / "study.json").read_text(encoding="utf-8"))
            complete = {"task", "reference", "task_file", "methods", "seeds", "budget", "epochs", "versions"}
            if not isinstance(before, dict) or not complete <= before.keys():
                raise ValueError("incomplete")
        except (OSError, ValueError):
            raise ValueError(f"resume: there is no study in {str(self.folder)!r}") from None
        return before

    def _check_same(self, before: dict[str, Any]) -> None:
        now = self._settings()
        for key in ("task", "task_file", "budget", "epochs", "batch_size", "versions"):
            if before.get(key) != now[key]:
                raise ValueError(
                    f"resume: the study in {str(self.folder)!r} has {key} {before.get(key)!r}, not {now[key]!r}; "
                    "its runs would not be comparable: choose another out, or overwrite"
                )

    def _check_folder(self) -> None:
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"out must be a folder, got the file {str(self.folder)!r}")
        there = [name for name in OUTPUTS if (self.folder / name).exists()]
        if there and not (self.resume or self.overwrite):
            raise ValueError(
                f"out: {str(self.folder)!r} holds a study ({', '.join(there)}); go on with it by resume, or replace it "
                "by overwrite"
            )

    def __enter__(self) -> Study:
        """Make the folder and lock it, so that no two studies write to it."""
        if self.folder is None:
            return self
        filelock = need("filelock", "study")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.folder / ".lock")
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"out: another study is running in {str(self.folder)!r}") from None
        except OSError as error:
            raise ValueError(f"out: cannot write to {str(self.folder)!r} ({error.strerror})") from None
        if self.resume:
            try:
                Store(self.folder / "study.sqlite").close()
            except sqlite3.DatabaseError as error:
                self._lock.release()
                raise ValueError(f"resume: {str(self.folder / 'study.sqlite')!r} is damaged ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def _open(self) -> Store:
        assert self.folder is not None
        if not self.resume:
            for name in OUTPUTS:
                (self.folder / name).unlink(missing_ok=True)
        for left in self.folder.glob(".*.tmp"):  # by a study that was killed while it wrote
            left.unlink(missing_ok=True)
        write_atomic(self.folder / "study.json", json.dumps(self.settings, indent=2) + "\n")
        return Store(self.folder / "study.sqlite")

    # --- the runs ----------------------------------------------------------------------------------

    def run(self, progress: Progress | None = None) -> StudyResult:
        """Do the runs that are missing, keep each as it ends, and write the outputs."""
        with contextlib.ExitStack() as stack:
            store = None
            if self.folder is not None:
                store = stack.enter_context(contextlib.closing(self._open()))
            stored = {} if store is None else store.load()
            wanted = [(str(recipe), seed) for recipe in self.recipes for seed in self.seeds]
            records = {key: stored[key] for key in wanted if key in stored and stored[key].status != "failed"}
            # Seed by seed, so that an interrupted study has whole pairs.
            missing = [key for key in wanted if key not in records]
            missing.sort(key=lambda key: self.seeds.index(key[1]))
            if progress is not None:
                for key in wanted:
                    if key in records:
                        progress(records[key], len(wanted))
            for record in self._execute(missing):
                if store is not None:
                    store.add(record)
                records[record.method, record.seed] = record
                if progress is not None:
                    progress(record, len(wanted))
            result = StudyResult(tuple(records[key] for key in wanted), self.settings)
            if self.folder is not None:
                _write(self.folder, result)
        return result

    def _execute(self, missing: list[tuple[str, int]]) -> Iterator[Record]:
        if self.jobs == 1:
            for method, seed in missing:
                try:
                    yield run(self.task, parse_method(method), seed, self.budget, self._peaks)
                except Exception as error:
                    yield self._failed(method, seed, describe(error))
            return
        carried = None if self.reference else self.task
        work = [(self.reference, self.digest, carried, method, seed, self.budget) for method, seed in missing]
        with contextlib.closing(run_jobs(_run_one, work, self.jobs)) as ended:
            for index, record, message in ended:
                yield record if record is not None else self._failed(*missing[index], message)

    def _failed(self, method: str, seed: int, message: str) -> Record:
        return Record(self.task.name, method, seed, "failed", message=message)


def _seeds(seeds: int | Iterable[int]) -> list[int]:
    if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes)):
        chosen = [_check.integer("seeds", seed, low=0, high=2**31) for seed in seeds]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"seeds must be distinct integers, at least one, got {_check.show(chosen)}")
        return sorted(chosen)
    return list(range(_check.integer("seeds", seeds, low=1, high=10_000)))


@lru_cache(maxsize=1)
def _workers_task(reference: str, digest: str) -> tuple[Task, dict[str, int]]:
    """The task of the study that this worker process serves, read once; and what its methods' memory peaks are."""
    task = load_task(reference)
    if fingerprint(reference) != digest:
        raise RuntimeError(f"the file of task {reference!r} was changed while the study ran")
    return task, {}


def _run_one(reference: str, digest: str, task: Task | None, method: str, seed: int, budget: Budget) -> Record:
    peaks: dict[str, int] = {}
    if task is None:
        task, peaks = _workers_task(reference, digest)
    return run(task, parse_method(method), seed, budget, peaks)


def _write(folder: Path, result: StudyResult) -> None:
    write_atomic(folder / "results.csv", result.results_csv())
    write_atomic(folder / "costs.csv", result.costs_csv())
    result.to_html(folder / "report.html")
