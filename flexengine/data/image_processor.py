"""One image at a time through a model's own processor: the tokens that stand for it, and the columns of its pixels.

Files of images come from strangers. What is read of one is bounded before it is decoded: its bytes, its pixels as its
header states them, and the formats whose decoders are asked.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.data.kept_images import KeptImage, kept
from flexengine.data.records import IGNORE, Record, TokenizedRecord
from flexengine.wording import shown

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


MOST_PIXELS = 2**26
"""Pixels of the largest image: decoded it takes 0.2 GiB, and a processor that resizes it some more."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats whose decoders are asked: others run programs, or read files that they name."""
WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
ANIMATED = "images move, of which the first frame is taken"
THUMBNAIL_PIXELS = 160
IMAGE_CPU_S = 20.0
"""CPU seconds that one image may take beside what every record may."""
NO_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_soft_tokens_per_image")
"""Columns of a processor that are of the text, or follow from others."""
NEEDED = "pip install 'flexengine-train[images]'"


class ImageProcessor:
    """A model's processor.

    token: what stands for an image where the chat template has written a record; place_id: its id. row_id: of what
    stands for a row of an image, which may be another one.
    """

    def __init__(self, folder: Path) -> None:
        """Read the processor's files. Raises: ValueError where there are none, or packages are missing."""
        from transformers import AutoProcessor  # noqa: PLC0415 - takes seconds

        if not any(folder.glob("*processor_config.json")):
            raise ValueError(
                f"{folder}: no processor_config.json or preprocessor_config.json, which say how the model's images are"
                " read; fetch the model again, or leave --max-image-tokens out"
            )
        try:
            import PIL  # noqa: F401, PLC0415

            found: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.token, self.row_id = str(found.image_token), int(found.image_token_ids[0])
            self.place_id = int(found.tokenizer.convert_tokens_to_ids(self.token))
        except ImportError as error:
            said = " ".join(str(error).split())[:160]
            raise ValueError(
                f"{folder}: the model's processor needs packages that are missing: {NEEDED} ({said})"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # files of a downloaded folder: they may fail in any way
            said = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{folder}: transformers cannot read the processor: {said}; fetch its files again"
            ) from None
        self._processor, self._folder = found, folder

    def key(self) -> str:
        """A digest of what decides the tokens and pixels of an image, beside the versions of libraries."""
        return processor_key(self._folder)

    def columns(self, image: Image) -> dict[str, Tensor]:
        """What the processor makes of one image, input_ids and all. Raises: ValueError where it refuses it."""
        try:
            made = self._processor(text=[self.token], images=[image], return_tensors="pt", add_special_tokens=False)
        except MemoryError:
            raise
        except Exception as error:  # sizes that a processor does not take: any
            said = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the processor refuses an image of {image.width} x {image.height} pixels: {said}"
            ) from None
        return dict(made.items())

    def pixels(self, image: KeptImage) -> dict[str, Tensor]:
        """The columns of a kept image that a tower reads. Raises: ValueError where it cannot be read again."""
        report_alive(image.name, IMAGE_CPU_S)
        made = self.columns(decoded(image.read(), image.name))
        tensors = {name: column for name, column in made.items() if hasattr(column, "contiguous")}
        return {name: column.contiguous() for name, column in tensors.items() if name not in NO_PIXELS}

    def taken(self, record: Record, notes: Counter[str]) -> tuple[list[KeptImage], list[list[int]]]:
        """The images of a record, and the tokens that stand for each. Raises: ValueError naming one that is broken.

        notes: counts those of which a part alone is taken.
        """
        found, ids = [], []
        for source in record.images:
            report_alive(source.name, IMAGE_CPU_S)
            image, data = kept(source)
            picture = decoded(data, source.name)
            if getattr(picture, "moves", False):
                notes[ANIMATED] += 1
            found.append(image)
            ids.append(self.columns(picture)["input_ids"][0].tolist())
        return found, ids


def processor_key(folder: Path) -> str:
    """See `ImageProcessor.key`: of the processor of a model's folder."""
    import PIL  # noqa: PLC0415

    parts = [path.read_bytes() for path in sorted(folder.glob("*processor_config.json"))]
    return hashlib.sha256(b"".join([PIL.__version__.encode(), *parts])).hexdigest()


def in_own_process(folder: Path) -> ImageProcessor:
    """A processor in a forked process, which would wait for ever for the threads that its parent had."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    return ImageProcessor(folder)


def decoded(data: bytes, name: str) -> Image:
    """An image as transformers reads it: upright, in red, green and blue, of several frames the first.

    Raises: ValueError where it is damaged, of no known format, without or with too many pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415

    Image.MAX_IMAGE_PIXELS = None  # the header's size is looked at here, before anything is decoded
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(image.width, image.height, name)
        if image.mode in WIDE_MODES:
            raise ValueError(f"the image {name} has {image.mode} numbers a pixel; save it with 8 bits a channel")
        moves = getattr(image, "is_animated", False)
        image.load()
        found = ImageOps.exif_transpose(image).convert("RGB")
    except (MemoryError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("the image"):
            raise ValueError(f"the image {name} is damaged: {error}; save it again") from None
        raise
    except UnidentifiedImageError:
        begins = shown(data[:12])
        raise ValueError(
            f"the image {name} is damaged or none of {', '.join(FORMATS)} (it begins with {begins})"
        ) from None
    except Exception as error:  # decoders of damaged files: any
        raise ValueError(f"the image {name} is damaged: {str(error)[:160]}; save it again") from None
    found.moves = moves  # pyright: ignore[reportAttributeAccessIssue]
    return found


def picture_of(image: KeptImage, is_small: bool) -> str:
    """An image as a processor sees it, as a data URL; is_small: for pages.

    Raises: ValueError where it cannot be read again.
    """
    report_alive(image.name, IMAGE_CPU_S)
    picture, out = decoded(image.read(), image.name), io.BytesIO()
    if is_small:
        picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"the image {name} has {width} x {height} pixels; leave it out")
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"the image {name} has {width} x {height} pixels, more than the {MOST_PIXELS >> 20} million that are"
            " decoded; save it smaller"
        )


def expanded(tokens: TokenizedRecord, place_id: int, images: Sequence[Sequence[int]]) -> TokenizedRecord:
    """Tokens with those of each image in the place of its one; they have no loss.

    Raises: ValueError unless there are as many places as images.
    """
    places = tokens.input_ids.count(place_id)
    if places != len(images):
        raise ValueError(
            f"{len(images)} images, but {places} tokens stand for one (id {place_id}) where the chat template has"
            " written the record; write the image's token into no text, or correct the model's chat template"
        )
    ids, labels, waiting = list[int](), list[int](), iter(images)
    for token, label in zip(tokens.input_ids, tokens.labels, strict=True):
        own = next(waiting) if token == place_id else None
        ids.extend([token] if own is None else own)
        labels.extend([label] if own is None else [IGNORE] * len(own))
    return TokenizedRecord(ids, labels)
