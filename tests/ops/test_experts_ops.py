"""Router and experts against a plain mixture with autograd: each op by itself, and all of them in a row."""

import pytest
import torch

from flexengine.ops.base import OpEnv
from flexengine.ops.experts.expert_scale import ExpertScale
from flexengine.ops.experts.experts import GroupedLinear, WeightedGLU
from flexengine.ops.experts.router import Router, RouterStyle
from flexengine.ops.experts.rows import Combine, Dispatch
from flexengine.ops.experts.shared_gate import SharedGate
from flexengine.ops.layer_scale import LayerScale

D, F, EXPERTS = 6, 5, 4
CASES = [(1, True), (2, True), (2, False), (EXPERTS, False)]


def router(h, tokens, per_token, normalised, bias=False):
    op = Router("router", "x", D, EXPERTS, per_token, "w", normalised, "b" if bias else None)
    return op, {"x": h.randn(tokens, D)}, {"w": h.randn(EXPERTS, D)} | ({"b": h.randn(EXPERTS)} if bias else {})


def route(h, tokens, per_token, favoured=None):
    """(place, bounds, expert of each row) of random routing, or of all tokens to one expert among others."""
    score = torch.rand(tokens, EXPERTS)
    if favoured is not None:
        score[:, favoured] = 2.0
    expert, order = score.topk(per_token).indices.flatten().sort(stable=True)
    place = torch.empty(len(order), dtype=torch.int32)
    place[order] = torch.arange(len(order), dtype=torch.int32)
    bounds = torch.searchsorted(expert, torch.arange(EXPERTS + 1)).int()
    return place.view(tokens, per_token).to(h.device), bounds.to(h.device), expert


def chosen_weights(x, weight, per_token, normalised, bias=0.0):
    probabilities = torch.softmax(x @ weight.t() + bias, dim=-1)
    values, indices = probabilities.topk(per_token, dim=-1)
    return (values / values.sum(-1, keepdim=True) if normalised else values), indices


def leaves(*tensors):
    return [t.detach().double().cpu().requires_grad_() for t in tensors]


def check_router(h, checks, tokens, per_token, normalised, tolerance=1e-12, bias=False):
    op, inputs, params = router(h, tokens, per_token, normalised, bias)
    grad = h.randn(tokens, per_token)
    x, weight, *biases = operands = leaves(inputs["x"], *params.values())
    values, indices = chosen_weights(x, weight, per_token, normalised, *biases)
    outputs = h.run(op, h.chunk((tokens,)), inputs, params).outputs
    place = outputs[op.place].long().cpu()
    assert torch.equal(outputs[op.expert].long().cpu(), indices)
    assert torch.equal(place.flatten().sort().values, torch.arange(tokens * per_token))
    by_row = torch.empty(tokens * per_token, dtype=torch.int64)
    by_row[place.flatten()] = indices.flatten()
    assert torch.equal(by_row, by_row.sort().values)
    assert torch.equal(outputs[op.bounds].long().cpu(), torch.searchsorted(by_row, torch.arange(EXPERTS + 1)))
    checks.close(outputs[op.row_weight].cpu().flatten()[place.flatten()].view(tokens, per_token), values, tolerance)
    by_rows = torch.empty(tokens * per_token, dtype=grad.dtype).to(grad.device)
    by_rows[place.flatten().to(grad.device)] = grad.flatten()
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    given = {op.row_weight: by_rows.view(tokens, per_token).to(wide)}
    result = h.run(op, h.chunk((tokens,)), inputs, params, given)
    wanted = torch.autograd.grad(values, operands, grad.double().cpu())
    if per_token > 1 or not normalised:  # one weight made to be 1 has no gradient
        checks.close(result.grads["x"], wanted[0], tolerance)
        for name, expected in zip(params, wanted[1:], strict=True):
            checks.close(result.param_grads[name], expected, tolerance, name)


@pytest.mark.parametrize(("per_token", "normalised"), CASES)
def test_router_matches_autograd(harness, checks, per_token, normalised):
    check_router(harness, checks, 9, per_token, normalised)
    check_router(harness, checks, 9, per_token, normalised, bias=True)


