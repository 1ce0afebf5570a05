"""A study as one HTML file that opens without a network."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from flatmin.study._result import COLUMNS, cells, show, show_difference
from flatmin.study._statistics import Estimate, MethodSummary, metric

if TYPE_CHECKING:
    from flatmin.study._result import StudyResult

# The reference has the ink to itself. Six colours and seven symbols share no factor, so that 42 other
# methods differ in at least one of them.
_COLORS = tuple(f"var(--method-{index})" for index in range(1, 7))
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
_INK = "var(--ink)"
_ROW_HEIGHT = 40
_FRAME_HEIGHT = 84

Figure = dict[str, Any]  # plotly's JSON


def render(result: StudyResult) -> str:
    """Return the report of a study: its table, four figures and settings."""
    rows = result.summary()
    figures = {
        "accuracy": _accuracies(result, rows),
        "difference": _differences(result, rows),
        "curves": _curves(result),
        "cost": _costs(result, rows),
    }
    return _template().render(
        result=result,
        header=COLUMNS,
        rows=[_html_cells(row) for row in rows],
        whole=True,
        outcome=_outcome(result, rows),
        figures=figures,
        data=_script_json({name: f["plot"] for name, f in figures.items() if f["plot"]["data"]}),
        plotly=_plotly(),
        settings=json.dumps(result.settings, indent=2, ensure_ascii=False, default=str),
    )


def render_table(result: StudyResult) -> str:
    """Return only the table of the report, for a notebook."""
    rows = [_html_cells(row) for row in result.summary()]
    return _template().render(result=result, header=COLUMNS, rows=rows, whole=False)


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


@cache
def _plotly() -> str:
    """plotly.js in base64 after gzip, 2 MB in the place of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _script_json(data: object) -> Markup:
    text = json.dumps(data, allow_nan=False)
    # A method or task may be called "</script>"; in JSON the three characters can be written as escapes.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _html_cells(row: MethodSummary) -> tuple[str, ...]:
    method, *numbers = cells(row)
    return (method, *(_minus(text) for text in numbers))


def _minus(text: str) -> str:
    return re.sub(r"-(?=\d)", "\N{MINUS SIGN}", text)


def _outcome(result: StudyResult, rows: Sequence[MethodSummary]) -> str:
    tested = [row.comparison for row in rows if row.comparison and not math.isnan(row.comparison.p_holm)]
    if not tested:
        return "There are too few finished runs, or none whose differences vary, for a test."
    found = [c for c in tested if c.p_holm <= 0.05]
    if not found:
        return (
            f"No method's test accuracy could be told apart from that of {result.reference} "
            "(paired t-tests at 5 % after Holm's adjustment); this does not show that they are equal."
        )
    seeds = len(result.settings["seeds"])
    listed = ", ".join(
        f"{c.method} ({_minus(f'{c.mean_difference:+.2f}')} points"
        + (f" on the {c.n} of {seeds} seeds that both finished)" if c.n < seeds else ")")
        for c in found
    )
    rest = len(tested) - len(found)
    return (
        f"Test accuracy differs from that of {result.reference} for {listed} "
        "(paired t-tests at 5 % after Holm's adjustment)"
        + (f"; {'one other' if rest == 1 else f'the other {rest}'} could not be told apart from it." if rest else ".")
    )


def _accuracies(result: StudyResult, rows: Sequence[MethodSummary]) -> Figure:
    data, empty = [], {}
    for index, row in enumerate(rows):
        if not row.accuracy.n:
            empty[row.method] = "not measured" if row.n_ok else "no run ended well"
            continue
        seeds = {r.seed: metric(r, "test_accuracy") for r in result.records if r.method == row.method}
        known = {seed: value for seed, value in seeds.items() if not math.isnan(value)}
        # The runs lie below their mean, spread by order of seed so that equal values stay visible.
        places = [index + 0.16 + 0.2 * i / max(1, len(known) - 1) for i in range(len(known))]
        points = _points(row, index, list(known.values()), places, size=7, filled=False)
        points["text"] = [f"seed {seed}: {value:.2f} %" for seed, value in known.items()]
        data += [points, _mean(row, index, row.accuracy, f"{_show_interval(row.accuracy)} %")]
    words = [f"{row.method} {_show_interval(row.accuracy)}" for row in rows]
    return {
        "alternative": f"Test accuracy in percent, mean and 95 % interval: {'; '.join(words)}.",
        "key": [],
        "plot": {"data": data, "layout": _by_method(rows, "test accuracy, %", empty)},
    }


