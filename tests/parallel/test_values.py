"""Values cross between ranks as JSON and come back as they were; bytes from elsewhere make nothing else."""

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.parallel.values import decode, encode
from flexengine.plan import Prediction


class Pair(NamedTuple):
    left: object
    right: object = None


@dataclass(frozen=True)
class Held:
    name: str
    pair: Pair


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**70, -1.5e-300, "µ\n", [1, [2, None]], (1, (2.0,)), {1: "a", "b": (2, [3])}, frozenset({1, 2}),
        b"\x00\xff" * 5000, {"k": [b"a", b""]}, Path("a/b"), {}, [], (), {"tuple": 1, "record": ["os.system", []]},
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back(value):
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_numbers_that_are_none_come_back():
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf, np.float64(0.1), np.int64(3)])) == [math.inf, -math.inf, 0.1, 3]
    assert decode(encode(np.bool_(True))) is True


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)], ids=str)
def test_arrays_come_back_with_their_bits(dtype, shape):
    array = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    found = decode(encode({"a": (array,)}))["a"][0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    found += found  # it may be written


def test_records_come_back_where_their_classes_are_named():
    value = [Held("a", Pair(b"x", Pair(np.ones(2)))), Prediction(step_s=0.1, busy_s={"cpu": 2.0})]
    held, prediction = decode(encode(value), [Held, Pair, Prediction])
    assert (held.name, held.pair.left, held.pair.right.left.tolist()) == ("a", b"x", [1.0, 1.0])
    assert prediction == value[1]
    profile = preset("h100-80")
    assert decode(encode(profile), [HardwareProfile]) == profile
    with pytest.raises(ValueError, match="cannot be read: KeyError: 'Pair'"):
        decode(encode(value), [Held, Prediction])


def test_a_value_of_another_type_is_refused():
    for value in (object(), 1j, np.array([object()]), print):
        with pytest.raises(TypeError, match="ranks tell each other no values of type"):
            encode(value)


def packed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", pickle.dumps({"a": 1}), packed("[1"), packed("7"), packed('[{"bytes": 3}, []]'), b"\xff" * 64,
        packed('[{"array": ["O", [1], {"bytes": 0}]}, [8]]') + bytes(8), packed('[{"eval": "1"}, []]'),
        packed('[{"array": ["<f4", [9], {"bytes": 0}]}, [8]]') + bytes(8), packed('[{"a": 1, "b": 2}, []]'),
        packed('[{"record": ["Path", ["a"]]}, []]'), packed("[" * 100_000),
    ],
)  # fmt: skip
def test_bytes_that_hold_no_value_are_refused(data):
    with pytest.raises(ValueError, match="what another rank sent cannot be read"):
        decode(data)
