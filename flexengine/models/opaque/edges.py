"""Embedding and head of an opaque model: ops of their own where they compute what these do, else opaque as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.models.decoder import LayerContent
from flexengine.models.opaque.graph import used_by
from flexengine.models.opaque.names import sources_of
from flexengine.models.opaque.skeleton import Skeleton, StructureError
from flexengine.models.spec import ParamSpec
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import Op
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.embedding import Embedding
from flexengine.ops.opaque import LayerFunction, OpaqueBlock, OpaqueHead
from flexengine.ops.opaque_cost import CallCost, CostCurve, traced_call

EMBED, HEAD = "embed.weight", "lm_head.weight"
ROWS_PER_CALL = 1024
"""Rows that are normalised at once: the model's forward makes masks for so many, which nobody reads."""


def parameter(skeleton: Skeleton, local: str, p: Tensor) -> ParamSpec:
    """Describe a parameter of the skeleton under the name that ops use."""
    shape = tuple(p.shape)
    sources = sources_of(skeleton.model, skeleton.names[id(p)], shape)
    init = "normal" if p.dim() > 1 else "zeros" if local.endswith("bias") else "ones"
    return ParamSpec(local, shape, sources, "matrix" if p.dim() > 1 else "vector", init)


class Edges:
    """What is before and after the layers of a skeleton."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton, model = skeleton, skeleton.model
        self.table: nn.Parameter = model.get_input_embeddings().weight
        self.output: Any = model.get_output_embeddings()
        if self.output is None or not hasattr(self.output, "weight"):
            raise StructureError("it has no output embedding")
        self.tied = self.output.weight is self.table
        self.vocab_size: int = self.output.weight.shape[0]
        self.head_source = f"{skeleton.modules[id(self.output)]}.weight"
        base = skeleton.modules[id(skeleton.base)]
        stored = sources_of(model, skeleton.names[id(self.table)], tuple(self.table.shape))[0].name
        self.prefix = f"{base}." if stored.startswith(f"{base}.") else ""

    def embedding(self) -> LayerContent:
        """The layer before the blocks: rows of the table, perhaps scaled."""
        v, d = self.table.shape
        if d > self.skeleton.width:
            raise StructureError(f"its embedding has rows of {d} elements, and its layers of {self.skeleton.width}")
        op = Embedding("embed", "y", v, d, EMBED, self._scale())
        return LayerContent((op,), (parameter(self.skeleton, EMBED, self.table),))

    def _scale(self) -> float:
        row = torch.randn(self.table.shape[1], dtype=torch.float64)
        scales = self.skeleton.lookup(torch.zeros(1, dtype=torch.int64), row.expand(self.table.shape))[0] / row
        if not torch.allclose(scales, scales[:1].expand(len(row)), rtol=1e-6):
            raise StructureError("its embedding is no table of rows")
        scale = scales.mean().item()
        return 1.0 if abs(scale - 1.0) < 1e-9 else scale

    def entry(self) -> LayerContent:
        """The op between the embedding's rows and the first layer (positions, norms, factors), with its parameters.

        It belongs to the first block, as its backward reads weights. No op where the first layer is given the rows.
        Tables of positions that the model keeps out of training are buffers.
        """
        skeleton, width = self.skeleton, self.skeleton.input_width

        def first_input(values: Mapping[str, Tensor], x: Tensor, sequences: int = 1) -> Tensor:
            return skeleton.first_input(x, values, inputs_embeds=x.unflatten(0, (sequences, -1)))

        used = used_by(lambda values: first_input(values, torch.zeros(2, width)), skeleton.outside)
        values = {own: torch.randn(p.shape[-1:]).expand(p.shape) for own, p in skeleton.outside.items()}
        table = next(value for own, value in values.items() if skeleton.outside[own] is self.table)
        padding = getattr(skeleton.model.config.get_text_config(), "pad_token_id", None)
        ids = torch.full((3,), int(padding == 0))
        rows = skeleton.lookup(ids, table)
        found = first_input(values, rows)
        if not torch.allclose(found, skeleton.first_input(rows, values, input_ids=ids[None]), rtol=1e-5):
            raise StructureError("its first layer is given more of the tokens than rows of the embedding")
        if not used and torch.equal(found, rows):
            return LayerContent((), ())
        local = {f"embed.{own}": own for own in used}
        fixed = [name for name, own in local.items() if not skeleton.outside[own].requires_grad]

        def entered(
            layer: int, weights: Mapping[str, Tensor], x: Tensor, adapters: object = (), sequences: int = 1
        ) -> Tensor:
            return first_input({own: weights[name].to(x.dtype) for name, own in local.items()}, x, sequences)

        op = self._around("entry", ("x", "entered"), (width, skeleton.width), local, entered, None)
        params = {name: parameter(skeleton, name, skeleton.outside[own]) for name, own in local.items()}
        op.buffers, op.params = tuple(fixed), tuple(name for name in local if name not in fixed)
        buffers = tuple((name, params[name].sources[0]) for name in fixed)
        return LayerContent((op,), tuple(params[name] for name in op.params), buffers)

    def _around(
        self, name: str, io: tuple[str, str], widths: tuple[int, int], local: Mapping[str, str],
        function: LayerFunction, rows: int | None,
    ) -> OpaqueBlock:  # fmt: skip
        """An op before or after the layers. local: its parameters' names in base by those that it uses."""
        skeleton, width = self.skeleton, widths[0]
        shapes = {own: tuple(skeleton.outside[other].shape) for own, other in local.items()}
        longest = skeleton.longest_sequence

        def cost_of(adapters: tuple[Adapters, ...], trained: tuple[str, ...]) -> CostCurve:
            def traced(tokens: int, sequences: int) -> CallCost:
                call = lambda weights, x: function(0, weights, x, (), sequences)  # noqa: E731
                return traced_call(call, shapes, width, tokens * sequences, trained, "cpu")

            return CostCurve(traced, longest)

        return OpaqueBlock(name, io, widths, tuple(local), skeleton.titled(function), cost_of, rows)

    def head(self) -> LayerContent:
        """The layer after the blocks: what base does after its last layer, then logits and their losses."""
        final, norms = self._final()
        inner, v = self.skeleton.output_width, self.vocab_size
        skeleton, h = self.skeleton, torch.zeros(2, inner)
        used = used_by(lambda values: skeleton.logits(h, values), skeleton.head_parameters)
        local = {HEAD if own == self.head_source else f"lm_head.{own}": own for own in used}
        if HEAD not in local:
            raise StructureError("its logits depend on nothing of the head")
        names = (HEAD, *(name for name in local if name != HEAD))
        op: Op
        if names == (HEAD,) and self._is_product():
            op = LMHeadLoss("lm_head", "h", inner, v, HEAD)
        else:

            def logits(weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
                return skeleton.logits(h, {local[name]: weights[name] for name in names})

            op = OpaqueHead("lm_head", "h", inner, v, names, skeleton.titled(logits))
        own = [name for name in names if name != HEAD or not self.tied]
        params = (parameter(skeleton, name, skeleton.head_parameters[local[name]]) for name in own)
        return LayerContent((final, op), (*norms, *params))

    def _is_product(self) -> bool:
        """Whether the logits are the product with the head's weight and nothing else."""
        row = torch.randn(self.output.weight.shape[1]).abs()
        h = row.new_tensor([[0.01], [1.0], [100.0]]).expand(3, len(row))
        found = self.skeleton.logits(h.contiguous(), {self.head_source: row.expand(self.output.weight.shape)})
        wanted = (h @ row)[:, None]
        return bool(torch.allclose(found.float(), wanted.expand(found.shape), rtol=1e-5, atol=0.0))

    def _final(self) -> tuple[OpaqueBlock, tuple[ParamSpec, ...]]:
        """The op of what base does after its last layer, and its parameters."""
        skeleton, width = self.skeleton, self.skeleton.width
        x = torch.zeros(2, width)
        used = used_by(lambda values: skeleton.after_layers(x, values), skeleton.outside)
        local = {f"final.{own}": own for own in used}

        def final(
            layer: int, weights: Mapping[str, Tensor], x: Tensor, adapters: object = (), sequences: int = 1
        ) -> Tensor:
            return skeleton.after_layers(x, {own: weights[name] for name, own in local.items()})

        rows = min(ROWS_PER_CALL, skeleton.longest_sequence or ROWS_PER_CALL)
        op = self._around("final_norm", ("x", "h"), (width, skeleton.output_width), local, final, rows)
        return op, tuple(parameter(skeleton, name, skeleton.outside[own]) for name, own in local.items())
