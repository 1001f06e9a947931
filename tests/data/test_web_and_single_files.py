"""Data by an https address, and the formats of files that are named themselves: plain texts and those of torch.save."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from flexengine.checkpoint import web_file
from flexengine.checkpoint.web_file import fetched
from flexengine.data import ChatTokenizer, parse_source, prepare_sources
from flexengine.data.sources import Reader, Source
from flexengine.models.registry import ASSETS
from flexengine.wording import without_folders

RECORD = b'{"question": "What is 2 plus 2?", "answer": "It is 4."}\n'
FILES = {
    "/a.jsonl": (200, "application/json", 2 * RECORD),
    "/page.jsonl": (200, "text/html; charset=utf-8", b"<html>log in</html>"),
    "/gone.jsonl": (404, "text/plain", b""),
}


@pytest.fixture
def web(monkeypatch):
    """Serves FILES; gives the address, and the list of what was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            status, kind, body = FILES[path]
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *arguments):
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(web_file, "RETRIES", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_of_the_web_is_fetched_once(web, tmp_path, monkeypatch):
    url, asked = f"{web[0]}/a.jsonl?token=secret", web[1]
    tokenizer = ChatTokenizer.from_folder(ASSETS / "demo")
    for _ in range(2):
        [prepared] = prepare_sources([parse_source(url)], tokenizer, 64, False, tmp_path)
        assert prepared.num_kept == 2
        assert prepared.describe().startswith(f"{web[0]}/a.jsonl: 2 of 2 records")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert asked == ["/a.jsonl"]
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set and it was not fetched before"):
        fetched(f"{web[0]}/other.jsonl", tmp_path)
    fetched(url, tmp_path).write_bytes(b"cut")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        fetched(url, tmp_path)


def test_what_is_not_fetched(web, tmp_path, monkeypatch):
    for name, says in (
        ("page.jsonl", "the answer is a web page, not a file"),
        ("gone.jsonl", "the server answered HTTP 404"),
    ):
        with pytest.raises(ValueError, match=f"data set {web[0]}/{name}: {says}"):
            fetched(f"{web[0]}/{name}", tmp_path)
    monkeypatch.setattr(web_file, "MOST_FETCHED_BYTES", len(RECORD))
    with pytest.raises(ValueError, match="the most that is fetched"):
        fetched(f"{web[0]}/a.jsonl", tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for url, says in (
        ("http://example.org/a.jsonl", "give an https address"),
        ("https://example.org/data", "the address ends in data; --dataset wants"),
        ("ftp://example.org/a.jsonl", "only https addresses are fetched"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_source(url)


def test_weights_and_names_of_addresses():
    assert parse_source("https://h.org/a.jsonl=0.5") == Source("https://h.org/a.jsonl", weight=0.5)
    assert parse_source("https://h.org/a.jsonl?v=2") == Source("https://h.org/a.jsonl?v=2")
    assert without_folders("https://me:word@h.org/b/a.jsonl?key=2") == "https://h.org/b/a.jsonl"


def records(path, **options):
    return list(Reader(Source(str(path), **options)).records())


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_plain_texts(tmp_path, monkeypatch, suffix):
    """In blocks of whole lines, which lose nothing."""
    monkeypatch.setattr("flexengine.checkpoint.dataset_rows.TEXT_BYTES", 12)
    text = "\ufeffEine Zeile\nnoch eine\nGrüße"
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    found = records(path)
    assert [record.text for record in found] == ["Eine Zeile\nnoch eine\n", "Grüße"]
    assert found[1].where.endswith("line 3")


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
SAVED = {
    "matrix": (IDS, [[1, 2, 3], [4, 5, 6]]),
    "vector": (IDS[0], [[1, 2, 3]]),
    "columns": ({"input_ids": IDS, "labels": IDS}, [[1, 2, 3], [4, 5, 6]]),
    "lists": ([[1, 2], IDS[1]], [[1, 2], [4, 5, 6]]),
    "rows": ([{"input_ids": IDS[0], "labels": IDS[0]}], [[1, 2, 3]]),
}


@pytest.mark.parametrize("name", SAVED)
def test_files_of_torch(tmp_path, name):
    saved, ids = SAVED[name]
    torch.save(saved, tmp_path / "a.pt")
    found = [record.tokens.input_ids for record in records(tmp_path / "a.pt") if record.tokens]
    assert found == ids
    assert len(records(tmp_path / "a.pt", max_records=1)) == 1


class Other:
    """No code of a file is run, so that this is not read."""


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (Other(), "weights_only, which runs no code of the file, does not read it"),
        (3, "holds a int, expected a tensor"),
        ({"input_ids": IDS, "labels": IDS[:1]}, "expected one row each"),
        ([torch.ones(3)], "input_ids must be a flat list of integers"),
    ],
)
def test_files_of_torch_that_are_not_read(tmp_path, saved, says):
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=f"a.pt.*{says}"):
        records(tmp_path / "a.pt")


def test_only_the_first_records_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(2 * RECORD + b"what is read no more\n")
    assert len(records(path, max_records=2)) == 2
    reader, whole = (Reader(Source(str(path), max_records=most)) for most in (2, None))
    assert reader.key() != whole.key(), "their tokens are kept apart"
    [row] = records(path, max_records=1, columns=(("prompt", "question"),))
    assert row.messages[0].content == "What is 2 plus 2?"
