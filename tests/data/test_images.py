"""Records with images: every way to write one, the tokens and pixels of transformers, and files that are broken."""

import base64
import io
import json
import struct
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from image_models import GEMMA_TOKENS, IMAGE_TOKENS, write_gemma3, write_llava
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from flexengine import cli
from flexengine.data import ChatTokenizer, hold_out, prepare_sources, sources_of
from flexengine.data.batches import GlobalBatches, ImageBatch, PromptBatch, Room, batch_of
from flexengine.data.image_pixels import PixelReader, joined
from flexengine.data.image_processor import ImageProcessor, expanded
from flexengine.data.preview import marked_text
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.sources import LabelNames
from flexengine.data.validation import ValidationBatches

IMAGE_ID = 3
ASK = {"type": "text", "text": "what is this"}
ANSWER = {"role": "assistant", "content": "disc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def chat(folder):
    found = ChatTokenizer.from_folder(folder)
    found.images = ImageProcessor(folder)
    return found


def png(colour=(200, 10, 30), size=(40, 28), mode="RGB", kind="PNG", **options):
    out = io.BytesIO()
    Image.new(mode, size, colour).save(out, kind, **options)
    return out.getvalue()


RED, GREEN = png(), png((10, 200, 30), (28, 50))


@pytest.fixture
def here(tmp_path):
    for name, data in (("red.png", RED), ("green.png", GREEN)):
        (tmp_path / name).write_bytes(data)
    return tmp_path


def prepared(path, chat, cache=None, policy: Any = "stop", kind: Any = "answers") -> Any:
    return prepare_sources(sources_of([str(path)], kind=kind, images=True), chat, 96, False, cache, policy)[0]


def rows_of(folder, chat, *records, **options) -> list[Any]:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(prepared(folder / "data.jsonl", chat, **options).sequences)


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}, ANSWER]}


DATA_URL = "data:image/png;base64," + base64.b64encode(RED).decode()
MARKED = [{"role": "user", "content": "<image> what is this"}, ANSWER]
SAME = {
    "path": user({"type": "image", "image": "red.png"}, ASK),
    "type_path": user({"type": "image", "path": "red.png"}, ASK),
    "file_url": user({"type": "image", "url": "file://red.png"}, ASK),
    "data_url": user({"type": "image_url", "image_url": {"url": DATA_URL}}, ASK),
    "base64": user({"type": "image", "base64": DATA_URL.partition(",")[2]}, ASK),
    "beside": {**user({"type": "image"}, ASK), "images": ["red.png"]},
    "marked": {"messages": MARKED, "images": [{"path": "red.png"}]},
    "without a place": {"question": " what is this", "answer": "disc", "image": "red.png"},
    "of LLaVA": {"conversations": [{"from": "human", "value": "<image> what is this"},
                                   {"from": "gpt", "value": "disc"}], "image": "red.png"},
}  # fmt: skip


def test_every_way_to_write_an_image_gives_the_tokens_of_transformers(here, chat, folder):
    rows = rows_of(here, chat, *SAME.values())
    reader = transformers.AutoProcessor.from_pretrained(folder)
    turns = [{"role": "user", "content": [{"type": "image", "image": Image.open(here / "red.png")}, ASK]},
             {"role": "assistant", "content": [{"type": "text", "text": "disc"}]}]  # fmt: skip
    wanted = reader.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    for name, row in zip(SAME, rows, strict=True):
        assert row.input_ids == wanted["input_ids"][0].tolist(), name
        assert row.labels == [IGNORE] * (len(row.labels) - 2) + row.input_ids[-2:]
        assert torch.equal(chat.images.pixels(row.images[0])["pixel_values"], wanted["pixel_values"]), name


def tokens_of(*special, **named):
    vocabulary = {token: i for i, token in enumerate((*special, "a", "b", "c", "<unk>"))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=special[0], extra_special_tokens=named
    )


def idefics3():
    around, whole = "<fake_token_around_image>", "<global-img>"
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]
    named = {"image_token": "<image>", "fake_image_token": around, "global_image_token": whole}
    tokens = tokens_of("<end_of_utterance>", "<image>", around, whole, *tiles, **named)
    pictures = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return transformers.Idefics3Processor(pictures, tokens, image_seq_len=4)


