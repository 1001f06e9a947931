"""Decoders of quantised weights: values against their definition, and which tensors they ask for."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexengine.checkpoint import quantised
from flexengine.checkpoint.quantised import DECODERS, fp8_values, mxfp4_values
from flexengine.checkpoint.reader import CheckpointReader

SHAPE = (3, 96, 5)


def random_bytes(*shape, largest=255):
    return torch.randint(0, largest + 1, shape, dtype=torch.uint8)


def by_definition(blocks, scales):
    """Bit by bit, in Python's numbers: [F, D] of blocks [F, B, 16] and scales [F, B]."""

    def value(bits, scale):
        sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
        magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return (-1) ** sign * magnitude * 2.0 ** (scale - 127)

    rows = []
    for row, row_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        pairs = ((byte, scale) for span, scale in zip(row, row_scales, strict=True) for byte in span)
        rows.append([value(bits, scale) for byte, scale in pairs for bits in (byte & 15, byte >> 4)])
    return torch.tensor(rows, dtype=torch.float64)


def test_mxfp4_values_are_those_of_the_specification():
    blocks, scales = random_bytes(7, 3, 16), torch.randint(0, 253, (7, 3), dtype=torch.uint8)
    assert torch.equal(mxfp4_values(blocks, scales).double(), by_definition(blocks, scales))
    every = torch.tensor(list(itertools.product(range(16), repeat=2)))
    codes = (every[:, 0] | every[:, 1] << 4).to(torch.uint8).view(16, 1, 16)
    ones = torch.full((16, 1), 127, dtype=torch.uint8)
    assert torch.equal(mxfp4_values(codes, ones).double(), by_definition(codes, ones))
    assert mxfp4_values(codes[:1], torch.full((1, 1), 255, dtype=torch.uint8)).isnan().all()


def test_mxfp4_values_are_those_of_transformers():
    blocks, scales = random_bytes(3, 5, 3, 16), random_bytes(3, 5, 3, largest=252)
    assert torch.equal(mxfp4_values(blocks, scales).transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("rows", [(0, 3), (1, 1), (2, 1), (1, 2)], ids=str)
def test_mxfp4_rows_are_matrices(rows, tmp_path):
    tensors = {"x_blocks": random_bytes(3, 5, 3, 16), "x_scales": random_bytes(3, 5, 3, largest=252)}
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = DECODERS["mxfp4"]
    wanted = decoder.stored("x", SHAPE)
    assert {name: stored.shape for name, stored in wanted.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    with CheckpointReader.open(tmp_path) as reader:
        found = decoder.decode(reader, "x", SHAPE, *rows)
    every = convert_moe_packed_tensors(tensors["x_blocks"], tensors["x_scales"])
    assert torch.equal(found, every[rows[0] : sum(rows)])


@pytest.mark.parametrize("shape", [(3, 40, 5), (64, 32)], ids=str)
def test_mxfp4_has_no_such_shapes(shape):
    with pytest.raises(ValueError, match="MXFP4 holds stacks of matrices"):
        DECODERS["mxfp4"].stored("x", shape)


def fp8_by_definition(values, scales):
    """One by one: the scale of row i and column j is that of block (i // 128, j // 128)."""
    rows, columns = (torch.arange(n) // 128 for n in values.shape)
    return values.double() * scales.double()[rows[:, None], columns[None, :]]


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 257), (5, 500)], ids=str)
def test_fp8_values_have_the_scale_of_their_block(shape):
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.01
    assert torch.equal(fp8_values(values, scales), fp8_by_definition(values, scales).float())


@pytest.mark.parametrize("rows", [(0, 300), (0, 128), (128, 128), (256, 44), (128, 172)], ids=str)
def test_fp8_rows_are_those_of_whole_blocks(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "_SLAB_ELEMENTS", 128 * 200)
    values, scales = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2)
    save_file({"x.weight": values, "x.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    decoder = DECODERS["fp8"]
    assert {n: s.shape for n, s in decoder.stored("x.weight", (300, 200)).items()} == {
        "x.weight": (300, 200), "x.weight_scale_inv": (3, 2),
    }  # fmt: skip
    assert decoder.slab_rows((300, 200)) == 128
    with CheckpointReader.open(tmp_path) as reader:
        found = decoder.decode(reader, "x.weight", (300, 200), *rows)
    assert torch.equal(found, fp8_values(values, scales)[rows[0] : sum(rows)])


def test_fp8_holds_matrices_only():
    with pytest.raises(ValueError, match="blocks of FP8 are those of a matrix"):
        DECODERS["fp8"].stored("x", (3, 128, 128))
