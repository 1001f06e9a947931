"""Random segments for every rule and way to keep masters, and the comparison of what two paths made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.optim import AdamW
from flexengine.optim.lion import Lion
from flexengine.optim.rounding import split_fp32
from flexengine.optim.rule import Rule, Update
from flexengine.optim.rules import rule_of
from flexengine.optim.sgd import SGD

SETTINGS = {
    "adamw": AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "lion": Lion(lr=3e-3, weight_decay=0.1),
    "sgd": SGD(lr=3e-3, weight_decay=0.1),
}
FLOATS = [(optimizer, state) for optimizer in ("adamw", "lion", "sgd") for state in ("float32", "bfloat16")]
"""Optimizers and the dtypes of their states."""
ALL = [*FLOATS, ("adamw", "int8")]
MASTERS = ["fp32", "split", "bf16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8, "float64": torch.float64}


def random_update(
    optimizer: str, state: str, master: str, count: int, grad_dtype: torch.dtype = torch.bfloat16,
    element_offset: int = 0, step: int = 3, scale: float = 0.37,
) -> tuple[Rule, Update]:  # fmt: skip
    """A rule and an update with random weights and gradients, and states that a few steps have made."""
    rule = rule_of(optimizer, "matrix", state, "float32" if master == "fp32" else "bfloat16")
    weights = torch.randn(count)
    planes = {"weights": weights if master == "fp32" else weights.bfloat16(), "grad": torch.randn(count).to(grad_dtype)}
    if master == "split":
        planes["remainder"] = torch.empty(count, dtype=torch.int16)
        split_fp32(weights, planes["weights"], planes["remainder"])
    for plane in rule.states:
        planes[plane.kind] = torch.zeros(-(-count // plane.block), dtype=DTYPES[plane.dtype])
    settings = SETTINGS[optimizer]
    update = Update(
        planes, torch.tensor([scale]), settings, settings.lr, settings.weight_decay, step, 11, element_offset
    )
    for earlier in (1, 2):
        warm = {**planes, "grad": torch.randn(count).to(grad_dtype)}
        rule.update(update._replace(planes=warm, grad_scale=torch.ones(1), step=earlier))
    return rule, update


def copied(update: Update, device: torch.device | str = "cpu") -> Update:
    """The same update of other memory."""
    planes = {name: plane.to(device).clone() for name, plane in update.planes.items()}
    return update._replace(planes=planes, grad_scale=update.grad_scale.to(device))


def patterns(plane: Tensor) -> Tensor:
    """A plane's bits."""
    return plane.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()])


def assert_same_bits(actual: Update, expected: Update) -> None:
    """Every plane has the same bits."""
    for name, plane in expected.planes.items():
        differing = int((patterns(actual.planes[name]) != patterns(plane)).sum())
        assert differing == 0, f"{name}: {differing} of {plane.numel()} elements differ"
