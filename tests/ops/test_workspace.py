"""No op takes more memory beside its operands than it declares: budgets on CUDA are promised with these figures.

What counts is what CUDA would run: the plain path for float64, and attention's plain path where no kernel is written
for the dtype or the head width. The same code runs here, and torch's profiler sees what it allocates.
"""

from itertools import product

import pytest
import torch
from engine_helpers import peak_bytes, peaks_of, spec_of, tiny_config
from family_configs import CASES, gemma2, gemma3, gpt2
from thorough import cases

from bench.block_ops import block_env
from flexengine.ops import cross_entropy, linear
from flexengine.ops.attention import reference as attention_reference
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.kernels import Results, Rows
from flexengine.ops.attention.key_value_window import KeyValueWindow
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.columns import whole
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta import segments as delta_segments
from flexengine.ops.delta.delta_rule import DeltaRule
from flexengine.ops.delta.state_space import StateSpaceScan
from flexengine.optim.adamw import AdamW, adamw_update
from flexengine.optim.rule import Update
from flexengine.runtime.gradients import Squares, finish_gradient

SMALL = 64 * 1024  # scalars, index tensors, masks of a few rows
MIB = 2**20


def calls_of(op, env: OpEnv):
    yield "forward", lambda: (torch.empty(1), op.forward(env))  # one allocation at least
    if op.grad_inputs:
        yield "input half", lambda: (torch.empty(1), op.backward_input(env))
    if op.params:
        yield "weight half", lambda: (torch.empty(1), op.backward_weight(env))


def env_of(spec, layer, tokens, seq_len, dtype):
    return block_env(spec, layer, tokens, seq_len, torch.device("cpu"), dtype)


WIDER = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 997, "attention_bias": True}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
CONFIGS = {
    "llama": tiny_config(**WIDER, mlp_bias=True),
    "gemma2": gemma2(**WIDER),
    "gemma3": gemma3(**WIDER),
    "gemma4": {**CASES["gemma4_text, experts"], **WIDER},
    "olmo2": {**CASES["olmo2"], **WIDER},
    "olmoe": {**CASES["olmoe, many experts"], **WIDER},
    "qwen2_moe": {**CASES["qwen2_moe"], **WIDER},
    "gpt_oss": {**CASES["gpt_oss"], **WIDER},
    "deepseek_v2": {**CASES["deepseek_v2, groups, biases, scaled"], **WIDER, "n_routed_experts": 48},
    "deepseek_v3": {**CASES["deepseek_v3, experts everywhere"], **WIDER, "n_routed_experts": 64},
    "qwen3_next": {**CASES["qwen3_next, linear attention, not normalised"], **WIDER, **LINEAR},
    "qwen3_5_text": {**CASES["qwen3_5_text, full attention, biases, tied"], **WIDER},
    "granitemoehybrid": {**CASES["granitemoehybrid"], **WIDER, "mamba_d_state": 24},
    "gpt2": gpt2(n_embd=96, vocab_size=997, n_positions=2000),
}


LIKE_OTHERS = ("olmo2", "gemma2", "gemma3", "olmoe", "qwen2_moe", "qwen3_5_text")
"""Of which the others have all ops, some in another order; in float32 and bf16 all are tried."""


@pytest.mark.parametrize("name", cases(CONFIGS, {*CONFIGS} - {*LIKE_OTHERS}))
@pytest.mark.parametrize(("tokens", "seq_len"), cases([(1024, 128), (640, 640)], [(1024, 128)]))
def test_every_op_in_float64(tokens, seq_len, name):
    spec = spec_of(CONFIGS[name])
    check_layers(
        spec, lambda layer: env_of(spec, layer, tokens, seq_len, torch.float64),
        lambda op: op.workspace_bytes(tokens, 8) + SMALL,
    )  # fmt: skip


def check_layers(spec, env_of_layer, allowed_of) -> None:
    """No half of an op of the first block and the head takes more than it may."""
    for layer in (spec.blocks[0], spec.layers[-1]):
        env = env_of_layer(layer)
        halves = [(op, half, call) for op in layer.ops for half, call in calls_of(op, env)]
        for (op, half, _), taken in zip(halves, peaks_of([call for *_, call in halves]), strict=True):
            assert taken <= allowed_of(op), f"{op.name}, {half}: {taken} bytes, declared {allowed_of(op)}"


