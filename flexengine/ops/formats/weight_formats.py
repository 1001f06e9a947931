"""The formats that frozen matrices may be stored in, by name."""

from __future__ import annotations

from flexengine.ops.formats.mxfp4 import Mxfp4
from flexengine.ops.formats.nf4 import Nf4, PlainNf4
from flexengine.ops.formats.scaled_codes import FP8_BLOCKS, INT8_ROWS
from flexengine.ops.formats.weight_format import WeightFormat

FORMATS: dict[str, WeightFormat] = {form.name: form for form in (FP8_BLOCKS, Nf4(), PlainNf4(), INT8_ROWS, Mxfp4())}
