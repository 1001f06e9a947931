"""What a person may rely on: batches in every form, errors with numbers, accumulation, skipped steps, names."""

import contextlib
import copy
import math
import time
from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    FLOAT64,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    streamed_plan,
    tiny_config,
    worst_error,
)

import flexengine
from flexengine import LoRA
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.optim import SGD, AdamW, name_of
from flexengine.plan import Numerics, PlanError

CONFIG = tiny_config()
V = CONFIG["vocab_size"]
SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
BATCH = random_batch(0, (20, 7, 33), V)


def new_engine(numerics=FLOAT64, optimizer=None, config=CONFIG, **options):
    source = random_weights(config)
    max_tokens = options.pop("max_tokens", 300)
    plan = streamed_plan(source.spec, numerics=numerics, max_tokens=max_tokens)
    return build_engine(source, plan, optimizer, **options)


@pytest.fixture
def engine():
    return new_engine()


def padded(rows, value):
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


# -- batches in every form ---------------------------------------------------------------------------------------------


def test_an_output_says_what_was_seen(engine):
    out = engine.fwd_bwd(BATCH)
    assert (out.num_tokens, out.num_target_tokens) == (60, 57)
    assert out.model_flops == engine.model.model_flops([20, 7, 33])
    assert out.hardware_flops > out.model_flops  # the streamed plan recomputes
    evaluated = engine.evaluate(BATCH)
    assert (evaluated.loss, evaluated.num_tokens, evaluated.num_target_tokens) == (out.loss, 60, 57)


def test_without_labels_every_token_is_a_target(engine):
    plain = engine.fwd_bwd(BATCH)
    for labels in (None, BATCH, [torch.tensor(row) for row in BATCH]):
        assert engine.fwd_bwd(input_ids=BATCH, labels=labels) == plain
    assert engine.fwd_bwd([torch.tensor(row) for row in BATCH]) == plain


def test_padding_under_an_attention_mask_is_cut_off(engine):
    plain, ids = engine.fwd_bwd(BATCH), padded(BATCH, 0)
    mask = padded([[1] * len(row) for row in BATCH], 0)
    assert engine.fwd_bwd(input_ids=ids, attention_mask=mask) == plain
    assert engine.fwd_bwd(input_ids=ids, labels=padded(BATCH, -100), attention_mask=mask) == plain
    assert engine.fwd_bwd(input_ids=ids.to(torch.int32), attention_mask=mask.tolist()) == plain


def test_padding_with_ignored_labels_gives_the_same_loss(engine):
    """As in Hugging Face: right padding whose labels are -100 changes nothing but the number of tokens."""
    plain = engine.fwd_bwd(BATCH)
    out = engine.fwd_bwd(input_ids=padded(BATCH, 0), labels=padded(BATCH, -100))
    assert (out.loss, out.num_tokens) == (pytest.approx(plain.loss, rel=1e-12), 99)
    assert out.num_target_tokens == plain.num_target_tokens


def test_labels_are_unshifted_and_the_first_one_is_never_a_target(engine):
    ids = [BATCH[0]]
    labels = [[-100] * 5 + BATCH[0][5:]]
    assert engine.fwd_bwd(input_ids=ids, labels=labels).num_target_tokens == 15
    first_only = [[*BATCH[0][:1], *labels[0][1:]]]
    assert engine.fwd_bwd(input_ids=ids, labels=first_only).num_target_tokens == 15


def test_a_sequence_of_one_token_has_no_target(engine):
    assert engine.fwd_bwd([[5], [1, 2]]).num_target_tokens == 1


# -- errors ------------------------------------------------------------------------------------------------------------

