"""The transfer engine over a fake CUDA driver: contents, order, errors; and on a GPU against torch."""

import gc
import os
import signal
import threading

import pytest
import torch
from fake_driver import FakeDriver, fake_driver

from flexengine.native.transfer import NativeTransfers, open_transfers
from flexengine.native.transfer_operations import Copy, Record, Wait
from flexengine.native.transfer_torch import TorchTransfers


@pytest.fixture
def engine(driver: FakeDriver):
    """Pieces of 100 bytes."""
    engine = driver.open(piece_bytes=100)
    yield engine
    driver.reset()
    engine.close()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def copy(stream, target, source, num_bytes=None, target_offset=0, source_offset=0):
    return Copy(stream, target, target_offset, source, source_offset, num_bytes or source.numel())


# -- submit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 99, 100, 101, 1234])
def test_copies_are_cut_into_pieces_and_arrive(driver: FakeDriver, engine: NativeTransfers, num_bytes: int):
    stream, source, target = driver.stream(), random_bytes(2000), torch.zeros(3000, dtype=torch.uint8)
    engine.submit(engine.prepare([copy(stream, target, source, num_bytes, target_offset=7, source_offset=11)]))
    driver.settle()
    expected = torch.zeros_like(target)
    expected[7 : 7 + num_bytes] = source[11 : 11 + num_bytes]
    assert torch.equal(target, expected)
    pieces = driver.log()
    assert [p.num_bytes for p in pieces] == [100] * (num_bytes // 100) + [num_bytes % 100] * (num_bytes % 100 > 0)
    assert [p.source - source.data_ptr() for p in pieces] == list(range(11, 11 + num_bytes, 100))
    assert {p.stream for p in pieces} == {stream.cuda_stream}


def test_a_batch_runs_again_and_in_parts(driver: FakeDriver, engine: NativeTransfers):
    stream, source, target = driver.stream(), random_bytes(30), torch.zeros(30, dtype=torch.uint8)
    batch = engine.prepare([copy(stream, target, source, 10, i, i) for i in (0, 10, 20)])
    for first, last, expected in ((0, 0, 0), (1, 2, 1), (1, None, 3), (0, None, 6)):
        engine.submit(batch, first, last)
        driver.settle()
        assert len(driver.log()) == expected
    assert torch.equal(target, source)


def test_an_event_orders_two_streams(driver: FakeDriver, engine: NativeTransfers):
    """The second stream may not copy before the first, which is held back, has filled what it reads."""
    first, second = driver.stream(), driver.stream()
    source, middle, target = random_bytes(50), torch.zeros(50, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)
    (event,) = engine.create_events(1)
    batch = engine.prepare(
        [copy(first, middle, source), Record(first, event), Wait(second, event), copy(second, target, middle)]
    )
    driver.hold(first)
    engine.submit(batch)
    driver.settle()
    assert driver.log() == []
    driver.release(first)
    driver.settle()
    assert torch.equal(target, source)


def test_a_wait_sees_the_record_before_it_and_no_later_one(driver: FakeDriver, engine: NativeTransfers):
    first, second = driver.stream(), driver.stream()
    (event,) = engine.create_events(1)
    data, target = random_bytes(10), torch.zeros(10, dtype=torch.uint8)
    engine.submit(engine.prepare([Record(first, event), Wait(second, event)]))
    driver.settle()
    driver.hold(first)
    engine.submit(engine.prepare([copy(second, target, data), Record(first, event)]))
    driver.settle()
    assert torch.equal(target, data)  # the second record, which is held back, is not waited for


def test_a_wait_for_an_event_that_nothing_recorded_is_refused(driver: FakeDriver, engine: NativeTransfers):
    """CUDA takes such a wait for no wait at all."""
    stream = driver.stream()
    (event,) = engine.create_events(1)
    data, target = random_bytes(10), torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="operation 1 waits for an event that nothing has recorded"):
        engine.submit(engine.prepare([copy(stream, target, data), Wait(stream, event)]))
    engine.synchronize(event)  # returns at once, as CUDA does
    driver.settle()  # the submitted copy is under way


def test_the_interpreter_lock_is_free_during_a_call(driver: FakeDriver, engine: NativeTransfers):
    """A copy blocks inside the driver until another Python thread lets it go on: with the lock held it never could."""
    stream, source, target = driver.stream(), random_bytes(10), torch.zeros(10, dtype=torch.uint8)
    batch = engine.prepare([copy(stream, target, source)])
    driver.block(True)
    seen = []

    def unblock() -> None:
        seen.append(driver.await_blocked())
        seen.append(threading.main_thread().is_alive())
        driver.block(False)

    other = threading.Thread(target=unblock)
    other.start()
    engine.submit(batch)
    other.join()
    driver.settle()
    assert seen == [True, True]
    assert torch.equal(target, source)


@pytest.mark.parametrize("function", ["cuMemcpyAsync", "cuStreamWaitEvent", "cuEventRecord"])
def test_driver_errors_come_with_the_driver_s_words(driver: FakeDriver, engine: NativeTransfers, function: str):
    stream, source, target = driver.stream(), random_bytes(10), torch.zeros(10, dtype=torch.uint8)
    (event,) = engine.create_events(1)
    batch = engine.prepare([Record(stream, event), Wait(stream, event), copy(stream, target, source)])
    driver.fail(function, 719)
    with pytest.raises(OSError, match=r"submit: .*719: fake error 719"):
        engine.submit(batch)
    engine.submit(batch)  # such an error is not kept
    driver.settle()
    assert torch.equal(target, source)


