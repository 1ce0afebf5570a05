"""The command line: arguments in, library calls, one clear line for bad input."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from flatmin._grammar import ALIASES, split_methods
from flatmin._registry import methods as registered
from flatmin._version import __version__
from flatmin.study import Record, StudyResult
from flatmin.study._compare import BUDGETS, DEFAULT_METHODS, DEFAULT_SEEDS, DEFAULT_TASK, Study
from flatmin.study._tasks import TASKS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train networks into flat minima, and find out honestly whether it helped.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: something outside went wrong (a full disk). 2: bad input, one line on standard error.
    130: interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        status = app(list(sys.argv[1:] if arguments is None else arguments), prog_name="flatmin", standalone_mode=False)
    except _BadInputError as error:
        return _complain(str(error), 2)
    except (OSError, sqlite3.Error) as error:
        return _complain(f"{error}; what had finished is kept, go on with --resume", 1)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        # typer's usage errors: its exception classes are not public in every version it supports.
        if hasattr(error, "format_message") and getattr(error, "exit_code", None) == 2:
            return _complain(error.format_message() or "no command given, see flatmin --help", 2)
        raise
    if status == 130:  # what typer makes of Ctrl-C
        return _complain("interrupted; what had finished is kept, go on with --resume", 130)
    return int(status or 0)


class _BadInputError(Exception):
    pass


def _complain(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _version(show: bool) -> None:
    if show:
        print(f"flatmin {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def compare(
    task: Annotated[
        str | None,
        typer.Option(help=f"A task's name ({', '.join(TASKS)}), or file.py:attribute.", show_default=DEFAULT_TASK),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated method strings; the others are compared to the first.",
            show_default=",".join(DEFAULT_METHODS),
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many: 0, 1, ...", show_default=str(DEFAULT_SEEDS))] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="What is equal for all methods: epochs, or gradients (gradient evaluations).", show_default=BUDGETS[0]
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", show_default="the task's own")] = None,
    out: Annotated[str, typer.Option(help="Folder for the runs, the report and the tables.")] = "study",
    jobs: Annotated[int | None, typer.Option(help="Processes.", show_default="as many as cores")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the study in --out; what is not given is as it was there.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a study in --out.")] = False,
) -> None:
    """Compare methods on a task, paired by seed."""
    with contextlib.ExitStack() as stack:
        try:
            study = stack.enter_context(
                Study(
                    task,
                    None if methods is None else split_methods(methods),
                    seeds,
                    budget=budget,
                    epochs=epochs,
                    out=out,
                    jobs=_cores() if jobs is None else jobs,
                    resume=resume,
                    overwrite=overwrite,
                )
            )
        except (ValueError, TypeError, ModuleNotFoundError) as error:
            raise _BadInputError(str(error)) from error
        result = _run(study)
    console = Console(emoji=False)
    for table in result.tables(console.width):
        console.print(table)
        console.print()
    for line in (result.caption(), result.footnote()):
        if line:
            console.print(line, markup=False, highlight=False)
    console.print(f"Written to {out}: report.html, results.csv, costs.csv, study.json", markup=False, highlight=False)
    failed = [record for record in result.records if record.status == "failed"]
    if failed:
        _complain(f"{len(failed)} of {len(result.records)} runs failed, the first: {failed[0].message}", 1)
        raise typer.Exit(1)


@app.command("methods")
def list_methods() -> None:
    """List the methods: place, cost, memory, options and source."""
    table = Table(box=None, pad_edge=False)
    for column in ("method", "place", "gradients a step", "extra memory", "options", "what", "source"):
        table.add_column(column, overflow="fold")
    aliases = {base: alias for alias, base in ALIASES.items()}
    for name, method in registered().items():
        label = f"{name} ({aliases[name]})" if name in aliases else name
        cost = f"+{method.cost({}):g}" if method.place in ("penalty", "average") else f"{method.cost({}) or 1:g}"
        memory = f"{method.copies:g} x weights" if method.copies else "none"
        options = ", ".join(f"{key}={str(value).lower()}" for key, value in method.options.items())
        table.add_row(label, method.place, cost, memory, options, method.summary, method.source)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table, highlight=False, markup=False)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _run(study: Study) -> StudyResult:
    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    columns += [TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("runs", total=None)

        def progress(record: Record, total: int) -> None:
            bar.update(shown, advance=1, total=total)
            if record.status != "ok":
                bar.console.print(
                    f"{record.method}, seed {record.seed}: {record.status}: {record.message}", markup=False
                )

        return study.run(progress)
