"""What a study found: its runs, their summary by method, and the ways to show and keep them."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatmin.study._files import write_atomic
from flatmin.study._record import METRICS, Record
from flatmin.study._statistics import Comparison, Estimate, MethodSummary, metric, summarise

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

#: Shown where a number is not known.
UNKNOWN = "–"  # noqa: RUF001

#: The columns of the table in the terminal and in the report.
COLUMNS = (
    "method",
    "runs",
    "accuracy %",
    "NLL",
    "ECE %",
    "gap",
    "difference [95 %]",
    "Holm p",
    "gradients",
    "time x",
    "memory x",
)

#: Characters that the whole table needs for one line a row.
_WHOLE = 132


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The runs of a study in order of method and seed, and the settings that they were made with.

    Args:
        records: One record a run.
        settings: The content of study.json: at least ``task``, ``methods`` (the first is the reference),
            ``seeds``, ``budget`` (``"epochs"`` or ``"gradients"``) and ``versions``.
    """

    records: tuple[Record, ...]
    settings: dict[str, Any]  # JSON; read through the properties below

    def __post_init__(self) -> None:
        place = {method: index for index, method in enumerate(self.methods)}
        seen = set()
        for record in self.records:
            if record.method not in place:
                allowed = ", ".join(repr(method) for method in place)
                raise ValueError(f"records must be of the study's methods ({allowed}), got a run of {record.method!r}")
            if (record.method, record.seed) in seen:
                raise ValueError(f"records must hold a run once, got {record.method!r} with seed {record.seed} twice")
            seen.add((record.method, record.seed))
        ordered = sorted(self.records, key=lambda record: (place[record.method], record.seed))
        object.__setattr__(self, "records", tuple(ordered))

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.settings["task"])

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order asked."""
        return tuple(self.settings["methods"])

    @property
    def reference(self) -> str:
        """The method that the others are compared with."""
        return self.methods[0]

    @property
    def budget(self) -> str:
        """What every run was given the same amount of, in words."""
        return {"epochs": "equal epochs", "gradients": "equal gradient evaluations"}[self.settings["budget"]]

    def summary(self) -> list[MethodSummary]:
        """Return one row a method, in the order of the study."""
        return summarise(self.records, self.methods)

    def table(self, columns: Sequence[str] = COLUMNS) -> Table:
        """Return the summary, or some columns of it, as a table for the terminal."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for name in columns:
            # In a narrow terminal a cell takes a second line; it is never cut.
            table.add_column(name, overflow="fold", justify="left" if name == "method" else "right")
        for row in self.summary():
            # Text and not str: a method such as "sam[rho]" is no markup.
            shown = dict(zip(COLUMNS, cells(row), strict=True))
            table.add_row(*(Text(shown[name]) for name in columns))
        return table

    def tables(self, width: int) -> list[Table]:
        """Return :meth:`table`, or the same in two where ``width`` characters are too few for one."""
        if width >= _WHOLE:
            return [self.table()]
        return [self.table(COLUMNS[:3] + COLUMNS[6:8]), self.table(COLUMNS[:1] + COLUMNS[3:6] + COLUMNS[8:])]

    def caption(self) -> str:
        """What the table shows, in a few words for each column that needs them."""
        parts = [
            f"{self.task}, {self.budget}, {_count(len(self.settings['seeds']), 'seed')}",
            "mean ± standard error",
        ]
        if len(self.methods) > 1:
            compared = [row.comparison for row in self.summary() if row.comparison is not None]
            tested = sum(not math.isnan(comparison.p) for comparison in compared)
            difference = f"difference: accuracy minus that of {self.reference} in points, paired by seed"
            if tested:
                parts += [
                    f"{difference}, with its 95 % t interval",
                    f"Holm p: two-sided paired t-test, adjusted over {_count(tested, 'comparison')}",
                ]
            else:
                parts += [difference, "an interval and a test need two seeds that both methods finished"]
        return "; ".join(parts) + "."

    def footnote(self) -> str:
        """The runs that the means leave out, in a sentence each; empty if there are none."""
        lost, missing = [], []
        for row in self.summary():
            counts = ((row.n_diverged, "diverged"), (row.n_failed, "failed"))
            if any(count for count, _ in counts):
                lost.append(f"{row.method} ({', '.join(f'{n} {word}' for n, word in counts if n)})")
            absent = len(self.settings["seeds"]) - row.n_ok - row.n_diverged - row.n_failed
            if absent > 0:
                missing.append(f"{row.method} ({absent})")
        sentences = []
        if lost:
            sentences.append(f"Counted under runs but left out of the means: {', '.join(lost)}.")
        if missing:
            sentences.append(f"Not run yet: {', '.join(missing)}.")
        return " ".join(sentences)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a run with the deterministic columns; what a run did not measure is NaN."""
        import pandas as pd

        columns = ("task", "method", "seed", "status", *METRICS, "steps", "gradients")
        rows = [
            (
                r.task,
                r.method,
                r.seed,
                r.status,
                *(metric(r, name) for name in METRICS),
                r.steps,
                r.gradients,
            )
            for r in self.records
        ]
        return pd.DataFrame(rows, columns=list(columns))

    def results_csv(self) -> str:
        """Return :meth:`to_pandas` as CSV; the same runs give the same bytes."""
        return str(self.to_pandas().to_csv(index=False, lineterminator="\n"))

    def costs_csv(self) -> str:
        """Return time and memory of each run as CSV; they differ from machine to machine."""
        import pandas as pd

        rows = [(r.method, r.seed, r.seconds, r.peak_bytes) for r in self.records]
        frame = pd.DataFrame(rows, columns=["method", "seed", "seconds", "peak_bytes"])
        return str(frame.to_csv(index=False, lineterminator="\n"))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report, one HTML file that opens without a network."""
        from flatmin.study._report import render

        write_atomic(Path(path), render(self))

    def __repr__(self) -> str:
        return f"StudyResult(task={self.task!r}, methods={list(self.methods)!r}, runs={len(self.records)})"

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        console = Console(file=file, width=140, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(self.table())
        for text in filter(None, (self.caption(), self.footnote())):
            console.print(text, markup=False, highlight=False, emoji=False)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        from flatmin.study._report import render_table

        return render_table(self)


def cells(row: MethodSummary) -> tuple[str, ...]:
    """The row as text, one cell for each of ``COLUMNS``."""
    return (
        row.method,
        f"{row.n_ok}/{row.n_ok + row.n_diverged + row.n_failed}",
        show_estimate(row.accuracy, "z.2f"),
        show_estimate(row.nll, "z.3f"),
        show_estimate(row.ece, "z.2f"),
        show_estimate(row.gap, "z.2f"),
        "reference" if row.comparison is None else show_difference(row.comparison),
        UNKNOWN if row.comparison is None else show_p(row.comparison.p_holm),
        show(row.gradients, ",.0f"),
        show(row.time_ratio, ".2f"),
        show(row.memory_ratio, ".2f"),
    )


def show_estimate(estimate: Estimate, spec: str) -> str:
    """A mean and its standard error as text."""
    mean = show(estimate.mean, spec)
    return mean if math.isnan(estimate.error) else f"{mean} ± {estimate.error:{spec}}"


def show_difference(comparison: Comparison) -> str:
    """The difference and its interval as text."""
    mean = show(comparison.mean_difference, "+z.2f")
    if math.isnan(comparison.low):
        return mean if mean == UNKNOWN else f"{mean} [{UNKNOWN}]"
    return f"{mean} [{comparison.low:+z.2f}, {comparison.high:+z.2f}]"


def show_p(p: float) -> str:
    """A p value as text."""
    return "<0.001" if p < 0.001 else show(p, ".3f")


def show(value: float, spec: str) -> str:
    """A number as text, a dash if it is not known."""
    return UNKNOWN if math.isnan(value) else format(value, spec)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
