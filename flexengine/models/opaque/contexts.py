"""What layers are given beside the hidden state, by length; and the functions that opaque blocks call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flexengine.models.opaque.known import KnownModules
from flexengine.models.opaque.linears import adding, shapes_of
from flexengine.models.opaque.skeleton import Skeleton, StructureError, rows_of
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.opaque_cost import CallCost, traced_call

Context = dict[str, Any]


def context_bytes(contexts: list[Context]) -> int:
    """Bytes of all tensors in contexts; layers share most of them."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(contexts) if _is(t)}
    return sum(storages.values())


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


class Contexts:
    """Contexts of all layers by the length of sequences and their number.

    Those used last are kept, of as many bytes as the largest takes: about those of one chunk's sequences.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._kept: OrderedDict[tuple, tuple[int, list[Context]]] = OrderedDict()

    def at(self, tokens: int, like: Tensor, sequences: int = 1) -> list[Context]:
        """The context of every layer for sequences of so many tokens; like: has the dtype and device to compute in."""
        key = tokens, like.dtype, like.device, sequences
        if key not in self._kept:
            found = self._skeleton.contexts(*key)
            self._kept[key] = context_bytes(found), found
            most = max(size for size, _ in self._kept.values())
            while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]


class LayerCalls:
    """Calls the layers of a skeleton, each with what the model's own forward gives it.

    known: those of their modules that are not called as they are.
    """

    __qualname__: str

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton, self._contexts, self.known = skeleton, Contexts(skeleton), KnownModules(skeleton.layers)
        self._own = [{n for n, _ in (*m.named_parameters(), *m.named_buffers())} for m in skeleton.layers]

    def __call__(
        self, layer: int, weights: Mapping[str, Tensor], x: Tensor, adapters: tuple[Adapters, ...] = (),
        sequences: int = 1,
    ) -> Tensor:  # fmt: skip
        """y [T, D] of sequences; layer: its number in the model, that of the embedding being 0."""
        context = self._contexts.at(len(x) // sequences, x, sequences)[layer - 1]
        own = {name: tensor for name, tensor in weights.items() if name in self._own[layer - 1]}
        with self.known.called(layer - 1), adding(self.skeleton.layers[layer - 1], adapters, weights):
            return hidden_of(self.skeleton.call_layer(layer - 1, own, x, context, sequences))

    def cost(
        self, index: int, tokens: int, adapters: tuple[Adapters, ...] = (), trained: Collection[str] = (),
        sequences: int = 1,
    ) -> CallCost:  # fmt: skip
        """What a call of a layer costs on sequences of so many tokens each, with what its contexts take while they are
        kept and a new one is made.

        trained: names of parameters. Raises: StructureError where the layer does not run on so many tokens in the dtype
        that is traced.
        """
        skeleton = self.skeleton
        given: Context = {}
        layer = skeleton.layers[index]
        own = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        added = {name: shape for one in adapters for name, shape in shapes_of(one)}

        def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            with self.known.called(index), adding(layer, adapters, weights):
                mine = {name: weights[name] for name in own}
                return hidden_of(skeleton.call_layer(index, mine, x, given, sequences))

        try:
            contexts = skeleton.contexts(tokens, torch.bfloat16, torch.device("cpu"), sequences)
            given |= tree_map(lambda value: value.to("meta") if _is(value) else value, contexts[index])
            cost = traced_call(call, own | added, skeleton.width, tokens * sequences, trained)
        except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
            why = " ".join(str(error).split())[:200]
            raise StructureError(f"layer {index} does not run on {tokens} tokens in bfloat16 ({why})") from None
        return cost._replace(peak_bytes=cost.peak_bytes + 2 * context_bytes(contexts))


def hidden_of(found: Any) -> Tensor:
    """The hidden state [T, D] of all sequences, of what a layer gives."""
    return rows_of(found[0] if isinstance(found, (tuple, list)) else found)