def _differences(result: StudyResult, rows: Sequence[MethodSummary]) -> Figure:
    compared = [row for row in rows if row.comparison is not None]
    data, words, empty = [], [], {}
    for index, row in enumerate(compared):
        comparison = row.comparison
        assert comparison is not None
        text = _minus(show_difference(comparison))
        words.append(f"{row.method} {text}")
        if not comparison.n:
            empty[row.method] = "no seed that both finished"
            continue
        center = Estimate(comparison.n, comparison.mean_difference, math.nan, comparison.low, comparison.high)
        pairs = f"{comparison.n} paired seed{'s' if comparison.n > 1 else ''}"
        data.append(_mean(row, index + 1, center, f"{text}, {pairs}", place=index))
    layout = _by_method(compared, "difference to the reference, points", empty)
    bounds = [0.0]
    for trace in data:
        x, bars = trace["x"][0], trace["error_x"]
        bounds += [x, x + bars.get("array", [0])[0], x - bars.get("arrayminus", [0])[0]]
    # Room on both sides keeps the line of no difference apart from the frame.
    room = 0.06 * (max(bounds) - min(bounds)) or 1.0
    layout["xaxis"] |= {"zeroline": True, "zerolinecolor": _INK, "zerolinewidth": 1.5}
    layout["xaxis"]["range"] = [min(bounds) - room, max(bounds) + room]
    return {
        "alternative": f"Difference in points and 95 % interval: {'; '.join(words)}.",
        "key": [],
        "plot": {"data": data, "layout": layout},
    }


def _curves(result: StudyResult) -> Figure:
    data, words, key = [], [], []
    for index, method in enumerate(result.methods):
        histories = [r.history for r in result.records if r.method == method and r.status == "ok"]
        # Only as far as every run reaches: beyond, the mean would be over other seeds.
        epochs = [
            epoch
            for epoch in zip(*histories, strict=False)
            if all(math.isfinite(run.get("validation_accuracy", math.nan)) for run in epoch)
        ]
        if not epochs:
            continue
        x = [sum(run["gradients"] for run in epoch) / len(epoch) for epoch in epochs]
        y = [sum(run["validation_accuracy"] for run in epoch) / len(epoch) for epoch in epochs]
        key.append(_key(method, index))
        words.append(f"{method} ends at {y[-1]:.2f} after {x[-1]:,.0f}")
        hover = [f"{_plain(method)}<br>{b:.2f} % after {a:,.0f}" for a, b in zip(x, y, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": x,
                "y": y,
                "text": hover,
                "hoverinfo": "text",
                "line": {"color": _color(index), "width": 2},
                "marker": {"symbol": _symbol(index), "color": _color(index), "size": 7, "maxdisplayed": 12},
            }
        )
    layout = _layout("gradient evaluations", 420)
    layout["yaxis"] = _upright("validation accuracy, %")
    return {
        "alternative": f"Validation accuracy in percent over gradient evaluations: {'; '.join(words)}.",
        "key": key,
        "plot": {"data": data, "layout": layout},
    }


