"""Models trained with images, in float32 on the CPU, against transformers: loss, gradients and logits.

A batch holds a sequence with several images, one with none and one with one, between cut and padded rows.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import (
    build_engine,
    make_plan,
    peak_bytes,
    random_batch,
    relative_error,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_checks import as_stored
from family_configs import CASES, experts, gemma3, gemma4
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from thorough import cases

from flexengine.models.lora import PEFT_PREFIX
from flexengine.models.registry import open_model
from flexengine.models.towers import cost
from flexengine.models.towers.description import SEE_EACH_OTHER, with_images
from flexengine.models.towers.layouts import Placed, Sizes
from flexengine.ops.given_rows import placing
from flexengine.ops.opaque_cost import traced
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.request import described
from flexengine.runtime.weights.weight_store import check_checkpoint

IMAGE = 66
VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
CLIP = {**VIT, "model_type": "clip_vision_model", "projection_dim": 8}
SIGLIP = {**VIT, "model_type": "siglip_vision_model"}
PIXTRAL = {**VIT, "model_type": "pixtral", "head_dim": 8}
INTERN = {**VIT, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
SMOL = {**VIT, "model_type": "smolvlm_vision"}


def text(kind, **changes):
    return {**tiny_config(), "model_type": kind, **changes}


def tiles(count, size=28):
    return [{"pixel_values": torch.randn(1, 3, size, size)} for _ in range(count)]


def nested(count):
    return [{"pixel_values": one["pixel_values"][None]} for one in tiles(count)]


def sizes(count, patch=7):
    shapes = [((2 + i % 2) * 2 * patch, (1 + i % 3) * 2 * patch) for i in range(count)]
    return [{"pixel_values": torch.randn(1, 3, *shape), "image_sizes": torch.tensor([shape])} for shape in shapes]


def grids(count):
    """Pictures of 4 patches by 4, 4 by 8, 8 by 4, of which each four are a row."""
    shapes = [(4, 4), (4, 8), (8, 4)][:count]
    return [
        {"pixel_values": torch.randn(h * w, 3 * 2 * 49), "image_grid_thw": torch.tensor([[1, h, w]])} for h, w in shapes
    ]


def placed(count):
    """Pictures of 4 rows by 2, 3 by 1, 2 by 1, each of two patches by two; 32 patches with padding."""
    found = []
    for high, wide in [(8, 4), (6, 2), (4, 2)][:count]:
        places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
        pad = (0, 0, 0, 32 - len(places))
        pixels = torch.nn.functional.pad(torch.rand(len(places), 3 * 49), pad)
        places = torch.nn.functional.pad(places, pad, value=-1)
        found.append({"pixel_values": pixels[None], "image_position_ids": places[None]})
    return found


def placed_rows(count):
    """Pictures whose patches are rows: 4 by 2, 3 by 1, 2 by 1; 8 with padding."""
    found = []
    for high, wide in [(4, 2), (3, 1), (2, 1)][:count]:
        places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
        pad = (0, 0, 0, 8 - len(places))
        pixels = torch.nn.functional.pad(torch.rand(len(places), 3 * 196), pad)
        places = torch.nn.functional.pad(places, pad, value=-1)
        found.append({"pixel_values": pixels[None], "image_position_ids": places[None]})
    return found


def rows_of(image):
    """Rows of an image whose columns tell them, or None."""
    if "image_position_ids" in image:
        patches = int((image["image_position_ids"] >= 0).all(-1).sum())
        return patches // 4 if image["pixel_values"].shape[-1] == 3 * 49 else patches
    return int(image["image_grid_thw"].prod()) // 4 if "image_grid_thw" in image else None


PLACED = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 7, "pooling_kernel_size": 2,
          "position_embedding_size": 64, "standardize": True}  # fmt: skip
EMBEDDER = {"model_type": "gemma4_unified_vision", "patch_size": 7, "pooling_kernel_size": 2, "mm_embed_dim": 16,
            "mm_posemb_size": 32, "output_proj_dims": 16}  # fmt: skip
UNIFIED = gemma4("gemma4_unified_text", use_bidirectional_attention="vision", attention_k_eq_v=True, pad_token_id=65)
QWEN2 = {"depth": 2, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7,
         "spatial_merge_size": 2}  # fmt: skip
QWEN2_5 = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 7, "window_size": 28,
           "spatial_merge_size": 2, "out_hidden_size": 24, "fullatt_block_indexes": [1]}  # fmt: skip
QWEN3 = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 7, "out_hidden_size": 24,
         "spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
QWEN3_5 = {name: value for name, value in QWEN3.items() if name != "deepstack_visual_indexes"}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}
PARTLY = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.6}}
EXPERTS = {**experts("qwen3_moe"), "model_type": "qwen3_vl_moe_text"}
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight")
"""Ends of names of weights of decays, for whose gradients float32 is narrow; transformers has it in float64, too."""
FAMILIES = {
    "llava": ({"text_config": text("llama"), "vision_config": CLIP}, tiles, lambda _: 16),
    "llava-pixtral": ({"text_config": text("mistral"), "vision_config": PIXTRAL, "vision_feature_layer": -1,
                       "vision_feature_select_strategy": "full"}, sizes, lambda s: s[0] * s[1] // 49),
    "internvl": ({"text_config": text("qwen2"), "vision_config": INTERN}, tiles, lambda _: 4),
    "idefics3": ({"text_config": text("llama"), "vision_config": SMOL, "scale_factor": 2}, nested, lambda _: 4),
    "smolvlm": ({"text_config": text("llama"), "vision_config": SMOL, "scale_factor": 2}, nested, lambda _: 4),
    "mistral3": ({"text_config": text("mistral"), "vision_config": PIXTRAL, "spatial_merge_size": 2,
                  "vision_feature_layer": -1}, sizes, lambda s: s[0] * s[1] // 196),
    "mistral3-ministral3": ({"text_config": CASES["ministral3"], "vision_config": PIXTRAL, "spatial_merge_size": 2,
                             "vision_feature_layer": -1}, sizes, lambda s: s[0] * s[1] // 196),
    "lighton_ocr": ({"text_config": text("qwen3"), "vision_config": PIXTRAL, "spatial_merge_size": 2}, sizes,
                    lambda s: s[0] * s[1] // 196),
    "aya_vision": ({"text_config": text("cohere2", pad_token_id=65), "vision_config": SIGLIP, "downsample_factor": 2,
                    "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, tiles, lambda _: 4),
    "qwen2_vl": ({"text_config": text("qwen2_vl_text", **MROPE), "vision_config": QWEN2}, grids, None),
    "qwen2_5_vl": ({"text_config": text("qwen2_5_vl_text", **MROPE), "vision_config": QWEN2_5}, grids, None),
    "qwen3_vl": ({"text_config": text("qwen3_vl_text", **MROPE), "vision_config": QWEN3}, grids, None),
    "qwen3_5": ({"text_config": {**CASES["qwen3_5_text"], **PARTLY}, "vision_config": QWEN3_5}, grids, None),
    "qwen3_vl_moe": ({"text_config": {**EXPERTS, **MROPE}, "vision_config": QWEN3}, grids, None),
    "qwen3_5_moe": ({"text_config": {**CASES["qwen3_5_moe_text"], **PARTLY}, "vision_config": QWEN3_5}, grids, None),
    "gemma3": ({"text_config": gemma3(), "vision_config": {**SIGLIP, "vision_use_head": False},
                "mm_tokens_per_image": 4}, tiles, lambda _: 4),
    "gemma4": ({"text_config": gemma4(use_bidirectional_attention="vision", attention_k_eq_v=True, pad_token_id=65),
                "vision_config": PLACED}, placed, None),
    "gemma4_unified": ({"text_config": UNIFIED, "vision_config": EMBEDDER}, placed_rows, None),
    "cohere2_vision": ({"text_config": text("cohere2", pad_token_id=65), "vision_config": SIGLIP,
                        "downsample_factor": 2}, tiles, lambda _: 4),
}  # fmt: skip


def joined(images):
    """Columns of a batch as a processor makes them: pictures padded to the largest."""
    if "image_grid_thw" in images[0]:
        return {name: torch.cat([one[name] for one in images]) for name in images[0]}
    high, wide = (max(one["pixel_values"].shape[axis] for one in images) for axis in (-2, -1))
    pixels = [one["pixel_values"] for one in images]
    padded = [torch.nn.functional.pad(p, (0, wide - p.shape[-1], 0, high - p.shape[-2])) for p in pixels]
    found = {"pixel_values": torch.cat(padded)}
    return found | {n: torch.cat([o[n] for o in images]) for n in images[0] if n != "pixel_values"}


def drawn(images, rows):
    """Token ids of sequences with two images, none, and one; labels, of which some are -100."""
    ids = random_batch(3, [46, 9, 30], 60)
    counts = [rows_of(one) or rows(tuple(one["pixel_values"].shape[-2:])) for one in images]
    ids[0][2 : 2 + counts[0]] = [IMAGE] * counts[0]
    ids[0][3 + counts[0] : 3 + counts[0] + counts[1]] = [IMAGE] * counts[1]
    ids[2][: counts[2]] = [IMAGE] * counts[2]
    return ids, [[-100 if token == IMAGE or i % 4 == 0 else token for i, token in enumerate(row)] for row in ids]


def kinds_of(model, row, columns):
    """Columns that say which tokens of a row stand for images, where a model reads one."""
    kinds = (torch.tensor([row]) == IMAGE).int()
    if model.config.model_type == "gemma4_unified":  # with the masks of its answers, not those of its forward alone
        shown = torch.zeros(1, len(row), model.config.text_config.hidden_size)
        places = torch.arange(len(row))[None]
        return {"attention_mask": model.create_masks_for_generate(model.config, shown, None, None, places, kinds)}
    if model.config.model_type in SEE_EACH_OTHER:
        return {"token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids": kinds}
    return {"mm_token_type_ids": kinds} if "image_grid_thw" in columns else {}


def reference(model, ids, labels, images):
    """Mean loss over all targets, each sequence alone; logits of the first one."""
    total, count, logits = 0.0, 0, []
    for row, unshifted, own in zip(ids, labels, (images[:2], [], images[2:]), strict=True):
        given = joined(own) if own else {}
        if "pixel_attention_mask" in given or given.get("pixel_values", torch.zeros(1)).dim() == 5:
            given["pixel_values"] = given["pixel_values"].flatten(0, 1)[None]
        given |= kinds_of(model, row, given)
        logits.append(model(input_ids=torch.tensor([row]), use_cache=False, **given).logits[0])
        target = torch.tensor(unshifted[1:])
        total = total + torch.nn.functional.cross_entropy(logits[-1][:-1], target, reduction="sum")
        count += int((target != -100).sum())
    return total / count, logits


def saved(case, folder):
    config = FAMILIES[case][0]
    config = {"model_type": case.partition("-")[0], "image_token_id": IMAGE, "image_token_index": IMAGE, **config}
    return saved_model(folder, config, kind_of_model=transformers.AutoModelForImageTextToText).eval()


def opened(folder, most=64, **options):
    """The model of a folder; options: those of a job."""
    source = open_model(folder)
    job = Job(max_image_tokens=most, max_seq_len=48, max_global_batch_tokens=4096, dtype="float32", **options)
    return source._replace(spec=check_checkpoint(described(source.spec, job), folder))


def drop_biases_of_keys(found, wanted):
    """Leave out gradients that are all rounding: the softmax has none of these biases."""
    for name in [name for name in wanted if name.endswith("k_proj.bias")]:
        if wanted[name].norm() < 1e-6:
            assert found.pop(name).norm() < 1e-6
            del wanted[name]


@pytest.mark.parametrize(
    "case", cases(FAMILIES, ("llava", "llava-pixtral", "idefics3", "qwen3_vl", "qwen3_5", "gemma4"))
)
def test_images(case, tmp_path):
    model, (_, draw, rows) = saved(case, tmp_path), FAMILIES[case]
    images = draw(3)
    ids, labels = drawn(images, rows)
    loss, logits = reference(model, ids, labels, images)
    loss.backward()
    source = opened(tmp_path, train_tower=True)
    chunk = 48 if source.spec.whole_sequences else 16
    with build_engine(source, streamed_plan(source.spec, chunk_tokens=chunk, chunks_per_round=3)) as engine:
        result = engine.fwd_bwd(input_ids=ids, labels=labels, **joined(images))
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        found = engine.gradients()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        wanted = {n if n in found else n.removeprefix("model."): grad for n, grad in grads.items()}
        wanted = wanted if wanted.keys() == found.keys() else as_stored(model, grads)
        assert found.keys() == wanted.keys()
        drop_biases_of_keys(found, wanted)
        for name in [name for name in wanted if name.endswith(DECAYS)]:
            assert relative_error(found.pop(name), wanted.pop(name)) <= 1e-3
        error, name = worst_error(found, wanted)
        assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        told = engine.evaluate(input_ids=ids, labels=ids, per_token=True, **joined(images)).token_log_probs
        for row, own, log_probs in zip(ids, logits, told, strict=True):
            wanted = own[:-1].log_softmax(-1)[range(len(row) - 1), row[1:]]
            assert relative_error(log_probs[1:], wanted) <= 1e-4


@pytest.mark.parametrize("case", ["llava", "qwen2_vl", "gemma4"])
def test_answers_about_images(case, tmp_path):
    """Several images in a prompt, none, and one; positions in three axes go on behind the largest."""
    model, (_, draw, rows) = saved(case, tmp_path), FAMILIES[case]
    images = draw(3)
    runs = [[IMAGE] * (rows_of(one) or rows(tuple(one["pixel_values"].shape[-2:]))) for one in images]
    prompts = [[15, *runs[0], 7, *runs[1], 2], [13, 4, 50], [*runs[2], 31, 11]]
    wanted = []
    for prompt, own in zip(prompts, (images[:2], [], images[2:]), strict=True):
        row, given = list(prompt), joined(own) if own else {}
        for _ in range(4):
            given |= kinds_of(model, row, given)
            with torch.no_grad():
                row.append(int(model(input_ids=torch.tensor([row]), use_cache=False, **given).logits[0, -1].argmax()))
        wanted.append(row[len(prompt) :])
    assert not any(IMAGE in row for row in wanted), "another seed: the reference would take it for an image"
    source = opened(tmp_path)
    with build_engine(source, streamed_plan(source.spec, chunk_tokens=16, chunks_per_round=4)) as engine:
        assert engine.generate(prompts, 4, images=joined(images)) == wanted
        with pytest.raises(ValueError, match=r"which do not go with|give \d+ rows"):
            engine.generate(prompts[:1], 1, images=joined(images))


@pytest.mark.parametrize("case", ["mistral3", "gemma3"])
def test_plans_change_no_bits_and_text_alone_needs_no_images(case, tmp_path):
    """Bits are equal where weights stay and where they stream, whether the tower is trained or not; a batch of text is
    as in an engine without a tower. transformers reads what was trained."""
    saved(case, tmp_path / "model")
    images, plain = FAMILIES[case][1](3), random_batch(1, [20, 7], 60)
    ids, labels = drawn(images, FAMILIES[case][2])
    batch = {"input_ids": ids, "labels": labels, **joined(images)}
    source, text_alone, found, told = opened(tmp_path / "model"), open_model(tmp_path / "model"), [], []
    trained = opened(tmp_path / "model", train_tower=True)
    for own, make in ((source, streamed_plan), (source, make_plan), (trained, make_plan), (trained, streamed_plan)):
        with build_engine(own, make(own.spec, chunk_tokens=48)) as engine:
            told.append(engine.evaluate(plain).loss)
            loss = engine.fwd_bwd(batch).loss
            found.append({**engine.gradients(), "loss": torch.tensor(loss)})
            if len(found) == 4:
                engine.step()
                engine.save_pretrained(tmp_path / "trained")
                after = engine.evaluate(batch).loss
    same_bits(*found[:2])
    same_bits(*found[2:])
    same_bits(found[0], {name: found[2][name] for name in found[0]})
    assert {name.split(".")[0] for name in found[2].keys() - found[0].keys()} == {"vision_tower"}
    exported = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained").eval()
    assert reference(exported, ids, labels, images)[0].item() == pytest.approx(after, abs=1e-5)
    with build_engine(text_alone, make_plan(text_alone.spec, chunk_tokens=48)) as engine:
        assert [engine.evaluate(plain).loss] * 4 == told


OF_ALL = r".*\.(q_proj|qkv|fc1|linear_fc2|linear_1)"
OF_TEXT = r".*language_model.*\.(q_proj|down_proj)"


@pytest.mark.parametrize(
    ("case", "targets", "whole"),
    [
        ("gemma3", OF_ALL, []),
        ("qwen3_vl", OF_ALL, []),
        ("llava", OF_TEXT, ["multi_modal_projector", "vision_tower"]),
    ],
)
def test_adapters_of_tower_projector_and_text(case, targets, whole, tmp_path):
    """Against PEFT, which made them, and which reads what was trained. whole: trained in full beside them."""
    saved(case, tmp_path / "base")
    images = FAMILIES[case][1](3)
    ids, labels = drawn(images, FAMILIES[case][2])

    def loaded():
        return transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base", attn_implementation="eager")

    model = get_peft_model(
        loaded(), LoraConfig(r=3, lora_alpha=5, target_modules=targets, modules_to_save=whole)
    ).eval()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    options = {"lora_targets": [targets], "lora_rank": 3, "lora_alpha": 5.0, "modules_to_save": whole}
    source = opened(tmp_path / "base", mode="lora", **options)
    plan = streamed_plan(source.spec, chunk_tokens=48, chunks_per_round=2)
    with build_engine(source, plan, AdamW(lr=1e-2), adapter=tmp_path / "adapter") as engine:
        loss, _ = reference(model, ids, labels, images)
        loss.backward()
        assert engine.fwd_bwd(input_ids=ids, labels=labels, **joined(images)).loss == pytest.approx(
            loss.item(), abs=1e-5
        )
        found = engine.gradients()
        of = {
            n.replace(".modules_to_save", "").replace(".default", ""): p
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in of.items()}
        wanted = {peft_name(n, found): grad for n, grad in grads.items()}
        assert any("vision" in n or "visual" in n for n in wanted)
        drop_biases_of_keys(found, wanted)
        error, name = worst_error(found, wanted)
        assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        engine.step()
        engine.save_pretrained(tmp_path / "out")
        after = engine.evaluate(input_ids=ids, labels=labels, **joined(images)).loss
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        again = PeftModel.from_pretrained(loaded(), tmp_path / "out").eval()
    assert abs(after - loss.item()) > 1e-3
    assert reference(again, ids, labels, images)[0].item() == pytest.approx(after, abs=1e-5)


def peft_name(name, names):
    """What a file of adapters calls a tensor of PEFT's: by the module's name in the checkpoint."""
    start, own = PEFT_PREFIX, name.removeprefix(PEFT_PREFIX)
    others = own.removeprefix("model."), own.replace("model.language_model.", "language_model.model.")
    known = (f"{first}{other}" for other in (own, *others) for first in (start, ""))
    return next(found for found in known if found in names)


def test_experts_that_lie_input_by_output(tmp_path):
    """As Qwen3-VL's were published; transformers writes them the other way, and reads both."""
    saved("qwen3_vl_moe", tmp_path)
    file, ids, losses = tmp_path / "model.safetensors", random_batch(1, [20, 7], 60), []
    for _ in range(2):
        source = open_model(tmp_path)
        with build_engine(source, make_plan(source.spec, chunk_tokens=32)) as engine:
            losses.append(engine.evaluate(ids).loss)
        tensors = {n: t.mT.contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


GOOD = [IMAGE] * 8 + [1, 2]
TWO = {"pixel_values": torch.zeros(2, 3, 28, 28)}
WRONG = {
    "too_many_image_tokens": (
        [IMAGE] * 17 + [1],
        TWO,
        "the batch has 17 tokens of images, more than max_image_tokens=16",
    ),
    "more_rows_than_tokens": ([IMAGE] * 5 + [1], TWO, "5 tokens that stand for images .id 66., but .* give 8 rows"),
    "fewer_rows_than_tokens": ([IMAGE] * 9 + [1], TWO, "9 tokens that stand for images .id 66., but .* give 8 rows"),
    "another_size": ([IMAGE] * 8 + [1], {"pixel_values": torch.zeros(2, 3, 14, 14)}, "pictures of .3, 28, 28.; use"),
    "numbers": ([IMAGE] * 8 + [1], {"pixel_values": torch.zeros(2, 3, 28, 28, dtype=torch.uint8)}, "are torch.uint8"),
}


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("internvl")
    saved("internvl", folder)
    source = opened(folder, most=16)
    with build_engine(source, make_plan(source.spec, chunk_tokens=32)) as engine:
        yield folder, engine


@pytest.mark.parametrize("case", WRONG)
def test_wrong_images(internvl, case):
    """Nothing of a batch that is refused remains."""
    ids, columns, message = WRONG[case]
    _, engine = internvl
    loss = engine.evaluate(input_ids=[GOOD], **TWO).loss
    with pytest.raises(ValueError, match=message):
        engine.fwd_bwd(input_ids=[ids], labels=[ids], **columns)
    assert not engine.has_gradients
    assert engine.evaluate(input_ids=[GOOD], **TWO).loss == loss


def test_an_image_lies_within_a_sequence(internvl):
    """Here its tokens would be in two rounds, which ranks may share out."""
    _, engine = internvl
    ids = [[IMAGE] * 6 + [1] * 26, [1] * 32, [IMAGE] * 2 + [1] * 30]
    for call in (engine.evaluate, engine.fwd_bwd):
        with pytest.raises(ValueError, match="tokens of one of the images of the batch lie in two sequences; give"):
            call(input_ids=ids, **TWO)


def test_text_alone_takes_no_images(internvl):
    alone = open_model(internvl[0])
    with (
        build_engine(alone, make_plan(alone.spec, chunk_tokens=32)) as engine,
        pytest.raises(ValueError, match="has pixel_values, but this engine trains the text alone"),
    ):
        engine.fwd_bwd(input_ids=[GOOD], **TWO)


def test_grids_that_do_not_go_with_tokens(tmp_path):
    """A tower's call takes no more than was traced; text rotates as in an engine of text, bit by bit."""
    saved("qwen2_vl", tmp_path)
    source, alone, images = opened(tmp_path), open_model(tmp_path), grids(3)
    text_alone, given = random_batch(0, [20, 7], 60), source.spec.given
    with build_engine(source, make_plan(source.spec, chunk_tokens=32)) as engine:
        for runs, count in (((4, 8), 1), ((5, 7), 2)):
            ids = [IMAGE] * runs[0] + [1] + [IMAGE] * runs[1]
            message = rf"sequence 0 of the batch has runs of \[{runs[0]}, {runs[1]}\] tokens .* do not go with image"
            with pytest.raises(ValueError, match=message):
                engine.fwd_bwd(input_ids=[ids], labels=[ids], **joined(images[:count]))
        loss = engine.evaluate(text_alone).loss
    weights = {p.name: torch.zeros(p.shape) for group in source.spec.groups[1:3] for p in group.params}
    [call] = given.tower.calls(joined(images))
    grads = torch.zeros(1, call.rows, 24)
    for run, trained in (
        (lambda: given.tower(weights, call.columns), ()),
        (lambda: given.tower.backward(weights, list(weights), call.columns, grads, lambda *_: None), tuple(weights)),
    ):
        assert 0 < peak_bytes(run) <= given.cost(trained).peak_bytes
    with build_engine(alone, make_plan(alone.spec, chunk_tokens=32)) as engine:
        assert engine.evaluate(text_alone).loss == loss


def test_calls_of_padded_images_take_what_is_counted(tmp_path):
    """Each takes as much as the largest of its call; columns that do not go together are refused."""
    saved("gemma4", tmp_path)
    source, images = opened(tmp_path, train_tower=True), placed(3) * 7
    given: Any = source.spec.given
    weights = {p.name: torch.zeros(p.shape) for group in source.spec.groups[1:4] for p in group.params}
    trained = [name for name in weights if name not in given.tower.constants]
    calls = given.tower.calls(joined(images))
    assert [(len(call.columns["pixel_values"]), call.rows) for call in calls] == [(8, 37), (8, 36), (5, 18)]
    for call in calls:
        rest = call.columns, torch.zeros(1, call.rows, 24), lambda *_: None
        assert peak_bytes(partial(given.tower, weights, call.columns)) <= given.cost(()).peak_bytes
        taken = peak_bytes(partial(given.tower.backward, weights, trained, *rest))
        assert taken <= given.cost(tuple(trained)).peak_bytes
    layout, columns = Placed(3 * 49, 2, most=7), joined(images)
    with pytest.raises(ValueError, match="an image of the batch takes 8 tokens, more than 7; make it smaller"):
        layout.calls(columns, 64)
    with pytest.raises(ValueError, match=r"do not go with image_position_ids of shape \[21, 32, 3\]"):
        layout.calls({**columns, "image_position_ids": torch.zeros(21, 32, 3)}, 64)
    with pytest.raises(ValueError, match=r"have \[32, 12, 8, .* with padding at the end; use the processor"):
        layout.calls({**columns, "image_position_ids": columns["image_position_ids"].flip(1)}, 64)


def test_a_call_is_traced_once(tmp_path, monkeypatch):
    """Four: forward and backward, of the largest call and of one of a typical image. A second job has the same ones."""
    saved("qwen3_vl", tmp_path)
    traces = []
    monkeypatch.setattr(cost, "_TRACED", {})
    monkeypatch.setattr(cost, "traced", lambda run: traces.append(run) or traced(run))
    costs = [placing(opened(tmp_path, 1100, train_tower=True).spec.layers[0].ops).cost for _ in range(2)]
    assert len(traces) == 4
    assert costs[0] == costs[1]


def test_an_image_that_is_too_large_for_a_call_is_refused():
    columns = joined([{"pixel_values": torch.zeros(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 56]])}] * 3)
    layout = Sizes(3, 14)
    assert [call.rows for call in layout.calls(columns, 16)] == [16, 8]
    assert [call.rows for call in layout.calls(columns, 16, {8})] == [8, 16]
    with pytest.raises(ValueError, match="image 0 of the batch takes 8 tokens, more than the 7"):
        layout.calls(columns, 7)


