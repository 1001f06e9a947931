"""A model of transformers without weights: its own forward, run with other functions in place of its layers.

No line here knows a type: layers are found by what they are, and what a layer is given comes from the model's own code.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from flexengine.models.opaque.remote_code import digest_of_code

DTYPE = torch.bfloat16
"""The dtype of runs without storage: kernels of experts have one on the meta device in it alone."""
LayerForward = Callable[[int, Tensor, dict[str, Any]], Tensor]
"""(number of a layer, hidden state [B, T, ...], what the layer is given beside it) -> its hidden state [B, T, ...]."""
COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
"""Fields of configs with the number of layers of a decoder."""
KNOWN = "known-1"
"""Which modules are called by kernels here (`known.py`), and how layers are called: another word where bits change."""
LENGTHS = ("max_target_positions", "max_position_embeddings", "max_seq_len")
"""Fields of configs with the tokens that tables of positions are for."""


_Function = TypeVar("_Function", bound=Callable)


class StructureError(ValueError):
    """A model that cannot be taken apart into an embedding, a list of layers and a head; says why."""


class _ReachedError(Exception):
    """Ends a forward at its first layer, with what this one was given."""

    def __init__(self, x: Tensor, context: dict[str, Any]) -> None:
        super().__init__()
        self.x, self.context = x, context


class _Output(tuple):
    """What a model's base gives: the last hidden state, and nothing else that a head could ask for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class Skeleton:
    """A causal language model with parameters on the meta device and real buffers.

    base: the module that runs the layers. outside: parameters of base that are in no layer, by their names in base.
    outputs: how many things a layer gives in a tuple; 0 where it gives a tensor. others: what stands for all
    of them but the hidden state.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.base: Any = _base(self.model)
        self.layers = _layers(self.base, self.model.config.get_text_config())
        inside = {id(p) for p in self.layers.parameters()}
        self.outside = {n: p for n, p in self.base.named_parameters() if id(p) not in inside}
        self.modules = {id(module): name for name, module in model.named_modules()}
        prefix = f"{self.modules[id(self.base)]}.".lstrip(".")
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.names |= {id(p): prefix + name for name, p in self.base.named_parameters()}  # not by those of tied heads
        self.outputs = 0
        self.others: object = None
        self._signatures = [inspect.signature(layer.forward) for layer in self.layers]
        self._buffers: dict[tuple[int, torch.device, torch.dtype], dict[str, Tensor]] = {}

    @cached_property
    def title(self) -> str:
        """All that decides what the model computes, beside its weights: code and config, as a digest."""
        code = digest_of_code(self.model.config.model_type) or type(self.model).__module__.partition(".")[0]
        version = code, sys.modules["transformers"].__version__
        text = self.model.config.to_json_string(use_diff=False)
        return f"{' '.join(version)} {KNOWN} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def titled(self, function: _Function) -> _Function:
        """Give a function of this model a name that says what it computes; plans of equal names have equal bits."""
        function.__qualname__ = self.title
        return function

    @cached_property
    def width(self) -> int:
        """Elements per token of the hidden state."""
        return math.prod(self.inner)

    @cached_property
    def longest_sequence(self) -> int | None:
        """Tokens that a table of positions is for; None where the model has no such table."""
        config = self.model.config.get_text_config()
        stated = next((found for name in LENGTHS if isinstance(found := getattr(config, name, None), int)), None)
        if stated is None:
            return None
        tables = [p for p in self.outside.values() if p is not self.model.get_input_embeddings().weight]
        given = [leaf for leaf in tree_leaves(self.contexts(2, torch.float32, torch.device("cpu"))) if _is_tensor(leaf)]
        sizes = {size for table in (*tables, *self.base.buffers(), *given) if table.dim() > 1 for size in table.shape}
        if not any(stated <= size < stated + 8 for size in sizes):
            return None
        return next((length for length in range(stated, 0, -1) if self._takes(length)), None)

    def _takes(self, tokens: int) -> bool:
        """Whether tables hold positions for so many tokens; those of some models begin behind the padding token's."""
        rows = torch.zeros((), dtype=DTYPE).expand(1, tokens, self.input_width)
        try:
            self._reached(rows, {}, inputs_embeds=rows)
        except (IndexError, RuntimeError):  # what torch raises for lookups and gathers beyond a table
            return False
        return True

    def buffers_of(self, module: nn.Module, like: Tensor) -> dict[str, Tensor]:
        """The buffers of a module by name, on a tensor's device; those of the model's dtype in the tensor's."""
        key = id(module), like.device, like.dtype
        if key not in self._buffers:
            self._buffers[key] = {
                name: buffer.to(like.device, like.dtype if buffer.dtype == torch.float64 else buffer.dtype)
                for name, buffer in module.named_buffers()
            }
        return self._buffers[key]

    # ---- the model's own forward ------------------------------------------------------------------------------------

    def run_base(
        self, layer: LayerForward, like: Tensor, values: Mapping[str, Tensor] | None = None, **given: Any
    ) -> Tensor:
        """Run base with `layer` in place of its layers; returns its last hidden state [1, T, D].

        like: has the device and dtype to compute in. values: parameters outside of layers by their names in base; the
        others are zeros, which take no memory.
        """
        state = self._state(self.outside, values or {}, like) | self.buffers_of(self.base, like)
        given = {name: value.clone() for name, value in given.items()}  # some models scale their input in place
        with self._replaced(layer):
            return _first(functional_call(self.base, state, (), {**given, "use_cache": False}))

    def first_input(self, like: Tensor, values: Mapping[str, Tensor], **given: Any) -> Tensor:
        """What the first layer is given, as rows, for input_ids [B, T] or inputs_embeds [B, T, E]; as `run_base`."""
        return rows_of(self._reached(like, values, **given).x)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The shape of a token's hidden state as layers see it: several rows where residuals are side by side."""
        ids = torch.zeros(1, 1, dtype=torch.int64)
        return tuple(self._reached(torch.zeros(1), {}, input_ids=ids).x.shape[2:])

    def _reached(self, like: Tensor, values: Mapping[str, Tensor], **given: Any) -> _ReachedError:
        def first(index: int, x: Tensor, context: dict[str, Any]) -> Tensor:
            raise _ReachedError(x, context)

        try:
            self.run_base(first, like, values, **given)
        except _ReachedError as reached:
            return reached
        raise StructureError("its forward calls none of its layers")

    def lookup(self, ids: Tensor, table: Tensor) -> Tensor:
        """What the embedding's own module gives [T, E] for token ids [T] and its table."""
        embedding = self.model.get_input_embeddings()
        buffers = self.buffers_of(embedding, table)
        return functional_call(embedding, {**buffers, "weight": table}, (ids[None],))[0]

    def after_layers(self, x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """What base makes [T, D] of the last layer's hidden state [T, D]; values as of `run_base`."""
        rows, last = self._as_seen(x), len(self.layers) - 1
        given = x.new_zeros(1, len(x), self.input_width)

        def passed(index: int, hidden: Tensor, context: dict[str, Any]) -> Tensor:
            return rows if index == last else hidden

        return self.run_base(passed, x, values, inputs_embeds=given)[0]

    def logits(self, h: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """The logits [T, V] that the model makes of what base gives [T, D]; values by their names in the model."""
        state = self._state(self.head_parameters, values, h)
        inputs = torch.zeros(1, len(h), dtype=torch.int64, device=h.device)
        with replaced_forward(self.base, lambda *args, **given: _Output((h[None],))):
            found = functional_call(self.model, state, (), {"input_ids": inputs, "use_cache": False})
        return (found[0] if isinstance(found, (tuple, list)) else found.logits)[0]

    @cached_property
    def head_parameters(self) -> dict[str, Tensor]:
        """Parameters outside of base, by their names in the model; that of a tied head among them."""
        inside = {id(p) for p in self.base.parameters()}
        found = {name: p for name, p in self.model.named_parameters() if id(p) not in inside}
        head = self.model.get_output_embeddings()
        if isinstance(head, nn.Module):
            prefix = self.modules[id(head)]
            found |= {f"{prefix}.{name}": p for name, p in head.named_parameters()}
        return {name: p for p, name in {p: name for name, p in found.items()}.items()}

    @cached_property
    def output_width(self) -> int:
        """Elements per token of what base gives."""
        return self.after_layers(torch.zeros(1, self.width), {}).shape[-1]

    @cached_property
    def input_width(self) -> int:
        """Elements of a row of the embedding."""
        return self.model.get_input_embeddings().weight.shape[1]

    def contexts(
        self, tokens: int, dtype: torch.dtype, device: torch.device, sequences: int = 1
    ) -> list[dict[str, Any]]:
        """What the model's own forward gives each layer beside the hidden state, for sequences of so many tokens."""
        rows = torch.zeros(sequences, tokens, self.input_width, dtype=dtype, device=device)
        with torch.no_grad():
            return self.record(rows, {})

    def record(self, rows: Tensor, values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """What each layer is given beside the hidden state, for rows [B, T, E] of the embedding; as `run_base`.

        Raises: StructureError where layers do not follow each other, once each and with nothing in between.
        """
        found: list[dict[str, Any]] = []
        passed: list[int] = []

        def note(index: int, x: Tensor, context: dict[str, Any]) -> Tensor:
            if index != len(found) or (passed and passed[0] != x.data_ptr()):
                raise StructureError(f"layer {index} is not given what the layer before it gives")
            found.append(context)
            passed[:] = [x.data_ptr()]
            return x

        self.run_base(note, rows, values, inputs_embeds=rows)
        if len(found) != len(self.layers):
            raise StructureError(f"its forward calls {len(found)} of its {len(self.layers)} layers")
        return found

    def learn_outputs(self) -> None:
        """Find how many things a layer gives, by running the first one without storage."""
        x = torch.zeros(1, 2, self.input_width, dtype=DTYPE)
        context = self._reached(x, {}, inputs_embeds=x).context
        found = self.call_without_storage(0, context, 2)
        self.outputs = len(found) if isinstance(found, (tuple, list)) else 0

    def call_without_storage(self, index: int, context: dict[str, Any], tokens: int, sequences: int = 1) -> Any:
        """Run a layer on sequences of so many tokens on the meta device; context: of these, anywhere."""
        given = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, context)
        weights = {
            n: torch.empty(p.shape, dtype=DTYPE, device="meta") for n, p in self.layers[index].named_parameters()
        }
        x = torch.empty(sequences * tokens, self.width, dtype=DTYPE, device="meta")
        return self.call_layer(index, weights, x, given, sequences)

    def call_layer(
        self, index: int, weights: Mapping[str, Tensor], x: Tensor, context: dict[str, Any], sequences: int = 1
    ) -> Any:
        """What a layer itself gives for x [T, D] of sequences of one length; weights: its parameters by name."""
        layer = self.layers[index]
        state = {**self.buffers_of(layer, x), **weights}
        with replaced_forward(layer, None):
            return functional_call(layer, state, (self._as_seen(x, sequences),), context)

    def _as_seen(self, x: Tensor, sequences: int = 1) -> Tensor:
        """The hidden state [B, T / B, ...] of x [T, D] as layers see it."""
        return x.view(sequences, len(x) // sequences, *self.inner)

    # ---- replacing --------------------------------------------------------------------------------------------------

    def _state(self, own: Mapping[str, Tensor], values: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Values for parameters: those given, else zeros of one element's memory."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        return {name: values[name] if name in values else zero.expand(p.shape) for name, p in own.items()}

    @contextmanager
    def _replaced(self, run: LayerForward) -> Iterator[None]:
        kept = [layer.__dict__.get("forward") for layer in self.layers]

        def forward_of(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **given: Any) -> Any:
                x, context = self._bound(index, args, given)
                y = run(index, x, context)
                return (y, *[self.others] * (self.outputs - 1)) if self.outputs else y

            return forward

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = forward_of(index)
            yield
        finally:
            for layer, forward in zip(self.layers, kept, strict=True):
                _restore(layer, forward)

    def _bound(self, index: int, args: tuple, given: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden state that a layer is given, and what else it is given, by the names of its parameters.

        What is None is left out unless the layer asks for it.
        """
        parameters = self._signatures[index].parameters
        names = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        bound = {**dict(zip(names, args, strict=False)), **given}
        x = bound.pop(names[0])
        bound = {n: Unread() if isinstance(v, MutableMapping) and not v else v for n, v in bound.items()}
        required = {name for name in names[1:] if parameters[name].default is inspect.Parameter.empty}
        return x, {name: value for name, value in bound.items() if value is not None or name in required}


class Unread(dict):
    """Where layers write what later ones might read, as keys and values that they share: it keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def _refuse(self, *args: Any) -> Any:
        raise StructureError("a layer reads what others may have written")

    __getitem__ = __contains__ = __iter__ = get = items = values = keys = _refuse  # type: ignore[assignment]


def rows_of(hidden: Tensor) -> Tensor:
    """The hidden state [T, D] of all sequences, of one [B, T / B, ...] as layers see it."""
    return hidden.flatten(0, 1).flatten(1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _base(model: Any) -> Any:
    """The module that runs the layers."""
    decoder = model.get_decoder()
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        return model.base_model  # `decoder` is what some models call their head
    return getattr(decoder, "model", decoder) if hasattr(decoder, "lm_head") else decoder


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, (tuple, list)) else found.last_hidden_state


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Replace a module's forward; None for that of its class."""
    kept = module.__dict__.get("forward")
    _restore(module, forward)
    try:
        yield
    finally:
        _restore(module, kept)


def _restore(module: nn.Module, forward: Any) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward


def _layers(base: nn.Module, config: Any) -> nn.ModuleList:
    """Find the list of decoder layers: of all lists with as many modules as the config says, that of most parameters.

    Raises: StructureError where there is none, or layers share a parameter.
    """
    counts = {getattr(config, name, None) for name in COUNTS}
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) in counts]
    if not lists:
        raise StructureError(f"it has no list of num_hidden_layers={config.num_hidden_layers} layers")
    layers = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if owners.setdefault(id(parameter), index) != index:
                raise StructureError(f"layers {owners[id(parameter)]} and {index} share a parameter")
    return layers
