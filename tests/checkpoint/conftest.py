"""A Hugging Face hub in miniature on the loopback interface, counting what it is asked for."""

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants as hub_constants
import pytest

from flexengine.checkpoint import hub_cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Request(NamedTuple):
    """One answered request for a file: where it started and how many bytes of body were sent."""

    path: str
    start: int
    sent_bytes: int
    authorization: str | None


class FakeHub:
    """Repositories by "models/ORG/NAME" or "datasets/ORG/NAME"; knobs for everything that can go wrong.

    lfs: files kept in large-file storage, served by redirect from another host name, as the hub does.
    drop_after: file -> the connection breaks after this many bytes of body. corrupt: files sent with one byte changed.
    status: file -> HTTP status instead of contents, error_code: what HEAD says of it as X-Error-Code.
    no_ranges: Range headers are ignored, as some mirrors do.
    refuse: (status, X-Error-Code) for every question about repositories.
    together: files whose contents are sent once all of them have been asked for.
    """

    commit = COMMIT

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.lfs: set[str] = set()
        self.drop_after: dict[str, int] = {}
        self.corrupt: set[str] = set()
        self.status: dict[str, int] = {}
        self.unlisted_hashes = False
        self.no_ranges = False
        self.refuse: tuple[int, str] | None = None
        self.error_code = ""
        self.together: dict[str, threading.Barrier] = {}
        self.requests: list[Request] = []
        self.url = ""

    def sent_bytes(self, path: str) -> int:
        return sum(request.sent_bytes for request in self.requests if request.path == path)

    def starts(self, path: str) -> list[int]:
        return [request.start for request in self.requests if request.path == path]

    def describe(self, repo: str) -> dict:
        siblings = []
        for path, contents in self.repos[repo].items():
            blob_id = hashlib.sha1(b"blob %d\0" % len(contents) + contents, usedforsecurity=False).hexdigest()
            sibling: dict = {"rfilename": path, "size": len(contents), "blobId": blob_id}
            if path in self.lfs:
                lfs = {"sha256": hashlib.sha256(contents).hexdigest(), "size": len(contents), "pointerSize": 134}
                sibling |= {"lfs": lfs, "blobId": "f" * 40}
            siblings.append({"rfilename": path} if self.unlisted_hashes else sibling)
        name = repo.partition("/")[2]
        counts = {"private": False, "downloads": 0, "likes": 0, "tags": [], "disabled": False, "gated": False}
        return {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, **counts}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/") and "/revision/" in path:
            repo, _, revision = path.removeprefix("api/").partition("/revision/")
            self.answer_listing(repo, revision)
        elif path.startswith("api/") and "/tree/" in path:
            self.answer_tree(path.removeprefix("api/").partition("/tree/")[0])
        elif path.startswith("cdn/"):
            _, kind, organisation, name, file = path.split("/", 4)
            self.answer_contents(self.hub.repos[f"{kind}/{organisation}/{name}"], file)
        elif "/resolve/" in path:
            repo, _, rest = path.partition("/resolve/")
            self.answer_file(repo if repo.startswith("datasets/") else f"models/{repo}", *rest.split("/", 1))
        else:
            self.answer(404)

    def do_HEAD(self) -> None:
        """What the client of the hub asks before it fetches a file: its commit, size and hash."""
        repo, _, rest = unquote(urlsplit(self.path).path).lstrip("/").partition("/resolve/")
        _, _, file = rest.partition("/")
        contents = self.hub.repos[f"models/{repo}"].get(file)
        if file in self.hub.status or contents is None:
            self.answer(self.hub.status.get(file, 404), X_Error_Code=self.hub.error_code)
            return
        digest = hashlib.sha256(contents).hexdigest()
        about = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self.send_response(200)
        for name, value in {"Content-Length": str(len(contents)), **about}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer_tree(self, repo: str) -> None:
        """All files of a commit, as `list_repo_tree` asks for them."""
        described = self.hub.describe(repo)["siblings"]
        files = [{"type": "file", "path": s["rfilename"], "size": s["size"], "oid": s["blobId"]} for s in described]
        self.answer(200, json.dumps(files).encode(), Content_Type="application/json")

    def answer_listing(self, repo: str, revision: str) -> None:
        if self.hub.refuse:
            self.answer(self.hub.refuse[0], X_Error_Code=self.hub.refuse[1])
        elif repo not in self.hub.repos:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif revision not in ("main", COMMIT):
            self.answer(404, X_Error_Code="RevisionNotFound")
        else:
            self.answer(200, json.dumps(self.hub.describe(repo)).encode(), Content_Type="application/json")

    def answer_file(self, repo: str, revision: str, file: str) -> None:
        assert revision == COMMIT, "files must be fetched from the commit that was listed"
        if file in self.hub.status:
            self.answer(self.hub.status[file], X_Error_Code="EntryNotFound" if self.hub.status[file] == 404 else "")
        elif file in self.hub.lfs:
            port = urlsplit(self.hub.url).port
            self.answer(302, Location=f"http://localhost:{port}/cdn/{repo}/{file}")
        else:
            self.answer_contents(self.hub.repos[repo], file)

    def answer_contents(self, files: dict[str, bytes], file: str) -> None:
        contents = files[file]
        if file in self.hub.together:
            self.hub.together[file].wait(timeout=10)
        if file in self.hub.corrupt:
            contents = contents[:-1] + bytes([contents[-1] ^ 1])
        asked = None if self.hub.no_ranges else self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        body = contents[start:]
        sent = body[: max(self.hub.drop_after.get(file, len(contents)) - start, 0)]
        self.hub.requests.append(Request(file, start, len(sent), self.headers.get("Authorization")))
        if start and start >= len(contents):
            self.answer(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(sent)
        if len(sent) < len(body):
            self.close_connection = True


class Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up, as a download does when another file of it is wrong."""

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch) -> Iterator[FakeHub]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with serve() as running:
        yield running


@pytest.fixture
def hub_of_models(hub, tmp_path, monkeypatch) -> FakeHub:
    """The hub that ids of models lead to; files that are fetched of it are kept in tmp_path."""
    monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_cache, "RETRIES", 0)
    hub_cache._commits.clear()
    return hub