def aya_vision():
    tokens = tokens_of("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL")
    pictures = transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True)
    return transformers.AyaVisionProcessor(pictures, tokens, patch_size=7, img_size=28, downsample_factor=2)


@pytest.mark.parametrize("make", [idefics3, aya_vision])
def test_images_one_by_one_are_as_those_of_a_batch(make, tmp_path):
    """Tiles of images of several sizes, whose places and rows have tokens of their own."""
    whole = make()
    whole.save_pretrained(tmp_path)
    images = ImageProcessor(tmp_path)
    noise = torch.Generator().manual_seed(0)
    sizes = (50, 80, 3), (30, 30, 3), (90, 40, 3)
    pictures = [torch.randint(0, 255, size, generator=noise, dtype=torch.uint8).numpy() for size in sizes]
    pictures = [Image.fromarray(picture) for picture in pictures]
    text = f"a {images.token} b {images.token} {images.token} c"
    wanted = whole(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    each = [images.columns(picture) for picture in pictures]
    ids = whole.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = expanded(TokenizedRecord(ids, ids), images.place_id, [one["input_ids"][0].tolist() for one in each])
    assert found.input_ids == wanted["input_ids"][0].tolist()
    assert found.labels.count(IGNORE) == len(found.labels) - 3
    columns = joined([{name: one[name] for name in ("pixel_values",)} for one in each])
    assert torch.equal(columns["pixel_values"], wanted["pixel_values"])


def test_several_images_in_several_turns_and_none(here, chat, tmp_path):
    """In batches that hold no more image tokens than asked for, with the pixels of all images in their order."""
    image = {"type": "image", "image": "green.png"}
    turns = [{"role": "user", "content": ["what", image, "and the other", {"type": "image", "image": DATA_URL}]},
             ANSWER, {"role": "user", "content": [image, ASK]}, {"role": "assistant", "content": "no"}]  # fmt: skip
    text = {"messages": [{"role": "user", "content": "is this one"}, ANSWER]}
    cache = tmp_path / "cache"
    for _ in range(2):  # made, and from the cache
        rows = rows_of(here, chat, {"messages": turns}, text, SAME["path"], cache=cache)
    assert [row.input_ids.count(IMAGE_ID) for row in rows] == [3 * IMAGE_TOKENS, 0, IMAGE_TOKENS]
    assert [marked_text(chat, rows[0]).count(said) for said in ("[[disc </s>]]", "[[no </s>]]")] == [1, 1]
    assert sum(label != IGNORE for label in rows[0].labels) == 4
    part = prepared(here / "data.jsonl", chat, cache)
    batches = GlobalBatches.of_parts([part], 400, seed=0, max_image_tokens=3 * IMAGE_TOKENS)
    made = list(batches.batches(2))
    assert sorted(sum(row.count(IMAGE_ID) for row in batch.input_ids) for batch in made) == [
        IMAGE_TOKENS,
        3 * IMAGE_TOKENS,
    ]
    other = GlobalBatches.of_parts([part], 400, seed=0, max_image_tokens=4 * IMAGE_TOKENS)
    assert other.fingerprint() != batches.fingerprint()
    with pytest.raises(ValueError, match="1 of 3 records have more tokens of images than --max-image-tokens 47"):
        GlobalBatches.of_parts([part], 400, seed=0, max_image_tokens=47)
    for half in hold_out(part, 0.34, seed=0):  # counts stay with their sequences
        counts = [row.input_ids.count(IMAGE_ID) for row in half.sequences]
        assert half.sequences.image_tokens is not None
        assert half.sequences.image_tokens.tolist() == counts
    whole = batch_of(part.sequences, [0, 1, 2])
    assert isinstance(whole, ImageBatch)
    alone = joined([chat.images.pixels(image) for image in whole.images])
    assert alone["pixel_values"].shape == (4, 3, 28, 28)
    assert torch.equal(alone["pixel_values"][0], alone["pixel_values"][2])
    (here / "green.png").write_bytes(RED)
    with pytest.raises(ValueError, match=r"green.png: the image has changed since it was read"):
        chat.images.pixels(whole.images[0])
    assert next(iter(prepared(here / "data.jsonl", chat, cache).sequences)).images != rows[0].images  # made again


def test_bytes_in_parquet_are_decoded_in_other_processes(here, chat, folder):
    """As the image feature of `datasets` has them; a table keeps them, so that the file may go."""
    pictures = pa.array([[{"bytes": RED, "path": "a.png"}], [{"bytes": GREEN, "path": None}]])
    asked = pa.array(["<image> what is this"] * 2)
    pq.write_table(
        pa.table({"images": pictures, "question": asked, "answer": pa.array(["disc"] * 2)}), here / "a.parquet"
    )
    part = prepared(here / "a.parquet", chat)
    batches = GlobalBatches.of_parts([part], 32, seed=0, max_image_tokens=64)
    reader = batches.pixels = PixelReader(folder)
    (here / "a.parquet").unlink()
    try:
        for batch, row in zip(batches.batches(2), (part.sequences[i] for i in batches._epoch(0)[0]), strict=True):
            assert isinstance(batch, ImageBatch)
            assert torch.equal(batch.columns["pixel_values"], chat.images.pixels(row.images[0])["pixel_values"])
    finally:
        reader.close()


def test_the_preview_shows_pictures_and_what_is_trained(here, folder, capsys):
    (here / "data.jsonl").write_text(json.dumps(SAME["path"]) + "\n" + json.dumps(SAME["marked"]) + "\n")
    asked = {"model": folder, "dataset": here / "data.jsonl", "data-cache": here / "cache", "html": here / "a.html"}
    preview = ["data", "preview", *(f"--{name}={value}" for name, value in asked.items()), "--max-image-tokens"]
    assert cli.main([*preview, "16"]) == 0
    out, page = capsys.readouterr().out, (here / "a.html").read_text()
    assert f"sequence 1: {IMAGE_TOKENS + 10} tokens, 2 trained, 1 image" in out
    assert "<image> x 16 " in out
    assert "[[disc </s>]]" in out
    assert page.count("<mark>disc &lt;/s&gt;</mark>") == page.count('<img src="data:image/png;base64,') == 2
    assert "&lt;image&gt; x 16 " in page
    assert cli.main([*preview, "15"]) == 2
    assert "2 of 2 records have more tokens of images than --max-image-tokens 15" in capsys.readouterr().err


def bomb(width, height):
    """The header of a PNG of so many pixels, and next to nothing behind it."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


LARGE = png((1, 2, 3), (60, 60), "RGB")
BROKEN = {
    "image_truncated": (LARGE[: len(LARGE) // 2], "line 2: the image .*x.png is damaged: .*; save it again"),
    "image_bomb": (bomb(10_000, 10_001), r"has 10000 x 10001 pixels, more than the 64 million that are decoded"),
    "image_without_pixels": (bomb(0, 5), "the image .*x.png is damaged or none of PNG"),
    "image_of_another_kind": (b"%PDF-1.7 and so on", r"x.png is damaged or none of PNG, JPEG.*begins with b'%PDF"),
    "image_of_16_bits": (png(9, (30, 30), "I;16"), "has I;16 numbers a pixel; save it with 8 bits a channel"),
    "image_missing": (None, "the image .*x.png: .*[Nn]o such file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_images_are_named_and_counted(here, chat, case):
    data, message = BROKEN[case]
    if data is not None:
        (here / "x.png").write_bytes(data)
    records = SAME["path"], user({"type": "image", "image": "x.png"}, ASK)
    with pytest.raises(ValueError, match=message) as refused:
        rows_of(here, chat, *records)
    assert "data.jsonl, line 2" in str(refused.value)
    assert "--bad-records skip" in str(refused.value)
    part = prepared(here / "data.jsonl", chat, policy="skip")
    assert (part.num_kept, part.table.num_bad) == (1, 1)
    assert "line 2" in part.bad_lines[0]


REFUSED = {
    "image_on_the_web": (
        user({"type": "image", "url": "https://a.b/c.png"}, ASK),
        "is on the web, where training fet",
    ),
    "image_without_place": ({"messages": MARKED, "images": ["red.png"] * 2}, "2 images beside 1 places for them"),
    "place_without_image": ({"messages": MARKED, "images": []}, "0 images, but 1 tokens stand for one .id 3."),
    "more_places": ({**user(ASK, {"type": "image"}, {"type": "image"}), "image": "red.png"}, "more places for images"),
    "image_damaged_base64": (user({"type": "image", "base64": "a*"}, ASK), "base64 is damaged"),
    "image_no_image": ({**user(ASK), "image": 3}, "an image is a path, a data URL or {bytes, path}, found 3"),
    "image_beside_tokens": ({"input_ids": [1, 2], "image": "red.png"}, "no turn of a user|images beside input_ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_records_whose_images_do_not_go_with_their_texts(here, chat, case):
    record, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        rows_of(here, chat, record)


def test_kinds_of_pictures(here, chat):
    """CMYK and grey are converted; of one that moves the first frame is taken, and told."""
    frames = [Image.new("RGB", (30, 30), (80 * i, 0, 9)) for i in range(3)]
    frames[0].save(here / "moves.gif", save_all=True, append_images=frames[1:])
    (here / "ink.jpg").write_bytes(png((0, 0, 0, 0), (30, 30), "CMYK", "JPEG"))
    (here / "grey.png").write_bytes(png(255, (30, 30), "L"))
    names = "moves.gif", "ink.jpg", "grey.png"
    rows = rows_of(here, chat, *(user({"type": "image", "image": name}, ASK) for name in names))
    pixels = [chat.images.pixels(row.images[0])["pixel_values"] for row in rows]
    assert (pixels[1] - pixels[2]).abs().max() < 0.02
    assert prepared(here / "data.jsonl", chat).table.notes == {"images move, of which the first frame is taken": 1}


def test_a_folder_without_a_processor(tmp_path):
    with pytest.raises(ValueError, match=r"no processor_config.json or preprocessor_config.json, which say how"):
        ImageProcessor(tmp_path)
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"transformers cannot read the processor: .*; fetch its files again"):
        ImageProcessor(tmp_path)


def test_what_begins_an_image_is_none_of_its_tokens(tmp_path, here):
    """The processor of Gemma 3 says another token than the one that stands for rows."""
    found = ChatTokenizer.from_folder(write_gemma3(tmp_path / "gemma3"))
    found.images = ImageProcessor(tmp_path / "gemma3")
    rows_of(here, found, SAME["path"])
    part = prepared(here / "data.jsonl", found)
    assert part.sequences[0].input_ids.count(IMAGE_ID) == part.sequences.image_tokens[0] == GEMMA_TOKENS


def test_margins_and_labels_stand_beside_images(here, chat):
    pair = {"prompt": WHOLE, **SAID, "margin": 0.5}
    rows = rows_of(here, chat, pair, PAIRS["of TRL"], kind="ranked")
    assert [(row.value, len(row.images)) for row in rows] == [(0.5, 1), (0.0, 1)]
    (here / "data.jsonl").write_text(
        "".join(json.dumps({"text": "<image> what", "images": [f"{name}.png"], "label": name}) + "\n"
                for name in ("green", "red"))
    )  # fmt: skip
    labels = LabelNames(("red", "green", "no"), "single_label_classification")
    sources = sources_of([str(here / "data.jsonl")], kind="labelled", labels=labels, images=True)
    part: Any = prepare_sources(sources, chat, 96, False, None)[0]
    assert [(row.value, len(row.images)) for row in part.sequences] == [(1.0, 1), (0.0, 1)]
    assert part.sequences.image_tokens.tolist() == [IMAGE_TOKENS] * 2
    batch: Any = batch_of(part.sequences, [1, 0])
    assert (batch.values, [image.name for image in batch.images]) == ([0.0, 1.0], ["red.png", "green.png"])


# ---- pairs ---------------------------------------------------------------------------------------------------------

SAID = {"chosen": [{"role": "assistant", "content": "disc"}], "rejected": [{"role": "assistant", "content": "no"}]}
ASKED = [{"role": "user", "content": [{"type": "image"}, ASK]}]
WHOLE = [{"role": "user", "content": [{"type": "image", "image": "red.png"}, ASK]}]
PAIRS = {
    "of TRL": {"images": ["red.png"], "prompt": ASKED, **SAID},
    "in the turn": {"prompt": WHOLE, **SAID},
    "two conversations": {side: [*WHOLE, *said] for side, said in SAID.items()},
    "texts": {"prompt": "<image> what is this", "images": ["red.png"], "chosen": "disc", "rejected": "no"},
    "a ranking": {"prompt": WHOLE, "ranked": ["disc", "no"]},
}


def test_pairs_with_images_have_them_in_both_rows(here, chat):
    """However they are written; a text alone beside them. Rows are those of single answers."""
    text = {"prompt": "what is this", "chosen": "disc", "rejected": "no"}
    (alone,) = rows_of(here, chat, SAME["path"])
    rows = rows_of(here, chat, *PAIRS.values(), text, kind="pair")
    for name, row in zip(PAIRS, rows[:-1], strict=True):
        assert (row.first.input_ids, row.first.labels[1:], row.images) == (
            alone.input_ids,
            alone.labels[1:],
            alone.images,
        )
        assert row.second.input_ids[:-2] == row.first.input_ids[:-2], name
        assert (row.wanted, row.value) == (True, 0.0)
    assert (rows[-1].images, rows[-1].input_ids.count(IMAGE_ID)) == ([], 0)
    part = prepared(here / "data.jsonl", chat, kind="pair")
    assert part.sequences.image_tokens.tolist() == [2 * IMAGE_TOKENS] * len(PAIRS) + [0]
    batch: Any = batch_of(part.sequences, [0, 5, 1])
    assert [image.name for image in batch.images] == ["red.png"] * 4
    assert f"{IMAGE_TOKENS} " in marked_text(chat, part.sequences[0])
    for half in hold_out(part, 0.5, seed=0):  # five records ask the same about the same picture
        assert len(half.sequences) in (1, 5)
    wrong = {"prompt": "what is this", **SAID, "rejected": WHOLE[:1]}
    wrong["rejected"] = [{"role": "assistant", "content": WHOLE[0]["content"]}]
    with pytest.raises(ValueError, match="an answer that is compared has images; they stand in the prompt"):
        rows_of(here, chat, wrong, kind="pair")


def test_prompts_with_images(here, chat, folder):
    """They are those of transformers, and stand in a batch as often as they are answered. Judges get no data."""
    asked = {"prompt": WHOLE, "answer": "disc"}, {"prompt": "what is this", "answer": "no"}
    rows = rows_of(here, chat, {**asked[0], "image": DATA_URL, "prompt": ASKED}, *asked, kind="prompt")
    reader = transformers.AutoProcessor.from_pretrained(folder)
    turns = [{"role": "user", "content": [{"type": "image", "image": Image.open(here / "red.png")}, ASK]}]
    wanted = reader.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert rows[0].input_ids == rows[1].input_ids == wanted["input_ids"][0].tolist()
    assert [len(row.images) for row in rows] == [1, 1, 0]
    assert [row.columns["answer"] for row in rows] == ["disc", "disc", "no"]
    assert (rows[0].columns["image"], rows[1].columns["prompt"]) == ("data:image/png;base64", WHOLE)
    part, room = prepared(here / "data.jsonl", chat, kind="prompt"), Room(3, 8)
    assert f"{IMAGE_TOKENS} " in marked_text(chat, part.sequences[0])
    with pytest.raises(ValueError, match=r"2 of 3 records have more tokens of images in 3 completions than .* 47"):
        GlobalBatches.of_parts([part], 400, 0, room, 47)
    batches = GlobalBatches.of_parts([part], 400, 0, room, 2 * 48)
    validation = ValidationBatches.of_parts([part], 400, room, 2 * 48)
    for batch in (*batches.batches(1), *validation):
        assert isinstance(batch, PromptBatch)
        assert len(batch.images) == 6
        assert len(set(batch.images)) == 2


def test_pixels_of_a_pair_are_decoded_once(here, chat, folder, monkeypatch):
    rows_of(here, chat, PAIRS["of TRL"], kind="pair")
    batches = GlobalBatches.of_parts([prepared(here / "data.jsonl", chat, kind="pair")], 96, 0, max_image_tokens=64)
    reader, asked = PixelReader(folder), []
    decode = reader._decode
    monkeypatch.setattr(reader, "_decode", lambda image, target: asked.append(image) or decode(image, target))
    batches.pixels = reader
    try:
        batch: Any = next(batches.batches(1))
        assert batch.columns["pixel_values"].shape == (2, 3, 28, 28)
        assert torch.equal(*batch.columns["pixel_values"])
        assert len(asked) == 1
    finally:
        reader.close()
