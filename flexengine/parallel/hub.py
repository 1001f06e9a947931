"""Every rank's connection to rank 0, which hands all of them what each has sent.

On one machine it is a socket without a name on any disk, which processes of the same user alone may use and which no
network reaches. Ranks of several nodes use TCP, at the address by which the other nodes reach rank 0. Either way both
ends show that they know the token of the run.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

TOKEN_VARIABLE = "FLEXENGINE_RUN_TOKEN"
"""Environment variable: a secret text that all ranks of a run have, and nobody else."""
_UNKNOWN_TOKEN = b"flexengine"  # where none was given: on one machine the kernel vouches for users
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_LENGTH = struct.Struct("<Q")
_TIMEOUT = struct.Struct("ll")  # struct timeval
_WELCOME_S = 30  # for one that connects to show that it belongs here
_WELCOMED_S = 300  # for rank 0 to have welcomed the others, and turned strangers away
_LOOK_S = 0.05

Awaited = Callable[[Callable[[float], bool]], None]
"""Waits until its argument, which waits for at most the seconds that it is given, returns True."""

logger = logging.getLogger(__name__)


class Hub:
    """This rank's connections: of rank 0 to all others, of the others to rank 0. All ranks make the same calls."""

    def __init__(self, rank: int, connections: dict[int, Connection]) -> None:
        """connections: by the rank at the other end."""
        self._rank, self._connections = rank, connections
        self._rows: dict[int, bytes] = {}

    def send(self, row: bytes) -> None:
        """Give all ranks this rank's row. Raises: OSError where the other end is gone, as the calls below do."""
        self._rows = {self._rank: row}
        if self._rank:
            self._connections[0].send_bytes(row)

    def arrived(self, seconds: float) -> bool:
        """Whether `take` has all rows at once, or has after waiting for so long. Raises: EOFError."""
        if self._rank:
            return self._connections[0].poll(seconds)
        missing = {self._connections[rank]: rank for rank in self._connections.keys() - self._rows.keys()}
        for connection in wait([*missing], seconds) if missing else ():
            assert isinstance(connection, Connection)
            self._rows[missing[connection]] = connection.recv_bytes()
        return len(self._rows) == len(self._connections) + 1

    def take(self) -> list[bytes]:
        """The rows of all ranks, in their order. Order: when `arrived` says so."""
        if self._rank:
            return _cut(self._connections[0].recv_bytes())
        rows = [self._rows[rank] for rank in range(len(self._connections) + 1)]
        joined = b"".join([_LENGTH.pack(len(rows)), *(_LENGTH.pack(len(row)) for row in rows), *rows])
        for connection in self._connections.values():
            connection.send_bytes(joined)
        return rows

    def close(self) -> None:
        """Leave the others. What was sent still reaches them."""
        for connection in self._connections.values():
            connection.close()


def _cut(joined: bytes) -> list[bytes]:
    (count,) = _LENGTH.unpack_from(joined)
    first = _LENGTH.size * (count + 1)
    lengths = [_LENGTH.unpack_from(joined, _LENGTH.size * index)[0] for index in range(1, count + 1)]
    return [joined[start:end] for start, end in pairwise(accumulate(lengths, initial=first))]


def open_hub(rank: int, size: int, store: Any, outside: bool, awaited: Awaited) -> Hub:
    """Join the other ranks; all make this call together.

    store: a store of torch.distributed that no other opening uses. outside: ranks are on several nodes. Raises:
    ValueError where rank 0 cannot be reached or has another token; OSError; what `awaited` raises.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if outside and not token and rank == 0:
        logger.warning(
            "%s is not set: whoever reaches this machine over the network could pass for a rank; give all nodes the"
            " same random text",
            TOKEN_VARIABLE,
        )
    if rank:
        host = _got(store, "host", awaited)
        if host and rank == size - 1:
            store.set("seen", _seen_address(host))
        family, address = json.loads(_got(store, "hub", awaited))
        return Hub(rank, {0: _connected(rank, family, address, token or _UNKNOWN_TOKEN)})
    store.set("host", (os.environ.get("MASTER_ADDR", "") or socket.gethostname()) if outside else "")
    place = address_of_node(rank, store, awaited) if outside else f"\0flexengine-{secrets.token_hex(16)}"
    with _listening(place) as listener:
        name = listener.getsockname()
        store.set("hub", json.dumps([listener.family.value, name.decode() if isinstance(name, bytes) else name]))
        welcomed: dict[int, Connection] = {}

        def all_came(seconds: float) -> bool:
            listener.settimeout(seconds or _LOOK_S)
            with suppress(AuthenticationError, EOFError, OSError, ValueError, struct.error):  # nobody, or a stranger
                came, connection = _welcomed(listener.accept()[0], token or _UNKNOWN_TOKEN)
                if 0 < came < size:
                    welcomed[came] = connection
            return len(welcomed) == size - 1

        awaited(all_came)
    return Hub(rank, welcomed)


def address_of_node(node: int, store: Any, awaited: Awaited) -> str:
    """The address by which the other nodes reach this one, on the way to rank 0's; store: that of `open_hub`."""
    seen = _got(store, "seen", awaited)
    with _toward(seen) as reached:
        return seen if node == 0 else reached.getsockname()[0]