def test_a_failed_copy_says_how_much_from_where(driver: FakeDriver, engine: NativeTransfers):
    stream, source, target = driver.stream(), random_bytes(250), torch.zeros(250, dtype=torch.uint8)
    driver.fail("cuMemcpyAsync", 1, calls_before=2)
    place = f"50 bytes from {source.data_ptr() + 200:#x} to {target.data_ptr() + 200:#x}"
    with pytest.raises(OSError, match=place):
        engine.submit(engine.prepare([copy(stream, target, source)]))
    driver.settle()  # the tensors are freed next, and two pieces were handed over


def test_timing_events(driver: FakeDriver, engine: NativeTransfers):
    """Every operation of the fake device lasts 1 ms."""
    stream, source, target = driver.stream(), random_bytes(30), torch.zeros(30, dtype=torch.uint8)
    start, end = engine.create_events(2, timing=True)
    copies = [copy(stream, target, source)] * 3
    engine.submit(engine.prepare([Record(stream, start), *copies, Record(stream, end)]))
    engine.synchronize(end)
    assert engine.elapsed_s(start, end) == pytest.approx(4e-3)
    plain = engine.create_events(2)
    engine.submit(engine.prepare([Record(stream, event) for event in plain]))
    engine.synchronize(plain[1])
    with pytest.raises(OSError, match="fake error 400"):
        engine.elapsed_s(*plain)


# -- doors -------------------------------------------------------------------------------------------------------------


def test_closing_frees_events_and_leaves_copies_to_run(driver: FakeDriver):
    engine = driver.open(piece_bytes=10)
    stream, source, target = driver.stream(), random_bytes(1000), torch.zeros(1000, dtype=torch.uint8)
    events = engine.create_events(5)
    driver.pause(True)
    engine.submit(engine.prepare([copy(stream, target, source), Record(stream, events[0])]))
    engine.close()
    engine.close()
    assert driver.calls("cuEventCreate") == driver.calls("cuEventDestroy_v2") == 5
    driver.pause(False)
    driver.settle()
    assert torch.equal(target, source)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_engine_alone(driver: FakeDriver, engine: NativeTransfers):
    """It has no device there to free events on."""
    engine.create_events(1)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        engine.close()
        os._exit(driver.calls("cuEventDestroy_v2"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_events_are_released_once(driver: FakeDriver, engine: NativeTransfers):
    events = engine.create_events(2)
    engine.release_events(events[:1])
    with pytest.raises(ValueError, match="event 1 of 2 is not, or no longer, of this engine"):
        engine.release_events([events[1], events[0]])


def test_a_forgotten_engine_gives_everything_back(driver: FakeDriver):
    gc.collect()  # engines of tests before
    before = driver.calls("cuEventDestroy_v2")
    engine = driver.open()
    engine.release_events(engine.create_events(3)[:2])
    del engine
    gc.collect()
    assert driver.calls("cuEventDestroy_v2") == before + 3


def test_the_engine_s_context_is_current_during_calls(driver: FakeDriver, engine: NativeTransfers):
    before = driver.calls("cuCtxSetCurrent")
    engine.create_events(1)
    assert driver.calls("cuCtxSetCurrent") == before
    driver.set_context(0xBAD)  # as on a thread that has used another device
    engine.create_events(1)
    assert driver.calls("cuCtxSetCurrent") == before + 2  # set, and put back


def test_refusals_at_the_door(driver: FakeDriver, engine: NativeTransfers):
    stream, data = driver.stream(), random_bytes(10)
    for bad, message in (
        (Copy(stream, data, 1, data, 0, 10), "10 bytes at byte 1 does not fit its target of 10 bytes"),
        (Copy(stream, data, 0, data, -1, 5), "byte -1 does not fit its source"),
        (Copy(stream, data.view(torch.int16), 0, data, 0, 1), "contiguous uint8"),
        (Copy(stream, data, 0, data[::2], 0, 1), "contiguous uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.prepare([bad])
        with pytest.raises(ValueError, match=message):
            object.__new__(TorchTransfers).prepare([bad])
    with pytest.raises(ValueError, match="piece_bytes is 0"):
        driver.open(piece_bytes=0)
    driver.set_context(None)
    with pytest.raises(ValueError, match="no CUDA context"):
        driver.open()


def test_a_missing_or_foreign_driver_is_named():
    fake_driver()
    with pytest.raises(OSError, match=r"no_such_libcuda\.so"):
        NativeTransfers("no_such_libcuda.so")
    with pytest.raises(OSError, match=r"libc\.so\.6 has no function cuGetErrorString"):
        NativeTransfers("libc.so.6")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "torch"])
def gpu_transfers(request):
    device = torch.device("cuda", 0)
    transfers = open_transfers(device) if request.param == "native" else TorchTransfers(device)
    assert isinstance(transfers, TorchTransfers) == (request.param == "torch")
    yield transfers
    transfers.close()


@pytest.mark.gpu
def test_gpu_round_trip_through_two_streams(gpu_transfers):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    host = random_bytes(100_000_001).pin_memory()
    device, back = torch.empty_like(host, device="cuda"), torch.empty_like(host).pin_memory()
    start, there, done = gpu_transfers.create_events(3, timing=True)
    torch.cuda.synchronize()
    operations = [
        Record(streams[0], start),
        copy(streams[0], device, host),
        Record(streams[0], there),
        Wait(streams[1], there),
        copy(streams[1], back, device),
        Record(streams[1], done),
    ]
    gpu_transfers.submit(gpu_transfers.prepare(operations))
    gpu_transfers.synchronize(done)
    assert torch.equal(back, host)
    assert 0 < gpu_transfers.elapsed_s(start, there) < gpu_transfers.elapsed_s(start, done)
    gpu_transfers.release_events([start, there, done])
