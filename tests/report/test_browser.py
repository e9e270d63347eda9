"""The pages in a real browser, from disk, with the network off."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.run_folders import write_run

from coowned import AttributionGraph, plan
from coowned.report.page import write_plan, write_report

pytestmark = pytest.mark.full

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIMEOUT = 600_000  # milliseconds
LOOKS = [("light", 1280), ("dark", 1280), ("light", 375), ("dark", 375)]
OUTSIDE = """() => [...document.querySelectorAll("figure")].flatMap(figure => {
  const frame = figure.getBoundingClientRect();
  return [...figure.querySelectorAll("svg text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width > 0 && (box.left < frame.left || box.right > frame.right);
  }).map(text => `${figure.dataset.name}: ${text.textContent}`);
})"""
PAGES = ("scheduled", "simulated", "seeded", "none", "release", "tiers", "plan")


@pytest.fixture(scope="module")
def pages(runs, tiered_claim, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    others = [runs[name] for name in ("none", "scheduled", "seeded")]
    target = {"epsilon": 4.0, "delta": 1e-6, "batch_size": 10, "iterations": 20, "adjacency": "zero-out"}
    graph = AttributionGraph.from_users_per_example([[i % 40, (i * 3) % 37] for i in range(300)])
    return {
        "scheduled": write_report(runs["scheduled"], folder / "scheduled.html"),
        "simulated": write_report(runs["simulated"], folder / "simulated.html", also=others),
        "seeded": write_report(runs["seeded"], folder / "seeded.html"),
        "none": write_report(runs["none"], folder / "none.html"),
        "release": write_report(runs["simulated"], folder / "release.html", release=True),
        "tiers": write_report(write_run(tmp_path_factory.mktemp("tiers"), tiered_claim), folder / "tiers.html"),
        "plan": write_plan(plan(graph, contribution_bounds=(1, 3), **target), folder / "plan.html"),
    }


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    """Where screenshots are kept: COOWNED_SCREENSHOTS, else with the test's own files."""
    folder = Path(os.environ.get("COOWNED_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A busy machine is slow, not wrong: nothing here ends for want of time.
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=SWITCHES, timeout=TIMEOUT)
        yield opened
        opened.close()


@pytest.fixture
def show(browser, pages) -> Iterator:
    """Opens a page with the network off; fails where it says or asks for anything."""
    contexts, said, asked = [], [], []

    def opened(name: str, scheme: str = "light", width: int = 1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-charts=drawn]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert all(address.startswith("file://") for address in asked)
    assert len(asked) == len(contexts)


@pytest.mark.parametrize("name", PAGES)
def test_in_a_browser(show, name: str):
    page = show(name)
    figures = page.locator("figure").all()
    assert len(figures) >= (2 if name == "release" else 3)  # graph statistics are left out of a release
    for figure in figures:
        marks = figure.locator("g.rows_marks > path").count()
        assert marks == figure.locator("tbody tr").count() > 0, figure.get_attribute("data-name")


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [(name, *look) for name in PAGES for look in LOOKS if name == "simulated" or look in (LOOKS[0], LOOKS[3])],
)
def test_accessible_in_every_look(show, shots: Path, name: str, scheme: str, width: int):
    from axe_playwright_python.sync_playwright import Axe

    page = show(name, scheme, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=shots / f"{name}-{scheme}-{width}.png", full_page=True)
    assert page.evaluate(OUTSIDE) == []
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_hover_shows_the_numbers(show, shots: Path):
    page = show("simulated")
    for name in ("levels", "users-per-example", "utility-by-epsilon", "delta-curve"):
        figure = page.locator(f'figure[data-name="{name}"]')
        figure.scroll_into_view_if_needed()
        mark = figure.locator("g.rows_marks > path").nth(1)
        mark.hover(force=True)
        tooltip = page.locator("#vg-tooltip-element.visible")
        tooltip.wait_for()
        cells = figure.locator("tbody tr").nth(1).locator("th, td").all_text_contents()
        shown = tooltip.inner_text()
        assert [cell for cell in cells if cell and cell != "–" and cell not in shown] == []
        if name == "users-per-example":
            page.screenshot(path=shots / "hover.png")
        page.mouse.move(1, 1)


def test_keyboard_reaches_everything(show):
    page = show("simulated")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    seen = []
    for _ in range(120):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.tagName")
        if name == "BODY":
            break
        seen.append(name)
    assert seen.count("SUMMARY") == page.locator("figure").count()
    assert "PRE" in seen


def test_printed(show, shots: Path):
    page = show("simulated", "dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.locator("figure .chart svg").first.is_visible()
    printed = page.pdf(format="A4", margin={"top": "15mm", "bottom": "15mm", "left": "15mm", "right": "15mm"})
    (shots / "printed.pdf").write_bytes(printed)
    assert printed.startswith(b"%PDF")
