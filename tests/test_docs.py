"""Pages of documentation: their lines fit a screen, and every file, module and section that they name exists."""

import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest

from flexengine.commands.plan_flags import FILES
from flexengine.options.option import flag_of, options_of
from flexengine.options.other_names import BY_VALUE, OTHERWISE, SAME
from flexengine.options.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]
LONGEST_LINE = 120
FOLDERS = ("", "flexengine", "bench/results")
"""Where a path in a page may begin, beside the page's own folder."""
OF_TORCHRUN = {
    *("--nproc-per-node", "--max-restarts", "--shutdown-timeout", "--signals-to-handle", "--standalone"),
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend"),
    *("--rdzv-id", "--rdzv-endpoint"),
}
OF_SLURM = {"--ntasks-per-node", "--gpus-per-node", "--exclusive"}
OF_SERVERS = {
    *("--enable-lora", "--max-lora-rank", "--lora-modules", "--model-path", "--lora-paths", "--outfile", "--outtype"),
    *("--base", "--lora"),
}
"""Flags of the programs that docs/export.md gives commands for: vLLM, SGLang and llama.cpp."""
RESULTS = ROOT / "bench/results"
MOST_BYTES_OF_RESULTS = 600_000
OF_A_MACHINE = re.compile(r"`(?:bench/results/)?(cpu_[\w-]+\.json|h[12]00(?:x\d)?_[\w.*-]+?)`")
TABLE_OF_FILES = re.compile(r"^\| file in `([\w/]+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\(([^)\s]+)\)")


@cache
def flags_in_code() -> set[str]:
    """Every string of the package and of benchmarks that is a flag."""
    sources = "".join(path.read_text() for room in ("flexengine", "bench") for path in (ROOT / room).rglob("*.py"))
    return set(re.findall(r'"(--[a-z][a-z0-9-]*)"', sources))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_not_too_long(page):
    """Rows of tables and targets of links cannot be wrapped, so they do not count."""
    lines = enumerate(page.read_text().splitlines(), start=1)
    long = [number for number, line in lines if not line.startswith("|") and len(TARGET.sub("]", line)) > LONGEST_LINE]
    assert not long, f"{name_of(page)} has more than {LONGEST_LINE} columns in lines {long}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in TARGET.findall(CODE_BLOCK.sub("", page.read_text())):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.exists(), f"{name_of(page)} links to {target}"
            assert not anchor or anchor in anchors_of(linked), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|json|md|cpp|h))(?::\w+)?`", page.read_text())
    for name in named:
        places = [page.parent / name, *(ROOT / folder / name for folder in FOLDERS)]
        assert any(place.exists() for place in places), f"{name_of(page)} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_that_are_named_exist(page):
    """Every --flag is an option of `train`, by its own or another tool's name, or stands in a command or benchmark.

    --rank shows how to add one."""
    known = {option.flag for option in options_of(TrainConfig).values()} | {flag_of(name) for name in FILES}
    known |= {flag_of(name) for name in (*SAME, *BY_VALUE, *OTHERWISE)}
    known |= {*flags_in_code(), "--rank", *OF_TORCHRUN, *OF_SLURM}
    known |= OF_SERVERS if page.name in ("export.md", "training.md", "errors.md") else set()
    text = page.read_text().replace("unknown flag --max-gpu-mem;", "")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= known


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_pages_have_a_place_in_the_site(page):
    assert f"- {page.name}\n" in (ROOT / "mkdocs.yml").read_text(), f"name {page.name} under nav in mkdocs.yml"


def test_nothing_tells_to_install_the_other_flexengine():
    """The name belongs to another project on PyPI; extras (`flexengine[plot]`) would be its extras."""
    texts = {path: path.read_text() for room in ("flexengine", "bench") for path in (ROOT / room).rglob("*.py")}
    texts |= {page: page.read_text() for page in PAGES} | {ROOT / "Makefile": (ROOT / "Makefile").read_text()}
    told = re.compile(r"pip install[^\n`]*[ '\"]flexengine\b(?!-train)")
    assert [name_of(path) for path, text in texts.items() if told.search(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_named_exist(page):
    for module in re.findall(r"python -m ((?:bench|tests)\.[\w.]+)", page.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{name_of(page)} names python -m {module}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_files_have_what_the_folder_has(page):
    """Of a table whose head says `file in FOLDER`, every file and folder there has a row, and no row stands alone."""
    for folder, rows in TABLE_OF_FILES.findall(page.read_text()):
        named = {name for row in rows.splitlines() for name in re.findall(r"`([\w.]+/?)`", row.split("|")[1])}
        there = [path for path in (ROOT / folder).iterdir() if not path.name.startswith("__")]
        found = {f"{path.name}/" if path.is_dir() else path.name for path in there}
        assert named == found, f"{name_of(page)}: {folder}"


def test_results_are_named_and_those_that_are_named_exist():
    """A figure needs its file, and a file somebody who tells of it: a page, or a comment beside a constant."""
    texts = {page: page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    texts |= {path: path.read_text() for path in (ROOT / "flexengine").rglob("*.py")}
    files = {path.stem for path in RESULTS.glob("*.json")}
    named, missing = set[str](), list[str]()
    for path, text in texts.items():
        for name in OF_A_MACHINE.findall(text) + re.findall(r"bench/results/([\w.*-]+)\.json", text):
            found = set(fnmatch.filter(files, name.removesuffix(".json")))
            named |= found
            missing += [] if found else [f"{name_of(path)}: {name}"]
        named |= files & set(re.findall(r"`([a-z_]+)\.json`", text))
    assert missing == []
    assert sorted(files - named) == [], "no page names these"


def test_results_stay_small():
    assert sum(path.stat().st_size for path in RESULTS.glob("*.json")) <= MOST_BYTES_OF_RESULTS
