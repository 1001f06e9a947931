"""Codes, scales and decoded values of every format, bit for bit against references written from the papers in numpy."""

import math

import numpy as np
import pytest
import torch

from flexengine.ops.formats.mxfp4 import MAGNITUDES
from flexengine.ops.formats.nf4 import CODEBOOK, dynamic_map
from flexengine.ops.formats.weight_formats import FORMATS

SHAPES = [(8, 64), (130, 192), (5, 48), (259, 330), (1, 2)]


def weights(rows, columns):
    """A matrix with a row of zeros, one large value, and values of both signs at every size."""
    values = torch.randn(rows, columns) * torch.logspace(-3, 0, rows)[:, None]
    values[rows // 2] = 0.0
    values[-1, -1] = -7.0
    return values


def stored_as(name, values):
    """A matrix in a format: its layout and bytes."""
    form = FORMATS[name]
    layout = form.layout(*values.shape)
    stored = torch.full((layout.num_bytes,), 0xA5, dtype=torch.uint8)
    encoder = form.encoder(stored, layout)
    for first, count in form.slabs(layout):
        encoder.add(first, values[first : first + count])
    encoder.finish()
    return layout, stored


def decoded(name, layout, stored, dtype=torch.float32):
    out = torch.full((1, layout.numel), math.nan, dtype=dtype)
    FORMATS[name].decode(stored[None], layout, out)
    return out.view(layout.rows, layout.columns)


def in_blocks(flat, width):
    """Rows of `width`, the last filled up with zeros."""
    return np.concatenate([flat, np.zeros(-len(flat) % width, flat.dtype)]).reshape(-1, width)


def nearest_code(scaled, numbers):
    """The nearest number's index in exact arithmetic: float32 differences are exact in float64."""
    return np.abs(scaled.astype(np.float64)[..., None] - numbers.astype(np.float64)).argmin(-1)


def divided(blocks):
    largest = np.abs(blocks).max(1)
    safe = np.where(largest > 0, largest, np.float32(1))
    return (blocks / safe[:, None]).astype(np.float32), largest


def reference_nf4(values):
    """Section 3 of the QLoRA paper: codes, magnitudes in 8 bits, the magnitudes of these, their mean, the values."""
    book, numbers = np.float32(CODEBOOK), dynamic_map(torch.device("cpu")).numpy()
    flat = values.numpy().ravel()
    scaled, largest = divided(in_blocks(flat, 64))
    codes = nearest_code(scaled, book)
    mean = np.float32(largest.astype(np.float64).mean())
    centred, nested = divided(in_blocks(largest - mean, 256))
    absmax = nearest_code(centred, numbers).ravel()[: len(largest)]
    scales = (numbers[absmax] * nested.repeat(256)[: len(largest)]).astype(np.float32) + mean
    found = (book[codes] * scales[:, None]).astype(np.float32).ravel()[: len(flat)]
    pairs = codes.ravel()[: len(flat)].reshape(-1, 2)
    return pairs[:, 0] * 16 + pairs[:, 1], absmax, nested, mean, found.reshape(values.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_equals_a_reference_from_the_paper(shape):
    values = weights(*shape)
    layout, stored = stored_as("nf4", values)
    fields, (codes, absmax, nested, mean, found) = layout.views(stored), reference_nf4(values)
    assert np.array_equal(fields["codes"].numpy(), codes)
    assert np.array_equal(fields["absmax"].numpy(), absmax)
    assert np.array_equal(fields["nested_absmax"].numpy(), nested)
    assert fields["offset"].item() == mean
    assert np.array_equal(decoded("nf4", layout, stored).numpy(), found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_with_magnitudes_in_float32_equals_a_reference_from_the_paper(shape):
    values = weights(*shape)
    layout, stored = stored_as("nf4_float32", values)
    fields, book = layout.views(stored), np.float32(CODEBOOK)
    scaled, largest = divided(in_blocks(values.numpy().ravel(), 64))
    codes = nearest_code(scaled, book)
    pairs = codes.ravel()[: values.numel()].reshape(-1, 2)
    assert np.array_equal(fields["codes"].numpy(), pairs[:, 0] * 16 + pairs[:, 1])
    assert np.array_equal(fields["absmax"].numpy(), largest)
    found = (book[codes] * largest[:, None]).ravel()[: values.numel()].reshape(shape)
    assert np.array_equal(decoded("nf4_float32", layout, stored).numpy(), found)


def reference_mxfp4(column):
    """Section 6.3 of the specification for 32 numbers, in exact arithmetic: byte of the scale, codes, values."""
    largest = max(abs(x) for x in column)
    exponent = min(127, max(-127, math.floor(math.log2(largest)) - 2)) if largest else -127
    codes = []
    for x in column:
        scaled = min(abs(x) * 2.0**-exponent, 6.0)
        # ties to the even code
        code = min(range(8), key=lambda i: (abs(MAGNITUDES[i] - scaled), i % 2))
        codes.append(code + 8 * (math.copysign(1.0, x) < 0))
    values = [math.copysign(MAGNITUDES[code & 7], -1.0 if code & 8 else 1.0) * 2.0**exponent for code in codes]
    return exponent + 127, codes, values


@pytest.mark.parametrize("shape", [(32, 1), (64, 7), (160, 33)], ids=str)
def test_mxfp4_equals_a_reference_from_the_specification(shape):
    values = weights(*shape)
    values[:4, 0] = torch.tensor([0.75, -1.25, 1e-30, 3.5])  # ties where the largest is 4 to 8
    values[:32, -1] = 1e-39  # below the smallest scale
    layout, stored = stored_as("mxfp4", values)
    fields, found = layout.views(stored), decoded("mxfp4", layout, stored)
    for column in range(shape[1]):
        for block in range(shape[0] // 32):
            rows = slice(block * 32, block * 32 + 32)
            scale, codes, expected = reference_mxfp4(values[rows, column].tolist())
            assert fields["scales"][column, block].item() == scale
            assert fields["codes"][column, block].tolist() == [
                low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)
            ]
            assert found[rows, column].tolist() == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_equals_a_reference_with_a_scale_for_each_block(shape):
    values = weights(*shape)
    layout, stored = stored_as("fp8", values)
    fields, found = layout.views(stored), decoded("fp8", layout, stored)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = (slice(row, row + 128), slice(column, column + 128))
            largest = np.abs(values[block].numpy()).max()
            scale = largest / np.float32(448) if largest > 0 else np.float32(1)
            assert fields["scales"][row // 128, column // 128].item() == scale
            codes = torch.from_numpy(values[block].numpy() / scale).to(torch.float8_e4m3fn)
            assert torch.equal(fields["codes"][block].view(torch.uint8), codes.view(torch.uint8))
            assert np.array_equal(found[block].numpy(), codes.float().numpy() * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_equals_a_reference_with_a_scale_for_each_row(shape):
    values = weights(*shape)
    layout, stored = stored_as("int8", values)
    fields, numbers = layout.views(stored), values.numpy()
    largest = np.abs(numbers).max(1)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    codes = np.rint(numbers / scales[:, None])
    assert np.array_equal(fields["scales"][:, 0].numpy(), scales)
    assert np.array_equal(fields["codes"].numpy(), codes)
    assert np.array_equal(decoded("int8", layout, stored).numpy(), codes.astype(np.float32) * scales[:, None])


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_rounded_once_to_the_compute_dtype(name):
    layout, stored = stored_as(name, weights(160 if name == "mxfp4" else 130, 192))
    exact = decoded(name, layout, stored)
    assert torch.equal(decoded(name, layout, stored, torch.bfloat16), exact.bfloat16())
    assert torch.equal(decoded(name, layout, stored, torch.float64), exact.double())


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_decoded_is_stored_again_within_a_step(name):
    """A second storing moves values by far less than the first did: the decoded values are of the format."""
    values = weights(64, 128)
    first = decoded(name, *stored_as(name, values))
    second = decoded(name, *stored_as(name, first))
    assert (second - first).abs().max() < 0.05 * (first - values).abs().max()


@pytest.mark.parametrize("name", FORMATS)
def test_slabs_do_not_change_bits(name, monkeypatch):
    values = weights(416, 96)
    _, whole = stored_as(name, values)
    monkeypatch.setattr("flexengine.ops.formats.weight_format.SLAB_ELEMENTS", 1)
    monkeypatch.setattr("flexengine.ops.formats.nf4.SLAB_ELEMENTS", 256)
    layout, parts = stored_as(name, values)
    for field in layout.fields:
        assert torch.equal(layout.views(parts)[field].view(torch.uint8), layout.views(whole)[field].view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_are_refused(name, bad):
    values = weights(64, 64)
    values[3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        stored_as(name, values)


def test_bytes_for_each_element():
    """Of a large matrix: 4 bits and 8 for 64; 8 bits and 32 for 128 x 128; 8 bits and 32 for a row."""
    numel = 4096 * 4096
    assert FORMATS["nf4"].layout(4096, 4096).num_bytes == numel // 2 + numel // 64 + 4 * numel // 64 // 256 + 16
    assert FORMATS["nf4_float32"].layout(4096, 4096).num_bytes == numel // 2 + 4 * numel // 64
    assert FORMATS["mxfp4"].layout(4096, 4096).num_bytes == numel // 2 + numel // 32
    assert FORMATS["fp8"].layout(4096, 4096).num_bytes == numel + 4 * 32 * 32
    assert FORMATS["int8"].layout(4096, 4096).num_bytes == numel + 4 * 4096


def test_shapes_that_formats_do_not_have():
    with pytest.raises(ValueError, match="odd; leave --base-dtype nf4 out"):
        FORMATS["nf4"].layout(3, 5)
    with pytest.raises(ValueError, match=r"32 inputs with one scale.*leave --base-dtype mxfp4 out"):
        FORMATS["mxfp4"].layout(40, 64)


def test_the_published_dynamic_map():
    """256 numbers, ascending, with 0 and 1, the smallest 5.5e-7 (the middle of the lowest decade's only part)."""
    numbers = dynamic_map(torch.device("cpu"))
    assert len(numbers) == 256
    assert torch.equal(numbers, numbers.sort().values)
    assert numbers[-1] == 1.0
    assert numbers[127] == 0.0
    assert numbers[128].item() == pytest.approx(5.5e-7)
