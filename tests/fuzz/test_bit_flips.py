"""A sample of bench/bit_flips.py on every run of the tests, and whether its judge would notice what it looks for."""

from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "bench" / "bit_flips.py").is_file():
    pytest.skip("bench/ is not beside the package", allow_module_level=True)

from bench import bit_flips
from flexengine import cli
from flexengine.checkpoint import manifest


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with bit_flips.known_machine():
        yield bit_flips.Folders(tmp_path_factory.mktemp("flips"))


def test_flipped_bits_are_noticed(folders):
    """One file in five of those that a download, a checkpoint and the exports consist of."""
    assert all(folders.whole.values())
    first = 1_000_000 * len(folders.files)  # beyond the seeds of the committed result
    results = [bit_flips.flip(first + number, folders) for number in range(2, len(folders.files), 5)]
    complaints = [result for result in results if result.complaint]
    assert not complaints, complaints[:3]
    assert len({result.kind for result in results}) == len(folders.places)


def test_the_judge_notices_what_is_silent(folders, monkeypatch):
    """Without checksums a bit of a weight trains another model."""
    number = folders.files.index(("export", "model-00001-of-00002.safetensors"))
    monkeypatch.setattr(manifest, "_differences", lambda *_: [])
    assert bit_flips.flip(number, folders).complaint.startswith("verify did not name it")
    place, named = Path("step-4"), bit_flips.Ending(cli.BAD_INPUT, "step-4: x: SHA-256")
    judged = [
        bit_flips.complaint_about("x", place, named, bit_flips.Ending(*ending), "as whole")
        for ending in ((0, "", "other"), (2, "step-4 is damaged"), (-1, "step-4: x: KeyError"), (0, "", "as whole"))
    ]
    assert judged[0].startswith("silent")
    assert judged[1].startswith("status 2, and no message")
    assert judged[2].startswith("status -1")
    assert judged[3] == ""
