"""Set-up of all tests: one CPU thread, Triton's interpreter without a GPU, seeds, the gpu mark; makes engine_helpers.py
importable (in its importlib mode pytest leaves sys.path alone)."""

import fcntl
import gc
import logging
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.dont_write_bytecode:
    # Every process would compile torch and transformers anew, four seconds of it, and tests start hundreds. What is
    # compiled lies with pytest's own cache, out of the folders that Python was told to leave alone.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).resolve().parents[1] / ".pytest_cache/code")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests are small: a second thread only waits, for very long when the machine is busy. Set before numpy and torch start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Read when triton is imported, so it is set before any test module brings triton in.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

# The same examples in every run, however slow the machine.
hypothesis.settings.register_profile(
    "alike", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("alike")
# Nor do they depend on which modules a process has imported: it would draw from the constants in their code, too, which
# takes every process seconds to find.
providers._get_local_constants = lambda: providers._local_constants
# A search for garbage goes through all that torch and pytest hold; by default one follows every 700 new objects.
gc.set_threshold(10_000, 10, 10)
torch.set_num_threads(1)  # whatever the environment says: the order of floating-point sums depends on it


def heed_interrupts() -> None:
    """Have children of the tests heed SIGINT and SIGHUP under a launcher that ignores them, as `nohup make test &`
    does: they would inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


heed_interrupts()
HELPERS = str(Path(__file__).resolve().parent)
if HELPERS not in sys.path:
    sys.path.append(HELPERS)


@pytest.fixture
def driver():
    """A CUDA driver without a GPU, new for every test."""
    from fake_driver import fake_driver  # noqa: PLC0415 (few tests need its library built)

    driver = fake_driver()
    yield driver
    driver.reset()


@pytest.fixture
def driven(driver, monkeypatch: pytest.MonkeyPatch):
    """Makes an executor issue to the driver without a GPU, as to CUDA; the tests say what torch.cuda.stream does."""
    from flexengine.schedule.commands import Stream  # noqa: PLC0415 (with Triton's interpreter set above)

    def drive(executor):
        streams = {stream: driver.stream() for stream in Stream if stream is not Stream.CPU}
        monkeypatch.setattr(executor, "on_cuda", True)
        monkeypatch.setattr(executor, "streams", streams, raising=False)
        monkeypatch.setattr(executor, "_transfers", driver.open(), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: driver.settle())
        return executor

    return drive


def search_quickly(patch: pytest.MonkeyPatch) -> None:
    """The planner takes a short race and simulates one finalist, in a fraction of the time."""
    from flexengine.planner.limits import Race, SearchLimits  # noqa: PLC0415 (with Triton's interpreter set above)

    quick = SearchLimits(race=(Race(3, 1.1, 10_000, 4),), commands=1, expansion_blocks=1)
    patch.setattr("flexengine.planner.limits.LIMITS", quick)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles and tokens of tests stay out of the user's cache; no file of theirs has to survive a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _tokenizers_are_imported() -> Iterator[None]:
    """Processes with a tokenizer are forked: what they would import, a second of it, hundreds of times, is there.

    No search for garbage goes through what has been imported until here, which takes it two seconds.
    """
    import transformers.tokenization_python  # noqa: F401, PLC0415 (with Triton's variable set)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401, PLC0415

    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _quick_search_elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """How good plans are is for the tests of the planner; others need some plan of its."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "planner":
            search_quickly(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _a_demo_of_few_layers(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Any]]:
    """The model of the demo has a first, a middle and a last layer, not eight: its runs and plans take half the time.

    Tests of the planner, and processes that are started anew, have the whole one. Gives what reads a config's folder.
    """
    from flexengine.models import registry  # noqa: PLC0415 (with Triton's interpreter set above)

    read = registry._read_config

    def of_few_layers(folder: Path) -> Any:
        config = read(folder)
        return {**config, "num_hidden_layers": 3} if folder == registry.ASSETS / "demo" else config

    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "planner":
            patch.setattr(registry, "_read_config", of_few_layers)
        yield read


@pytest.fixture
def whole_demo(_a_demo_of_few_layers: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that tell of the sizes of the demo's model: it has all its layers."""
    monkeypatch.setattr("flexengine.models.registry._read_config", _a_demo_of_few_layers)


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the planner that need some plan, not the best."""
    search_quickly(monkeypatch)


@pytest.fixture(scope="module")
def quick_search_in_module() -> Iterator[None]:
    """The same for plans that a file's tests share."""
    with pytest.MonkeyPatch.context() as patch:
        search_quickly(patch)
        yield


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """What earlier tests have left is freed before a test that measures memory, and not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _no_models_of_others() -> Iterator[None]:
    """What is remembered of a file's models is forgotten: with those of thousands a search for garbage takes seconds.

    All of them are functions of their arguments, so that no result depends on what they remember.
    """
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith(("flexengine.schedule.", "flexengine.planner.", "flexengine.models.")):
            for function in _remembering_functions(module):
                function.cache_clear()


@cache
def _remembering_functions(module: ModuleType) -> list[Any]:
    """A module's functions that remember what they gave: looking for them takes longer than to have them forget."""
    return [function for function in vars(module).values() if hasattr(function, "cache_clear")]


@contextmanager
def _logging_as_before() -> Iterator[None]:
    """A command sets up logging for its process; the tests after it have their own."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    if root.level != level:  # setting it visits every logger, of which there are a thousand
        root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True, scope="module")
def _logging_before_the_module() -> Iterator[None]:
    """Fixtures of a module run commands too."""
    with _logging_as_before():
        yield


@pytest.fixture(autouse=True)
def _logging_before_the_test() -> Iterator[None]:
    with _logging_as_before():
        yield


@pytest.fixture
def few_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows in a few groups, not one for each part of a card: the interpreter takes long for a program."""
    from flexengine.ops import causal_conv, layernorm, linear, rmsnorm  # noqa: PLC0415 (after Triton's variable is set)

    monkeypatch.setattr(causal_conv, "WEIGHT_GRAD_PARTIALS", 2)
    monkeypatch.setattr(rmsnorm, "HEAD_GRAD_PARTIALS", 3)
    monkeypatch.setattr(rmsnorm, "ROW_GRAD_PARTIALS", 3)
    monkeypatch.setattr(layernorm, "ROW_GRAD_PARTIALS", 3)
    monkeypatch.setattr(linear, "BIAS_GRAD_PARTIALS", 3)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, few_partials: None) -> None:
    """Ops run their kernels without a GPU, in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles its kernels for the GPU here, and does not interpret them")
    from quick_interpreter import make_quick  # noqa: PLC0415 (after Triton's variable is set)

    make_quick()
    monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, in whatever order tests run."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


Pair = tuple[tuple[str, str], ...]


def pairs_of(item: pytest.Item) -> set[Pair]:
    """Each two of the values of a case, with the names of its parameters."""
    assert isinstance(item, pytest.Function)
    return set(combinations(sorted((name, repr(value)) for name, value in item.callspec.params.items()), 2))


def leave_more_than_pairs(items: list[pytest.Item]) -> None:
    """Mark as thorough what adds no pair of values to a test's other cases; the one that adds most comes first.

    Cases that need a GPU stay as they are: without one they would be skipped with their pairs.
    """
    tests = defaultdict[str, dict[pytest.Item, set[Pair]]](dict)
    for item in items:
        if item.get_closest_marker("pairs") and not any(map(item.get_closest_marker, ("thorough", "gpu"))):
            tests[item.nodeid.partition("[")[0]][item] = pairs_of(item)
    for cases in tests.values():
        missing = set().union(*cases.values())
        assert missing, f"{next(iter(cases)).nodeid} has one parameter, whose values are in no pairs"
        while missing:
            best = max(cases, key=lambda item: len(cases[item] & missing))
            missing -= cases.pop(best)
        for item in cases:
            item.add_marker("thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_more_than_pairs(items)
    asked = str(config.getoption("markexpr", ""))
    for marker in {"interpreter", "thorough"} - {name for name in ("interpreter", "thorough") if name in asked}:
        by_hand = [item for item in items if item.get_closest_marker(marker)]
        items[:] = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=by_hand)
    # at the end, one process would run them and others wait
    items.sort(key=lambda item: ("alone" not in item.keywords, "long" not in item.keywords))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            if unknown := _unknown_fixtures(item):
                raise pytest.UsageError(f"{item.nodeid} asks for {unknown}, which no fixture is called here")
            item.add_marker(skip)


def _unknown_fixtures(item: pytest.Item) -> set[str]:
    """Names that a test asks for and no fixture has, which pytest itself tells of when the test runs, on a GPU."""
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    known = item._fixtureinfo.name2fixturedefs.keys() | parameters.keys()
    return set(item.fixturenames) - known - {"request"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests of several processes share a GPU, but for one marked `alone`: it waits for all others, and they for it.

    Afterwards each gives back what torch keeps of the GPU's memory.
    """
    if "gpu" not in item.keywords or not torch.cuda.is_available():
        return (yield)
    with (Path(tempfile.gettempdir()) / f"gpu-tests-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if "alone" in item.keywords else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            gc.collect()
            with suppress(RuntimeError):  # of a kernel that the test has launched, and the next test will hear of
                torch.cuda.empty_cache()