def _seen_address(host: str) -> str:
    """The address of rank 0's machine, as another node sees it: its own name may mean itself alone there."""
    with _toward(host) as reached:
        return reached.getpeername()[0]


def _toward(host: str) -> socket.socket:
    """A socket that has chosen its way to `host`; nothing is sent. Raises: ValueError where there is none."""
    problem: OSError | None = None
    with suppress(socket.gaierror):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            reached = socket.socket(family, kind, protocol)
            try:
                reached.connect(address)
            except OSError as error:
                reached.close()
                problem = error
            else:
                return reached
    raise ValueError(f"the machine of rank 0, {host!r} (MASTER_ADDR), cannot be reached: {problem or 'unknown name'}")


def _got(store: Any, key: str, awaited: Awaited) -> str:
    def known(seconds: float) -> bool:
        time.sleep(seconds)
        return store.check([key])

    awaited(known)
    return store.get(key).decode()


def _listening(place: str) -> socket.socket:
    """A socket that listens at an address, or at a name on this machine that begins with a zero."""
    family = socket.AF_UNIX if place.startswith("\0") else socket.AF_INET6 if ":" in place else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place if family == socket.AF_UNIX else (place, 0))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"MASTER_ADDR leads other nodes to {place}, where rank 0 cannot listen ({error.strerror}); give an address"
            " of its own machine"
        ) from None
    listener.listen(128)
    return listener


def _connected(rank: int, family: int, address: Sequence[Any], token: bytes) -> Connection:
    """Connect to rank 0, and show each other the token."""
    with socket.socket(socket.AddressFamily(family), socket.SOCK_STREAM) as ours:
        connect_to_first(ours, address if isinstance(address, str) else tuple(address))
        connection = _connection_of(ours)
        _limit_waits(ours, _WELCOMED_S)
        try:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
        except (AuthenticationError, EOFError, OSError):
            raise ValueError(
                f"rank 0 does not take rank {rank} for one of its run: give all nodes the same {TOKEN_VARIABLE}"
            ) from None
        connection.send_bytes(_LENGTH.pack(rank))
        _limit_waits(ours, 0)
    return connection


def _welcomed(theirs: socket.socket, token: bytes) -> tuple[int, Connection]:
    """The rank of one that connected, and the connection. Raises: many kinds of errors where a stranger did."""
    with theirs:
        _check_user(theirs)
        _limit_waits(theirs, _WELCOME_S)
        connection = _connection_of(theirs)
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        (rank,) = _LENGTH.unpack(connection.recv_bytes(_LENGTH.size))
        _limit_waits(theirs, 0)
    return rank, connection


def _limit_waits(connected: socket.socket, seconds: int) -> None:
    """Have reading from a socket fail after so long; 0: never."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.pack(seconds, 0))


def _connection_of(connected: socket.socket) -> Connection:
    """Messages of known length over a socket, which the caller may close."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(os.dup(connected.fileno()))


def connect_to_first(ours: socket.socket, address: str | tuple[Any, ...]) -> None:
    """Connect to the first rank of this node. Raises: ValueError where nobody listens, or another user does."""
    try:
        ours.connect(address)
    except ConnectionRefusedError:
        raise ValueError(
            "the first rank of this node cannot be reached: LOCAL_WORLD_SIZE must count processes of one machine"
            " and, in containers, of one network namespace"
        ) from None
    _check_user(ours)


def _check_user(connected: socket.socket) -> None:
    """Raise ValueError where another user is at the other end of a socket of this machine."""
    if connected.family == socket.AF_UNIX and user_of(connected) != os.geteuid():
        raise ValueError("the first rank of this node runs as another user; start all ranks as one user")


def user_of(connected: socket.socket) -> int:
    """The user at the other end of a socket of this machine."""
    return _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
