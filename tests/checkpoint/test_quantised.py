"""Decoders of quantised weights: values against their definition, and which tensors they ask for."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexengine.checkpoint.quantised import DECODERS, mxfp4_values
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
