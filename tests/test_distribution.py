"""The wheel and the sdist: built, installed into an empty environment, trained from, and read by a type checker."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from flexengine import __version__
from tests.test_architecture import FILES, imports_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "csrc", "flexengine")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"matplotlib", "nvidia-ml-py", "gguf", "lm-eval", "pillow"}
"""Distributions that are imported only where they are needed, with a message where they are missing."""

USERS_SCRIPT = """
from flexengine import from_pretrained
from flexengine.optim import AdamW

engine = from_pretrained("preset:demo", optimizer=AdamW(lr=1e-3), max_seq_len=64, max_gpu_mem_gib=0.09)
loss: float = engine.fwd_bwd([[1, 2, 3]]).loss
norm: float = engine.step().grad_norm
from_pretrained("preset:demo", max_seq_len="64")
engine.fwd_backward([[1, 2, 3]])
"""
MISTAKES = {
    8: 'Argument "max_seq_len" to "from_pretrained" has incompatible type "str"',
    9: 'no attribute "fwd_backward"',
}
"""What mypy shall find, by line; the types of all else are right."""
UNREAD = ("torch", "numpy", "scipy", "huggingface_hub", "transformers", "PIL")
"""Packages that mypy does not follow: torch takes it half a minute, and the others as long as all of flexengine."""


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def build(folder: Path, *options: str) -> list[Path]:
    """Build an sdist from a copy of the sources, and without options a wheel from the sdist; returns their paths."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    done = run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", folder, source, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment; returns its interpreter.

    Packages that the project requires come from the environment that runs the tests. Its own installation of the
    project does not: editable installs hook in by .pth files, which Python reads in site folders only.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installing = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
    done = run(*installing, "--no-compile", wheel, cwd=wheel.parent)  # Python compiles the part that it imports
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def test_an_sdist_has_every_source(tmp_path):
    (sdist,) = build(tmp_path, "--sdist")
    assert sdist.name == f"flexengine_train-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/adamw.cpp", "csrc/adamw.h", "CHANGELOG.md", "LICENSE", "flexengine/py.typed"} <= packed
    sources = {path.relative_to(tmp_path / "source") for path in (tmp_path / "source" / "flexengine").rglob("*.*")}
    assert {path.as_posix() for path in sources if path.suffix != ".so"} <= packed


@pytest.mark.long
@pytest.mark.thorough
def test_a_wheel_made_from_the_sdist_trains_in_an_empty_environment(tmp_path):
    _, wheel = build(tmp_path)
    assert re.fullmatch(r".*-py3-none-(manylinux_2_\d\d|linux)_\w+\.whl", wheel.name)  # linux: without a compiler
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flexengine/py.typed", "flexengine/assets/demo/tokenizer.json"} <= set(names)
    assert {re.split(r"[/-]", name)[0] for name in names} == {"flexengine", "flexengine_train"}
    assert any(name.startswith("flexengine/_native") for name in names) == (shutil.which("g++") is not None)

    python = install(wheel, tmp_path / "environment")
    command = python.parent / "flexengine"
    assert run(command, "--version", cwd=tmp_path).stdout == f"flexengine {__version__}\n"
    few = ("--steps", "2", "--max-global-batch-tokens", "256", "--chunk-tokens", "256", "--round-tokens", "256")
    demo = run(command, "demo", *few, "--device", "cpu", "--dtype", "float32", "--save", cwd=tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert len((tmp_path / "runs/demo/train_log.jsonl").read_text().splitlines()) == 2
    assert yaml.safe_load((tmp_path / "runs/demo/config.yaml").read_text())["model"] == "preset:demo"
    assert (tmp_path / "runs/demo/final/model.safetensors").is_file()

    assert mypy_errors(python, USERS_SCRIPT, tmp_path) == MISTAKES


def mypy_errors(python: Path, script: str, folder: Path) -> dict[int, str]:
    """Check a script against what is installed for an interpreter; returns the part of each message in MISTAKES."""
    (folder / "script.py").write_text(script)
    unread = ",".join(f"{name}.*" for name in UNREAD)
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{unread}]\nfollow_imports = skip\n")
    done = run(sys.executable, "-m", "mypy", "--python-executable", python, "script.py", cwd=folder)
    found = re.findall(r"^script\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == done.stdout.count("error:"), done.stdout + done.stderr
    return {int(line): next((m for m in MISTAKES.values() if m in text), text) for line, text in found}


def imported_packages() -> set[str]:
    """Top-level packages that some file of the package imports, beside Python's own."""
    names = {module.partition(".")[0] for path in FILES for _, module in imports_of(path)}
    return names - set(sys.stdlib_module_names) - {"flexengine"}


def test_every_package_that_is_imported_is_required():
    required = {re.split(r"[\s<>=;\[]", line)[0].lower() for line in PROJECT["dependencies"]}
    distributions = packages_distributions()
    missing = {
        package
        for package in imported_packages()
        if not {name.lower().replace("_", "-") for name in distributions.get(package, [package])}
        & (required | OPTIONAL)
    }
    assert missing == set()


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("train", "data", "plan", "generate", "models", "probe", "report")),
    ],
    ids=" ".join,
)
def test_help_is_quick(command):
    """What takes seconds to import is not imported to print a text."""
    listed = (
        "import sys, flexengine.cli as cli\ntry: cli.main(sys.argv[1:])\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    done = run(sys.executable, "-c", listed, *command, cwd=ROOT)
    slow = {"torch", "transformers", "datasets", "numpy", "scipy", "tokenizers", "huggingface_hub", "triton"}
    assert done.stdout
    assert not slow & set(done.stderr.split()), done.stderr