IN_DTYPES = [(name, dtype) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), cases(IN_DTYPES, IN_DTYPES[1::2]), ids=str)
def test_every_op_on_the_cpu(name, dtype):
    """What the plain path takes there; a bf16 product needs buffers of its own."""
    spec, tokens = spec_of(CONFIGS[name]), 640
    small = SMALL + (32 * 1024 if dtype == torch.bfloat16 else 0)
    check_layers(
        spec, lambda layer: env_of(spec, layer, tokens, 320, dtype),
        lambda op: op.plain_workspace_bytes(tokens, dtype.itemsize) + small,
    )  # fmt: skip


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_a_large_vocabulary_on_the_cpu(dtype, soft_cap, monkeypatch):
    """Temporaries are a share of the block of logits, and results those of the whole block."""
    tokens, width, vocab_size = 96, 16, 5000
    op = LMHeadLoss("head", "h", width, vocab_size, "weight", soft_cap)
    results = []
    for elements in (1 << 23, 1 << 16):
        monkeypatch.setattr(cross_entropy, "PLAIN_ELEMENTS", elements)
        monkeypatch.setattr(linear, "WIDENED_ELEMENTS", elements // 2)
        env = head_env(tokens, width, vocab_size, dtype)
        taken = peak_bytes(lambda env=env: (torch.empty(1), op.backward_input(env)))
        assert taken <= op.plain_workspace_bytes(tokens, dtype.itemsize) + 2 * SMALL
        results.append((env.chunk.losses, env.g["h"], env.gp["weight"]))
    assert taken < tokens * vocab_size * 4
    for at_once, in_blocks in zip(*results, strict=True):
        assert torch.equal(at_once, in_blocks)


def head_env(tokens, width, vocab_size, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(n, width, generator=generator).to(dtype) for n in (tokens, vocab_size)]
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    nothing, losses = torch.empty(0), torch.zeros(tokens)
    chunk = ChunkContext(tokens, nothing, labels, nothing, nothing, (tokens,), losses, {})
    tensors = {"h": rows[0], "logits": torch.empty(tokens, vocab_size, dtype=dtype)}
    accumulator = torch.zeros(vocab_size, width)
    return OpEnv(tensors, {"weight": rows[1]}, {"h": torch.empty_like(rows[0])}, {"weight": accumulator}, chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_op_on_cuda(dtype):
    """As the allocator saw it, for all biases that a model may have; what libraries keep is taken by the first call."""
    config = tiny_config(hidden_size=1024, intermediate_size=2816, num_attention_heads=8, head_dim=128)
    spec = spec_of({**config, "vocab_size": 4096, "attention_bias": True, "mlp_bias": True})
    for layer in (spec.blocks[0], spec.layers[-1]):
        env = block_env(spec, layer, 4096, 512, torch.device("cuda"), dtype)
        for op in layer.ops:
            allowed = op.workspace_bytes(4096, dtype.itemsize) + SMALL
            for half, call in calls_of(op, env):
                call()
                torch.cuda.synchronize()
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                call()
                taken = torch.cuda.max_memory_allocated() - held
                assert taken <= allowed, f"{op.name}, {half}: {taken} bytes, declared {allowed}"


CASES = {
    "float32, short": (torch.float32, 8, 4, 32, (256,) * 4, 0),
    "float32, ragged": (torch.float32, 8, 2, 32, (300, 7, 290, 100), 0),
    "float32, long": (torch.float32, 4, 4, 32, (1500,), 0),
    "float64, long": (torch.float64, 4, 2, 16, (1300, 1), 0),
    "float32, a slice": (torch.float32, 4, 2, 32, (512,), 3000),
    "float32, odd heads": (torch.float32, 4, 2, 20, (512, 512), 0),
    "float32, odd heads, a slice": (torch.float32, 4, 2, 20, (512,), 3000),
    "float32, mostly padding": (torch.float32, 8, 2, 32, (510, 1, 1), 0),
    "float64, mostly padding": (torch.float64, 8, 8, 32, (510, 1, 1), 0),
    "float32, many tiny ones": (torch.float32, 4, 2, 16, (3,) * 300, 0),
}


STYLES = {
    "causal": (CAUSAL, 1 << 24),
    "window, soft cap, small blocks": (AttentionStyle(window=50, soft_cap=9.0), 1 << 16),
}
WAYS = list(product(CASES, STYLES))


@pytest.mark.parametrize(("case", "way"), cases(WAYS, [way for i, way in enumerate(WAYS) if (i // 2 + i) % 2]))
def test_the_plain_path_of_attention(case, way, monkeypatch):
    style, score_elements = STYLES[way]
    monkeypatch.setattr(attention_reference, "SCORE_ELEMENTS", score_elements)
    dtype, n, g, width, seq_lens, before = CASES[case]
    tokens, wide = sum(seq_lens), torch.float64 if dtype == torch.float64 else torch.float32
    q, grad_out = (torch.randn(tokens, n, width).to(dtype) for _ in range(2))
    k, v = (torch.randn(before + tokens, g, width).to(dtype) for _ in range(2))
    out, lse = torch.empty_like(q), torch.empty(n, tokens, dtype=wide)
    totals = tuple(torch.zeros(before + tokens, g, width, dtype=wide) for _ in range(2)) if before else None
    op = CausalAttention("attention", "qkv", "o", n, g, width, style)
    allowed = op.workspace_bytes(tokens, dtype.itemsize) + SMALL
    allowed += op.window_workspace_bytes(tokens, dtype.itemsize) if before else 0
    operands = (q, k, v, seq_lens, before, out, lse, style)
    taken = peak_bytes(lambda: attention_reference.attention_forward_reference(*operands))
    assert taken <= allowed
    operands = (grad_out, Rows(q, k, v), Results(out, lse), seq_lens, before, totals, style)
    taken = peak_bytes(lambda: attention_reference.attention_backward_reference(*operands))
    assert taken <= allowed


DELTA_CASES = {
    "one sequence": ((2, 2, 64, 64), (1024,)),
    "segments": ((2, 2, 64, 64), (4096,)),
    "grouped": ((1, 4, 16, 32), (2048,)),
    "wide keys": ((2, 2, 128, 8), (1024,)),
    "wide values": ((2, 2, 8, 128), (1024,)),
    "side by side": ((2, 2, 64, 64), (513,) * 8),
    "ragged": ((2, 2, 64, 64), (1000, 900, 800, 700, 3)),
    "many tiny ones": ((2, 2, 64, 64), (1,) * 64),
}


RULES = {"delta": DeltaRule, "scan": StateSpaceScan}


def linear_attention(rule, case, dtype, device="cpu"):
    """(op, tokens, env)."""
    (g, n, k, v), seq_lens = DELTA_CASES[case]
    tokens, wide = sum(seq_lens), torch.float64 if dtype == torch.float64 else torch.float32
    columns = [whole(0, n), whole(n, n)][: 2 if rule == "delta" else 1]
    op = RULES[rule]("rule", "qkv", "gates", "o", (g, n, k, v), *columns)
    empty = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device=device)  # noqa: E731
    rows = {"qkv": empty(tokens, 2 * g * k + n * v).normal_(), "gates": empty(tokens, 2 * n).normal_()}
    tensors = {**rows, "o": empty(tokens, n * v), "rule_param_grads": empty(len(op.params), n, dtype=wide)}
    grads = {"o": tensors["o"].normal_(), **{name: torch.empty_like(x) for name, x in rows.items()}}
    params = {name: empty(n).fill_(0.0 if name == "A_log" else 1.0) for name in op.params}
    nothing, cu = torch.empty(0), torch.tensor([0, *seq_lens]).cumsum(0).to(device, torch.int32)
    chunk = ChunkContext(tokens, nothing, nothing, nothing, cu, seq_lens, nothing, {})
    return op, tokens, OpEnv(tensors, params, grads, {}, chunk)


@pytest.mark.parametrize("dtype", cases([torch.bfloat16, torch.float64], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize("rule", RULES)
def test_linear_attention(rule, case, dtype):
    """The plain path: what it takes depends on segments, and hardly on the chunk."""
    op, tokens, env = linear_attention(rule, case, dtype)
    allowed = delta_plain.workspace_bytes(tokens, max(4, dtype.itemsize), op.sizes) + SMALL
    narrow = op.storing("bfloat16") if rule == "delta" and dtype == torch.bfloat16 else op
    for call in (op.forward, op.backward_input, narrow.backward_input):
        taken = peak_bytes(lambda call=call: call(env))
        assert taken <= allowed, f"{taken} bytes, declared {allowed}"


@pytest.mark.parametrize("tile_heads", [4608, 20])
@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize("rule", RULES)
def test_buffers_of_linear_attentions_kernels(rule, case, tile_heads, monkeypatch):
    """The kernels themselves take nothing: they are left out."""
    from flexengine.ops.delta import kernels as delta_kernels  # noqa: PLC0415 (Triton is imported when first used)
    from flexengine.ops.delta import scan_kernels  # noqa: PLC0415

    monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")
    _, _, k, v = DELTA_CASES[case][0]
    monkeypatch.setattr(delta_segments, "STATE_BYTES", 4 * k * v * tile_heads)
    files = (delta_kernels if rule == "delta" else scan_kernels)._kernels()
    launches = [(x, name) for x in files for name in vars(x) if name.startswith(f"{rule}_")]
    assert launches
    for file, name in launches:
        monkeypatch.setattr(file, name, lambda *_: None)
    given, tokens, env = linear_attention(rule, case, torch.bfloat16)
    for op in (given, given.storing("bfloat16")) if rule == "delta" else (given,):
        allowed = op.workspace_bytes(tokens, 2) + SMALL
        for call in (op.forward, op.backward_input):
            taken = peak_bytes(lambda call=call: call(env))
            assert taken <= allowed, f"{taken} bytes, declared {allowed}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_on_cuda(rule, case, dtype):
    op, tokens, env = linear_attention(rule, case, dtype, "cuda")
    allowed = op.workspace_bytes(tokens, dtype.itemsize) + SMALL
    for call in (op.forward, op.backward_input):
        call(env)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(env)
        taken = torch.cuda.max_memory_allocated() - held
        assert taken <= allowed, f"{taken} bytes, declared {allowed}"


def test_blocks_of_any_size_give_the_same(monkeypatch):
    q, grad_out = (torch.randn(90, 6, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(120, 3, 8, dtype=torch.float64) for _ in range(2))
    found = []
    for score_elements in (1 << 24, 3000, 100):
        monkeypatch.setattr(attention_reference, "SCORE_ELEMENTS", score_elements)
        for seq_lens, before in (((90,), 30), ((40, 1, 49), 0)):
            out, lse = torch.full_like(q, torch.nan), torch.full((6, 90), torch.nan, dtype=torch.float64)
            keys, values = k[: before + 90], v[: before + 90]
            attention_reference.attention_forward_reference(q, keys, values, seq_lens, before, out, lse)
            operands = (grad_out, Rows(q, keys, values), Results(out, lse), seq_lens, before)
            grads = attention_reference.attention_backward_reference(*operands)
            found.append(((out, lse, *grads), before))
    for results, before in found[2:]:
        wanted = next(first for first, other in found[:2] if other == before)
        for actual, expected in zip(results, wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_window_of_the_plain_path_is_added_to_in_place(monkeypatch):
    """Its gradients are as long as the sequence: a copy would break the budget."""
    monkeypatch.setattr(attention_reference, "SCORE_ELEMENTS", 1 << 14)
    n, g, width, tokens, before = 4, 2, 8, 64, 20000
    window = KeyValueWindow(*(torch.randn(before + tokens, g, width) for _ in range(2)), before)
    window.grad_keys, window.grad_values = (torch.zeros(before + tokens, g, width) for _ in range(2))
    op = CausalAttention("attention", "qkv", "o", n, g, width)
    q, grad_out, out = (torch.randn(tokens, n, width) for _ in range(3))
    lse = torch.full((n, tokens), 12.0)
    taken = peak_bytes(lambda: op._plain_window_backward(grad_out, q, window, Results(out, lse), CAUSAL))
    assert taken < window.grad_keys.nbytes


def test_updates_in_float64_take_a_tile_at_a_time():
    num_elements = 3_000_000
    names = ("weights", "exp_avg", "exp_avg_sq", "grad")
    planes = {name: torch.rand(num_elements, dtype=torch.float64) for name in names}
    scale = torch.ones(1, dtype=torch.float64)
    update = Update(planes, scale, AdamW(), 1e-3, 0.1, step=1, seed=0, element_offset=0)
    assert peak_bytes(lambda: adamw_update(update)) <= 24 * MIB
    norm, partials = torch.zeros((), dtype=torch.float64), torch.zeros(1024, dtype=torch.float64)
    squares = Squares(partials, norm, before=0, whole=num_elements)
    finish = lambda: finish_gradient(planes["weights"], planes["grad"], True, squares)  # noqa: E731
    assert peak_bytes(finish) <= 24 * MIB
