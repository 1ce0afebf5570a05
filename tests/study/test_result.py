from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from flatmin.study._record import METRICS, Record, Status
from flatmin.study._result import COLUMNS, StudyResult, cells

#: Read by one of rich, HTML, JavaScript, CSV, plotly, number parsers and the report's own colours.
NASTY = (
    "sgd",
    "[bold]sam[/bold](rho=[0.1,0.2])",
    '</script><script>throw "x"</script>',
    "<b>ema</b>&amp;",
    "var(--ink)",
    "1e3",
    'sam+"sema",every=50',
    ":smile: $x$ %{y} {{ 7 * 7 }}",
)


def run(method: str, seed: int, status: Status = "ok", *, accuracy: float = 90.0, cost: int = 1) -> Record:
    if status != "ok":
        return Record("mnist1d", method, seed, status, message="loss is nan")
    metrics = dict.fromkeys(METRICS, 0.25) | {"test_accuracy": accuracy, "gap": 99.0 - accuracy}
    history = [{"gradients": 50.0 * cost * (e + 1), "validation_accuracy": accuracy - 20 / (e + 1)} for e in range(4)]
    return Record("mnist1d", method, seed, "ok", metrics, history, 200, 200 * cost, 1.5 * cost + seed / 7, 1000 * cost)


def study(
    *records: Record, methods: tuple[str, ...] = ("sgd", "sam"), seeds: int = 3, budget: str = "epochs"
) -> StudyResult:
    settings = {
        "task": "mnist1d",
        "methods": list(methods),
        "seeds": list(range(seeds)),
        "budget": budget,
        "versions": {"torch": "2.6.0"},
    }
    return StudyResult(records, settings)


def complete(methods: tuple[str, ...] = ("sgd", "sam"), seeds: int = 3) -> StudyResult:
    records = [
        run(method, seed, accuracy=90 + place + seed / 3 + (seed * place) % 4 / 10, cost=1 + place % 2)
        for place, method in enumerate(methods)
        for seed in range(seeds)
    ]
    return study(*records, methods=methods, seeds=seeds)


def test_records_are_put_in_order() -> None:
    result = study(run("sam", 1), run("sgd", 2), run("sam", 0), run("sgd", 0))
    assert [(r.method, r.seed) for r in result.records] == [("sgd", 0), ("sgd", 2), ("sam", 0), ("sam", 1)]


def test_records_of_another_study_are_refused() -> None:
    with pytest.raises(ValueError, match=r"records must be of the study's methods \('sgd', 'sam'\), got .*'ema'"):
        study(run("ema", 0))
    with pytest.raises(ValueError, match=r"records must hold a run once, got 'sgd' with seed 0 twice"):
        study(run("sgd", 0), run("sgd", 0))


def test_summary() -> None:
    records = [run("sgd", seed, accuracy=90 + seed) for seed in range(3)]
    records += [run("sam", 0, accuracy=92, cost=2), run("sam", 1, "diverged"), run("sam", 2, accuracy=93, cost=2)]
    sgd, sam = study(*records).summary()
    assert (sgd.accuracy.mean, sgd.accuracy.error) == (91.0, pytest.approx(1 / math.sqrt(3)))
    assert (sgd.comparison, sgd.time_ratio, sgd.memory_ratio) == (None, 1.0, 1.0)
    assert (sam.n_ok, sam.n_diverged, sam.n_failed) == (2, 1, 0)
    assert sam.comparison is not None
    assert (sam.comparison.n, sam.comparison.mean_difference) == (2, 1.5)
    assert sam.gradients == 400
    assert sam.time_ratio == pytest.approx((6 + 2 / 7) / (3 + 2 / 7))
    assert sam.memory_ratio == 2.0


def test_text_names_budget_reference_and_seeds() -> None:
    text = str(complete())
    for part in ("equal epochs", "minus that of sgd", "3 seeds", "adjusted over 1 comparison.", "±", "reference"):
        assert part in text
    assert "left out" not in text
    evaluations = study(run("sgd", 0), budget="gradients", methods=("sgd",), seeds=1)
    assert "equal gradient evaluations, 1 seed;" in str(evaluations)


