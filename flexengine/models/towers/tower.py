"""A tower and projector of a model of transformers, whose modules get their weights when they are called.

What a model makes of images has one name in transformers, `get_image_features`, whatever the tower. Its modules lie on
the meta device; each gets its own weights from the host for the time of its call, so that those of two modules within
each other are on the device at once, and never all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.models.opaque.names import sources_of
from flexengine.models.towers.layouts import Layout
from flexengine.ops.given_rows import Columns
from flexengine.wording import shown

Supply = Callable[[str], Tensor]
"""Gives a weight, by name, where and in the type that it is computed with."""


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
        own = {name: p for name, p in model.named_parameters() if id(p) not in text}
        self.shapes = {name: tuple(p.shape) for name, p in own.items()}
        # torch's own attention reads the weights of a module within it, and does not call it
        modules = model.named_modules()
        self._callers: dict[str, nn.Module] = {
            f"{name}.out_proj": module for name, module in modules if isinstance(module, nn.MultiheadAttention)
        }
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if any(f"{name}.{local}".lstrip(".") in own for local, _ in module.named_parameters(recurse=False))
        ]

    def calls(self, columns: Columns) -> list[Columns]:
        """As of `Tower`."""
        return self._layout.calls(columns, self.most)

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

    def __call__(self, weights: Mapping[str, Tensor], call: Columns, device: torch.device) -> Tensor:
        """As of `Tower`."""
        moved = {n: c.to(device, self.dtype) if c.is_floating_point() else c.to(device) for n, c in call.items()}
        return self.run(lambda name: weights[name].to(device, non_blocking=True), moved)

    def run(self, supply: Supply, call: Columns) -> Tensor:
        """The rows [n, D] of a call, on its device, with weights as they are supplied."""
        with torch.no_grad(), self._supplied(supply), _buffers_on(self._model, call[self.columns[0]].device):
            found = self._model.get_image_features(**call, return_dict=True)
        return torch.cat([piece.reshape(-1, self._width) for piece in _leaves(found.pooler_output)])

    @contextmanager
    def _supplied(self, supply: Supply) -> Iterator[None]:
        """Give modules their weights while they run; those that are not called themselves, all the time."""
        outer = {id(self._model), id(self._model.base_model)}
        with ExitStack() as stack:
            for name, module in self._modules:
                give, take = _exchange(module, name, supply)
                stack.callback(take)
                caller = self._callers.get(name) or module
                if id(caller) in outer:
                    give()
                else:
                    stack.callback(caller.register_forward_pre_hook(lambda *_, give=give: give()).remove)
                    stack.callback(caller.register_forward_hook(lambda *_, take=take: take()).remove)
            yield

    def read(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """As of `Tower`."""
        with CheckpointReader.open(folder) as reader:
            requests = []
            for name, weight in weights.items():
                flat, start = weight.view(-1), 0
                for source in sources_of(self._model, name, self.shapes[name]):
                    count = torch.Size(source.shape).numel()
                    stored = _stored_as(source.name, reader)
                    requests.append(ReadRequest(stored, flat[start : start + count], None))
                    start += count
            reader.read_many(requests)


def _stored_as(name: str, reader: CheckpointReader) -> str:
    """What a checkpoint calls a tensor. Raises: ValueError where it has none of that name."""
    for found in (name, f"model.{name}", name.removeprefix("model.")):
        if found in reader.tensors:
            return found
    raise ValueError(
        f"{reader.folder}: the checkpoint lacks {shown(name)}, which makes rows of images; fetch config.json and the"
        " weights of one model, or leave max_image_tokens out and train the text alone"
    )


def _head(model: Any) -> list[Tensor]:
    head = model.get_output_embeddings()
    return [] if head is None else list(head.parameters())


def _leaves(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [leaf for part in found for leaf in _leaves(part)]


def _exchange(module: nn.Module, name: str, supply: Supply) -> tuple[Callable[[], None], Callable[[], None]]:
    """What gives a module its own weights, and what takes them back."""
    empty = {local: p for local, p in module._parameters.items() if p is not None}

    def give() -> None:
        for local in empty:
            module._parameters[local] = nn.Parameter(supply(f"{name}.{local}".lstrip(".")), requires_grad=False)

    def take() -> None:
        module._parameters.update(empty)

    return give, take


@contextmanager
def _buffers_on(model: Any, device: torch.device) -> Iterator[None]:
    """Have the buffers of a model, such as frequencies, on a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    yield