BAD_BATCHES = {
    "empty": ({"batch": []}, "no sequences"),
    "empty sequence": ({"batch": [[1, 2], []]}, r"input_ids\[1\] is empty"),
    "token too large": (
        {"batch": [[1, 2], [3, V]]},
        rf"sequence 1 has token ids 3..{V}, outside the vocabulary 0..{V - 1}",
    ),
    "negative token": ({"batch": [[-1, 2]]}, r"sequence 0 has token ids -1..2"),
    "too long": ({"batch": [[1] * 49]}, r"sequence 0 has 49 tokens, more than max_seq_len=48"),
    "too many tokens": ({"batch": [[1] * 48] * 7}, r"336 tokens, more than max_global_batch_tokens=300"),
    "no target": ({"input_ids": [[1, 2, 3]], "labels": [[-100] * 3]}, "no target token.*-100"),
    "single tokens": ({"batch": [[1], [2]]}, "no target token"),
    "label too large": ({"input_ids": [[1, 2]], "labels": [[1, V]]}, rf"labels 1..{V}, outside 0..{V - 1}"),
    "label negative": ({"input_ids": [[1, 2]], "labels": [[1, -1]]}, r"labels -1..1"),
    "labels of another length": ({"input_ids": [[1, 2]], "labels": [[1]]}, "2 input_ids but 1 labels"),
    "another number of labels": ({"input_ids": [[1, 2]], "labels": [[1, 2], [3]]}, "1 sequences.* but 2 of labels"),
    "flat list": ({"batch": [1, 2, 3]}, "list of sequences, got a list of int"),
    "flat tensor": ({"input_ids": torch.tensor([1, 2])}, r"shape \[batch, tokens\], got \[2\]"),
    "floats": ({"batch": [[1.5, 2.0]]}, "integers, got torch.float32"),
    "text": ({"batch": "hello"}, "token lists or a tensor, got str"),
    "nothing": ({}, "give a batch of token lists, or input_ids"),
    "both": ({"batch": [[1, 2]], "input_ids": [[1, 2]]}, "not both"),
    "mask with a hole": ({"input_ids": [[0, 1, 2]], "attention_mask": [[1, 0, 1]]}, r"attention_mask\[0\].*as padding"),
    "mask of another shape": ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "shape of input_ids"),
    "mask of zeros": ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "no target token in 0 tokens"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_bad_batches_are_refused(engine, arguments, message):
    for call in (engine.fwd_bwd, engine.evaluate):
        with pytest.raises(ValueError, match=message):
            call(**arguments)


def test_a_refused_batch_leaves_no_trace(engine):
    engine.fwd_bwd(BATCH)
    before = engine.gradients()
    for arguments, _ in BAD_BATCHES.values():
        with contextlib.suppress(ValueError):
            engine.fwd_bwd(**arguments)
    same_bits(engine.gradients(), before)


def test_steps_need_gradients(engine):
    for call in (engine.step, engine.gradients):
        with pytest.raises(ValueError, match=r"call fwd_bwd\(batch\) first"):
            call()
    engine.evaluate(BATCH)
    with pytest.raises(ValueError, match="fwd_bwd"):
        engine.step()
    engine.fwd_bwd(BATCH)
    engine.step()
    with pytest.raises(ValueError, match="fwd_bwd"):
        engine.step()


@pytest.mark.parametrize("lr", [-1e-3, float("nan"), float("inf")])
def test_a_bad_learning_rate_is_refused(engine, lr):
    engine.fwd_bwd(BATCH)
    with pytest.raises(ValueError, match="lr must be a finite number >= 0"):
        engine.step(lr=lr)
    assert not engine.step(lr=1e-3).skipped  # the gradients are still there


