"""Pages of the docs, of plans and of runs in headless Chromium: three widths, light and dark, and axe's rules.

Runs where Chromium is installed and `pip install .[docs,browser]` was; the docs are read as a server gives them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flexengine.reports.plan_page import html_page
from flexengine.reports.run_page import run_page
from tests.reports.test_run_report import picture, run  # noqa: F401, fixtures

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 1280, 1920)
OF_AXE = 1280
"""The width at which texts are looked at: colours and names are those of all widths."""
OFFLINE = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
A4 = 718
"""Pixels between the margins of a sheet."""
RULES = {"runOnly": ["wcag2a", "wcag2aa"]}
pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, format: str, *args: object) -> None: ...


def build_site(folder, **variables):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, env={**environment, **variables}, check=True)


@contextlib.contextmanager
def served(folder):
    """Serve a folder; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module")
def address(tmp_path_factory, picture, run):  # noqa: F811
    """The address of a folder with the site, the page of a plan and that of a run."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    (folder / "of_a_plan.html").write_text(html_page(picture, "flexengine plan"))
    (folder / "of_a_run.html").write_text(run_page(run))
    (folder / "favicon.ico").write_bytes(b"")  # which browsers ask a server for
    with served(folder) as url:
        yield folder, url


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=list(OFFLINE))
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_screens_and_keep_the_rules_of_axe(address, chromium, width, scheme):
    """Nothing scrolls sideways but what has a box of its own, the console stays empty, texts have contrast."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    folder, url = address
    wrong: list[str] = []
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda said: wrong.append(f"{page.url}: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    for file in sorted(folder.glob("*.html")):
        page.goto(f"{url}/{file.name}", wait_until="load")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wrong.append(f"{file.name} is wider than {width} pixels")
        if width == OF_AXE:
            wrong += [f"{file.name}: {found}" for found in violations(axe.run(page, options=RULES).response)]
    page.close()
    assert not wrong, "\n".join(wrong)


CUT_IN_PRINT = """() => [...document.querySelectorAll("body *")].filter(one => {
  const style = getComputedStyle(one), box = one.getBoundingClientRect();
  if (!box.width || !box.height || style.visibility === "hidden") return false;
  const hides = /auto|scroll|hidden/.test(style.overflowX) && one.clientWidth > 1;
  return box.right > innerWidth + 1 || (hides && one.scrollWidth > one.clientWidth + 1);
}).map(one => one.tagName + "." + one.className + " " + one.textContent.trim().slice(0, 40)).slice(0, 3)"""
"""What a sheet of paper would not show of a page: it has no scroll bars."""


def test_paper_shows_all_of_a_page(address, chromium):
    folder, url = address
    page = chromium.new_page(viewport={"width": A4, "height": 1000})
    page.emulate_media(media="print")
    wrong: list[str] = []
    for file in sorted(folder.glob("*.html")):
        page.goto(f"{url}/{file.name}", wait_until="load")
        wrong += [f"{file.name}: {cut}" for cut in page.evaluate(CUT_IN_PRINT)]
    page.close()
    assert not wrong, "\n".join(wrong)


def violations(response) -> list[str]:
    return [f"{found['id']} {[node['target'] for node in found['nodes']][:3]}" for found in response["violations"]]


def test_pages_lead_to_other_versions(chromium, tmp_path):
    """As mike keeps them: a folder for each, and a list of them beside these."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    versions = [
        {"version": "0.2", "title": "0.2", "aliases": ["latest"]},
        {"version": "0.1", "title": "0.1", "aliases": []},
    ]
    (tmp_path / "versions.json").write_text(json.dumps(versions))
    build_site(tmp_path / "0.2", MIKE_DOCS_VERSION="0.2")
    page = chromium.new_page()
    with served(tmp_path) as url:
        page.goto(f"{url}/0.2/index.html")
        links = page.wait_for_selector(".md-version__list", state="attached").query_selector_all("a")
        assert [link.get_attribute("href") for link in links] == [f"{url}/0.2/", f"{url}/0.1/"]
    page.close()


def test_search_finds_failures_first(address, chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address[1]}/index.html")
    page.click(".md-search__input")
    page.keyboard.type("out of memory")
    page.wait_for_selector(".md-search-result__link")
    assert "/errors.html" in page.get_attribute(".md-search-result__link", "href")
    page.close()


def test_the_plan_in_the_browser_answers_what_is_chosen(address, chromium):
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    page.goto(f"{address[1]}/plan_table.html")
    page.select_option("[name=model]", "llama-3.1-70b")
    assert "Does not fit" in page.inner_text("#plan-answer")
    page.select_option("[name=way]", "LoRA on an NF4 base (QLoRA)")
    assert "tokens/s predicted" in page.inner_text("#plan-answer")
    said = page.inner_text("#plan-answer pre")
    assert said.startswith("flexengine plan --model preset:llama-3.1-70b --gpu rtx4090 --host-mem-gib 64 --mode lora")
    page.fill("[name=host]", "0")
    assert "--host-mem-gib 32 " in page.inner_text("#plan-answer pre")
    page.close()