def test_a_normalised_router_is_a_softmax_over_the_chosen(harness, checks):
    op, inputs, params = router(harness, 9, 2, normalised=True, bias=True)
    outputs = harness.run(op, harness.chunk((9,)), inputs, params).outputs
    chosen = (inputs["x"] @ params["w"].t() + params["b"]).topk(2, dim=-1).values.softmax(-1)
    checks.close(outputs[op.row_weight].flatten()[outputs[op.place].long()], chosen)


def test_router_adds_to_what_is_there(harness, checks):
    op, inputs, params = router(harness, 5, 2, normalised=False, bias=True)
    given = {op.row_weight: harness.randn(5, 2)}
    before, before_p = harness.randn(5, D), {"w": harness.randn(EXPERTS, D), "b": harness.randn(EXPERTS)}
    fresh = harness.run(op, harness.chunk((5,)), inputs, params, given)
    added = harness.run(op, harness.chunk((5,)), inputs, params, given, {"x": before}, before_p)
    checks.close(added.grads["x"], fresh.grads["x"] + before)
    for name, value in before_p.items():
        checks.close(added.param_grads[name], fresh.param_grads[name] + value)


def check_scale(h, checks, tokens, per_token, tolerance=1e-12):
    router_op = router(h, tokens, per_token, True)[0]
    op = ExpertScale("scale", router_op, "s")
    place, bounds, expert = route(h, tokens, per_token)
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    weight, grad = (h.randn(tokens, per_token).to(wide) for _ in "12")
    of_tokens = expert.to(h.device, torch.int32)[place.long()]
    inputs = {
        router_op.row_weight: weight,
        router_op.bounds: bounds,
        router_op.place: place,
        router_op.expert: of_tokens,
    }
    params, before = {"s": h.randn(EXPERTS)}, {"s": h.randn(EXPERTS)}
    w, scale = leaves(weight, params["s"])
    wanted = w * scale[expert].view(tokens, per_token)
    grads = torch.autograd.grad(wanted, (w, scale), grad.double().cpu())
    for previous in (None, before):
        result = h.run(op, h.chunk((tokens,)), inputs, params, {op.y: grad}, previous_params=previous)
        checks.close(result.outputs[op.y], wanted, tolerance)
        checks.close(result.grads[router_op.row_weight], grads[0], tolerance)
        checks.close(result.param_grads["s"], grads[1] + (before["s"].cpu() if previous else 0.0), tolerance)


@pytest.mark.parametrize("per_token", [1, 3])
def test_weights_scaled_by_expert_match_autograd(harness, checks, per_token):
    check_scale(harness, checks, 9, per_token)


@pytest.mark.usefixtures("interpreted")
def test_kernels_add_up_scales_of_experts(make_harness, checks):
    check_scale(make_harness("cpu", torch.float32), checks, 7, 2, 1e-5)


@pytest.mark.parametrize("residual", ["x", None])
def test_a_factor_of_a_layer_and_results_without_a_residual(harness, checks, residual):
    """What follows the experts of a block that has them beside a dense FFN."""
    place, bounds, _ = route(harness, 5, 2)
    combine = Combine("combine", "rows", "place", "sum", D, 2, residual, "bounds")
    inputs = {"rows": harness.randn(5, 2 * D), "place": place, "x": harness.randn(5, D), "bounds": bounds}
    grad = harness.randn(5, D)
    given = {name: inputs[name] for name in combine.inputs}
    result = harness.run(combine, harness.chunk((5,)), given, {}, {"sum": grad})
    expected = inputs["rows"].view(-1, D)[place.long()].sum(1) + (inputs["x"] if residual else 0.0)
    checks.close(result.outputs["sum"], expected)
    scale, factor = LayerScale("scale", "sum", "y", D, "factor"), torch.tensor([0.7], dtype=torch.float64)
    scaled = harness.run(scale, harness.chunk((5,)), {"sum": expected}, {"factor": factor}, {"y": grad})
    checks.close(scaled.outputs["y"], 0.7 * expected)
    checks.close(scaled.grads["sum"], 0.7 * grad)