BAD_REQUESTS = {
    "preset": ({"path_or_preset": "preset:nope"}, "unknown preset 'nope'; known presets: "),
    "folder": ({"path_or_preset": "/no/such/folder"}, "no such folder"),
    "dtype": ({"dtype": "fp33"}, "dtype='fp33' is not supported; choose bfloat16, float16, float32, float64"),
    "gradients in half": ({"grad_dtype": "float16"}, "grad_dtype='float16' is not supported"),
    "master_dtype": ({"master_dtype": "float64"}, "master_dtype='float64'.*choose float32, bfloat16"),
    "grad_dtype": ({"grad_dtype": "int8"}, "grad_dtype='int8'"),
    "state dtype": ({"optimizer_state_dtype": "fp8"}, "optimizer_state_dtype='fp8'"),
    "matmul dtype": ({"matmul_dtype": "fp4"}, "matmul_dtype='fp4' is not supported; choose compute, fp8"),
    "fp8 in float32": (
        {"matmul_dtype": "fp8", "dtype": "float32"},
        "matmul_dtype=fp8 needs dtype=bfloat16, got dtype=f",
    ),
    "no fp8": ({"matmul_dtype": "fp8", "hardware": "rtx3090"}, r"RTX 3090 multiplies no FP8 operands"),
    "narrow master": ({"dtype": "float32", "master_dtype": "bfloat16"}, "master_dtype=bfloat16 needs dtype=bfloat16"),
    "device": ({"device": "tpu"}, "device='tpu'.*choose auto, cpu, cuda"),
    "hardware": ({"hardware": "rtx9999"}, "no hardware preset is called 'rtx9999'; there are"),
    "two budgets": ({"max_gpu_mem_gib": 1, "max_gpu_mem_bytes": 1}, "max_gpu_mem_gib or max_gpu_mem_bytes, not both"),
    "no budget": ({"max_gpu_mem_gib": 0}, "gpu memory budget must be positive, got 0 bytes"),
    "lengths": ({"max_seq_len": 100, "max_global_batch_tokens": 64}, "max_seq_len=100 .*max_global_batch_tokens=64"),
    "recompute": ({"recompute": "some"}, "recompute='some'; choose auto, none or full"),
    "chunk": ({"chunk_tokens": 0}, "chunk_tokens must be positive, got 0"),
    "clipping": ({"max_grad_norm": 0.0}, "max_grad_norm must be positive.* got 0.0"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_requests_are_refused(changes, message):
    request = {
        "path_or_preset": "preset:demo",
        "hardware": "cpu-test",
        "device": "cpu",
        "max_seq_len": 32,
        "max_global_batch_tokens": 64,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        flexengine.from_pretrained(**request)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded():
    request = {"hardware": "cpu-test", "device": "cpu", "max_seq_len": 64, "max_global_batch_tokens": 64}
    with pytest.raises(PlanError, match=r"INSUFFICIENT_DEVICE_MEMORY") as refused:
        flexengine.from_pretrained("preset:llama-3.1-405b", max_gpu_mem_bytes=2**20, **request)
    assert refused.value.required_bytes > refused.value.budget_bytes == 2**20


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numerics", "tolerance"), [(FLOAT64, 1e-12), (FLOAT32, 1e-5)], ids=["float64", "float32"])
def test_several_calls_before_a_step_equal_one(numerics, tolerance):
    """The mean is over the target tokens of the whole step, however they are spread over calls."""
    whole, parts = new_engine(numerics, max_grad_norm=None), new_engine(numerics, max_grad_norm=None)
    labels = copy.deepcopy(BATCH)
    labels[1][2:] = [-100] * 5
    out = whole.fwd_bwd(input_ids=BATCH, labels=labels)
    outs = [parts.fwd_bwd(input_ids=[b], labels=[t]) for b, t in zip(BATCH, labels, strict=True)]
    total = sum(o.loss * o.num_target_tokens for o in outs)
    assert total / out.num_target_tokens == pytest.approx(out.loss, rel=tolerance)
    error, name = worst_error(parts.gradients(), whole.gradients())
    assert error <= tolerance, f"{name}: {error:.1e}"
    norms = [engine.step(lr=0.0).grad_norm for engine in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_gradients_are_those_of_the_mean_loss_by_finite_differences():
    """A step along one weight changes the loss as its gradient says."""
    engine, name, at = new_engine(), "model.layers.1.mlp.down_proj.weight", 77
    engine.fwd_bwd(BATCH)
    gradient = float(engine.gradients()[name].flatten()[at])
    weight, eps, losses = engine.weights.plane("weights", engine.weights.runs[name]), 1e-5, []
    for sign in (1, -1):
        weight[at] += sign * eps
        losses.append(engine.evaluate(BATCH).loss)
        weight[at] -= sign * eps
    assert (losses[0] - losses[1]) / (2 * eps) == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    ("optimizer", "reference", "lora"),
    [
        (AdamW(lr=1e-3, weight_decay=0.1), torch.optim.AdamW, None),
        (SGD(lr=0.1, momentum=0.0, weight_decay=0.1), torch.optim.SGD, None),
        (AdamW(lr=1e-3, weight_decay=0.1), torch.optim.AdamW, LoRA("all-linear", rank=2, init="orthogonal")),
    ],
    ids=["AdamW", "SGD", "adapters"],
)
def test_a_float64_step_is_that_of_torch(optimizer, reference, lora, max_grad_norm):
    """No factor is rounded to fewer bits: neither those of tokens' weights nor those of clipping."""
    source = random_weights(CONFIG)
    source = source if lora is None else source._replace(spec=with_lora(source.spec, lora))
    weights = [torch.rand(len(row)).tolist() for row in BATCH]
    plan = streamed_plan(source.spec, numerics=replace(FLOAT64, optimizer=name_of(optimizer)))
    with build_engine(source, plan, optimizer, max_grad_norm=max_grad_norm) as engine:
        engine.fwd_bwd(input_ids=BATCH, weights=weights)
        before, gradients = engine.state_dict(), engine.gradients()
        moved = {name: torch.nn.Parameter(before[name]) for name in gradients}
        for name, parameter in moved.items():
            parameter.grad = gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(list(moved.values()), max_grad_norm or math.inf)
        options = {"betas": optimizer.betas, "eps": optimizer.eps} if isinstance(optimizer, AdamW) else {}
        matrices, vectors = ([p for p in moved.values() if (p.ndim > 1) == wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        reference([group for group in groups if group["params"]], lr=optimizer.lr, **options).step()
        assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-14)
        after = engine.state_dict()
    for name, parameter in moved.items():
        assert (after[name] - parameter).abs().max() <= 1e-14 * parameter.abs().max(), name


def test_zero_learning_rate_leaves_the_weights(engine):
    before = engine.state_dict()
    engine.fwd_bwd(BATCH)
    result = engine.step(lr=0.0)
    assert result.grad_norm > 0
    assert result.seconds > 0
    same_bits(engine.state_dict(), before)


def test_repeated_data_is_learned(engine):
    losses = []
    for _ in range(8):
        losses.append(engine.fwd_bwd(BATCH).loss)
        engine.step()
    assert losses[-1] < losses[0] - 0.5
    assert engine.step_count == 8


@pytest.mark.parametrize("numerics", [FLOAT32, SPLIT], ids=["float32", "bf16"])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_is_skipped(numerics, poison):
    engine, name = new_engine(numerics), "model.layers.0.mlp.up_proj.weight"
    engine.fwd_bwd(BATCH)
    engine.step()
    weight = engine.weights.plane("weights", engine.weights.runs[name])
    kept = weight[3].clone()
    weight[3] = poison
    engine.fwd_bwd(BATCH)
    before = {k: {n: engine.weights.plane(k, r).clone() for n, r in engine.weights.runs.items()} for k in states()}
    result = engine.step()
    assert result.skipped
    assert engine.step_count == 1
    for kind, planes in before.items():
        for n, run in engine.weights.runs.items():
            found = engine.weights.plane(kind, run)
            assert torch.equal(found.nan_to_num(), planes[n].nan_to_num()), f"{kind} of {n} changed"
    weight[3] = kept
    engine.fwd_bwd(BATCH)
    assert not engine.step().skipped


def states():
    return ("weights", "exp_avg", "exp_avg_sq")


def test_clipping_bounds_the_step():
    """With one norm for all groups: the update follows gradient * min(1, max_norm / (norm + 1e-6))."""
    optimizer = AdamW(lr=1.0, betas=(0.0, 0.0), eps=1e6)  # such an eps makes the update lr * gradient / eps
    engine = new_engine(FLOAT64, optimizer, max_grad_norm=0.01)
    before = engine.state_dict()
    engine.fwd_bwd(BATCH)
    gradients, result = engine.gradients(), engine.step()
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for name, after in engine.state_dict().items():
        moved = (before[name] - after) * 1e6
        assert torch.allclose(moved, gradients[name] * 0.01 / (norm + 1e-6), rtol=1e-5, atol=1e-9), name


def test_norms_and_biases_do_not_decay():
    config = tiny_config(attention_bias=True, mlp_bias=True)
    engine = new_engine(FLOAT64, AdamW(lr=1e-3, eps=1e30, weight_decay=0.5), config)
    before = engine.state_dict()
    engine.fwd_bwd(BATCH)
    engine.step()
    for name, after in engine.state_dict().items():
        factor = 1.0 - 1e-3 * 0.5 if before[name].dim() > 1 else 1.0
        assert torch.allclose(after, before[name] * factor, rtol=1e-14), name


def test_an_exact_master_collects_updates_that_bf16_would_lose():
    """Tiny steps of the split master follow float32 AdamW on the same gradients, while its bf16 half barely moves."""
    settings = AdamW(lr=2e-7, betas=(0.9, 0.95), eps=1e-8)
    engine = new_engine(SPLIT, settings, max_grad_norm=None)
    masters = {name: torch.nn.Parameter(w.clone()) for name, w in engine.state_dict().items()}
    start = {name: p.detach().clone() for name, p in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=settings.lr, betas=settings.betas, eps=1e-8, weight_decay=0.0)
    for _ in range(12):
        engine.fwd_bwd(BATCH)
        for name, gradient in engine.gradients().items():
            masters[name].grad = gradient
        engine.step()
        optimizer.step()
    for name, weight in engine.state_dict().items():
        assert weight.dtype == torch.float32
        # one unit in the last place of a float32 weight per step
        assert torch.allclose(weight, masters[name].detach(), rtol=12 * 2**-23, atol=1e-9), name
        assert not torch.equal(weight, start[name]), name
    name = "model.layers.0.mlp.up_proj.weight"
    halves = engine.weights.plane("weights", engine.weights.runs[name]).view(masters[name].shape)
    assert (halves == start[name].bfloat16()).float().mean() > 0.95


def test_bf16_training_follows_float64():
    bf16, wide = new_engine(SPLIT), new_engine(FLOAT64)
    for _ in range(5):
        losses = [engine.fwd_bwd(BATCH).loss for engine in (bf16, wide)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
        for engine in (bf16, wide):
            engine.step(lr=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_names_are_those_of_transformers(tied, dtype, tmp_path):
    model = saved_model(tmp_path, {**CONFIG, "tie_word_embeddings": tied, "attention_bias": True})
    source = open_model(tmp_path)
    numerics = FLOAT32 if dtype == "float32" else SPLIT
    engine = build_engine(source, make_plan(source.spec, numerics=numerics))
    engine.fwd_bwd(BATCH)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for found in (engine.state_dict(), engine.gradients()):
        assert {name: t.shape for name, t in found.items()} == shapes
        assert {t.dtype for t in found.values()} == {torch.float32}
        assert {t.device.type for t in found.values()} == {"cpu"}


def test_what_is_returned_is_a_copy(engine):
    engine.fwd_bwd(BATCH)
    first = [engine.state_dict(), engine.gradients()]
    for tensors in first:
        for t in tensors.values():
            t.zero_()
    assert engine.state_dict()["model.norm.weight"].any()
    assert engine.gradients()["model.norm.weight"].any()


def test_evaluate_and_next_token_logits_leave_no_trace():
    plain, curious = new_engine(), new_engine()
    for engine in (plain, curious):
        for part in (BATCH[:1], BATCH[1:]):
            engine.fwd_bwd(part)
            if engine is curious:
                engine.evaluate(BATCH[::-1])
                engine.next_token_logits(BATCH[2])
        engine.step()
    same_bits(curious.state_dict(), plain.state_dict())


def test_next_token_logits_of_any_length(engine):
    """Prefixes of a sequence give the logits that its loss is made of."""
    row = BATCH[2]
    losses = []
    for n in range(1, len(row)):
        logits = engine.next_token_logits(row[:n])
        assert logits.shape == (V,)
        losses.append(float(torch.nn.functional.cross_entropy(logits[None], torch.tensor([row[n]]))))
    assert sum(losses) / len(losses) == pytest.approx(engine.evaluate([row]).loss, rel=1e-5)


def test_a_preset_trains_and_is_saved(tmp_path):
    """from_pretrained on random weights, and a folder that opens again with the same loss."""
    options = {"hardware": "cpu-test", "device": "cpu", "dtype": "float32", "max_seq_len": 32}
    options["max_global_batch_tokens"] = 64
    engine = flexengine.from_pretrained("preset:demo", optimizer=AdamW(lr=1e-3), seed=3, **options)
    batch = random_batch(1, (32, 20), engine.model.vocab_size)
    first = engine.fwd_bwd(batch).loss
    engine.step()
    assert engine.evaluate(batch).loss < first
    assert "round" in engine.describe()
    assert engine.plan.from_json(engine.plan.to_json()) == engine.plan
    engine.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in tmp_path.iterdir()}
    told = "flexengine_manifest.json"  # of which model and after how many updates files were written
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != told}
    again = flexengine.from_pretrained(tmp_path, **options)
    same_bits(again.state_dict(), engine.state_dict())
    assert again.evaluate(batch).loss == engine.evaluate(batch).loss
    again.save_pretrained(tmp_path)  # over its own source
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != told} == before


def interrupted_after(engine, monkeypatch, commands):
    """Make the executor raise KeyboardInterrupt after so many compute commands."""
    handle, seen = engine.handlers.run, []

    def counting(program, settings, command):
        seen.append(command)
        if len(seen) > commands:
            raise KeyboardInterrupt
        handle(program, settings, command)

    monkeypatch.setattr(engine.handlers, "run", counting)


def goes_on_as_new(engine, new):
    """There are no gradients left of an interrupted call, and the next step is that of a new engine."""
    with pytest.raises(ValueError, match="call fwd_bwd"):
        engine.step()
    for either in (engine, new):
        either.fwd_bwd(BATCH)
        either.step()
    same_bits(engine.state_dict(), new.state_dict())


def test_an_interrupted_call_leaves_no_half_gradients(monkeypatch):
    engine, again = new_engine(), new_engine()
    engine.fwd_bwd(BATCH)
    with monkeypatch.context() as patch:
        interrupted_after(engine, patch, 12)
        with pytest.raises(KeyboardInterrupt):
            engine.fwd_bwd(BATCH)
    goes_on_as_new(engine, again)


def test_an_interrupt_where_a_call_waits_for_its_loss_leaves_no_gradients(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    engine, again = new_engine(), new_engine()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__float__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.fwd_bwd(BATCH)
    goes_on_as_new(engine, again)


def test_whatever_interrupts_a_call_nothing_runs_on(monkeypatch):
    engine = new_engine()
    for call in (engine.fwd_bwd, engine.evaluate, lambda batch: engine.next_token_logits(batch[0])):
        waited = []
        with monkeypatch.context() as patch:
            interrupted_after(engine, patch, 1)
            patch.setattr(engine.executor, "synchronize", lambda waited=waited: waited.append(True))
            with pytest.raises(KeyboardInterrupt):
                call(BATCH)
        assert waited == [True]


def test_an_interrupted_step_ends_the_engine(monkeypatch, tmp_path):
    engine = new_engine()
    engine.fwd_bwd(BATCH)
    with monkeypatch.context() as patch:
        interrupted_after(engine, patch, 2)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    calls = (
        lambda: engine.fwd_bwd(BATCH), engine.step, lambda: engine.next_token_logits(BATCH[0]), engine.state_dict,
        engine.gradients, lambda: engine.save_pretrained(tmp_path / "out"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="half updated"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("measured_before", [False, True])
def test_the_rest_of_a_step_can_be_measured(measured_before):
    engine = new_engine()
    if measured_before:
        engine.measure_next_step(keep_runs=True)
        engine.train_step(BATCH)
    engine.fwd_bwd(BATCH)
    began_s = time.perf_counter()
    engine.measure_next_step(keep_runs=True)
    engine.step()
    [run] = engine.take_timed_runs()
    assert run.program.name == "update"
    assert 0 <= run.start_s <= time.perf_counter() - began_s


def test_a_closed_engine_says_so():
    engine = new_engine()
    engine.close()
    with pytest.raises(ValueError, match="it was closed"):
        engine.fwd_bwd(BATCH)
