"""Downloads from servers that misbehave: each ends in bounded time, in one message, and keeps no wrong file."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from thorough import cases

from flexengine.checkpoint import hub as hub_module
from flexengine.checkpoint import hub_errors, hub_file, hub_listing
from flexengine.checkpoint.download import main, verify_manifest

REPO, COMMIT = "org/tiny", "c" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": save({"a": torch.arange(5000.0)})}
WEIGHTS = FILES["model.safetensors"]
PAGE = b"<!DOCTYPE html><html><title>Log in to this network</title></html>"
MAX_SECONDS = 30  # of one case: limits of time are set to a second or less


class Asked(NamedTuple):
    """One request: the file's name ("" for the listing) and the first byte that is asked for."""

    name: str
    start: int


Send = Callable[[socket.socket, Asked], object]


def head(status: str, length: int | None, **headers: str) -> bytes:
    fields = {"Connection": "close", **({} if length is None else {"Content-Length": str(length)})}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "".join([f"HTTP/1.1 {status}\r\n", *(f"{k}: {v}\r\n" for k, v in fields.items()), "\r\n"]).encode()


def listing(hashes: bool = True, sizes: bool = True, **changes: object) -> bytes:
    """The list of files; hashes and sizes may be left out."""
    siblings = []
    for name, contents in FILES.items():
        entry: dict[str, object] = {"rfilename": name}
        if sizes:
            entry["size"] = len(contents)
        if hashes:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(contents) + contents, usedforsecurity=False).hexdigest()
        siblings.append(entry)
    return json.dumps({"sha": COMMIT, "siblings": siblings, **changes}).encode()


def send_listing(**changes: object) -> Send:
    body = listing(**changes)  # pyright: ignore
    return lambda to, asked: to.sendall(head("200 OK", len(body), Content_Type="application/json") + body)


def send_body(body: bytes, status: str = "200 OK", **headers: str) -> Send:
    return lambda to, asked: to.sendall(head(status, len(body), **headers) + body)


def send_file(to: socket.socket, asked: Asked) -> None:
    """What a good server does."""
    body = FILES[asked.name]
    if asked.start:
        place = f"bytes {asked.start}-{len(body) - 1}/{len(body)}"
        to.sendall(head("206 Partial Content", len(body) - asked.start, Content_Range=place) + body[asked.start :])
    else:
        to.sendall(head("200 OK", len(body)) + body)


def send_nothing(to: socket.socket, asked: Asked) -> None:
    """Keep the connection open until the other side closes it."""
    with contextlib.suppress(OSError):
        while to.recv(1024):
            pass


def send_slowly(to: socket.socket, asked: Asked) -> None:
    """A byte now and then, for ever."""
    to.sendall(head("200 OK", 10**6))
    while True:
        to.sendall(b"[")
        time.sleep(0.02)


def send_without_end(to: socket.socket, asked: Asked) -> None:
    to.sendall(head("200 OK", None))
    while True:
        to.sendall(bytes(1 << 16))


def endless_refusal(to: socket.socket, asked: Asked) -> None:
    to.sendall(head("500 No", None))
    send_without_end(to, asked)


def send_to(address: str) -> Send:
    return lambda to, asked: to.sendall(head("302 Found", 0, Location=address))


def cut_at(num_bytes: int) -> Send:
    """The whole file was asked for or not: from its beginning, and never further than `num_bytes`."""
    return lambda to, asked: to.sendall(head("200 OK", len(WEIGHTS)) + WEIGHTS[:num_bytes])


