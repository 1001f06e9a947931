"""A sample of bench/fuzz.py on every run of the tests, and whether the judge would notice what it looks for."""

import multiprocessing
from pathlib import Path

import pytest
from thorough import cases

if not (Path(__file__).resolve().parents[2] / "bench" / "fuzz.py").is_file():
    pytest.skip("bench/ is not beside the package", allow_module_level=True)

from bench import fuzz
from bench.fuzz_cases import Originals, damage

SEEDS, MORE_SEEDS = range(1_000_000, 1_000_050), range(1_000_050, 1_000_200)
"""Beyond those of the committed result."""


@pytest.mark.parametrize("seeds", cases([SEEDS, MORE_SEEDS], [SEEDS]), ids=str)
def test_damaged_inputs_end_in_a_message(seeds):
    results = fuzz.run_cases(seeds, num_workers=1)
    assert [result.seed for result in results] == list(seeds)
    complaints = [result for result in results if result.complaint]
    assert not complaints, complaints[:3]
    assert {result.kind for result in results} == {"config", "header", "index"}
    accepted = sum(result.outcome == "accepted" for result in results)
    assert 0 < accepted < len(results) // 2  # most cases do damage


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return Originals(tmp_path_factory.mktemp("originals"))


def test_a_seed_is_a_case(originals, tmp_path):
    """The same bytes on every run, so that a seed in a report can be looked into."""
    written = []
    for name in "ab":
        (tmp_path / name).mkdir()
        for seed in range(40):
            folder = tmp_path / name / str(seed)
            folder.mkdir()
            how = damage(seed, originals, folder).how
            written.append((name, seed, how, {path.name: path.read_bytes() for path in folder.iterdir()}))
    first, second = ([row[1:] for row in written if row[0] == name] for name in "ab")
    assert first == second
    assert len({str(row[2]) for row in first}) > 30  # and the cases differ


def judged(monkeypatch, originals, folder, use):
    monkeypatch.setattr(fuzz, "use", use)
    return fuzz.run_case(1, originals, folder / "case")


def raising(error):
    def use(case, seed):
        raise error

    return use


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (TypeError("int() argument"), "crash without a message"),
        (MemoryError(), "crash without a message"),
        (ValueError(), "an empty message"),
        (ValueError("'utf-8' codec can't encode"), "names no file"),
        (ValueError("case: hidden_size=3 is bad"), "without a remedy"),
        (ValueError("case: fetch it again\n" * 30), "a message of 30 lines"),
        (ValueError("case: fetch it again" + "x" * 2000), "the longest of 2020 characters"),
        (ValueError("case: fetch it again. Traceback ..."), "a traceback"),
    ],
)
def test_errors_that_are_complained_about(error, complaint, monkeypatch, originals, tmp_path):
    assert complaint in judged(monkeypatch, originals, tmp_path, raising(error)).complaint


def test_a_good_message_is_none(monkeypatch, originals, tmp_path):
    result = judged(monkeypatch, originals, tmp_path, raising(ValueError("case: hidden_size=0; correct it")))
    assert (result.outcome, result.complaint) == ("ValueError", "")


def test_memory_and_files_are_watched(monkeypatch, originals, tmp_path):
    def take(case, seed):
        bytearray(b"x" * (2 * fuzz.MOST_GROWTH_BYTES))

    def write(case, seed):
        (case.folder / "half").write_text("x")

    assert "bytes of memory" in judged(monkeypatch, originals, tmp_path, take).complaint
    assert "files of the model have changed" in judged(monkeypatch, originals, tmp_path, write).complaint


def test_hangs_and_deaths_are_noticed():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    assert fuzz.received(receiver, 7, limit_s=0.0)[:4] == (7, "?", "?", "hang")
    sender.close()
    dead = fuzz.received(receiver, 8, limit_s=10.0)
    assert dead.complaint == "the process died"
    figures = fuzz.summary([dead, fuzz.Result(9, "?", "?", "hang", complaint="longer than 1 s")])
    assert (figures["crashes"], figures["hangs"], figures["num_complaints"]) == (1, 1, 2)


def test_after_a_death_the_next_worker_goes_on(monkeypatch):
    def one_worker(seeds, limit_s):
        """Workers that die at every third case."""
        for seed in seeds:
            died = seed % 3 == 0
            yield fuzz.Result(seed, "?" if died else "config", "", "", complaint="the process died" if died else "")
            if died:
                return

    monkeypatch.setattr(fuzz, "of_one_worker", one_worker)
    results = fuzz.run_cases(range(20), num_workers=3)
    assert [result.seed for result in results] == list(range(20))
    assert [result.seed for result in results if result.complaint] == list(range(0, 20, 3))
