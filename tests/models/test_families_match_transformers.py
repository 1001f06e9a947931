"""Every family in float32 on the CPU against transformers: loss, gradients, logits, export; cut sequences; plans."""

from dataclasses import replace

import pytest
import torch
import transformers
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    relative_error,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_checks import (
    MAX_SEQ_LEN,
    check_against_transformers,
    check_export,
    draw_batch,
    engine_like,
    last_logits,
    reference_loss,
    reference_of,
)
from family_configs import CASES, FAMILY_CASES, FEW, LIKE_OTHERS, LONGROPE, OF_BLOCKS, lacking
from safetensors.torch import load_file, save_file
from thorough import cases

from flexengine import from_pretrained
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.models.sizes import CLASS_DEFAULTS
from flexengine.models.variant_rows import VARIANTS
from flexengine.optim import AdamW
from flexengine.plan import Numerics


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    """What transformers says of each config, for all tests of it."""
    return reference_of(CASES[request.param], tmp_path_factory.mktemp("reference"))


OF_OWN_BLOCKS = [name for name in CASES if name.split(",")[0] not in LIKE_OTHERS]


@pytest.mark.parametrize("reference", cases(OF_OWN_BLOCKS, [OF_BLOCKS[family] for family in FEW]), indirect=True)
def test_loss_gradients_and_logits(reference):
    engine = engine_like(reference, chunk_tokens=MAX_SEQ_LEN)
    check_against_transformers(engine, reference)
    engine.close()


@pytest.mark.parametrize("reference", cases(CASES, FAMILY_CASES.values()), indirect=True)
def test_cut_sequences_and_export(reference, tmp_path):
    engine = engine_like(reference, chunk_tokens=20)
    check_against_transformers(engine, reference)
    check_export(engine, reference, tmp_path)
    engine.close()


def planned_engine(folder, spec):
    """An engine with the planner's plan for a small budget, in rounds of three chunks that cut sequences."""
    budget = int(0.95 * 16 * spec.num_parameters)
    engine = from_pretrained(
        folder,
        AdamW(lr=1e-2),
        max_seq_len=MAX_SEQ_LEN,
        max_global_batch_tokens=96,
        max_gpu_mem_bytes=budget,
        max_host_mem_gib=8,
        chunk_tokens=20,
        round_tokens=60,
        hardware="cpu-test",
        device="cpu",
        dtype="float32",
    )
    assert engine.memory_peaks().gpu_bytes <= budget
    assert any(home.trained and "host" in (home.weights, home.grads, home.states) for home in engine.plan.groups)
    return engine


WITH_ALL_PLANS = ("phi3", "gemma4_text", "gpt2", "cohere2", "gpt_oss", "qwen3_5_moe_text", "deepseek_v32", "bamba")
"""Blocks with every kind of mixer and of MLP, with and without experts."""


@pytest.mark.parametrize("family", cases(OF_BLOCKS, WITH_ALL_PLANS))
def test_plans_give_the_same_bits(family, tmp_path):
    """Everything on the GPU, everything streamed, every other block kept, inputs made again in segments of three with
    hidden states on the host, and what the planner chooses for a small budget: it takes blocks of any kind, and of
    several kinds."""
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path, config)
    spec = spec_of(config)
    sizes = {"chunk_tokens": 20, "chunks_per_round": 3, "max_seq_len": MAX_SEQ_LEN, "numerics": FLOAT32}
    streamed = streamed_plan(spec, **sizes)
    resident = make_plan(spec, **sizes)
    blocks = [(resident if i % 2 else streamed).layers[i + 1] for i in range(len(spec.blocks))]
    segments = [replace(kept, input_again=i % 3 > 0) for i, kept in enumerate(blocks)]
    plans = (
        streamed, resident, make_plan(spec, blocks=blocks, **sizes),
        make_plan(spec, blocks=segments, hidden_home="host", **sizes),
    )  # fmt: skip
    engines = [build_engine(open_model(tmp_path), plan, AdamW(lr=1e-2)) for plan in plans]
    found = []
    for engine in (*engines, planned_engine(tmp_path, spec)):
        losses = []
        for step, lengths in enumerate(([48, 3, 17], [21])):
            losses.append(engine.train_step(random_batch(step, lengths, config["vocab_size"]))[0].loss)
        found.append((losses, engine.state_dict()))
        engine.close()
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        same_bits(weights, found[0][1])


