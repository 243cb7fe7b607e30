"""The report in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.writeup.build import build_report
from tests.jobs.harness import ROOT
from tests.jobs.results_folder import H200, TOY, ResultsFolder, ok

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None and os.environ.get("REQUIRE_CHROMIUM"):
    raise RuntimeError("REQUIRE_CHROMIUM is set, but chromium is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a reference study and of a sweep of our own."""
    folder = tmp_path_factory.mktemp("report")
    own = ResultsFolder(folder / "own")
    text = TOY.replace("toy", "own", 1) + "grid: {size: [1, 2, 4], mode: [fast, exact]}\n"
    text += "tables: [{name: own, columns: [mode], baseline: {mode: exact}}]\n"
    text += "plots: [{name: p, title: Zebra by size, x: size, series: [mode], phase: forward}]\n"
    own.submit(text, lambda p, _: ok(10.0 * p["size"] if p["mode"] == "fast" else 3.0), H200)
    build_report([own.path, ROOT / "logs" / "h200" / "memory"], folder / "out")
    return folder / "out" / "index.html"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser, report: Path) -> Iterator:
    """Opens the report. At the end, the page must have logged no error."""
    contexts, problems = [], []

    def opened(anchor: str = "", viewport=DESK, scheme: str = "light"):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda m: problems.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("request", lambda r: problems.append(r.url) if r.url.startswith("http") else None)
        page.goto(f"{report.as_uri()}{anchor}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


def own_section(page):
    return page.locator("#own_sweeps article").filter(has_text="Zebra by size")


@pytest.mark.slow
def test_what_is_looked_for_is_found(open_page) -> None:
    page = open_page("#own_sweeps")  # an anchor opens its problem
    assert own_section(page).count() == 1
    assert 0 <= page.locator("#own_sweeps h2").bounding_box()["y"] < DESK["height"]

    page.fill("#search", "zebra size")
    assert page.locator("section.problem:visible").count() == 1
    assert page.locator("#sidebar li:visible").count() == 1
    assert page.locator("#found").inner_text() == "1 part found."
    page.fill("#search", "largest allocations where come from")  # words of one of six parts
    assert page.locator("#memory_profiling article:visible").count() == 1
    page.fill("#search", "largest allocations zyx come from")  # as many of them as possible
    assert page.locator("#memory_profiling article:visible").count() == 1
    assert page.locator("#found").inner_text() == "1 part found with 4 of the 5 words."
    page.fill("#search", "zyx")
    assert page.locator("#found").inner_text() == "No parts found."
    page.fill("#search", "")
    overview = page.locator("#summary details")
    assert overview.is_visible() and not page.locator("#found").is_visible()

    button = page.locator('#counts [data-state="derived"]')
    button.click()  # shows the parts with this status
    states = page.locator("article:visible .question .state:visible").all_inner_texts()
    assert set(states) == {"no measurement needed"}
    assert button.inner_text() == f"{len(states)} no measurement needed"
    button.click()
    assert overview.is_visible()


@pytest.mark.slow
def test_the_records_of_a_number(open_page) -> None:
    page = open_page("#own_sweeps")
    own_section(page).locator("td button.n", has_text="40.00").first.click()
    dialog = page.locator("#records")
    dialog.wait_for()
    assert "size=4 mode=fast" in dialog.inner_text()
    assert "python -m jobs replay" in dialog.inner_text()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()


def figure_of(page):
    figure = own_section(page).locator("figure")
    figure.scroll_into_view_if_needed()
    page.wait_for_function(
        "f => f.querySelector('img').naturalWidth > 0", arg=figure.element_handle()
    )
    return figure


@pytest.mark.slow
def test_it_is_accessible_in_light_and_dark(open_page) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = open_page("#own_sweeps", scheme="dark")
    figure_of(page)
    colours = []
    for _ in range(2):
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        violations = Axe().run(page).response["violations"]
        serious = [v for v in violations if v["impact"] in ("serious", "critical")]
        assert not serious, [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in serious]
        page.click("#theme")
    assert colours[1] == "rgb(255, 255, 255)" != colours[0]


@pytest.mark.exhaustive
def test_on_a_phone_and_on_paper(open_page, tmp_path: Path) -> None:
    page = open_page("#own_sweeps", PHONE)
    figure_of(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.click("#menu")
    assert page.locator("#sidebar a").first.is_visible()

    page = open_page()
    figure_of(page)
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    page.emulate_media(media="print")
    assert not page.locator("#sidebar").is_visible()