@pytest.mark.parametrize("case", [case for case in FAMILIES if FAMILIES[case][1] is sizes])
def test_a_call_of_one_row(case, tmp_path):
    """As small a picture as there is has the row that it has beside others, and shows which layers may have adapters:
    transformers' Mistral 3 fails at it."""
    saved(case, tmp_path)
    given: Any = opened(tmp_path, mode="lora", lora_targets=["q_proj", r".*\.linear_1"], lora_rank=2).spec.given
    assert [one.name for one in given.tower._adapters if "linear_1" in one.name]
    weights = {name: torch.randn(shape) for name, shape in given.tower.shapes.items()}
    small = given.tower.example(1)
    both = {name: small[name].repeat_interleave(2, 0) for name in given.tower.columns}
    [call] = given.tower.calls(small)
    assert call.rows == 1
    rows = given.tower(weights, call.columns)
    assert rows.shape == (1, 1, 24)
    assert relative_error(given.tower(weights, both)[:, :1], rows) <= 1e-5


def test_models_whose_images_are_not_trained():
    job = Job(max_image_tokens=9)
    with pytest.raises(ValueError, match="max_image_tokens=9: images of llama models are not trained, only those of"):
        with_images(spec_of(tiny_config()), job)


def test_towers_that_are_not_trained():
    spec = spec_of(tiny_config())
    with pytest.raises(ValueError, match=r"train_tower=True: .* takes max_image_tokens"):
        described(spec, Job(train_tower=True))
