"""The Triton kernels at the shapes of a model: operands, launch, the plain path beside it, and the bytes it must move.

T tokens (S: filled up to a multiple of 16), D model width, F FFN width, N query heads, G key/value heads, R rotated
columns of a head, B tokens of a block of logits, V vocabulary, n parameters of a block, P partial sums. Everything in
bf16 unless a formula says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bench.kernel_case import BF16, Case, Random, Sizes, Tensors
from flexengine.ops import cross_entropy as ce_op
from flexengine.ops import fp8_scaling as fp8_op
from flexengine.ops import glu as glu_op
from flexengine.ops import layernorm as layernorm_op
from flexengine.ops import linear as linear_op
from flexengine.ops import rmsnorm as norm_op
from flexengine.ops import rope as rope_op
from flexengine.ops.formats.weight_format import WeightFormat
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.optim.adamw import AdamW, adamw_factors, adamw_update_reference
from flexengine.optim.rounding import split_fp32
from flexengine.optim.rule import Update
from flexengine.random_bits import stream_keys
from flexengine.runtime.gradients import Squares, finish_gradient

F32 = torch.float32
EPS = 1e-5
# a large rate: an update that did not happen must stand out of the error that is allowed
ADAMW = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ADAMW_STEP, ADAMW_SEED = 10, 0


def kernel_cases(sizes: Sizes) -> tuple[Case, ...]:
    """All kernels of flexengine.kernels, in the order of a block's forward, then the update, FP8 operands and weights
    in fewer bytes."""
    norms = (*norm_cases(sizes), *layernorm_cases(sizes), bias_case(sizes))
    block = (*norms, *rope_cases(sizes), *swiglu_cases(sizes))
    return (
        *block,
        *loss_cases(sizes),
        *update_cases(sizes),
        *fp8_cases(sizes),
        *fp8_block_cases(sizes),
        *blackwell_cases(sizes),
        *decode_cases(sizes),
    )


def norm_cases(s: Sizes) -> tuple[Case, ...]:
    """RMSNorm forward, input half without and with accumulation, both halves in one pass (accumulating)."""
    from flexengine.kernels import rmsnorm as kernel  # noqa: PLC0415 - Triton is imported when first used

    T, D, groups = s.tokens, s.width, min(s.tokens, norm_op.grad_partials(s.width))
    matrix, row, stats = 2 * T * D, 2 * D, 4 * T

    def make(random: Random) -> Tensors:
        x = random.normal(T, D)
        return {
            "x": x,
            "weight": 1 + 0.1 * random.normal(D),
            "grad_y": random.normal(T, D),
            "rstd": torch.rsqrt(x.float().square().mean(-1) + EPS),
            "out": random.empty(T, D),
            "grad_x": random.normal(T, D),
            "grad_weight": random.normal(D, dtype=F32),
            "partials": random.empty(groups, D, dtype=F32),
        }

    def forward(path) -> Callable[[Tensors], object]:
        return lambda t: path.rmsnorm_forward(t["x"], t["weight"], EPS, t["out"], t["rstd"])

    def input_half(path, accumulate: bool) -> Callable[[Tensors], object]:
        return lambda t: path.rmsnorm_backward_input(
            t["grad_y"], t["x"], t["weight"], t["rstd"], t["grad_x"], accumulate
        )

    def in_one_pass(t: Tensors) -> None:
        kernel.rmsnorm_backward(t["grad_y"], t["x"], t["weight"], t["rstd"], t["grad_x"], t["partials"], True)
        kernel.sum_partials(t["partials"], t["grad_weight"], True)

    def plain_in_one_pass(t: Tensors) -> None:
        norm_op.rmsnorm_backward(t["grad_y"], t["x"], t["weight"], t["rstd"], t["grad_x"], t["partials"], True)
        norm_op.add_partials(t["partials"], T, t["grad_weight"], True)

    operands = ("grad_y", "x", "weight", "rstd")
    totals = ("grad_x", "grad_weight")
    return (
        Case(
            "rmsnorm-forward", "2*2TD + 2D + 4T", 2 * matrix + row + stats, make,
            forward(kernel), forward(norm_op), ("x", "weight"), ("out", "rstd"),
        ),
        Case(
            "rmsnorm-backward-input", "3*2TD + 2D + 4T", 3 * matrix + row + stats, make,
            input_half(kernel, False), input_half(norm_op, False), operands, ("grad_x",),
        ),
        Case(
            "rmsnorm-backward-input-accumulate", "4*2TD + 2D + 4T", 4 * matrix + row + stats, make,
            input_half(kernel, True), input_half(norm_op, True), (*operands, "grad_x"), ("grad_x",),
        ),
        Case(
            "rmsnorm-backward-accumulate", "4*2TD + 2D + 4T + 2*4D", 4 * matrix + row + stats + 8 * D, make,
            in_one_pass, plain_in_one_pass, (*operands, *totals), totals,
        ),
    )  # fmt: skip


def layernorm_cases(s: Sizes) -> tuple[Case, ...]:
    """LayerNorm forward, input half without and with accumulation, both halves in one pass (accumulating)."""
    from flexengine.kernels import layernorm as kernel  # noqa: PLC0415

    T, D = s.tokens, s.width
    matrix, row, groups = 2 * T * D, 2 * D, min(T, layernorm_op.ROW_GRAD_PARTIALS)

    def make(random: Random) -> Tensors:
        return {
            "x": 1 + random.normal(T, D),
            "weight": 1 + 0.1 * random.normal(D),
            "bias": random.normal(D),
            "grad_y": random.normal(T, D),
            "out": random.empty(T, D),
            "grad_x": random.normal(T, D),
            "grad_weight": random.normal(D, dtype=F32),
            "grad_bias": random.normal(D, dtype=F32),
            "partials": random.empty(groups, 2, D, dtype=F32),
        }

    def forward(path) -> Callable[[Tensors], object]:
        return lambda t: path.layernorm_forward(t["x"], t["weight"], t["bias"], EPS, t["out"])

    def input_half(path, accumulate: bool) -> Callable[[Tensors], object]:
        return lambda t: path.layernorm_backward_input(t["grad_y"], t["x"], t["weight"], EPS, t["grad_x"], accumulate)

    def in_one_pass(t: Tensors) -> None:
        kernel.layernorm_backward(t["grad_y"], t["x"], t["weight"], EPS, t["grad_x"], t["partials"], True)
        kernel.sum_partials(t["partials"], t["grad_weight"], t["grad_bias"], True)

    def plain_in_one_pass(t: Tensors) -> None:
        layernorm_op.layernorm_backward(t["grad_y"], t["x"], t["weight"], EPS, t["grad_x"], t["partials"], True)
        layernorm_op.add_partials(t["partials"], T, t["grad_weight"], t["grad_bias"], True)

    operands, sums = ("grad_y", "x", "weight"), ("grad_weight", "grad_bias")
    return (
        Case(
            "layernorm-forward", "2*2TD + 2*2D", 2 * matrix + 2 * row, make,
            forward(kernel), forward(layernorm_op), ("x", "weight", "bias"), ("out",),
        ),
        Case(
            "layernorm-backward-input", "3*2TD + 2D", 3 * matrix + row, make,
            input_half(kernel, False), input_half(layernorm_op, False), operands, ("grad_x",),
        ),
        Case(
            "layernorm-backward-input-accumulate", "4*2TD + 2D", 4 * matrix + row, make,
            input_half(kernel, True), input_half(layernorm_op, True), (*operands, "grad_x"), ("grad_x",),
        ),
        Case(
            "layernorm-backward-accumulate", "4*2TD + 2D + 4*4D", 4 * matrix + row + 16 * D, make,
            in_one_pass, plain_in_one_pass, (*operands, "grad_x", *sums), ("grad_x", *sums),
        ),
    )  # fmt: skip


def bias_case(s: Sizes) -> Case:
    """The gradient of a bias (accumulating)."""
    from flexengine.kernels import column_sum as kernel  # noqa: PLC0415

    T, D = s.tokens, s.width
    groups = linear_op.bias_grad_partials(T, D)

    def make(random: Random) -> Tensors:
        acc, partials = random.normal(D, dtype=F32), random.empty(groups, D, dtype=F32)
        return {"grad_y": random.normal(T, D), "acc": acc, "partials": partials}

    return Case(
        "bias-gradient", "2TD + 2*4D", 2 * T * D + 8 * D, make,
        lambda t: kernel.column_sum(t["grad_y"], t["acc"], t["partials"], True),
        lambda t: linear_op.accumulate_bias_grad(t["acc"], t["grad_y"], False), ("grad_y", "acc"), ("acc",),
    )  # fmt: skip


def rope_cases(s: Sizes) -> tuple[Case, ...]:
    """Rotation of queries and keys in a fused row; `rotated` is the part of the row that it touches."""
    from flexengine.kernels import rope as kernel  # noqa: PLC0415

    T, half = s.tokens, len(s.inv_freq)

    def make(random: Random) -> Tensors:
        qkv = random.normal(T, s.heads + 2 * s.kv_heads, s.head_dim)
        positions = torch.arange(T, device=random.device, dtype=torch.int32)
        inv_freq = torch.tensor(s.inv_freq, device=random.device)
        rotated = qkv[:, : s.rotated_heads, : 2 * half]
        return {"qkv": qkv, "rotated": rotated, "positions": positions, "inv_freq": inv_freq}

    def call(path) -> Callable[[Tensors], object]:
        return lambda t: path.rope_(t["rotated"], t["positions"], t["inv_freq"], 1.0, s.rotated_heads, False)

    num_bytes = 2 * 2 * T * s.rotated_heads * 2 * half + 4 * T + 4 * half
    return (
        Case(
            "rope-forward", "2*2T(N+G)R + 4T + 4R/2", num_bytes, make, call(kernel), call(rope_op),
            ("rotated", "positions", "inv_freq"), ("rotated",),
        ),
    )  # fmt: skip


def swiglu_cases(s: Sizes) -> tuple[Case, ...]:
    """SwiGLU forward, backward into a buffer of its own and over its operand."""
    from flexengine.kernels import glu as kernel  # noqa: PLC0415

    T, F = s.tokens, s.ffn_width
    matrix = 2 * T * F

    def make(random: Random) -> Tensors:
        return {
            "gate_up": random.normal(T, 2 * F),
            "grad_out": random.normal(T, F),
            "out": random.empty(T, F),
            "grad_gate_up": random.empty(T, 2 * F),
        }

    def forward(path) -> Callable[[Tensors], object]:
        return lambda t: path.glu_forward(t["gate_up"], t["out"], "silu")

    def backward(path, target: str) -> Callable[[Tensors], object]:
        return lambda t: path.glu_backward(t["grad_out"], t["gate_up"], t[target], "silu")

    operands = ("grad_out", "gate_up")
    return (
        Case(
            "swiglu-forward", "3*2TF", 3 * matrix, make, forward(kernel), forward(glu_op), ("gate_up",), ("out",)
        ),
        Case(
            "swiglu-backward", "5*2TF", 5 * matrix, make,
            backward(kernel, "grad_gate_up"), backward(glu_op, "grad_gate_up"), operands, ("grad_gate_up",),
        ),
        Case(
            "swiglu-backward-in-place", "5*2TF", 5 * matrix, make,
            backward(kernel, "gate_up"), backward(glu_op, "gate_up"), operands, ("gate_up",),
        ),
    )  # fmt: skip


def loss_cases(s: Sizes) -> tuple[Case, ...]:
    """Cross-entropy of a block of logits: the losses alone, and with the gradient written over the logits."""
    from flexengine.kernels import cross_entropy as kernel  # noqa: PLC0415

    B, V = s.block_tokens, s.vocab_size

    def make(random: Random) -> Tensors:
        return {
            "logits": 3 * random.normal(B, V),
            "labels": random.integers(B, V),
            "losses": random.empty(B, dtype=F32),
        }

    def call(path, write_grad: bool) -> Callable[[Tensors], object]:
        return lambda t: path.cross_entropy_(t["logits"], t["labels"], t["losses"], write_grad)

    operands = ("logits", "labels")
    return (
        Case(
            "cross-entropy-losses", "2BV + 12B", 2 * B * V + 12 * B, make,
            call(kernel, False), call(ce_op, False), operands, ("losses",),
        ),
        Case(
            "cross-entropy-gradient", "2*2BV + 12B", 4 * B * V + 12 * B, make,
            call(kernel, True), call(ce_op, True), operands, ("logits", "losses"),
            note="the logits are read twice: 67% is the most, but for what the cache still holds",
        ),
    )  # fmt: skip


def update_cases(s: Sizes) -> tuple[Case, ...]:
    """The end of a block's backward, without and with an earlier round's gradient, and AdamW in its modes for bf16."""
    adamw = (("adamw-split-bf16-states", True, BF16), ("adamw-split-fp32-states", True, F32))
    return (
        _accumulate_case("gradient-round", s.parameters, s.partial_sums, False),
        _accumulate_case("gradient-round-accumulate", s.parameters, s.partial_sums, True),
        *(_adamw_case(name, s.parameters, split, states) for name, split, states in adamw),
        _adamw_case("adamw-stochastic-bf16-states", s.parameters, False, BF16),
    )


def _accumulate_case(name: str, n: int, partial_sums: int, has_previous: bool) -> Case:
    from flexengine.kernels.grad_accumulate import grad_accumulate  # noqa: PLC0415

    def make(random: Random) -> Tensors:
        squares = random.empty(partial_sums, dtype=F32)
        return {"acc": random.normal(n, dtype=F32), "stored": random.normal(n), "squares": squares}

    def plain(t: Tensors) -> None:
        norm_square = torch.zeros(())
        finish_gradient(t["acc"], t["stored"], has_previous, Squares(t["squares"], norm_square, 0, n))
        t["squares"].zero_()[0] = norm_square  # the kernel spreads this sum over its programs

    return Case(
        name, f"4n + {'2*' if has_previous else ''}2n + 4P", (8 if has_previous else 6) * n + 4 * partial_sums, make,
        lambda t: grad_accumulate(t["acc"], t["stored"], has_previous, t["squares"]), plain,
        ("acc", "stored") if has_previous else ("acc",), ("stored", "squares"),
    )  # fmt: skip


def _adamw_case(name: str, n: int, split: bool, states: torch.dtype) -> Case:
    from flexengine.kernels.adamw import adamw_update_  # noqa: PLC0415

    def make(random: Random) -> Tensors:
        master = random.normal(n, dtype=F32)
        tensors = {
            "weight": master.to(BF16),
            "exp_avg": random.normal(n, dtype=states),
            "exp_avg_sq": random.normal(n, dtype=states).square(),
            "grad": random.normal(n),
            "grad_scale": torch.full((1,), 0.5, device=random.device),
        }
        if split:
            tensors["remainder"] = torch.empty(n, dtype=torch.int16, device=random.device)
            split_fp32(master, tensors["weight"], tensors["remainder"])
        return tensors

    factors = adamw_factors(**ADAMW, step=ADAMW_STEP)
    keys = [stream_keys(ADAMW_SEED, ADAMW_STEP, stream) for stream in range(3)]

    def run(t: Tensors) -> None:
        states = (t["exp_avg"], t["exp_avg_sq"], t["grad"], t["grad_scale"])
        adamw_update_(t["weight"], t.get("remainder"), *states, factors, keys, 0)

    def plain(t: Tensors) -> None:
        rest = {name: tensor for name, tensor in t.items() if name not in ("weight", "grad_scale")}
        lr, weight_decay = ADAMW["lr"], ADAMW["weight_decay"]
        adamw_update_reference(
            Update(
                {"weights": t["weight"], **rest}, t["grad_scale"], AdamW(**ADAMW), lr, weight_decay, ADAMW_STEP,
                ADAMW_SEED, 0,
            )
        )  # fmt: skip

    planes = ("weight", *(("remainder",) if split else ()), "exp_avg", "exp_avg_sq")
    masters = 4 if split else 2
    return Case(
        name, f"2*({masters} + 2*{states.itemsize})n + 2n + 4", (2 * (masters + 2 * states.itemsize) + 2) * n + 4, make,
        run, plain, (*planes, "grad", "grad_scale"), planes,
    )  # fmt: skip


def fp8_cases(s: Sizes) -> tuple[Case, ...]:
    """The largest magnitude of an operand, and the operand in FP8: as it is, transposed, and both from one read."""
    from flexengine.kernels import fp8 as kernel  # noqa: PLC0415

    T, F, P, dtype = s.tokens, s.ffn_width, fp8_op.PARTIALS, fp8_op.FORWARD_DTYPE
    padded = -(-T // fp8_op.MULTIPLE) * fp8_op.MULTIPLE

    def make(random: Random) -> Tensors:
        x = random.normal(T, F)
        partials = torch.zeros(P, dtype=F32, device=random.device)
        partials[P // 2] = x.abs().max()
        tensors = {
            "x": x,
            "partials": partials,
            "absmax": random.empty(P, dtype=F32),
            "scale": random.empty(1, dtype=F32),
        }
        for name, shape in (("rows", (T, F)), ("columns", (F, padded))):
            tensors[name] = torch.full(shape, 0x7F, dtype=torch.uint8, device=random.device).view(dtype)
        return tensors

    def absmax(t: Tensors) -> None:
        t["absmax"].zero_()[0] = t["x"].abs().max()  # the kernel spreads this maximum over its programs

    def quantize(*results: str) -> Callable[[Tensors], object]:
        targets = ("rows", "columns")
        return lambda t: kernel.quantize(
            t["x"], t["partials"], torch.finfo(dtype).max, fp8_op.LEAST_ABSMAX, t["scale"],
            *(t[name] if name in results else None for name in targets),
        )  # fmt: skip

    def plain(*results: str) -> Callable[[Tensors], object]:
        def run(t: Tensors) -> None:
            scales = torch.empty(fp8_op.scale_buffer("x").height(T))
            t["scale"].copy_(fp8_op.quantize(t["x"], scales, 0, **{name: t[name] for name in results}))

        return run

    read, rows, columns = 2 * T * F + 4 * P, T * F, padded * F
    return (
        Case(
            "fp8-absmax", "2TF + 4P", read, make, lambda t: kernel.absmax_partials(t["x"], t["absmax"]), absmax,
            ("x",), ("absmax",),
        ),
        *(
            Case(
                name, f"2TF + 4P + {formula} + 4", read + num_bytes + 4, make, quantize(*results), plain(*results),
                ("x", "partials"), (*results, "scale"),
            )
            for name, formula, num_bytes, results in (
                ("fp8-quantize", "TF", rows, ("rows",)),
                ("fp8-quantize-transposed", "SF", columns, ("columns",)),
                ("fp8-quantize-both", "TF + SF", rows + columns, ("rows", "columns")),
            )
        ),
    )  # fmt: skip


def fp8_block_cases(s: Sizes) -> tuple[Case, ...]:
    """An operand in FP8 with scales for 128 elements of a row, of a column, or both from one read; and for squares."""
    from flexengine.kernels import fp8_blocks as kernel  # noqa: PLC0415 (Triton is imported when first used)
    from flexengine.ops import fp8_blocks as plain  # noqa: PLC0415

    T, F, dtype = s.tokens, s.ffn_width, fp8_op.FORWARD_DTYPE
    tiles, wide = (plain.num_blocks(T), plain.num_blocks(F)), plain.num_blocks(T) * 128
    shapes = {"rows": ((T, F), (tiles[1], T)), "columns": ((F, wide), (tiles[0], F))}
    shapes |= {"squares": ((T, F), plain.square_scales(T, F))}

    def make(random: Random) -> Tensors:
        tensors = {"x": random.normal(T, F)}
        for name, (codes, scales) in shapes.items():
            tensors[name] = torch.full(codes, 0x7F, dtype=torch.uint8, device=random.device).view(dtype)
            tensors[f"{name}_scales"] = torch.ones(scales, dtype=F32, device=random.device)
        return tensors

    def given(t: Tensors, name: str, results: tuple[str, ...]) -> fp8_op.Operand | None:
        kind = "squares" if name == "squares" else "terms"
        return fp8_op.Operand(t[name], t[f"{name}_scales"], kind) if name in results else None

    def run(t: Tensors, results: tuple[str, ...], by_kernel: bool) -> None:
        rows, columns, squares = (given(t, name, results) for name in shapes)
        limits = (fp8_op.LARGEST, fp8_op.LEAST_ABSMAX)
        if squares is not None and by_kernel:
            kernel.round_squares(t["x"], *limits, squares.codes, squares.scales, transposed=False)
        elif squares is not None:
            plain.round_squares(t["x"], squares, transposed=False)
        elif by_kernel:
            of_rows, of_columns = (None if side is None else side[:2] for side in (rows, columns))
            kernel.round_vectors(t["x"], *limits, of_rows, of_columns)
        else:
            plain.round_vectors(t["x"], rows, columns)

    return tuple(
        Case(
            f"fp8-blocks-{name}", f"2TF + {formula}", 2 * T * F + num_bytes, make,
            lambda t, results=results: run(t, results, True), lambda t, results=results: run(t, results, False),
            ("x",), tuple(f"{each}{end}" for each in results for end in ("", "_scales")),
        )
        for name, formula, num_bytes, results in (
            ("rows", "TF + TF/32", T * F + 4 * tiles[1] * T, ("rows",)),
            ("both", "TF + SF + (T + S)F/32", (T + wide) * F + 4 * (tiles[1] * T + tiles[0] * F), ("rows", "columns")),
            ("squares", "TF + TF/4096", T * F + 4 * math.prod(shapes["squares"][1]), ("squares",)),
        )
    )  # fmt: skip


def blackwell_cases(s: Sizes) -> tuple[Case, ...]:
    """An operand in MXFP8 as it is, and transposed, too; in NVFP4 at random, and of a weight's squares transposed. Any
    card rounds so; Blackwell cards multiply what comes out."""
    from flexengine.kernels import mxfp8, nvfp4  # noqa: PLC0415 (Triton is imported when first used)
    from flexengine.ops import mxfp8 as plain_mxfp8  # noqa: PLC0415
    from flexengine.ops import nvfp4 as plain_nvfp4  # noqa: PLC0415
    from flexengine.ops.scale_tiles import scale_shape  # noqa: PLC0415

    T, F, P, draws = s.tokens, s.ffn_width, fp8_op.PARTIALS, plain_nvfp4.Draws(seed=0, step=1, stream=2, first_row=3)
    whole, four_bits = -(-T // 32) * 32, ("fours", "squares")
    shapes = {"rows": (T, F), "columns": (F, whole), "fours": (T, F), "squares": (F, whole)}
    scales = {name: scale_shape(shape, 16 if name in four_bits else 32) for name, shape in shapes.items()}

    def make(random: Random) -> Tensors:
        x = random.normal(whole, F)
        x[T:] = 0.0
        absmax = torch.zeros(P, dtype=F32, device=x.device)
        absmax[0] = x.abs().max()
        tensors = {"x": x[:T], "weight": x, "partials": absmax}
        for name, (rows, terms) in shapes.items():
            width = terms // 2 if name in four_bits else terms
            tensors[name] = torch.full((rows, width), 0x7F, dtype=torch.uint8, device=x.device)
            tensors[f"{name}_scales"] = torch.full(scales[name], 0x7F, dtype=torch.uint8, device=x.device)
            tensors[f"{name}_factor"] = torch.full((1,), math.nan, dtype=F32, device=x.device)
        return tensors

    def side(t: Tensors, name: str) -> fp8_op.Operand:
        codes = t[name] if name in four_bits else t[name].view(fp8_op.FORWARD_DTYPE)
        return fp8_op.Operand(codes, t[f"{name}_scales"], "tiles", t[f"{name}_factor"])

    def mx(t: Tensors, results: tuple[str, ...], by_kernel: bool) -> None:
        rows, columns = (side(t, name) if name in results else None for name in ("rows", "columns"))
        if by_kernel:
            mxfp8.round_blocks(t["x"], *(each and each[:2] for each in (rows, columns)))
        else:
            plain_mxfp8.round_blocks(t["x"], rows, columns)

    def nv(t: Tensors, name: str, by_kernel: bool) -> None:
        squares, own = name == "squares", side(t, name)
        x, drawn = (t["weight"], None) if squares else (t["x"], draws)
        if by_kernel:
            keys = drawn and (plain_nvfp4.stream_keys(*draws[:3]), draws.first_row * F)
            operand = own.codes, own.scales, t[f"{name}_factor"]
            nvfp4.round_fours(x, operand, t["partials"], plain_nvfp4.LIMITS, squares, squares, keys)
        else:
            plain_nvfp4.round_fours(x, own, t["partials"], squares, squares, drawn)

    of_scales = {name: math.prod(shape) for name, shape in scales.items()}
    mx_cases = tuple(
        Case(
            f"mxfp8-{name}", f"2TF + {formula}", 2 * T * F + num_bytes, make,
            lambda t, results=results: mx(t, results, True), lambda t, results=results: mx(t, results, False),
            ("x",), tuple(f"{each}{end}" for each in results for end in ("", "_scales")),
        )
        for name, formula, num_bytes, results in (
            ("rows", "TF + TF/32", T * F + of_scales["rows"], ("rows",)),
            ("both", "TF + SF + (T + S)F/32", (T + whole) * F + of_scales["rows"] + of_scales["columns"],
             ("rows", "columns")),
        )
    )  # fmt: skip
    nv_cases = tuple(
        Case(
            f"nvfp4-{name}", f"2{rows}F + 4P + {rows}F/2 + {rows}F/16 + 4",
            2 * height * F + 4 * P + height * F // 2 + of_scales[name] + 4, make,
            lambda t, name=name: nv(t, name, True), lambda t, name=name: nv(t, name, False),
            (source, "partials"), (name, f"{name}_scales", f"{name}_factor"),
        )
        for name, source, rows, height in (("fours", "x", "T", T), ("squares", "weight", "S", whole))
    )  # fmt: skip
    return mx_cases + nv_cases


def decode_cases(s: Sizes) -> tuple[Case, ...]:
    """Gate and up projection out of every format of fewer bytes."""
    from flexengine.kernels import decode_weights as kernel  # noqa: PLC0415 - Triton is imported when first used

    rows, columns = 2 * s.ffn_width, s.width

    def case(form: WeightFormat, formula: str) -> Case:
        layout = form.layout(rows, columns)

        def make(random: Random) -> Tensors:
            stored = torch.zeros(1, layout.num_bytes, dtype=torch.uint8, device=random.device)
            encoder = form.encoder(stored[0], layout)
            for first, count in form.slabs(layout):
                encoder.add(first, random.normal(count, columns, dtype=F32))
            encoder.finish()
            return {"stored": stored, "out": random.empty(1, layout.numel)}

        def run(t: Tensors) -> None:
            form.launch(kernel, t["stored"], layout, t["out"])

        def plain(t: Tensors) -> None:
            form.decode(t["stored"], layout, t["out"])

        num_bytes = layout.num_bytes + 2 * layout.numel
        return Case(f"decode-{form.name}", formula, num_bytes, make, run, plain, ("stored",), ("out",))

    formulas = {
        "nf4": "2.516*2FD", "nf4_float32": "2.563*2FD", "fp8": "3*2FD + 4 for 128 x 128", "int8": "3*2FD + 4*2F",
        "mxfp4": "2.531*2FD",
    }  # fmt: skip
    return tuple(case(form, formulas[name]) for name, form in FORMATS.items())