def wrong_part(to: socket.socket, asked: Asked) -> None:
    """Half of the file, then always its last bytes."""
    if asked.start == 0:
        to.sendall(head("200 OK", len(WEIGHTS)) + WEIGHTS[: len(WEIGHTS) // 2])
    else:
        place = f"bytes {len(WEIGHTS) - 9}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
        to.sendall(head("206 Partial Content", 9, Content_Range=place) + WEIGHTS[-9:])


class Server:
    """Answers each request by the function that a case gives for its kind; counts the requests."""

    def __init__(self, send_list: Send, send_weights: Send) -> None:
        self.asked: list[Asked] = []
        self._send = {"": send_list, "model.safetensors": send_weights, "refused": send_body(b"", "418 No")}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                to, _ = self._socket.accept()
                self._open.append(to)
                threading.Thread(target=self._answer, args=(to,), daemon=True).start()

    def _answer(self, to: socket.socket) -> None:
        with contextlib.suppress(OSError), to:
            request = b""
            while b"\r\n\r\n" not in request:
                request += to.recv(65536)
            lines = request.decode().lower().split("\r\n")
            path = lines[0].split(" ")[1].partition("?")[0]
            name = "" if path.startswith("/api/") else path.rpartition("/")[2]
            ranges = [line.partition("=")[2] for line in lines if line.startswith("range:")]
            asked = Asked(name, int(ranges[0].rstrip("-")) if ranges else 0)
            self.asked.append(asked)
            self._send.get(name, send_file)(to, asked)

    def close(self) -> None:
        self._socket.close()
        for to in self._open:
            with contextlib.suppress(OSError):
                to.shutdown(socket.SHUT_RDWR)


class Case(NamedTuple):
    """How a server misbehaves, and what the message says."""

    name: str
    says: str
    send_list: Send = send_listing()
    send_weights: Send = send_file


NO_HASH = send_listing(hashes=False)
UNKNOWN = send_listing(hashes=False, sizes=False)
SIGNED = "/storage/refused?X-Amz-Signature=secret&Expires=1"
CASES = [
    Case("cut_at_a_fixed_byte", "connection failed", send_weights=cut_at(1000)),
    Case("silent_listing", "connection failed .*timed out", send_nothing),
    Case("silent_file", "timed out|0 bytes of 1 files arrived in 1 s", send_weights=send_nothing),
    Case("listing_that_trickles", "did not arrive within", send_slowly),
    Case("file_that_trickles", r"\d+ bytes of 1 files arrived in 1 s", UNKNOWN, send_slowly),
    Case("endless_listing", "longer than 100000 bytes", send_without_end),
    Case("endless_file", "goes on after its end", send_weights=send_without_end),
    Case("endless_file_of_unknown_size", "sends more than 1000000 bytes", UNKNOWN, send_without_end),
    Case("endless_refusal", "HTTP 500", endless_refusal),
    Case("page_in_place_of_the_listing", "no list of files: '<!DOCTYPE.*log-in", send_body(PAGE)),
    Case("page_in_place_of_a_file", "a web page in place", UNKNOWN, send_body(PAGE, Content_Type="text/html; a=b")),
    Case("listing_without_names", "no list of files", send_listing(siblings=[{"size": 3}])),
    Case("listing_of_numbers", "no list of files", send_listing(siblings=[1, 2])),
    Case("listing_that_is_a_list", "no list of files", send_body(b"[]")),
    Case("listing_nested_too_deep", "no list of files", send_body(b"[" * 90_000)),
    Case("listing_of_a_negative_size", "no list of files", send_listing(siblings=[{"rfilename": "a", "size": -1}])),
    Case("listing_with_a_wrong_hash", "no list of files", send_listing(siblings=[{"rfilename": "a", "blobId": "/"}])),
    Case("listing_with_a_file_twice", "lists a file twice", send_listing(siblings=[{"rfilename": "a"}] * 2)),
    Case("listing_without_a_commit", "names no commit", send_listing(sha="../../x")),
    Case("file_shorter_than_listed", "a file of 20065 bytes, 20072 bytes were", NO_HASH, send_body(WEIGHTS[:-7])),
    Case("file_longer_than_listed", "a file of 20079 bytes, 20072 bytes were", NO_HASH, send_body(WEIGHTS + bytes(7))),
    Case("other_part_than_was_asked_for", "connection failed", NO_HASH, wrong_part),
    Case("packed_file", "a body in gzip", send_weights=send_body(WEIGHTS, Content_Encoding="gzip")),
    Case("redirects_in_a_circle", "redirect", send_weights=send_to("model.safetensors")),
    Case("refusal_that_is_no_json", "HTTP 400", send_weights=send_body(b"[1]", "400 Bad")),
    Case("signed_address", "HTTP 418 .*/storage/refused", send_weights=send_to(SIGNED)),
]  # fmt: skip


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of seconds and a few bytes, and no proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    monkeypatch.setattr(hub_listing, "LIST_TIMEOUT_S", 0.4)
    monkeypatch.setattr(hub_listing, "LIST_DEADLINE_S", 0.5)
    monkeypatch.setattr(hub_listing, "MAX_LISTING_BYTES", 100_000)
    monkeypatch.setattr(hub_file, "MAX_UNANNOUNCED_BYTES", 1_000_000)
    monkeypatch.setattr(hub_module, "STALL_S", 1.0)
    monkeypatch.setattr(hub_errors, "MAX_WAIT_S", 0.01)


@contextlib.contextmanager
def serving(send_list: Send, send_weights: Send) -> Iterator[Server]:
    server = Server(send_list, send_weights)
    try:
        yield server
    finally:
        server.close()


def fetch(server: Server, target: Path) -> int:
    return main(["model", REPO, "--target", str(target), "--endpoint", server.url, "--retries", "2"])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_misbehaviour_ends_in_one_message(case: Case, impatient, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    began_s = time.monotonic()
    with serving(case.send_list, case.send_weights) as server:
        assert fetch(server, tmp_path / "x") == 1
    assert time.monotonic() - began_s < MAX_SECONDS
    output = capsys.readouterr()
    assert len(output.err.splitlines()) == 1
    assert len(output.err) < 1000
    assert "secret" not in output.err + output.out
    placed = {path.name for path in (tmp_path / "x").rglob("*")}
    assert placed.isdisjoint({"model.safetensors", "flexengine_manifest.json"})
    assert len(server.asked) < 100  # 20 redirects for each of three attempts
    assert re.search(case.says, output.err), output.err


@pytest.mark.parametrize("send_list", [send_listing(), UNKNOWN], ids=["listed size", "unknown size"])
def test_a_file_has_a_deadline(monkeypatch, impatient, tmp_path: Path, capsys, send_list):
    """A server that always sends a little more never stalls, and what it sent is kept for the next run."""

    def drip(to: socket.socket, asked: Asked) -> None:
        to.sendall(head("200 OK", len(WEIGHTS)))
        for start in range(0, len(WEIGHTS), 10):
            to.sendall(WEIGHTS[start : start + 10])
            time.sleep(0.02)

    monkeypatch.setattr(hub_module, "STALL_BYTES", 1)
    monkeypatch.setattr(hub_file, "DEADLINE_S", 0.3)
    monkeypatch.setattr(hub_file, "LEAST_BYTES_PER_S", 10 * len(WEIGHTS))
    with serving(send_list, drip) as server:
        assert fetch(server, tmp_path) == 1
    assert re.search(r"\d+ bytes arrived in \d+ s, too few to go on.*it continues", capsys.readouterr().err)
    with serving(send_listing(), send_file) as server:
        assert fetch(server, tmp_path) == 0
    verify_manifest(tmp_path)


def test_next_run_continues_after_a_cut(impatient, tmp_path: Path):
    with serving(send_listing(), cut_at(1000)) as server:
        assert fetch(server, tmp_path) == 1
    with serving(send_listing(), send_file) as server:
        assert fetch(server, tmp_path) == 0
        assert Asked("model.safetensors", 1000) in server.asked
    verify_manifest(tmp_path)


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({}, ", verified;"),
        ({"hashes": False}, "NOT verified: the hub lists no hash of 2 of them, and of 2 only the size was compared;"),
        ({"hashes": False, "sizes": False}, "no hash of 2 of them, and of 0 only the size was compared;"),
    ],
    ids=["hashes", "sizes", "nothing"],
)
def test_what_was_compared_is_said(impatient, tmp_path: Path, capsys: pytest.CaptureFixture[str], known, says):
    with serving(send_listing(**known), send_file) as server:
        assert fetch(server, tmp_path) == 0
    assert says in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("silent", cases(["listing", "file"], ["file"]))
def test_interrupt_at_a_silent_server(tmp_path: Path, silent: str):
    """Ctrl-C ends the process although a thread waits for an answer that never comes."""
    script = Path(__file__).parents[2] / "download.py"
    environment = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "600", "NO_PROXY": "127.0.0.1"}
    environment.pop("HF_TOKEN", None)
    sends = (send_nothing, send_file) if silent == "listing" else (send_listing(), send_nothing)
    with serving(*sends) as server:
        command = [
            sys.executable,
            str(script),
            "model",
            REPO,
            "--target",
            str(tmp_path / "x"),
            "--endpoint",
            server.url,
        ]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        name = "" if silent == "listing" else "model.safetensors"
        while name not in [asked.name for asked in server.asked]:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted; run the same command again to continue\n")


def test_secrets_are_left_out_of_messages():
    text = "for url 'https://user:word@host/a?Signature=x&y=z' and http://b/c?d"
    assert hub_errors.without_secrets(text) == "for url 'https://host/a' and http://b/c"
