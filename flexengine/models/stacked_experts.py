"""Experts as gpt-oss has them: one tensor for all experts of a layer, stored input by output, with biases.

The router has a bias, too.

Shapes: E experts, D model width, F FFN width: gate_up_proj [E, D, 2F] and its bias [E, 2F], down_proj [E, F, D] and its
bias [E, D].
"""

from __future__ import annotations

from typing import Any

from flexengine.models.spec import ParamSpec, WeightSource


def product_options(biased: bool, transposed: bool, row_weight: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give the options of both products of the experts.

    A router's weight multiplies the input of the last product, so it must multiply that product's bias as well.
    """
    if not biased:
        return {"transposed": transposed}, {"transposed": transposed}
    gate_up = {"bias": "experts_gate_up.bias", "transposed": True}
    return gate_up, {"bias": "experts_down.bias", "row_weight": row_weight, "transposed": True}


def stacked_params(d: int, count: int, f: int, router: str, experts: str, decode: str | None) -> list[ParamSpec]:
    """List router and experts, from tensors under these names; decode: the decoder of the experts' weights, if any."""

    def param(name: str, source: str, *shape: int, decode: str | None = None) -> ParamSpec:
        return ParamSpec(name, shape, (WeightSource(source, shape, decode),))

    # Vectors are never quantised in these checkpoints, so only weights have a decoder.
    def bias(name: str, source: str, *shape: int, init: Any = "zeros") -> ParamSpec:
        return ParamSpec(name, shape, (WeightSource(source, shape),), kind="vector", init=init)

    return [
        param("router.weight", f"{router}.weight", count, d),
        bias("router.bias", f"{router}.bias", count, init="normal"),
        param("experts_gate_up.weight", f"{experts}.gate_up_proj", count, d, 2 * f, decode=decode),
        bias("experts_gate_up.bias", f"{experts}.gate_up_proj_bias", count, 2 * f),
        param("experts_down.weight", f"{experts}.down_proj", count, f, d, decode=decode),
        bias("experts_down.bias", f"{experts}.down_proj_bias", count, d),
    ]
