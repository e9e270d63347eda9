"""The site that `make docs` builds, opened from disk in a real browser with the network off."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT = 600_000  # milliseconds: a busy machine is slow, not wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


def test_every_page_is_in_the_search_index(site):
    documents = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    indexed = {document["location"].split("#")[0] or "index.html" for document in documents}
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    assert pages - indexed == set()


def test_search_finds_a_page_and_asks_no_other_machine(site):
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"], timeout=TIMEOUT
        )
        context = browser.new_context(offline=True)
        context.set_default_timeout(TIMEOUT)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").click()
        page.locator("input.md-search__input").press_sequentially("simulated epsilon")
        page.locator(".md-search-result__link").first.wait_for()
        found = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
        browser.close()
    assert any("/glossary.html" in link for link in found)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