def test_published_gpt2_names_lack_a_prefix(tmp_path):
    """On the Hub they hold `wte.weight`, and masks, which are no parameters: both come back as they were."""
    config = CASES["gpt2"]
    model = saved_model(tmp_path / "source", config)
    tensors = {
        name.removeprefix("transformer."): t for name, t in model.state_dict().items() if name != "lm_head.weight"
    }
    mask = torch.ones(1, 1, 60, 60).tril()
    save_file({**tensors, "h.0.attn.bias": mask}, tmp_path / "source" / "model.safetensors")
    engine = from_pretrained(
        tmp_path / "source", max_seq_len=32, max_global_batch_tokens=64, hardware="cpu-test", device="cpu"
    )
    ids = random_batch(0, [30, 7], config["vocab_size"])
    assert engine.evaluate(ids).loss == pytest.approx(reference_loss(model, ids, ids).item(), rel=1e-2)
    engine.save_pretrained(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == {*tensors, "h.0.attn.bias"}
    same_bits({name: exported[name] for name in tensors}, tensors)
    assert torch.equal(exported["h.0.attn.bias"], mask)


GEMMA3_WITH_IMAGES = {
    "text_config": CASES["gemma3"],
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    "mm_tokens_per_image": 4, "image_token_index": 66, "boi_token_index": 64, "eoi_token_index": 65,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_of_a_model_with_images(tied, tmp_path, caplog):
    """Loss and gradients are those of transformers without an image; what sees comes back bit by bit, and is named.
    What the text's own config says of its head and of bounds to logits counts for neither."""
    torch.manual_seed(7)
    text = {**CASES["gemma3"], "tie_word_embeddings": not tied, "final_logit_softcapping": 2.0}
    config = {**GEMMA3_WITH_IMAGES, "text_config": text, "tie_word_embeddings": tied}
    described = transformers.AutoConfig.for_model("gemma3", **config)
    model = transformers.AutoModelForImageTextToText.from_config(described, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "source")
    engine = from_pretrained(
        tmp_path / "source",
        AdamW(lr=1e-2),
        max_seq_len=MAX_SEQ_LEN,
        max_global_batch_tokens=256,
        hardware="cpu-test",
        device="cpu",
        dtype="float32",
    )
    assert (
        "the text part is trained; the tensors beside it are exported unchanged (vision tower, projector)"
        in caplog.text
    )
    ids, labels = draw_batch(64)
    loss = reference_loss(model, ids, labels)
    loss.backward()
    assert engine.fwd_bwd(input_ids=ids, labels=labels).loss == pytest.approx(loss.item(), abs=1e-5)
    grads = {name: p.grad for name, p in model.named_parameters() if ".language_model." in name or "lm_head" in name}
    grads = {name.replace("lm_head", "language_model.lm_head"): grad for name, grad in grads.items()}
    stored = {name.replace("model.language_model.", "language_model.model."): grad for name, grad in grads.items()}
    error, name = worst_error(engine.gradients(), stored)
    assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
    engine.step()
    engine.save_pretrained(tmp_path / "export")
    source, export = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "export"))
    assert export.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(export[name], tensor) == (not name.startswith("language_model.")), name
    exported = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
    assert relative_error(engine.next_token_logits(ids[0]), last_logits(exported, ids[0])) <= 1e-4


def test_a_tied_head_that_is_stored_follows_the_embedding(tmp_path):
    """Under the name that models with images have for it, too."""
    described = transformers.AutoConfig.for_model("gemma3", **GEMMA3_WITH_IMAGES)
    transformers.AutoModelForImageTextToText.from_config(described).save_pretrained(tmp_path / "source")
    path, head = tmp_path / "source" / "model.safetensors", "language_model.lm_head.weight"
    tensors = load_file(path)
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({**tensors, head: tensors[embedding].clone()}, path)
    options = {"max_seq_len": 48, "max_global_batch_tokens": 256, "hardware": "cpu-test", "device": "cpu"}
    engine = from_pretrained(tmp_path / "source", AdamW(lr=1e-2), **options)
    engine.fwd_bwd(random_batch(0, [40, 20], 64))
    engine.step()
    engine.save_pretrained(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported[head], exported[embedding])
    assert not torch.equal(exported[head], tensors[embedding])


