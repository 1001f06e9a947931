"""The parallel reader: bits of every conversion, blocks and threads, ends of files; native and in torch."""

import os
import tempfile

import pytest
import torch

from flexengine.native import library, reader
from flexengine.native.reader import ReadFailureError, ReadJob, read_jobs
from flexengine.optim.rounding import join_fp32, split_fp32

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MIB = 2**20


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def path(request, monkeypatch, native_library):
    """Which of the two paths a test takes; the torch path in pieces of 1000 bytes."""
    monkeypatch.setenv(library.DISABLING_VARIABLE, "1" if request.param == "native" else "0")
    monkeypatch.setattr(reader, "FALLBACK_BUFFER_BYTES", 1000)
    return request.param


BOTH = pytest.mark.parametrize("path", ["native", "torch"], indirect=True)


@pytest.fixture
def file_of():
    """Makes nameless files that hold the bytes of tensors, one behind the other."""
    files = []

    def make(*tensors: torch.Tensor) -> int:
        files.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed when the fixture ends)
        for tensor in tensors:
            files[-1].write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        files[-1].flush()
        return files[-1].fileno()

    yield make
    for file in files:
        file.close()


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, subnormals, ties of rounding to bf16, the largest numbers, infinities, NaNs; and random bit patterns.

    Of the 16-bit formats every number there is.
    """
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    float32 = [0x0000_0000, 0x0000_0001, 0x0000_8000, 0x007F_FFFF, 0x0080_0000, 0x3F80_0000, 0x3F80_7FFF, 0x3F80_8000]
    float32 += [0x3F80_8001, 0x3F81_8000, 0x3F81_7FFF, 0x7F7F_0000, 0x7F7F_7FFF, 0x7F7F_8000, 0x7F7F_FFFF, 0x7F80_0000]
    float32 += [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0x4780_0000, 0x477F_E000, 0x3880_0000, 0x3300_0000, 0x3300_0001]
    bits = torch.tensor(float32 + [b | 0x8000_0000 for b in float32], dtype=torch.int64).to(torch.int32)
    random_bits = torch.randint(-(2**31), 2**31, (7_001,)).to(torch.int32)
    values = torch.cat([bits, random_bits]).view(torch.float32)
    if dtype == torch.float32:
        return values
    halfway = values.double() * (1 + 2.0**-25) + 2.0**-140  # between float32 numbers, and float32's subnormals
    tiny = torch.tensor([5e-324, 1e-310, -1e-310, 1e300, -1e300, 2.0**-150, 2.0**-149, 1.0000001])
    return torch.cat([values.double(), halfway, tiny.double()])


def equal_but_nans(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same bits; where torch has a NaN, a NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    nan = expected.isnan()
    return torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan].view(integers), expected[~nan].view(integers))


# -- bits --------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("source", FLOATS, ids=name_of)
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
def test_conversions_have_the_bits_of_torch(path, file_of, source, target):
    values = special_values(source)
    result = torch.full_like(values, -7, dtype=target)
    read_jobs([ReadJob(file_of(values), 0, source, result)])
    assert equal_but_nans(result, values.to(target))


@BOTH
@pytest.mark.parametrize("source", FLOATS, ids=name_of)
def test_splits_have_the_bits_of_split_fp32(path, file_of, source):
    values = special_values(source)
    weight, remainder = (
        torch.full_like(values, -7, dtype=torch.bfloat16),
        torch.full(values.shape, -7, dtype=torch.int16),
    )
    read_jobs([ReadJob(file_of(values), 0, source, weight, remainder)])
    if source == torch.bfloat16:  # exact as it is, the payloads of NaNs too
        assert torch.equal(weight.view(torch.int16), values.view(torch.int16))
        assert not remainder.any()
        return
    expected = torch.empty_like(weight), torch.empty_like(remainder)
    split_fp32(values.float(), *expected)
    assert torch.equal(weight.view(torch.int16), expected[0].view(torch.int16))
    assert torch.equal(remainder, expected[1])
    assert equal_but_nans(join_fp32(weight, remainder), values.float())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn, *FLOATS], ids=name_of)
def test_equal_dtypes_are_copied_as_they_are(path, file_of, dtype):
    raw = torch.randint(2 if dtype == torch.bool else 256, (8 * 1001,), dtype=torch.uint8)
    result = torch.zeros(8 * 1001 // dtype.itemsize, dtype=dtype)
    read_jobs([ReadJob(file_of(raw), 0, dtype, result)])
    assert torch.equal(result.view(torch.uint8), raw)


# -- blocks and threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 3, 8])
@pytest.mark.parametrize("num_elements", [1, 65_536, 131_073, 1_500_001])
def test_any_number_of_blocks_and_threads_gives_the_same(
    native_library, file_of, monkeypatch, num_threads, num_elements
):
    """Blocks of 512 KiB and less, conversion buffers of 256 KiB: sizes around their ends."""
    monkeypatch.setattr(reader, "MAX_BLOCK_BYTES", 512 << 10)
    values = torch.randn(num_elements)
    file = file_of(torch.zeros(3, dtype=torch.uint8), values, values.double())
    straight, rounded, narrow = torch.zeros_like(values), values.bfloat16() * 0, torch.zeros_like(values)
    weight, remainder = torch.zeros_like(rounded), torch.zeros(num_elements, dtype=torch.int16)
    behind = 3 + 4 * num_elements
    read_jobs(
        [
            ReadJob(file, 3, torch.float32, straight),
            ReadJob(file, 3, torch.float32, rounded),
            ReadJob(file, behind, torch.float64, narrow),
            ReadJob(file, behind, torch.float64, weight, remainder),
        ],
        num_threads,
    )
    assert torch.equal(straight, values)
    assert torch.equal(rounded, values.bfloat16())
    assert torch.equal(narrow, values)
    assert torch.equal(join_fp32(weight, remainder), values)


@BOTH
def test_jobs_write_their_own_elements_only(path, file_of):
    values = torch.arange(1000, dtype=torch.float32)
    arena = torch.full((3000,), -7.0, dtype=torch.float64)
    file = file_of(values)
    jobs = [ReadJob(file, 4 * i, torch.float32, arena[3 * i : 3 * i + 1]) for i in range(1000)]
    jobs.append(ReadJob(file, 4000, torch.float32, arena[:0]))
    read_jobs(jobs)
    assert torch.equal(arena[::3], values.double())
    assert (arena.view(1000, 3)[:, 1:] == -7).all()


def test_long_reads_return_to_python_in_between(native_library, file_of, monkeypatch):
    """Where the limit falls changes nothing; jobs that only torch can do take their turn."""
    values = torch.randn(10_000)
    jobs, targets = [], []
    file = file_of(values)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        targets.append(torch.zeros(10_000, dtype=dtype))
        jobs.append(ReadJob(file, 0, torch.float32, targets[-1]))
    monkeypatch.setattr(reader, "CALL_BYTES", 50_000)
    calls = []
    natively = reader._read_natively
    monkeypatch.setattr(reader, "_read_natively", lambda *a: (calls.append(len(a[2])), natively(*a)))
    read_jobs(jobs)
    assert calls == [1, 1, 1, 1]
    for target in targets:
        assert torch.equal(target, values.to(target.dtype))
    monkeypatch.setattr(reader, "CALL_BYTES", 1 << 30)
    calls.clear()
    read_jobs(jobs)
    assert calls == [1, 1, 2]


def test_little_memory_beside_the_target(native_library, file_of):
    psutil = pytest.importorskip("psutil")
    source = torch.ones(12 * MIB)
    target = torch.full((12 * MIB,), 7.0, dtype=torch.bfloat16)
    file = file_of(source)
    read_jobs([ReadJob(file, 0, torch.float32, target[:MIB])])  # starts the threads
    before_bytes = psutil.Process().memory_info().rss
    read_jobs([ReadJob(file, 0, torch.float32, target)])
    assert psutil.Process().memory_info().rss - before_bytes < 8 * MIB
    assert (target == 1).all()


# -- failures ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["straight", "converted"])
def test_a_file_that_ends_early(path, file_of, dtype):
    file = file_of(torch.zeros(5000))
    good = ReadJob(file, 0, torch.float32, torch.zeros(5000, dtype=dtype))
    with pytest.raises(ReadFailureError, match=r"job 2 at byte 20000: the file ends there") as caught:
        read_jobs([good, good, ReadJob(file, 4000, torch.float32, torch.zeros(4001, dtype=dtype))])
    assert (caught.value.job, caught.value.offset_bytes, caught.value.errno) == (2, 20000, 0)


@BOTH
def test_a_descriptor_that_cannot_be_read(path, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(ReadFailureError, match=r"job 0 at byte 8: Is a directory") as caught:
            read_jobs([ReadJob(folder, 8, torch.float32, torch.zeros(5))])
    finally:
        os.close(folder)
    assert isinstance(caught.value, OSError)


def test_the_number_of_the_failing_job_counts_over_all_calls(native_library, file_of, monkeypatch):
    file = file_of(torch.zeros(100))
    monkeypatch.setattr(reader, "CALL_BYTES", 1)
    jobs = [ReadJob(file, 0, torch.float32, torch.zeros(n)) for n in (10, 20, 101)]
    with pytest.raises(ReadFailureError, match="job 2 at byte 400"):
        read_jobs(jobs)


@BOTH
@pytest.mark.parametrize(
    ("job", "message"),
    [
        (ReadJob(0, 0, torch.int8, torch.zeros(4)), "no conversion from torch.int8 to torch.float32"),
        (ReadJob(0, 0, torch.float32, torch.zeros(4, device="meta")), "contiguous memory on the CPU.*meta"),
        (ReadJob(0, 0, torch.float32, torch.zeros(4, 4).t()), r"strides \(1, 4\)"),
        (ReadJob(0, 0, torch.float32, torch.zeros(4), torch.zeros(4, dtype=torch.int16)), "with torch.float32"),
        (ReadJob(0, 0, torch.float32, torch.zeros(4).bfloat16(), torch.zeros(3, dtype=torch.int16)), r"int16 \[3\]"),
        (ReadJob(0, 0, torch.float32, torch.zeros(4).bfloat16(), torch.zeros(4)), r"float32 \[4\]"),
    ],
)
def test_what_cannot_be_read_is_refused_before_reading(path, job, message):
    with pytest.raises(ValueError, match=message):
        read_jobs([job])


def test_the_torch_path_says_so_once(file_of, monkeypatch, caplog):
    assert notices(file_of, caplog, monkeypatch, "0", torch.float32) == [
        "native code is not available for reading files: one thread reads, and conversion by torch waits for it"
    ]


def test_conversion_to_float16_says_so_once(native_library, file_of, monkeypatch, caplog):
    """The library has none: torch does it, with all that this costs."""
    assert notices(file_of, caplog, monkeypatch, "1", torch.float16) == [
        "native code is not available for conversion to float16: one thread reads, and conversion by torch waits for it"
    ]
    caplog.clear()
    assert notices(file_of, caplog, monkeypatch, "1", torch.bfloat16) == []


def notices(file_of, caplog, monkeypatch, variable: str, dtype: torch.dtype) -> list[str]:
    """What three reads of a float32 file into `dtype` say."""
    monkeypatch.setenv(library.DISABLING_VARIABLE, variable)
    library.fallback_notice.cache_clear()
    file, target = file_of(torch.ones(10)), torch.zeros(10, dtype=dtype)
    for _ in range(3):
        read_jobs([ReadJob(file, 0, torch.float32, target)])
    library.fallback_notice.cache_clear()
    return [record.getMessage() for record in caplog.records]
