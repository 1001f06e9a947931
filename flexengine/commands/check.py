"""`flexengine check`: does a model compute here what transformers computes, op by op, forward and backward?

Both sides take the same checkpoint on the CPU in float32 or float64. Only a small model is checked in moments: its
weights are in memory twice, with their gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.api import from_pretrained
from flexengine.commands.parsers import check_parser
from flexengine.models.checkpoints import own_names
from flexengine.models.op_by_op import OpOutput, op_outputs
from flexengine.models.opaque.remote_code import digest_of_code
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.optim import AdamW
from flexengine.reports.text_format import align_columns

BOUNDS = {"float32": 1e-4, "float64": 1e-5}
"""Largest error that counts as the same, relative to the norm. Norms and rotations of transformers work in float32 also
in a model of float64, and their rounding stays."""
LENGTH, SEED = 24, 7
"""Tokens of the batch where none is given, and what they are drawn with."""
LR = 1e-3


class Row(NamedTuple):
    """One op, or one layer, with the relative errors of what it gives and of the gradients of its parameters."""

    layer: str
    op: str
    forward: float | None
    backward: float | None


class Found(NamedTuple):
    """What a check finds: rows in the order of forward, losses of both sides step by step, the bound."""

    rows: list[Row]
    losses: list[tuple[float, float]]
    bound: float

    @property
    def first(self) -> str:
        """The first difference in the order in which errors spread: forward first, then backward from the head down."""
        for row in self.rows:
            if (row.forward or 0.0) > self.bound:
                return f"{row.layer} {row.op}: forward {row.forward:.1e}"
        for row in reversed(self.rows):
            if (row.backward or 0.0) > self.bound:
                return f"{row.layer} {row.op}: gradient {row.backward:.1e}"
        step = next((i for i, (a, b) in enumerate(self.losses, 1) if abs(a / b - 1) > self.bound), None)
        return "" if step is None else f"loss of step {step}"


def main(argv: Sequence[str]) -> int:
    """Print the comparison; returns 0 if all is within the bound, else 1.

    Raises: ValueError as `check`.
    """
    arguments = check_parser().parse_args(argv)
    found = check(arguments.model, arguments.dtype, arguments.ids, arguments.steps, arguments.trust_remote_code)
    print("\n".join(describe(found)))
    return int(bool(found.first))


def check(
    model: str | Path,
    dtype: Literal["float32", "float64"] = "float32",
    ids: Sequence[int] = (),
    steps: int = 1,
    trust_remote_code: bool = False,
) -> Found:
    """Compare a model folder with transformers on one sequence. Raises: ValueError for what cannot be read or run.

    ids: the tokens, by default LENGTH drawn ones. steps: of AdamW at a fixed rate, on both sides.
    trust_remote_code: as of `open_model`.
    """
    if steps < 1:
        raise ValueError(f"--steps {steps}: expected 1 or more")
    import transformers  # noqa: PLC0415, other commands do not need it

    source = open_model(model, trust_remote_code=trust_remote_code)
    if source.weights_folder is None:
        raise ValueError(
            f"{model} has no weights to compare; give a folder with a checkpoint, such as a tiny random one"
        )
    if source.spec.task is not None:
        raise ValueError(f"{model} has a head for labels; check compares models that predict tokens (...ForCausalLM)")
    spec, folder = source.spec, source.weights_folder
    tokens = list(ids) or torch.randint(spec.vocab_size, (LENGTH,), generator=_generator()).tolist()
    if len(tokens) < 2 or not all(0 <= token < spec.vocab_size for token in tokens):
        raise ValueError(f"--ids: expected two tokens or more from 0 to {spec.vocab_size - 1}, got {tokens[:8]}")
    images = "text_config" in spec.hf_config
    loader = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    theirs = loader.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    theirs.set_experts_implementation("eager")  # torch's grouped products take no float64
    with torch.no_grad():
        given = _module_outputs(theirs, spec, tokens)
    errors, losses = _trained(theirs, spec, folder, tokens, dtype, steps)
    rows = [_row(out, given, errors, spec) for out in op_outputs(spec, folder, tokens, getattr(torch, dtype))]
    head = [name for name in errors if name in (spec.head_source, f"{spec.prefix}norm.weight")]
    rows.append(Row("head", "final_norm, lm_head", None, max((errors[name] for name in head), default=None)))
    return Found(rows, losses, BOUNDS[dtype])


def describe(found: Found) -> list[str]:
    """Give the lines to print."""
    cells = [("layer", "op", "forward", "gradients"), *((r.layer, r.op, _text(r.forward), _text(r.backward))
                                                        for r in found.rows)]  # fmt: skip
    steps = [f"step {i}: loss {a:.8f} here, {b:.8f} in transformers, {a / b - 1:+.1e}"
             for i, (a, b) in enumerate(found.losses, 1)]  # fmt: skip
    same = f"all is within {found.bound:g}, relative to the norm of what transformers has"
    end = f"first difference beyond {found.bound:g}: {found.first}" if found.first else same
    return [*align_columns(cells, left=(0, 1)), "", *steps, "", end]


def _text(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _module_outputs(theirs: Any, spec: ModelSpec, tokens: list[int]) -> dict[str, Tensor]:
    """What each module of transformers gives [T, ...], by its name in the description."""
    given: dict[str, Tensor] = {}
    names = {name: name for name, _ in theirs.named_modules() if name}
    own = own_names(spec, [f"{name}.weight" for name in names])

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.numel() % len(tokens) == 0:
                given.setdefault(own[f"{name}.weight"].removesuffix(".weight"), tensor.reshape(len(tokens), -1))

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in theirs.named_modules() if name]
    theirs(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return given


def _row(out: OpOutput, given: Mapping[str, Tensor], errors: Mapping[str, float], spec: ModelSpec) -> Row:
    """Compare one op: with the modules that hold its parameters, the last of a block with the block."""
    modules = list(dict.fromkeys(re.sub(r"\.(weight|bias)$", "", name) for name in out.sources))
    parts = [given[name] for name in modules if name in given]
    forward = None
    # Some classes scale what their embedding gives, others let it scale: block 0 tells whether that is right.
    scaled = out.layer == "embedding" and getattr(spec.layers[0].ops[0], "scale", 1.0) != 1.0
    if parts and len(parts) == len(modules) and not scaled:
        wanted = torch.cat(parts, dim=-1)
        forward = _error(out.output, wanted) if wanted.shape == out.output.shape else None
    block = re.fullmatch(r"block\.(\d+)", out.layer)
    if out.last and block:
        place = re.compile(rf"{re.escape(spec.prefix)}(layers|h)\.{block[1]}$")
        whole = next((tensor for name, tensor in given.items() if place.fullmatch(name)), None)
        forward = forward if whole is None else max(forward or 0.0, _error(out.whole, whole))
    own = [errors[name] for name in out.sources if name in errors]
    return Row(out.layer, out.op, forward, max(own, default=None))


def _trained(
    theirs: Any, spec: ModelSpec, folder: Path, tokens: list[int], dtype: Literal["float32", "float64"], steps: int
) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Train both sides; the errors of the first gradients by the names of the description, and the losses."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=AdamW().betas, eps=AdamW().eps, weight_decay=0.0)
    sizes = {"max_seq_len": len(tokens), "max_global_batch_tokens": len(tokens), "max_grad_norm": 1e9}
    trusted = bool(digest_of_code(spec.family))
    errors: dict[str, float] = {}
    losses = []
    with from_pretrained(
        folder, AdamW(lr=LR), dtype=dtype, device="cpu", hardware="cpu-test", trust_remote_code=trusted, **sizes
    ) as engine:
        for step in range(steps):
            logits = theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
            optimizer.zero_grad()
            loss.backward()
            losses.append((engine.fwd_bwd(input_ids=[tokens]).loss, loss.item()))
            if not step:
                stored = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
                wanted = revert_weight_conversion(theirs, stored)
                own = own_names(spec, wanted)
                wanted = {own[name]: gradient for name, gradient in wanted.items()}
                errors = {n: _error(g, wanted[n]) for n, g in engine.gradients().items() if n in wanted}
            engine.step()
            optimizer.step()
    return errors, losses


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)).item()
