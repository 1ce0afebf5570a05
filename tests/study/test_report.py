from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
import pytest

from flatmin.study._report import render
from flatmin.study._result import StudyResult
from tests.study.test_result import NASTY, complete, run, study

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FIGURES = ("accuracy", "difference", "curves", "cost")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def plots(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def without_colors(value: Any) -> Any:
    """The browser fills the colours in; plotly's validator would refuse their names."""
    if isinstance(value, dict):
        return {key: without_colors(item) for key, item in value.items() if not key.endswith("color")}
    return [without_colors(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("result", [complete(), complete(NASTY), complete(seeds=1)])
def test_figures_are_valid(result: StudyResult) -> None:
    figures = plots(render(result))
    assert tuple(figures) == FIGURES
    for figure in figures.values():
        go.Figure(without_colors(figure))


def test_figures_hold_the_results_numbers() -> None:
    result = complete(("sgd", "sam", "ema"))
    figures, (sgd, sam, _) = plots(render(result)), result.summary()
    assert sam.comparison is not None
    seeds, mean = figures["accuracy"]["data"][:2]
    assert seeds["x"] == [r.metrics["test_accuracy"] for r in result.records if r.method == "sgd"]
    assert mean["x"] == [sgd.accuracy.mean]
    bar = figures["difference"]["data"][0]
    assert bar["x"] == [sam.comparison.mean_difference]
    assert bar["x"][0] + bar["error_x"]["array"][0] == pytest.approx(sam.comparison.high)
    assert bar["x"][0] - bar["error_x"]["arrayminus"][0] == pytest.approx(sam.comparison.low)
    curve = figures["curves"]["data"][1]
    assert curve["x"] == [100, 200, 300, 400]
    assert curve["y"][-1] == pytest.approx(sam.accuracy.mean - 5)
    assert figures["cost"]["data"][1]["x"] == [sam.time_ratio]


def test_curves_go_as_far_as_every_run() -> None:
    short = run("sam", 1)
    short.history.pop()
    curve = plots(render(study(run("sgd", 0), run("sam", 0), short)))["curves"]["data"][1]
    assert len(curve["x"]) == 3


PAIR = ("sgd", "sam")


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (complete(("sgd", "sam"), seeds=1), "none whose differences vary, for a test."),
        (
            study(*(run(m, s, accuracy=90 + s) for m in ("sgd", "sam") for s in range(3))),
            "could be told apart from that of sgd",
        ),
        (
            study(*(run(m, s, accuracy=90 + s + (m == "sam") * (1 + s / 50)) for m in PAIR for s in range(3))),
            "differs from that of sgd for sam (+1.02 points)",
        ),
    ],
)
def test_outcome(result: StudyResult, sentence: str) -> None:
    assert sentence in render(result)


def test_lost_methods_are_named_in_the_figures() -> None:
    result = study(run("sgd", 0), run("sam", 0, "diverged"))
    figures = plots(render(result))
    assert figures["accuracy"]["layout"]["annotations"][0]["text"] == "no run ended well"
    assert "difference" not in figures
    assert "There is nothing to draw" in render(result)


def test_names_are_escaped() -> None:
    result = complete(NASTY)
    html = render(result)
    assert html.count("<script") == 3
    assert "<b>ema" not in html
    labels = plots(html)["accuracy"]["layout"]["yaxis"]["ticktext"]
    assert labels[3] == "&lt;b&gt;ema&lt;/b&gt;&amp;amp;"
    assert all(line.count("<br>") < 3 for line in labels)


def test_report_is_one_small_file_that_names_no_other() -> None:
    html = render(complete())
    assert len(html.encode()) < 3_000_000
    page = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"https?:|//\w|\bsrc=|@import|url\(|<link", page)
    assert render(complete()) == html


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    if executable is None:
        message = "chromium is not installed"
        if os.environ.get("FLATMIN_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield opened
        opened.close()


def opened(browser: Browser, result: StudyResult, path: Path, scheme: Any, width: int) -> Page:
    """The report in a page that has drawn it without an error and without a request but for the file."""
    result.to_html(path)
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html.drawn, html.undrawn", state="attached")
    assert problems == []
    assert page.evaluate("document.documentElement.className") == "drawn"
    return page


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 400)])
def test_browser_draws_the_report(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    page = opened(browser, complete(("sgd", "sam", "ema")), tmp_path / "report.html", scheme, width)
    for name in FIGURES:
        assert page.locator(f"#{name} .scatterlayer .point").count() > 0
        assert page.get_attribute(f"#{name}", "role") == "img"
        assert "sam" in (page.get_attribute(f"#{name}", "aria-label") or "")
    # Only the table may scroll sideways, and it does so inside its own frame.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    shot = page.screenshot(path=tmp_path / "report.png", full_page=True)
    assert shot.startswith(b"\x89PNG")
    assert ink(page, shot) > 0.01
    page.close()


def ink(page: Page, shot: bytes) -> float:
    """The share of pixels that are not of the most frequent colour."""
    share = page.evaluate(
        """async (bytes) => {
          const image = await createImageBitmap(new Blob([Uint8Array.from(bytes)], { type: "image/png" }));
          const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
          context.drawImage(image, 0, 0);
          const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
          const counts = new Map();
          for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
          return 1 - Math.max(...counts.values()) / pixels.length;
        }""",
        list(shot),
    )
    return float(share)


def test_browser_follows_the_scheme_and_prints_in_light(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, complete(), tmp_path / "report.html", "dark", 1000)
    color = "getComputedStyle(document.querySelector('#accuracy .ytick text')).fill"
    dark = page.evaluate(color)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(color) != dark
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(color) == dark
    page.emulate_media(color_scheme="light")
    for _ in range(100):
        if page.evaluate(color) != dark:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(color) != dark
    page.close()


def test_browser_shows_names_letter_by_letter(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, complete(NASTY), tmp_path / "report.html", "light", 1000)
    assert page.locator("tbody th").all_text_contents() == list(NASTY)
    labels = [text.replace(" ", "") for text in page.locator("#accuracy .ytick text").all_text_contents()]
    assert labels == [name.replace(" ", "") for name in NASTY]
    page.close()


def test_without_scripts_the_table_stands(browser: Browser, tmp_path: Path) -> None:
    result = complete()
    result.to_html(tmp_path / "report.html")
    page = browser.new_page(java_script_enabled=False)
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("tbody tr").count() == 2
    assert page.locator("noscript").is_visible()
    page.close()