def test_published_gemma3_configs_leave_defaults_out():
    """As in gemma-3-4b: no heads, no vocabulary."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # fmt: skip
    published = spec_of({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    preset = open_model("preset:gemma-3-4b").spec
    assert published.num_parameters == preset.num_parameters
    assert published.tables == preset.tables
    assert [layer.ops for layer in published.blocks] == [layer.ops for layer in preset.blocks]


@pytest.mark.parametrize(("family", "field"), [(f, field) for f in CLASS_DEFAULTS for field in CLASS_DEFAULTS[f]])
def test_an_absent_field_is_what_transformers_takes_it_for(family, field):
    """The same description as of the config that transformers completes."""
    config = lacking(tiny_config() if family == "llama" else CASES[FAMILY_CASES.get(family, "gemma3")], field)
    config = lacking(config, "layer_types") if field == "num_hidden_layers" else config
    if field in ("head_dim", "num_key_value_heads"):
        config |= {"num_attention_heads": 32, "hidden_size": 64}
    if field == "v_head_dim":
        config |= {"qk_nope_head_dim": 128}
    check_completed(family, config)


@pytest.mark.parametrize("family", VARIANTS)
def test_rows_have_the_defaults_of_transformers(family):
    """All fields at once: counts of heads and experts go together."""
    row = VARIANTS[family]
    case = CASES[FAMILY_CASES.get(family, "gemma3")]
    config = lacking(case, *row.defaults, *row.renamed, "layer_types", "mlp_layer_types")
    heads = row.defaults["num_key_value_heads"] if row.latent else 160  # latent attention has as many of both
    check_completed(family, {**config, "num_attention_heads": heads or 160, "hidden_size": 320})


def check_completed(family, config):
    """The description of a config is that of the one that transformers completes."""
    completed = transformers.AutoConfig.for_model(**config).to_dict()
    ours, wanted = spec_of(config), spec_of({**completed, "model_type": family})
    assert ours.num_parameters == wanted.num_parameters
    assert ours.max_position_embeddings == wanted.max_position_embeddings
    assert ours.tables == wanted.tables
    assert [layer.ops for layer in ours.blocks] == [layer.ops for layer in wanted.blocks]
    assert ours.layers[-1].ops[-1].soft_cap == wanted.layers[-1].ops[-1].soft_cap


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_old_names_of_longrope(old):
    """Phi3Config takes both for longrope."""
    config = {**CASES["phi3, long runs"], "rope_scaling": {**LONGROPE, "type": old}}
    assert spec_of(config).tables == spec_of(CASES["phi3, long runs"]).tables


@pytest.mark.parametrize("case", ["olmo2", "qwen2_moe"])
def test_fp8_products_add_to_gradients(case):
    """Where another op reads what a linear layer reads: the residual stream, or what the router sees."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 64}
    wide = {**CASES[case], **sizes, "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32}
    losses = {}
    for matmul in ("compute", "fp8"):
        source = random_weights({name: value for name, value in wide.items() if name in CASES[case]})
        numerics = Numerics("bfloat16", "full", "bfloat16", "float32", matmul)
        spec = with_matmul_dtype(source.spec, matmul)
        plan = streamed_plan(spec, chunk_tokens=64, chunks_per_round=2, max_seq_len=48, numerics=numerics)
        engine = build_engine(source._replace(spec=spec), plan, AdamW(lr=2e-3))
        losses[matmul] = [engine.train_step(random_batch(2, [48, 20, 9], 64))[0].loss for _ in range(4)]
        engine.close()
    assert losses["fp8"] == pytest.approx(losses["compute"], rel=0.08)  # a token may go to another expert
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.3
