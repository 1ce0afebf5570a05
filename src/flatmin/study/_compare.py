"""The comparison: every method on every seed, stored as they finish, and what comes out."""

from __future__ import annotations

import contextlib
import json
import pickle
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from flatmin import _check
from flatmin._grammar import parse_method
from flatmin._version import __version__
from flatmin.study._files import write_atomic
from flatmin.study._pool import run_jobs
from flatmin.study._record import Record
from flatmin.study._result import StudyResult
from flatmin.study._store import Store
from flatmin.study._task import Task, fingerprint, load_task
from flatmin.study._train import Budget, run

BUDGETS = ("epochs", "gradients")
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
        resume: go on with the study in ``out``; methods and seeds may have been added.
        overwrite: replace a study in ``out``.
        progress: called with each record as it finishes, and the number of runs in all.

    Returns:
        The result, with ``.table()``, ``.to_pandas()``, ``.to_html(path)``.

    Raises:
        ValueError, TypeError: for an argument outside what is allowed, naming it. Nothing is written then.

    Example:
        >>> from flatmin.study import compare
        >>> result = compare("moons", ["sgd", "sam(rho=0.1)"], seeds=2, epochs=1)
        >>> len(result.records)
        4
    """
    study = Study(task, methods, seeds, budget=budget, epochs=epochs, out=out, jobs=jobs)
    study.prepare(resume=resume, overwrite=overwrite)
    return study.run(progress)


class Study:
    """A comparison in three parts: its arguments checked, its folder prepared, its runs done."""

    def __init__(
        self,
        task: Task | str,
        methods: Sequence[str],
        seeds: int | Iterable[int],
        *,
        budget: str,
        epochs: int | None,
        out: str | Path | None,
        jobs: int,
    ) -> None:
        self.reference = task if isinstance(task, str) else None
        self.task = task if isinstance(task, Task) else load_task(task)
        if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
            raise TypeError(f"methods must be a non-empty list of method strings, got {_check.show(methods)}")
        self.recipes = [parse_method(text) for text in methods]
        names = [str(recipe) for recipe in self.recipes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"methods must differ, got {name!r} twice")
        self.seeds = _seeds(seeds)
        _check.choice("budget", budget, BUDGETS)
        if epochs is not None:
            _check.integer("epochs", epochs, low=1)
        self.budget = Budget(budget, epochs or self.task.epochs)
        self.jobs = _check.integer("jobs", jobs, low=1)
        self.folder = None if out is None else Path(out)
        self._check_task()
        if self.jobs > 1 and self.reference is None:
            self._check_picklable()

    def _check_task(self) -> None:
        """Build the task's parts once, so that a mistake in it is found before anything runs."""
        with torch.random.fork_rng():
            model = self.task.model()
            self.task.head_of(model)
            base = self.task.optimizer(model.parameters())
        for part in (part for recipe in self.recipes for part in recipe.parts):
            if part.label == "sgd" and not isinstance(base, torch.optim.SGD):
                raise ValueError(
                    f"method 'sgd' is not true of task {self.task.name!r}, whose base optimizer is "
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

    def settings(self) -> dict[str, Any]:
        """What study.json says."""
        return {
            "task": self.task.name,
            "task_file": fingerprint(self.reference) if self.reference else "",
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

    def prepare(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make the folder ready, or say why it cannot be; nothing is changed then."""
        if resume and overwrite:
            raise ValueError("resume and overwrite exclude each other: give one of them")
        if self.folder is None:
            if resume or overwrite:
                raise ValueError(f"{'resume' if resume else 'overwrite'} needs out, the folder of the study")
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"out must be a folder, got the file {str(self.folder)!r}")
        there = (self.folder / "study.sqlite").exists()
        if resume:
            self._check_same()
        elif there and not overwrite:
            raise ValueError(
                f"out: {str(self.folder)!r} holds a study; go on with it by resume, or replace it by overwrite"
            )
        elif there:
            for name in OUTPUTS:
                (self.folder / name).unlink(missing_ok=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out: cannot make the folder {str(self.folder)!r} ({error.strerror})") from None

    def _check_same(self) -> None:
        assert self.folder is not None
        try:
            before = json.loads((self.folder / "study.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ValueError(f"resume: there is no study in {str(self.folder)!r}") from None
        now = self.settings()
        for key in ("task", "task_file", "budget", "epochs", "batch_size", "versions"):
            if before.get(key) != now[key]:
                raise ValueError(
                    f"resume: the study in {str(self.folder)!r} has {key} {before.get(key)!r}, not {now[key]!r}; "
                    "its runs would not be comparable: choose another out, or overwrite"
                )

    def run(self, progress: Progress | None = None) -> StudyResult:
        """Do the runs that are missing, keep each as it ends, and write the outputs."""
        with contextlib.ExitStack() as stack:
            store = None
            if self.folder is not None:
                write_atomic(self.folder / "study.json", json.dumps(self.settings(), indent=2) + "\n")
                store = stack.enter_context(contextlib.closing(Store(self.folder / "study.sqlite")))
            records = {} if store is None else store.load()
            wanted = [(str(recipe), seed) for recipe in self.recipes for seed in self.seeds]
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
            result = StudyResult(tuple(records[key] for key in wanted), self.settings())
            if self.folder is not None:
                _write(self.folder, result)
        return result

    def _execute(self, missing: list[tuple[str, int]]) -> Iterator[Record]:
        if self.jobs == 1:
            for method, seed in missing:
                try:
                    yield _run_one(None, self.task, method, seed, self.budget)
                except Exception as error:
                    yield self._failed(method, seed, f"{type(error).__name__}: {error}")
            return
        carried = None if self.reference else self.task
        work = [(self.reference, carried, method, seed, self.budget) for method, seed in missing]
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
        return chosen
    return list(range(_check.integer("seeds", seeds, low=1, high=10_000)))


def _run_one(reference: str | None, task: Task | None, method: str, seed: int, budget: Budget) -> Record:
    return run(task or load_task(str(reference)), parse_method(method), seed, budget)


def _write(folder: Path, result: StudyResult) -> None:
    write_atomic(folder / "study.json", json.dumps(result.settings, indent=2) + "\n")
    write_atomic(folder / "results.csv", result.results_csv())
    write_atomic(folder / "costs.csv", result.costs_csv())
    result.to_html(folder / "report.html")
