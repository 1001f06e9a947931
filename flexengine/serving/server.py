"""HTTP around the queue of requests, by Python's own server: it is for trying a model, on this machine."""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from flexengine.serving.answering import Answered, Job, Jobs, Piece
from flexengine.serving.protocol import (
    CHAT,
    COMPLETIONS,
    MODELS,
    Asked,
    Defaults,
    RequestError,
    first_pieces,
    last_piece,
    models,
    piece,
    read_request,
    usage,
    whole_answer,
)
from flexengine.wording import parse_json

MOST_BODY_BYTES = {False: 2**22, True: 2**25}
"""Largest body of a request, without images and with them."""
MOST_CONNECTIONS = 32
"""Each has a thread of its own."""
IDLE_S = 60.0
"""How long a connection may say nothing."""
POLL_S = 0.1


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Server(ThreadingHTTPServer):
    """Takes connections in threads of its own. local_only: answers only who calls it by a name of this machine.

    Order: `listen` begins to answer. Raises: ValueError where nobody can listen there, as where the port is taken.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, jobs: Jobs, defaults: Defaults, local_only: bool) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"--host {host} --port {port}: {reason}; choose another port, or stop who has it"
            ) from None
        self.jobs, self.defaults, self.local_only, self.created = jobs, defaults, local_only, int(time.time())
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    @property
    def url(self) -> str:
        """Where clients find it."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}/v1"

    def server_bind(self) -> None:
        """Bind without asking who is called so, as the parent would."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def listen(self) -> None:
        """Answer from now on, in another thread."""
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread, or close it where there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


class Handler(BaseHTTPRequestHandler):
    """One connection: request after request, or one stream."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Name the model."""
        self._try(self._name_models)

    def do_POST(self) -> None:
        """Answer."""
        self._try(self._answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing; answers are told where they are made."""

    def _try(self, call: Any) -> None:
        try:
            self._check_caller()
            call()
        except RequestError as error:
            self.close_connection = True  # of a body that was not read nothing may be taken for a request
            self._send(error.status, error.body())

    def _check_caller(self) -> None:
        """Raise RequestError for pages of other sites, whose scripts a browser would run here."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        named = urlsplit(f"//{host}").hostname or ""
        if self.server.local_only and not is_loopback(named):
            raise RequestError(f"this server answers on localhost alone, not as {named or 'nobody'}", status=403)
        if origin is not None and urlsplit(origin).netloc != host:
            raise RequestError(f"pages of {origin} may not ask this server", status=403)

    def _name_models(self) -> None:
        found = models(self.server.defaults.model, self.server.created)
        path = urlsplit(self.path).path
        if path == MODELS:
            self._send(200, found)
        elif path == f"{MODELS}/{self.server.defaults.model}":
            self._send(200, found["data"][0])
        else:
            raise _no_such_path(path)

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        if path not in (CHAT, COMPLETIONS):
            raise _no_such_path(path)
        asked = read_request(path, self._body(), self.server.defaults)
        job = self.server.jobs.add(asked)
        try:
            self._stream(job) if asked.stream else self._send_whole(job)
        finally:
            job.given_up.set()

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError("give a body and its Content-Length", status=411)
        if int(length) > (most := MOST_BODY_BYTES[self.server.defaults.images]):
            raise RequestError(f"the body has {length} bytes, of at most {most}", status=413)
        try:
            return parse_json(self.rfile.read(int(length)), "the body")
        except ValueError as error:
            raise RequestError(str(error).partition(";")[0], code="invalid_json") from None

    def _send_whole(self, job: Job) -> None:
        for message in job.messages():
            if isinstance(message, RequestError):
                raise message
            if isinstance(message, Answered):
                used = usage(message.num_prompt, message.num_answer)
                self._send(200, whole_answer(job.asked, message.answers, used))

    def _stream(self, job: Job) -> None:
        """Send pieces as events; what goes wrong before the first one has a status of its own."""
        begun = False
        for message in job.messages():
            if isinstance(message, RequestError) and not begun:
                raise message
            if not begun:
                self._begin_events()
                self._send_events(first_pieces(job.asked))
                begun = True
            self._send_events(_events(job.asked, message))
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # the end of the connection is that of the stream
        self.end_headers()

    def _send_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)


def _no_such_path(path: str) -> RequestError:
    return RequestError(
        f"there is no {path}; there are {CHAT}, {COMPLETIONS} and {MODELS}", code="not_found", status=404
    )


def _events(asked: Asked, message: Any) -> list[dict[str, Any]]:
    """The events that tell what became known."""
    if isinstance(message, Piece):
        return [piece(asked, message.index, message.text)]
    if isinstance(message, RequestError):
        return [message.body()]
    ends = [piece(asked, index, "", answer.reason) for index, answer in enumerate(message.answers)]
    return [*ends, last_piece(asked, usage(message.num_prompt, message.num_answer))] if asked.tells_usage else ends
