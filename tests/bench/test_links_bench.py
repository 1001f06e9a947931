"""bench/links.py without a GPU: its copies over the fake driver, what runs together, tables."""

import json
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import links
from flexengine.hardware.curve import Curve
from flexengine.hardware.measure import links as measure_links
from flexengine.hardware.measure.links import CURVE_NAMES, LinkBuffers, LinkRates
from flexengine.native import allocate_host
from flexengine.native.transfer_operations import Copy, Record

SIZE = 100_000


@pytest.fixture
def buffers() -> LinkBuffers:
    up, down = (torch.randint(256, (SIZE,), dtype=torch.uint8) for _ in range(2))
    return LinkBuffers(up, torch.zeros_like(up), down, torch.zeros_like(down))


def test_engine_copies_go_to_the_current_stream(driver, buffers: LinkBuffers, monkeypatch: pytest.MonkeyPatch):
    engine, streams = driver.open(piece_bytes=30_000), [driver.stream() for _ in range(2)]
    current = SimpleNamespace(stream=streams[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current.stream)
    link = links.EngineLink(buffers, engine)
    assert link.num_bytes == SIZE
    up, down = link.upward(70_000), link.downward(SIZE)
    for stream in streams:
        current.stream = stream
        up()
    down()
    events = engine.create_events(2)
    for stream, event in zip(streams, events, strict=True):
        engine.submit(engine.prepare([Record(stream, event)]))
        engine.synchronize(event)
    engine.close()
    assert torch.equal(buffers.up_gpu[:70_000], buffers.up_host[:70_000])
    assert not buffers.up_gpu[70_000:].any()
    assert torch.equal(buffers.down_host, buffers.down_gpu)
    used = [copy.stream for copy in driver.log()]
    assert used.count(streams[0].cuda_stream) == 3  # pieces of 70 000 bytes
    assert used.count(streams[1].cuda_stream) == 3 + 4


def test_together_counts_what_each_has_moved(driver, buffers: LinkBuffers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", partial(FakeEvent, driver))
    engines = {direction: driver.open() for direction in links.DIRECTIONS}
    copies = {
        "h2d": Copy(driver.stream(), buffers.up_gpu, 0, buffers.up_host, 0, SIZE),
        "d2h": Copy(driver.stream(), buffers.down_host, 0, buffers.down_gpu, 0, SIZE),
    }
    calls = []
    work = links.HostWork("host copy", lambda: (calls.append(1), time.sleep(0.001)), num_bytes=1000)
    rows = list(links.all_together(engines, copies, [work], seconds=0.05))
    for engine in engines.values():
        engine.close()
    busy = [(row.h2d_bytes_per_s > 0, row.d2h_bytes_per_s > 0, row.host_work) for row in rows]
    assert busy == [
        (False, False, "host copy"),
        (True, False, ""), (True, False, "host copy"),
        (False, True, ""), (False, True, "host copy"),
        (True, True, ""), (True, True, "host copy"),
    ]  # fmt: skip
    assert all((row.host_work_bytes_per_s > 0) == bool(row.host_work) for row in rows)
    assert 0 < rows[0].host_work_bytes_per_s <= 1000 / 0.001  # no call is shorter than its sleep
    assert rows[-1].host_memory_bytes_per_s == sum(rows[-1][1:])
    assert torch.equal(buffers.up_gpu, buffers.up_host)
    assert torch.equal(buffers.down_host, buffers.down_gpu)


def test_a_failing_copy_ends_the_measurement(driver, buffers: LinkBuffers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", partial(FakeEvent, driver))
    engine, copy = driver.open(), Copy(driver.stream(), buffers.up_gpu, 0, buffers.up_host, 0, SIZE)
    driver.fail("cuMemcpyAsync", 719)
    with pytest.raises(OSError, match="fake error 719"):
        links.together({"h2d": engine}, {"h2d": copy}, None, seconds=0.01)
    engine.close()


class FakeEvent:
    """torch.cuda.Event: on a stream of the fake driver one of its events, on the current stream a time of the host."""

    def __init__(self, driver, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at_s = 0.0
        self._engine = driver.open()
        [self._event] = self._engine.create_events(1)

    def record(self, stream=None) -> None:
        self.at_s = time.perf_counter()
        if stream is not None:
            self._engine.submit(self._engine.prepare([Record(stream, self._event)]))

    def synchronize(self) -> None:
        self._engine.synchronize(self._event)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def fake_cuda(driver, monkeypatch: pytest.MonkeyPatch):
    """torch.cuda on the fake driver's streams; events are times of the host, so no rate means anything."""

    def stream(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=driver.stream().cuda_stream, wait_event=lambda event: None)

    current = [stream()]

    @contextmanager
    def inside(stream: SimpleNamespace):
        current.append(stream)
        yield
        current.pop()

    replacements = {
        "Stream": stream,
        "stream": inside,
        "Event": partial(FakeEvent, driver),
        "current_stream": lambda: current[-1],
    }
    replacements |= {"synchronize": lambda device=None: None, "_sleep": lambda cycles: None}
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    monkeypatch.setattr(links, "open_transfers", lambda device: driver.open())
    for module in (links, measure_links):
        monkeypatch.setattr(module, "allocate_host", lambda num_bytes, page_locked: allocate_host(num_bytes, False))
    monkeypatch.setattr(links, "BESIDE_SIZES", (2**20, 2**21))
    for name in ("HOST_COPY_BYTES", "ADAMW_PARAMETERS", "PIECE_BYTES"):
        monkeypatch.setattr(links, name, 2**16)


def test_a_run_measures_all_parts(fake_cuda: None, capsys: pytest.CaptureFixture[str]):
    results = json.loads(json.dumps(links.measure(torch.device("cpu"), 2 * links.MIB, seconds=0.01)))
    for curves in results["by_size"].values():
        assert [curve["name"] for curve in curves] == list(CURVE_NAMES)
        assert [[size for size, _ in curve["points"]] for curve in curves] == [[2**16, 2**18, 2**20]] * 4
    assert results["transfers"] == "NativeTransfers"
    assert [threads for threads, _ in results["host_copy"]][-1] == torch.get_num_threads()
    assert len(results["together"]) in (7, 11)  # without AdamW's library, and with it
    assert list(results["beside_adamw"]) == ["the same again", "of 1 MiB", "of 2 MiB"]
    assert min(rate for found in results["beside_adamw"].values() for rate in found.values()) > 0
    printed = capsys.readouterr().out
    assert "(h) torch: device to host, both busy" in printed
    assert "host copy, 1 threads" in printed


def test_host_work_is_the_copy_and_adamw():
    with links.host_works(2**20, 2**16) as works:
        names = {work.name: work.num_bytes for work in works}
        for work in works:
            work.call()
    assert names["host copy"] == 2 * 2**20
    assert names.get("AdamW", 18 * 2**16) == 18 * 2**16  # weight, remainder, two states both ways, and the gradient


def test_tables_show_every_figure():
    curves = tuple(Curve(name, "bytes", "bytes/s", ((2**16, 1e9), (2**30, 5e10))) for name in CURVE_NAMES)
    rates = LinkRates(5e10, 5e10, 5e10, 5e10, 1e-5, curves)
    lines = links.size_table({"engine": rates, "torch": rates}).splitlines()
    assert lines[4].strip() == "(e) torch: host to device"
    assert lines[-1].split() == ["1048576", "KiB", *["50.00"] * 8]
    line = links.together_table([links.Together("AdamW", 1e9, 2e9, 30e9)]).splitlines()[-1]
    assert line.split() == ["AdamW", "1.0", "2.0", "30.0", "33.0"]
    beside = measure_links.BesideRates(3e10, 4e10, 4.5e10, 5e10, 0.61)._asdict() | {"adamw_parameters_per_s": 8.2e9}
    assert links.beside_table({"one": beside}).splitlines()[-1].split() == [
        "one", "30.0", "40.0", "45.0", "50.0", "61%", "8.20",
    ]  # fmt: skip


@pytest.mark.gpu
def test_measures_on_a_gpu():
    results = links.measure(torch.device("cuda", torch.cuda.current_device()), 16 * links.MIB, seconds=0.1)
    assert set(results["by_size"]) == {"engine", "torch"}
    assert [len(curve["points"]) for curve in results["by_size"]["engine"]] == [5] * 4
    assert len(results["together"]) >= 7
