"""Ranks meet at a hub that takes nobody else, on one machine and over a network."""

import json
import os
import pickle
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
from torch.distributed import HashStore

from flexengine.parallel import hub as hub_module
from flexengine.parallel.hub import TOKEN_VARIABLE, Hub, open_hub


def awaited(done) -> None:
    end_s = time.monotonic() + 20
    while not done(0.01):
        assert time.monotonic() < end_s


def gathered(hub: Hub, row: bytes) -> list[bytes]:
    hub.send(row)
    awaited(hub.arrived)
    return hub.take()


@pytest.fixture(params=[False, True], ids=["one node", "nodes"])
def first(request, monkeypatch):
    """A store, whether ranks are on several nodes, and rank 0 of three, which opens its hub in a thread."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    monkeypatch.setattr(hub_module, "_WELCOME_S", 1)
    store, found = HashStore(), []
    thread = threading.Thread(target=lambda: found.append(open_hub(0, 3, store, request.param, awaited)))
    thread.start()
    if request.param:
        store.set("seen", "127.0.0.1")  # as the last rank tells
    yield store, request.param, found
    thread.join()


def joined(first) -> list[Hub]:
    store, outside, found = first
    others: dict[int, Hub] = {}

    def join(rank: int) -> None:
        others[rank] = open_hub(rank, 3, store, outside, awaited)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    awaited(lambda seconds: time.sleep(seconds) or bool(found))
    return [found[0], others[1], others[2]]


def all_gather(hubs: list[Hub], rows: list[bytes]) -> list[list[bytes]]:
    found: dict[int, list[bytes]] = {}

    def gather(rank: int) -> None:
        found[rank] = gathered(hubs[rank], rows[rank])

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(3)]


def test_rows_reach_all_ranks_in_order(first):
    hubs = joined(first)
    for rows in ([b"a", b"", b"c" * 3_000_000], [b"", b"", b""]):
        assert all_gather(hubs, rows) == [rows] * 3
    hubs[2].close()
    with pytest.raises((EOFError, OSError)):
        gathered(hubs[0], b"")
    hubs[0].close()
    with pytest.raises((EOFError, OSError)):
        gathered(hubs[1], b"")
    hubs[1].close()


def address_of(store) -> tuple[socket.socket, object]:
    awaited(lambda seconds: time.sleep(seconds) or store.check(["hub"]))
    family, address = json.loads(store.get("hub"))
    return socket.socket(socket.AddressFamily(family)), address if isinstance(address, str) else tuple(address)


@pytest.mark.parametrize("says", [b"", pickle.dumps(print), b"\xff" * 100, None], ids=["bye", "pickle", "bytes", "-"])
def test_a_stranger_is_turned_away_and_the_run_goes_on(first, says):
    """None: it says nothing at all, and keeps its connection."""
    stranger, address = address_of(first[0])
    with stranger:
        stranger.connect(address)
        if says is not None:
            stranger.sendall(says)
            stranger.close()
        assert all_gather(joined(first), [b"0", b"1", b"2"]) == [[b"0", b"1", b"2"]] * 3


def test_a_rank_with_another_token_is_told(first, monkeypatch):
    store, outside, _ = first
    awaited(lambda seconds: time.sleep(seconds) or store.check(["hub"]))
    monkeypatch.setenv(TOKEN_VARIABLE, "other")
    with pytest.raises(ValueError, match="rank 0 does not take rank 1 for one of its run: give all nodes the same"):
        open_hub(1, 3, store, outside, awaited)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    joined(first)


def test_a_stranger_is_not_taken_for_rank_0():
    """Who answers at rank 0's place without the token is no rank."""
    store, name = HashStore(), f"\0flexengine-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        store.set("host", "")
        store.set("hub", json.dumps([socket.AF_UNIX.value, name]))

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted, Connection(accepted.detach()) as connection:
                connection.send_bytes(b"#CHALLENGE#" + b"{sha256}" + bytes(20))
                connection.recv_bytes()
                connection.send_bytes(b"#WELCOME#")
                connection.recv_bytes(64)  # a challenge, which it cannot answer
                connection.send_bytes(b"no")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match="does not take rank 1"):
            open_hub(1, 2, store, False, awaited)
        thread.join()


def test_an_address_of_another_machine_is_refused():
    store = HashStore()
    store.set("seen", "192.0.2.1")  # of no machine, RFC 5737
    with pytest.raises(ValueError, match=r"MASTER_ADDR leads other nodes to 192\.0\.2\.1, where rank 0 cannot listen"):
        open_hub(0, 2, store, True, awaited)


def test_who_has_no_token_on_several_nodes_is_warned(monkeypatch, caplog):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    store = HashStore()
    store.set("seen", "127.0.0.1")
    hub = open_hub(0, 1, store, True, awaited)
    hub.close()
    assert TOKEN_VARIABLE in caplog.text