def _costs(result: StudyResult, rows: Sequence[MethodSummary]) -> Figure:
    data, words, key = [], [], []
    for index, row in enumerate(rows):
        if math.isnan(row.time_ratio) or not row.accuracy.n:
            continue
        key.append(_key(row.method, index))
        text = f"{_show_interval(row.accuracy)} % at {row.time_ratio:.2f} x the time"
        words.append(f"{row.method} {text}")
        trace = _points(row, index, [row.time_ratio], [row.accuracy.mean], size=11)
        data.append(trace | {"text": [f"{_plain(row.method)}<br>{text}"], "error_y": _bars(row.accuracy, index)})
    layout = _layout("training time, reference = 1", 420)
    layout["yaxis"] = _upright("test accuracy, %")
    return {
        "alternative": f"Test accuracy over training time: {'; '.join(words)}.",
        "key": key,
        "plot": {"data": data, "layout": layout},
    }


def _mean(row: MethodSummary, index: int, center: Estimate, text: str, *, place: int | None = None) -> Figure:
    """The mean with its interval; ``index`` chooses the colour and, unless ``place`` does, the line."""
    trace = _points(row, index, [center.mean], [index if place is None else place], size=10)
    return trace | {"error_x": _bars(center, index), "text": [f"{_plain(row.method)}<br>{text}"]}


def _points(
    row: MethodSummary, index: int, x: list[float], y: list[float], *, size: int, filled: bool = True
) -> Figure:
    symbol = _symbol(index) if filled else f"{_symbol(index)}-open"
    marker = {"symbol": symbol, "color": _color(index), "size": size}
    if filled:
        # The lighter colours of the palette need an outline against the background.
        marker["line"] = {"color": _INK, "width": 1}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": _plain(row.method),
        "x": x,
        "y": y,
        "hoverinfo": "text",
        "marker": marker,
        "cliponaxis": False,
    }


def _bars(center: Estimate, index: int) -> Figure:
    if math.isnan(center.low):
        return {"visible": False}
    return {
        "type": "data",
        "symmetric": False,
        "array": [center.high - center.mean],
        "arrayminus": [center.mean - center.low],
        "color": _color(index),
        "thickness": 2,
        "width": 5,
    }


def _by_method(rows: Sequence[MethodSummary], title: str, empty: dict[str, str]) -> Figure:
    """A layout with a line a method; ``empty`` says what is written where a method has no mark."""
    layout = _layout(title, _FRAME_HEIGHT + _ROW_HEIGHT * max(1, len(rows)))
    # Numbers and not categories: plotly would read a method called "1e3" as a number.
    layout["yaxis"] = {
        "tickvals": list(range(len(rows))),
        "ticktext": [_wrap(row.method) for row in rows],
        "range": [len(rows) - 0.4, -0.6],
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }
    layout["annotations"] = [
        {"xref": "paper", "x": 0.5, "y": index, "text": empty[row.method], "showarrow": False}
        for index, row in enumerate(rows)
        if row.method in empty
    ]
    return layout


def _layout(x_title: str, height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 16, "r": 20, "t": 12, "b": 56},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {"title": {"text": x_title}, "automargin": True, "zeroline": False},
    }


def _upright(title: str) -> Figure:
    return {"title": {"text": title, "standoff": 10}, "automargin": True, "zeroline": False}


def _show_interval(center: Estimate) -> str:
    mean = show(center.mean, "z.2f")
    return mean if math.isnan(center.low) else f"{mean} [{center.low:.2f}, {center.high:.2f}]"


def _plain(text: str) -> str:
    """The text as plotly shows it letter by letter; plotly reads a few tags of HTML, and TeX between dollars."""
    return escape(text, quote=False).replace("$", "&#36;")


def _wrap(method: str) -> str:
    """A long method in lines, broken after its own punctuation where there is some."""
    lines = re.findall(r".{1,21}[+,]|.{1,22}", method) if len(method) > 22 else [method]
    return "<br>".join(_plain(line) for line in lines)


def _key(method: str, index: int) -> dict[str, str]:
    return {"method": method, "color": _color(index), "symbol": _symbol(index)}


def _color(index: int) -> str:
    return _COLORS[(index - 1) % len(_COLORS)] if index else _INK


def _symbol(index: int) -> str:
    return _SYMBOLS[index % len(_SYMBOLS)]
