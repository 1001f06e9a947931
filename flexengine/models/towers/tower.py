"""A tower and projector of a model of transformers, as a function of their weights.

What a model makes of images has one name in transformers, `get_image_features`, whatever the tower. Its modules lie on
the meta device, and are called with the weights that are given.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from flexengine.models.opaque.linears import adding, linears_called, shapes_of
from flexengine.models.opaque.skeleton import replaced_forward
from flexengine.models.towers.layouts import Layout
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.given_rows import AddGrad, Columns, TowerCall
from flexengine.ops.opaque import OpaqueLinear
from flexengine.ops.opaque_cost import traced

Then = Callable[[Tensor], Tensor]
_OTHER = re.compile(r"(^|\.)(audio_tower|embed_audio)\.")
"""Weights of what hears, which an export has as they came."""


class TransformersTower:
    """The tower of a model that lies on the meta device, beside its text.

    most: rows of a call at the most. width: of the text's hidden state.
    """

    __qualname__: str

    def __init__(self, model: Any, layout: Layout, width: int, dtype: torch.dtype, most: int) -> None:
        self.most = most
        # what it computes, as text: plans of equal names have equal bits
        self.__qualname__ = f"{model.config.to_json_string(use_diff=False)} {layout} {most}"
        self._model, self._layout, self._width, self.dtype = model, layout, width, dtype
        self.columns = layout.columns
        text = {id(p) for p in model.get_decoder().parameters()} | {id(p) for p in _head(model)}
        self.shapes = {
            name: tuple(p.shape)
            for name, p in model.named_parameters()
            if id(p) not in text and not _OTHER.search(name)
        }
        """Shapes of its weights, by name."""
        self.constants = {name: tuple(c.shape) for name, c in _constants(model)}
        """Shapes of what checkpoints hold beside these, which is never trained; they are given with the weights."""
        self.shapes |= self.constants
        self._features, self._adapters = _Features(model), tuple[Adapters, ...]()
        self._layers = list(_outermost_layers(model, self.shapes))

    @property
    def linears(self) -> tuple[OpaqueLinear, ...]:
        """As of `Tower`."""
        return self._called

    @cached_property
    def _called(self) -> tuple[OpaqueLinear, ...]:
        """Linear layers that the forward of a call calls."""
        zero, call = torch.zeros((), dtype=self.dtype), self._layout.probe(1)
        weights = {name: zero.expand(shape) for name, shape in self.shapes.items()}
        columns = {name: c.to(self.dtype) if c.is_floating_point() else c for name, c in call.items()}
        return linears_called(self._model, self.shapes, lambda: traced(lambda: self(weights, columns)))

    def adapted(self, adapters: Sequence[Adapters]) -> TransformersTower:
        """As of `Tower`."""
        tower = copy.copy(self)
        tower._adapters = tuple(adapters)
        tower.shapes = {**self.shapes, **{n: shape for one in adapters for n, shape in shapes_of(one)}}
        tower.__qualname__ = f"{self.__qualname__} {adapters}"
        return tower

    def example(self, rows: int) -> Columns:
        """As of `Tower`."""
        return self._layout.probe(rows)

    def calls(self, columns: Columns, borders: Collection[int] = ()) -> list[TowerCall]:
        """As of `Tower`."""
        return self._layout.calls(columns, self.most, borders)

    def positions(self, ids: Sequence[Tensor], columns: Columns) -> list[Tensor]:
        """As of `Tower`: positions as transformers counts them, with an image for each run of its tokens."""
        grids, token, first, found = columns["image_grid_thw"], self._model.config.image_token_id, 0, list[Tensor]()
        merged = self._model.config.vision_config.spatial_merge_size**2
        for row in ids:
            kinds = (row == token).int()
            values, counts = kinds.unique_consecutive(return_counts=True)
            runs = counts[values == 1].tolist()
            own = grids[first : first + len(runs)]
            if (own.prod(-1) // merged).tolist() != runs:
                raise ValueError(
                    f"sequence {len(found)} of the batch has runs of {runs} tokens that stand for an image each, which"
                    f" do not go with image_grid_thw={own.tolist()}; give the columns of the processor, uncut"
                )
            first += len(runs)
            positions, _ = self._model.base_model.get_rope_index(row[None], kinds[None], own)
            found.append(positions[:, 0])
        return found

    def __call__(self, weights: Mapping[str, Tensor], columns: Columns) -> Tensor:
        """As of `Tower`."""
        with torch.no_grad():
            return self._call(weights, columns, lambda rows: rows)

    def backward(
        self, weights: Mapping[str, Tensor], trained: Sequence[str], columns: Columns, grads: Tensor, add: AddGrad
    ) -> None:
        """As of `Tower`. Of layers the inputs are kept; each is run once more for its backward."""
        # what `add` writes may lie in one storage with the weights, and would count as a change of these but for `data`
        weights = {name: weights[name].data for name in self.shapes if name in weights}
        leaves = {name: weights[name].data.requires_grad_() for name in trained}
        for name, leaf in leaves.items():  # so that those of all weights are never there at once
            leaf.register_post_accumulate_grad_hook(partial(_hand_over, name, add))

        def backward(rows: Tensor) -> Tensor:
            torch.autograd.backward(rows, grads)
            return rows.detach()

        with torch.enable_grad(), ExitStack() as stack:
            for layer in self._layers:
                again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
                stack.enter_context(replaced_forward(layer, again))
            self._call({**weights, **leaves}, columns, backward)

    def _call(self, weights: Mapping[str, Tensor], columns: Columns, then: Then) -> Tensor:
        """What `then` makes of the rows [depth, n, D] of a call. Weights are there as long as it runs."""
        added = {name for one in self._adapters for name in one.params}
        given = {f"model.{name}": weights[name] for name in self.shapes if name not in added}
        adapters = self._adapters if added <= weights.keys() else ()
        with _buffers_on(self._model, columns[self.columns[0]].device), adding(self._model, adapters, weights):
            return functional_call(self._features, given, (columns, self._width, then), strict=False)


class _Features(nn.Module):
    """A model whose call makes rows of images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, columns: Columns, width: int, then: Then) -> Tensor:
        found = self.model.get_image_features(**columns, return_dict=True)
        depths = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
        return then(torch.stack([torch.cat([leaf.reshape(-1, width) for leaf in _leaves(rows)]) for rows in depths]))


def _outermost_layers(model: nn.Module, own: Mapping[str, object]) -> Iterator[nn.Module]:
    """The members of lists of modules, but for lists within these, whose parameters are own ones."""
    seen = list[str]()
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in seen)
        if isinstance(module, nn.ModuleList) and not inside and any(key.startswith(f"{name}.") for key in own):
            seen.append(name)
            yield from module


def _constants(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a tower that a checkpoint holds."""
    for prefix, module in model.named_modules():
        if prefix.split(".")[-1] == "vision_tower":
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer


def _hand_over(name: str, add: AddGrad, leaf: Tensor) -> None:
    add(name, leaf.grad)  # type: ignore[arg-type]
    leaf.grad = None


def _head(model: Any) -> list[Tensor]:
    head = model.get_output_embeddings()
    return [] if head is None else list(head.parameters())


def _leaves(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [leaf for part in found for leaf in _leaves(part)]


@contextmanager
def _buffers_on(model: Any, device: torch.device) -> Iterator[None]:
    """Have the buffers of a model, such as frequencies, on a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    yield
