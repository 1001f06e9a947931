"""Adds what the site has beside docs/: README, CONTRIBUTING, CHANGELOG, the options and the Python interface.

mkdocs calls the functions `on_*`, as mkdocs.yml asks. Links are written for readers of the repository, so they are
rewritten here; files that they lead to, such as results and recipes, become files of the site.
"""

import inspect
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import flexengine
from flexengine import optim
from flexengine.api import PlannedRun, build, prepare
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.options.job import Job
from flexengine.options.option import Option, options_of
from flexengine.options.train_config import TrainConfig
from flexengine.plan import PlanError
from flexengine.runtime.engine import Engine
from flexengine.runtime.outputs import EvaluateOutput, FwdBwdOutput, StepOutput

ROOT = Path(__file__).resolve().parents[1]
PAGES_OF_FILES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
FUNCTIONS = (flexengine.train, flexengine.from_pretrained, prepare, build)
CLASSES = (
    *(flexengine.FlexTrainer, flexengine.TrainResult, flexengine.Callback),
    *(Engine, FwdBwdOutput, StepOutput, EvaluateOutput, LogitsBlock),
    *optim.OPTIMIZERS.values(),
    *(flexengine.LoRA, PlannedRun, PlanError),
)

SEARCH_BOOST = {"errors.md": 4.0, "changelog.md": 0.1}
"""How much words of a page count in a search: who looks for a failure wants its remedy, not when it was mended."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
LONGEST_SIGNATURE = 100
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Tell the version at the foot of every page; where mike builds one of several, pages offer the others."""
    config.copyright = f"flexengine {flexengine.__version__}"
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ holds."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for file, page in PAGES_OF_FILES.items()}
    pages |= {"options.md": options_page(), "python.md": python_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for file in linked_files():
        files.append(File.generated(config, file, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page; code stays as it is."""
    page.meta["search"] = {"boost": SEARCH_BOOST.get(page.file.src_uri, 1.0)}
    sources = {name: file for file, name in PAGES_OF_FILES.items()}
    folder = (ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    pieces, end = [], 0
    for code in CODE.finditer(markdown):
        pieces += [with_links(markdown[end : code.start()], folder), code[0]]
        end = code.end()
    pieces.append(with_links(markdown[end:], folder))
    if page.file.src_uri == "plan_table.md":
        pieces.append(plan_table())
    return "".join(pieces)


def plan_table() -> str:
    """The plans that a page shows, within the page: a browser reads no other file of a folder."""
    text = (ROOT / "docs/plan_table.json").read_text(encoding="utf-8").replace("<", "\\u003c")
    return f'\n\n<script type="application/json" id="plan-table">{text.strip()}</script>\n'


def with_links(text: str, folder: Path) -> str:
    """Give links the names of the site's pages and files; those to folders become plain text.

    folder: where the text's links begin in the repository.
    """

    def rewritten(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        if not target or "://" in target:
            return link[0]
        name = os.path.relpath(folder / target, ROOT)
        name = PAGES_OF_FILES.get(name, name.removeprefix("docs/"))
        there = name in PAGES_OF_FILES.values() or (ROOT / "docs" / name).is_file() or (ROOT / name).is_file()
        return f"[{label}]({name}{anchor})" if there else label

    return LINK.sub(rewritten, text)


def linked_files() -> set[str]:
    """Name the files beside docs/ that pages link to and that are no pages, from the root of the repository."""
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / file for file in PAGES_OF_FILES)]
    found = set[str]()
    for source in sources:
        for link in LINK.finditer(CODE.sub("", source.read_text(encoding="utf-8"))):
            place = Path(os.path.normpath(source.parent / link[2]))
            if link[2] and "://" not in link[2] and place.is_file() and ROOT / "docs" not in place.parents:
                found.add(str(place.relative_to(ROOT)))
    return found - PAGES_OF_FILES.keys()


# ---- options ------------------------------------------------------------------------------------------------------


def options_page() -> str:
    """The options of `train` as tables, from their declarations."""
    job = options_of(Job)
    run = {name: option for name, option in options_of(TrainConfig).items() if name not in job}
    return "\n".join(
        [
            "# Options",
            "",
            "Options of `flexengine train` are flags, keys of a YAML file (`--config run.yaml`, with dashes or"
            " underscores) and, where they belong to the job, keywords in Python.",
            "",
            "## The job: batch, budgets, numerics and pins",
            "",
            *option_rows(job.values()),
            "",
            "## The run: model, data, length and files",
            "",
            *option_rows(run.values()),
            "",
        ]
    )


def option_rows(options: Any) -> list[str]:
    """A table with one row for each option."""
    rows = ["| option | default | what it is |", "|---|---|---|"]
    return [*rows, *(f"| `{o.flag}` | {default_of(o)} | {escaped(o.help)} |" for o in options)]


def default_of(option: Option) -> str:
    """The default as a reader would write it; empty where the help tells it."""
    default = option.default
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"`{default}`" if default != "" and isinstance(default, str | int | float) else ""


def escaped(text: str) -> str:
    """A text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# ---- the Python interface -----------------------------------------------------------------------------------------


def python_page() -> str:
    """Signatures and docstrings of what a program calls."""
    head = [
        "# Python",
        "",
        "[Data](data.md#batches-from-python) describes batches, [Losses](losses.md) other losses.",
        "",
    ]
    functions = [line for function in FUNCTIONS for line in described(function, f"## {place_of(function)}")]
    return "\n".join([*head, *functions, *(line for cls in CLASSES for line in class_lines(cls))])


def place_of(thing: Any) -> str:
    """The name to import something by; what the package or a room offers by itself comes first."""
    for module in (flexengine, optim):
        if getattr(module, thing.__name__, None) is thing:
            return f"{module.__name__}.{thing.__name__}"
    return f"{thing.__module__}.{thing.__name__}"


def class_lines(cls: type) -> list[str]:
    """A class with its public methods and properties, in the order in which they are written."""
    made_by_hand = "__init__" in vars(cls) and cls is not Engine  # from_pretrained makes engines
    lines = described(cls, f"## {place_of(cls)}", with_signature=made_by_hand or hasattr(cls, "_fields"))
    for name, member in vars(cls).items():
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(inner) and inner.__doc__:
            lines += described(inner, f"### {cls.__name__}.{name}", with_signature=not isinstance(member, property))
    return lines


def described(thing: Any, heading: str, with_signature: bool = True) -> list[str]:
    """Heading, signature and docstring."""
    signature = ["```python", signature_of(thing), "```", ""] if with_signature else []
    return [heading.replace("_", "\\_"), "", *signature, *docstring_lines(thing), ""]


def signature_of(thing: Any) -> str:
    """The signature, with a line for each parameter where one line would be too long."""
    signature, parts = inspect.signature(thing), []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.name != "self":
            parts.append(str(parameter.replace(annotation=short(parameter.annotation))))
    result = signature.return_annotation
    returned = "" if result is inspect.Signature.empty else f" -> {short(result)}"
    line = f"{thing.__name__}({', '.join(parts)}){returned}"
    if len(line) <= LONGEST_SIGNATURE:
        return line
    return "\n".join([f"{thing.__name__}(", *(f"    {part}," for part in parts), f"){returned}"])


class Named:
    """An annotation that is printed as given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def short(annotation: Any) -> Any:
    """A type by its last name."""
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return Named(re.sub(r"\b(?:\w+\.)+([A-Za-z]\w*)", r"\1", text))


def docstring_lines(thing: Any) -> list[str]:
    """The docstring as Markdown: a line `name: text` begins an item of a list."""
    text = inspect.getdoc(thing) or ""
    blocks = [inspect.cleandoc(block) for block in text.split("\n\n")]
    return ARGUMENT.sub(r"\n- `\1`: ", "\n\n".join(blocks)).replace("\n\n\n", "\n\n").splitlines()