STYLES = {
    "groups by their best": (RouterStyle(groups=4, groups_taken=2, scale=1.7, exact=True), False),
    "sigmoid": (RouterStyle("sigmoid", scale=2.5), True),
    "sigmoid, bias, groups by their best two": (RouterStyle("sigmoid", 4, 2, 2, 2.5, biased=True, exact=True), True),
    "sigmoid, bias, not normalised": (RouterStyle("sigmoid", biased=True), False),
}


def chosen_in_style(x, weight, bias, per_token, normalised, style):
    """(weights [T, K], experts [T, K]), token by token, group by group."""
    logits, values, experts = x @ weight.t(), [], []
    scores = torch.softmax(logits, -1) if style.scores == "softmax" else torch.sigmoid(logits)
    size = scores.shape[1] // style.groups
    for row in scores:
        by = (row + bias if style.biased else row).detach()
        ranks = [float(group.sort(descending=True).values[: style.group_best].sum()) for group in by.split(size)]
        taken = sorted(range(style.groups), key=lambda i: -ranks[i])[: style.groups_taken]
        allowed = [e for e in range(len(row)) if e // size in taken]
        chosen = torch.tensor(sorted(allowed, key=lambda e: -float(by[e]))[:per_token])
        weights = row[chosen]
        values.append(style.scale * (weights / weights.sum() if normalised else weights))
        experts.append(chosen)
    return torch.stack(values), torch.stack(experts)


def check_style(h, checks, tokens, style, normalised, tolerance=1e-12, previous=False):
    experts, per_token = 12, 3
    op = Router("router", "x", D, experts, per_token, "w", normalised, style=style)
    inputs, params = {"x": h.randn(tokens, D)}, {"w": h.randn(experts, D)}
    bias = torch.randn(experts, dtype=torch.float64)
    if style.biased:
        params["router.choice_bias"] = bias.to(h.device, torch.float64 if h.dtype == torch.float64 else torch.float32)
    x, weight = leaves(inputs["x"], params["w"])
    values, indices = chosen_in_style(x, weight, bias, per_token, normalised, style)
    outputs = h.run(op, h.chunk((tokens,)), inputs, params).outputs
    place = outputs[op.place].long().cpu()
    assert torch.equal(outputs[op.expert].long().cpu(), indices)
    checks.close(outputs[op.row_weight].cpu().flatten()[place.flatten()].view(tokens, per_token), values, tolerance)
    grad = torch.randn(tokens, per_token, dtype=torch.float64)
    by_rows = torch.empty(tokens * per_token, dtype=torch.float64)
    by_rows[place.flatten()] = grad.flatten()
    given = {op.row_weight: by_rows.view(tokens, per_token).to(outputs[op.row_weight])}
    before, before_w = h.randn(tokens, D), h.randn(experts, D)
    earlier = ({"x": before}, {"w": before_w}) if previous else (None, None)
    result = h.run(op, h.chunk((tokens,)), inputs, params, given, *earlier)
    grad_x, grad_weight = torch.autograd.grad(values, (x, weight), grad)
    assert result.param_grads.keys() == {"w"}, "nothing trains the bias"
    checks.close(result.grads["x"], grad_x + (before.cpu() if previous else 0.0), tolerance)
    checks.close(result.param_grads["w"], grad_weight + (before_w.cpu() if previous else 0.0), tolerance)


@pytest.mark.parametrize("previous", [False, True], ids=["first gradient", "added"])
@pytest.mark.parametrize(("style", "normalised"), STYLES.values(), ids=STYLES.keys())
def test_router_styles_match_autograd(harness, checks, style, normalised, previous):
    check_style(harness, checks, 9, style, normalised, previous=previous)


@pytest.mark.parametrize("per_token", [1, 3])
def test_rows_match_autograd(harness, checks, per_token):
    place, _, _ = route(harness, 7, per_token)
    (x,), index = leaves(harness.randn(7, D)), place.flatten().long().cpu()
    rows = torch.zeros(7 * per_token, D, dtype=torch.float64).index_copy(0, index, x.repeat_interleave(per_token, 0))
    out = Dispatch("dispatch", "x", "place", "rows", D, per_token)
    grad = harness.randn(7, per_token * D)
    result = harness.run(out, harness.chunk((7,)), {"x": x.detach(), "place": place}, grad_outputs={"rows": grad})
    checks.close(result.outputs["rows"].view(-1, D), rows)
    checks.close(result.grads["x"], torch.autograd.grad(rows, x, grad.view(-1, D))[0])
    back = Combine("combine", "rows", "place", "y", D, per_token, "r")
    given, residual, grad_y = leaves(harness.randn(7, per_token * D))[0], harness.randn(7, D), harness.randn(7, D)
    y = residual + given.view(-1, D)[place.long()].sum(1)
    inputs = {"rows": given.detach(), "place": place, "r": residual}
    result = harness.run(back, harness.chunk((7,)), inputs, grad_outputs={"y": grad_y})
    checks.close(result.outputs["y"], y)
    checks.close(result.grads["rows"], torch.autograd.grad(y, given, grad_y)[0])


OPTIONS = {
    "plain": {},
    "input by output": {"transposed": True},
    "biases": {"bias": "b"},
    "weighted biases": {"bias": "b", "row_weight": "weight"},
    "all of them": {"bias": "b", "row_weight": "weight", "transposed": True},
}


def check_products(h, checks, options, favoured=None, tokens=7, sizes=(D, F), tolerance=1e-12):
    """Output and gradients of a product, over nothing and on top of what is there."""
    d, f = sizes
    _, bounds, expert = route(h, tokens, 2, favoured)
    op = GroupedLinear("experts", "x", "bounds", "y", d, f, EXPERTS, 2, "w", **options)
    inputs = {"x": h.randn(tokens, 2 * d), "bounds": bounds}
    params = {"w": h.randn(EXPERTS, *((d, f) if op.transposed else (f, d)))}
    rows = torch.rand(tokens, 2, dtype=torch.float64).to(h.device, torch.float64 if tolerance < 1e-9 else torch.float32)
    inputs |= {} if op.row_weight is None else {"weight": rows}
    params |= {} if op.bias is None else {"b": h.randn(EXPERTS, f)}
    names = ["x", "w", *(n for n in ("b", "weight") if n in inputs | params)]
    x, w, *others = operands = leaves(*((inputs | params)[n] for n in names))
    y = torch.einsum("rd,rdf->rf" if op.transposed else "rd,rfd->rf", x.view(-1, d), w[expert])
    if others:
        y = y + others[0][expert] * (others[1].view(-1, 1) if op.row_weight else 1.0)
    grad = h.randn(tokens, 2 * f)
    wanted = dict(zip(names, torch.autograd.grad(y, operands, grad.double().cpu().view(-1, f)), strict=True))
    before = {n: torch.randn(p.shape).to(h.device, rows.dtype) for n, p in (*params.items(), ("weight", rows))}
    for there in ({}, before):
        given = {"weight": there["weight"]} if there and op.row_weight else None
        kept = {n: there[n] for n in params} if there else None
        result = h.run(op, h.chunk((tokens,)), inputs, params, {"y": grad}, given, kept)
        checks.close(result.outputs["y"].view(-1, f), y, tolerance)
        for name, found in (result.grads | result.param_grads).items():
            total = wanted[name] + (0.0 if name == "x" or not there else there[name].cpu())
            checks.close(found, total, tolerance, name)


@pytest.mark.parametrize("favoured", [None, 0, EXPERTS - 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_products_match_autograd(harness, checks, favoured, options):
    check_products(harness, checks, options, favoured)


@pytest.mark.parametrize("favoured", [None, 0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_products_match_autograd(make_harness, checks, options, favoured):
    check_products(make_harness("cpu", torch.float32), checks, options, favoured, 19, (20, 131), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.usefixtures("deterministic")
def test_products_on_cuda(make_harness, checks, options):
    check_products(make_harness("cuda", torch.bfloat16), checks, options, None, 515, (136, 264), 1e-2)


@pytest.mark.parametrize("write_over", [False, True], ids=["own buffer", "over gate_up"])
def test_weighted_unit_matches_autograd(harness, checks, write_over):
    op = WeightedGLU("glu", "gate_up", "weight", "a", F, 2, "silu")
    gate_up, weight = leaves(harness.randn(7, 4 * F, scale=2.0), harness.randn(7, 2))
    gate, up = gate_up.view(-1, 2 * F).chunk(2, dim=-1)
    a = weight.view(-1, 1) * torch.nn.functional.silu(gate) * up
    grad = harness.randn(7, 2 * F)
    inputs = {"gate_up": gate_up.detach(), "weight": weight.detach()}
    result = harness.run(op, harness.chunk((7,)), inputs, grad_outputs={"a": grad}, write_over=write_over)
    checks.close(result.outputs["a"].view(-1, F), a)
    wanted = torch.autograd.grad(a, (gate_up, weight), grad.view(-1, F))
    checks.close(result.grads["gate_up"], wanted[0])
    checks.close(result.grads["weight"], wanted[1])
    before = {"weight": harness.randn(7, 2)}
    again = harness.run(op, harness.chunk((7,)), inputs, {}, {"a": grad}, before, write_over=write_over)
    checks.close(again.grads["weight"], wanted[1] + before["weight"])
    over = grad.clone()
    grads = {"a": over, "gate_up": harness.nan(7, 4 * F), "weight": harness.nan(7, 2)}
    op.backward_input(OpEnv({**inputs, "a": over}, {}, grads, {}, harness.chunk((7,))))
    assert torch.equal(over, result.outputs["a"])
    assert all(torch.equal(grads[name], result.grads[name]) for name in inputs)


@pytest.mark.parametrize("accumulate", [False, True])
def test_shared_gate_matches_autograd(harness, checks, accumulate):
    op = SharedGate("gate", "shared", "x", "y", D, "w", "r")
    inputs = {name: harness.randn(7, D) for name in ("shared", "x", "r")}
    params, grad = {"w": harness.randn(1, D)}, harness.randn(7, D)
    before = {"x": harness.randn(7, D)} if accumulate else None
    before_w = {"w": harness.randn(1, D)} if accumulate else None
    shared, x, weight = leaves(inputs["shared"], inputs["x"], params["w"])
    y = inputs["r"] + torch.sigmoid(x @ weight.t()) * shared
    result = harness.run(op, harness.chunk((7,)), inputs, params, {"y": grad}, before, before_w)
    grads = torch.autograd.grad(y, (shared, x, weight), grad)
    checks.close(result.outputs["y"], y)
    checks.close(result.grads["shared"], grads[0])
    checks.close(result.grads["x"], grads[1] + (before["x"] if before else 0.0))
    checks.close(result.param_grads["w"], grads[2] + (before_w["w"] if before_w else 0.0))


def mixture(x, router_weight, gate_up, down, per_token):
    """x + the weighted sum of a token's experts, each of them by itself."""
    values, indices = chosen_weights(x, router_weight, per_token, normalised=True)
    total = x
    for k in range(per_token):
        gate, up = torch.einsum("td,tfd->tf", x, gate_up[indices[:, k]]).chunk(2, dim=-1)
        result = torch.einsum("tf,tdf->td", torch.nn.functional.silu(gate) * up, down[indices[:, k]])
        total = total + values[:, k, None] * result
    return total


def run_chain(h, ops, tokens, inputs, params):
    """Forward of ops in a row over NaN."""
    tensors, chunk = dict(inputs), h.chunk((tokens,))
    for op in ops:
        given = {name: tensors[name] for name in op.inputs}
        tensors |= h.forward(op, chunk, given, {name: params[name] for name in op.params})
    return tensors


def chain(per_token):
    route_op = Router("router", "x", D, EXPERTS, per_token, "w_router", True)
    return [
        route_op,
        Dispatch("dispatch", "x", route_op.place, "rows", D, per_token),
        GroupedLinear("gate_up", "rows", route_op.bounds, "gate_up", D, 2 * F, EXPERTS, per_token, "w_gate_up"),
        WeightedGLU("glu", "gate_up", route_op.row_weight, "a", F, per_token, "silu"),
        GroupedLinear("down", "a", route_op.bounds, "results", F, D, EXPERTS, per_token, "w_down"),
        Combine("combine", "results", route_op.place, "y", D, per_token, "x"),
    ]


def random_params(h):
    return {
        "w_router": h.randn(EXPERTS, D),
        "w_gate_up": h.randn(EXPERTS, 2 * F, D),
        "w_down": h.randn(EXPERTS, D, F),
    }


def test_the_ops_in_a_row_are_the_mixture(harness, checks):
    params, x = random_params(harness), harness.randn(8, D)
    tensors = run_chain(harness, chain(2), 8, {"x": x}, params)
    checks.close(tensors["y"], mixture(x, *params.values(), per_token=2))


@pytest.mark.usefixtures("interpreted")
def test_kernels_in_a_row_are_the_mixture(make_harness, checks):
    """What runs on CUDA; backward of the weighted unit, whose rows add up, as well."""
    h = make_harness("cpu", torch.float32)
    params, x, ops = random_params(h), h.randn(8, D), chain(2)
    tensors = run_chain(h, ops, 8, {"x": x}, params)
    checks.close(tensors["y"], mixture(x, *params.values(), per_token=2), 1e-5)
    glu, (gate_up, weight) = ops[3], leaves(tensors["gate_up"], tensors[ops[0].row_weight])
    gate, up = gate_up.view(-1, 2 * F).chunk(2, dim=-1)
    a = weight.view(-1, 1) * torch.nn.functional.silu(gate) * up
    grad = h.randn(8, 2 * F)
    grads = {"a": grad, "gate_up": h.nan(8, 4 * F), ops[0].row_weight: h.nan(8, 2)}
    glu.backward_input(OpEnv(tensors, {}, grads, {}, h.chunk((8,))))
    wanted = torch.autograd.grad(a, (gate_up, weight), grad.double().view(-1, F))
    checks.close(grads["gate_up"], wanted[0], 1e-5)
    checks.close(grads[ops[0].row_weight], wanted[1], 1e-5)


@pytest.mark.parametrize(("per_token", "normalised"), CASES)
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_the_router_match_autograd(make_harness, checks, per_token, normalised):
    check_router(make_harness("cpu", torch.float32), checks, 37, per_token, normalised, 1e-5, bias=True)


@pytest.mark.parametrize(("style", "normalised"), STYLES.values(), ids=STYLES.keys())
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_router_styles_match_autograd(make_harness, checks, style, normalised):
    check_style(make_harness("cpu", torch.float32), checks, 37, style, normalised, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("per_token", "normalised"), CASES)
def test_router_on_cuda(make_harness, checks, per_token, normalised):
    check_router(make_harness("cuda", torch.float32), checks, 515, per_token, normalised, 1e-4, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("style", "normalised"), STYLES.values(), ids=STYLES.keys())
def test_router_styles_on_cuda(make_harness, checks, style, normalised):
    check_style(make_harness("cuda", torch.float32), checks, 257, style, normalised, 1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("style", "normalised"), STYLES.values(), ids=STYLES.keys())
def test_router_styles_never_synchronise(make_harness, style, normalised):
    h = make_harness("cuda", torch.bfloat16)
    op = Router("router", "x", D, 12, 3, "w", normalised, style=style)
    inputs, params = (
        {"x": h.randn(64, D)},
        {"w": h.randn(12, D), "router.choice_bias": torch.zeros(12, device=h.device)},
    )
    env = h.env(op, h.chunk((64,)), inputs, params, {op.row_weight: torch.ones(64, 3, device=h.device)})
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.forward(env)
        op.backward_input(env)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_nothing_synchronises_on_cuda(make_harness, checks):
    """The experts' forward and the router's backward while torch refuses to wait for the device."""
    h = make_harness("cuda", torch.bfloat16)
    params, x, ops = random_params(h), h.randn(64, D), chain(2)
    tensors = run_chain(h, ops, 64, {"x": x}, params)
    wanted = mixture(x.double(), *(p.double() for p in params.values()), per_token=2)
    assert float((tensors["y"].double() - wanted).norm() / wanted.norm()) < 0.1  # a tie may go to another expert
    scratch = {ops[0].grad_logits.name: h.nan(64, EXPERTS)}
    grads = {"x": h.nan(64, D), ops[0].weight: torch.ones(64, 2, device=h.device)}
    chunk = h.chunk((64,))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op in ops:
            op.forward(OpEnv(tensors, params, {}, {}, chunk))
        ops[0].backward_input(OpEnv({**tensors, **scratch}, params, grads, {}, chunk))
    finally:
        torch.cuda.set_sync_debug_mode("default")