def test_text_fits_a_terminal() -> None:
    long = "sam(rho=0.05)+sema(decay=0.99,every=50)"
    lines = str(complete(("sgd", "sam", long))).splitlines()
    assert max(map(len, lines)) <= 140
    assert all(name in lines[0] for name in COLUMNS)
    assert long in "".join(line[: lines[0].index("runs")].strip() for line in lines[2:])
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [132, 160])
def test_table_keeps_a_row_on_a_line(width: int) -> None:
    result = complete()
    shown = printed(result, width)
    for row in result.summary():
        assert all(cell in shown for cell in cells(row))


def test_every_mean_has_its_standard_error() -> None:
    row = dict(zip(COLUMNS, cells(complete().summary()[1]), strict=True))
    for name in ("accuracy %", "NLL", "ECE %", "gap"):
        assert " ± " in row[name]


def test_table_in_a_narrow_terminal_cuts_nothing() -> None:
    result = complete(("sgd", "sam(rho=0.05)+sema(decay=0.99,every=50)"))
    wide, narrow = ("".join(sorted(printed(result, width))) for width in (160, 70))
    assert {c: wide.count(c) for c in "0123456789"} == {c: narrow.count(c) for c in "0123456789"}
    assert "…" not in narrow


def printed(result: StudyResult, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(result.table())
    return file.getvalue()


def test_one_seed_has_no_interval() -> None:
    result = study(run("sgd", 0), run("sam", 0, accuracy=91), seeds=1)
    row = dict(zip(COLUMNS, cells(result.summary()[1]), strict=True))
    assert row["accuracy %"] == "91.00"
    assert row["difference [95 %]"] == "+1.00 [–]"  # noqa: RUF001
    assert row["Holm p"] == "–"  # noqa: RUF001
    assert "an interval and a test need two seeds" in " ".join(str(result).split())
    assert "nan" not in str(result)


@pytest.mark.parametrize("lost", ["sgd", "sam"])
def test_a_method_that_always_diverges_is_shown(lost: str) -> None:
    kept = "sam" if lost == "sgd" else "sgd"
    result = study(run(lost, 0, "diverged"), run(lost, 1, "diverged"), run(lost, 2, "failed"), run(kept, 0))
    text = str(result)
    assert f"Counted under runs but left out of the means: {lost} (2 diverged, 1 failed)." in text
    assert f"Not run yet: {kept} (2)." in text
    assert "0/3" in text
    assert "nan" not in text


def test_nothing_ran() -> None:
    result = study()
    assert "Not run yet: sgd (3), sam (3)." in str(result)
    assert result.results_csv().count("\n") == 1


def test_missing_metrics_are_unknown() -> None:
    result = study(Record("mnist1d", "sgd", 0, "ok"), run("sam", 0))
    assert cells(result.summary()[0])[2:6] == ("–",) * 4  # noqa: RUF001
    assert math.isnan(result.to_pandas()["test_accuracy"][0])


def test_names_are_not_read_as_markup() -> None:
    text = str(complete(NASTY)).replace("\n", "")
    assert "[bold]" in text
    assert ":smile:" in text
    html = complete(NASTY)._repr_html_()
    assert "<script>" not in html
    assert "&lt;b&gt;ema&lt;/b&gt;&amp;amp;" in html


def test_results_csv_gives_back_every_bit() -> None:
    result = complete(NASTY)
    text = result.results_csv()
    assert "\r" not in text
    assert text.splitlines()[0].split(",") == ["task", "method", "seed", "status", *METRICS, "steps", "gradients"]
    assert "seconds" not in text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["method"] for row in rows] == [record.method for record in result.records]
    for name in METRICS:
        assert [float(row[name]) for row in rows] == [record.metrics[name] for record in result.records]
    assert text == StudyResult(result.records[::-1], result.settings).results_csv()


def test_costs_csv() -> None:
    result = complete()
    rows = list(csv.DictReader(io.StringIO(result.costs_csv())))
    assert list(rows[0]) == ["method", "seed", "seconds", "peak_bytes"]
    assert [float(row["seconds"]) for row in rows] == [record.seconds for record in result.records]


def test_repr_is_short() -> None:
    assert repr(complete()) == "StudyResult(task='mnist1d', methods=['sgd', 'sam'], runs=6)"


def test_to_html_replaces_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("before")
    result = complete()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="no space left"):
            result.to_html(target)
    assert target.read_text() == "before"
    result.to_html(str(target))
    assert target.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [target]
