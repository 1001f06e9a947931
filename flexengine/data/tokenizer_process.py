"""A model's tokenizer, its chat template and the readers of data in a process of their own, within bounds."""

from __future__ import annotations

import base64
import datetime
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import load_file, save_file

from flexengine.checkpoint.bounded_process import MOST_BYTES, BoundedProcess, report_alive
from flexengine.data.bad_records import Policy
from flexengine.data.image_pixels import joined
from flexengine.data.image_processor import in_own_process, picture_of
from flexengine.data.kept_images import KeptImage
from flexengine.data.masks import TrainOn
from flexengine.data.prepare import make_table
from flexengine.data.sources import LabelNames, Source
from flexengine.data.tokenizer import ChatTokenizer, Turns, encode_with_images, render_prompt

if TYPE_CHECKING:
    from torch import Tensor

IMPORT_CPU_S = 30.0
"""CPU seconds in which transformers is imported."""
BYTES_PER_CPU_S = 2**20
"""What is read in a CPU second of tokenizer.json at least; the largest have 30 MB and take two seconds."""


class TokenizerOptions(NamedTuple):
    """Which tokenizer a process has. folder: of the model; vocab_size: rows of its embedding; see `ChatTokenizer`.

    images: whether records have some, which the folder's processor reads.
    """

    folder: Path
    vocab_size: int
    new_tokens: Sequence[str] = ()
    date: str | None = None
    train_on: TrainOn = "assistant"
    images: bool = False


class TokenizerProcess:
    """A `ChatTokenizer` in a bounded process: what its files say to run may take neither this one's time nor memory.

    Every method raises ValueError where a bound is broken, and whatever that of `ChatTokenizer` raises.
    """

    def __init__(self, options: TokenizerOptions, most_bytes: int = MOST_BYTES) -> None:
        """Fork, and read the tokenizer in the other process. Order: before memory is page-locked."""
        self._process = BoundedProcess(str(options.folder), lambda: _calls(_opened(options)), most_bytes)
        about = self._process.call("about")
        self.num_ids: int = about["num_ids"]
        self.date = None if about["date"] is None else datetime.date.fromisoformat(about["date"])
        self.bos_id: int | None = about["bos_id"]
        self.eos_id: int | None = about["eos_id"]
        self._own_files: dict[str, str] = about["own_files"]

    def make_table(self, source: Source, cache: Path | None, scratch: Path, bad_records: Policy) -> Path:
        """See `prepare.make_table`."""
        place = None if cache is None else str(cache)
        return Path(self._process.call("make_table", asdict(source), place, str(scratch), bad_records))

    def encode_prompt(self, text: str | Turns, raw: bool = False, thinking: bool | None = None) -> list[int]:
        """See `ChatTokenizer.encode_prompt`."""
        return self._process.call("encode_prompt", text, raw, thinking)

    def encode_with_images(
        self, said: str | Turns, images: Sequence[str] = (), thinking: bool | None = None, raw: bool = False
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Ids of a message or turns about images, and the columns of their pixels: see `encode_with_images`."""
        with tempfile.TemporaryDirectory(prefix="flexengine-pixels") as scratch:
            asked = said, list(images), str(Path.cwd()), thinking, raw
            ids, count = self._process.call("encode_with_images", *asked, scratch)
            return ids, joined([load_file(Path(scratch, str(i))) for i in range(count)])

    def encode_turns(self, turns: Turns, thinking: bool | None = None) -> tuple[list[int], dict[str, Tensor]]:
        """Ids of turns to be answered, and the columns of their images' pixels, where turns have images as parts."""
        if any(isinstance(turn["content"], list) for turn in turns):
            return self.encode_with_images(turns, thinking=thinking)
        return self.encode_prompt(turns, thinking=thinking), {}

    def picture_of(self, image: KeptImage, is_small: bool = False) -> str:
        """See `picture_of`."""
        data = base64.b64encode(image.data).decode()
        return self._process.call("picture_of", image.name, image.placed, data, is_small)

    def render_prompt(self, turns: Turns, places: bool = False) -> str:
        """See `render_prompt`."""
        return self._process.call("render_prompt", turns, None, places)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `ChatTokenizer.decode`."""
        return self._process.call("decode", list(ids), skip_special_tokens)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """See `ChatTokenizer.stop_ids`."""
        return frozenset(self._process.call("stop_ids"))

    def own_files(self) -> dict[str, str]:
        """See `ChatTokenizer.own_files`."""
        return dict(self._own_files)

    def close(self) -> None:
        """End the process."""
        self._process.close()


# ---- in the other process -----------------------------------------------------------------------------------------


def _opened(options: TokenizerOptions) -> ChatTokenizer:
    report_alive("", IMPORT_CPU_S)
    from transformers import AutoTokenizer  # noqa: F401, PLC0415 - takes seconds, which are none of the tokenizer's

    size = sum(path.stat().st_size for path in options.folder.glob("tokenizer.*") if path.is_file())
    report_alive("", size / BYTES_PER_CPU_S)
    tokenizer = ChatTokenizer.from_folder(options.folder)
    tokenizer.fit(options.vocab_size, options.new_tokens)
    tokenizer.pin_date(options.date)
    tokenizer.train_on = options.train_on
    tokenizer.images = in_own_process(options.folder) if options.images else None
    return tokenizer


def _calls(tokenizer: ChatTokenizer) -> Mapping[str, Callable[..., Any]]:
    """The functions of the process, of JSON values to JSON values."""

    def about() -> dict[str, Any]:
        date = None if tokenizer.date is None else tokenizer.date.isoformat()
        bos, eos = map(tokenizer.tokenizer.token_to_id, (tokenizer.bos_token, tokenizer.eos_token))
        ids = {"num_ids": tokenizer.num_ids, "bos_id": bos, "eos_id": eos}
        return {**ids, "date": date, "own_files": tokenizer.own_files()}

    def table(source: dict[str, Any], cache: str | None, scratch: str, bad_records: Policy) -> str:
        place = None if cache is None else Path(cache)
        source["columns"] = tuple(tuple(pair) for pair in source["columns"])
        source["labels"] = LabelNames(tuple(source["labels"][0]), source["labels"][1])
        return str(make_table(Source(**source), tokenizer, place, Path(scratch), bad_records))

    def with_images(
        said: str | Turns, images: list[str], folder: str, thinking: bool | None, raw: bool, scratch: str
    ) -> tuple[list[int], int]:
        ids, found = encode_with_images(tokenizer, said, images, Path(folder), thinking, raw=raw)
        assert tokenizer.images is not None, "the tokenizer has a processor"
        for i, image in enumerate(found):
            save_file(tokenizer.images.pixels(image), Path(scratch, str(i)))
        return ids, len(found)

    def picture(name: str, placed: list[Any] | None, data: str, is_small: bool) -> str:
        kept = KeptImage(name, None if placed is None else tuple(placed), base64.b64decode(data))
        return picture_of(kept, is_small)

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens)

    def stop_ids() -> list[int]:
        return sorted(tokenizer.stop_ids)

    calls = {"about": about, "make_table": table, "decode": decode, "stop_ids": stop_ids}
    calls |= {"encode_with_images": with_images, "picture_of": picture}
    prompts = {"encode_prompt": tokenizer.encode_prompt, "render_prompt": partial(render_prompt, tokenizer)}
    return {**calls, **prompts}
