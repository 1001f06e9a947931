"""Tokenizer of a model folder: text to ids, conversations to ids with the targets marked.

Ids come from tokenizer.json as it is (or from what transformers makes of tokenizer.model), the text of conversations
from the folder's chat template. Around a plain text stand the ids that transformers puts there, and the token that ends
a text.
"""

import datetime
import functools
import hashlib
import json
import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from flexengine.checkpoint.tokenizer_files import add_tokens, read_config, read_tokenizer
from flexengine.data.image_places import MARK, PLACE, ImageSource
from flexengine.data.image_processor import ImageProcessor, expanded
from flexengine.data.kept_images import KeptImage
from flexengine.data.masks import AddedTokens, LeftOutError, Marked, Span, TrainOn, mark
from flexengine.data.model_folder import TEMPLATE_FILE, TextEnds, ends_of_text, find_templates, read_special_tokens
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord, parse_record
from flexengine.data.templates import ChatTemplate, fallback_template, variants_of
from flexengine.wording import shown

logger = logging.getLogger(__name__)

REWRITTEN = "answers are context only, since the chat template rewrites them in later turns"
ENDLESS = "{}, so that the model may not learn to stop"
"""What is counted and told of records beside their tokens."""

Turns = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with role and content."""


def _messages_of(said: str | Turns) -> list[Message]:
    """A user's message, or turns, as templates read them."""
    return [Message("user", said)] if isinstance(said, str) else [Message(t["role"], t["content"]) for t in said]


THINKING_SWITCH = "enable_thinking"
"""What templates of models call it that may think before they answer."""


class ChatTokenizer:
    """The tokenizer and the chat template of one model folder.

    train_on says what has a loss in conversations. left_out counts records that were not encoded, by reason, and notes
    counts what else is worth telling. num_ids: ids that the model has rows for, by default all; a record
    with another one is refused. images: the model's processor, where images are trained with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: dict[str, str] | None = None,
        tool_template: str | None = None,
        *,
        around: tuple[Sequence[int], Sequence[int]] | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """special_tokens: further variables that templates may read, such as {"pad_token": "<pad>"}.

        tool_template: of conversations with tools, where a model has a template of its own for them. around: ids before
        and after a text, by default those of the tokenizer. ends: ids that end what the model writes.
        """
        tokenizer.no_truncation()  # tokenizer.json stores both as they were last used: a text would be cut silently
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.bos_token, self.eos_token, self._ends = bos_token, eos_token, tuple(ends)
        before, after = ends_of_text(tokenizer) if around is None else around
        self._around = TextEnds(tuple(before), tuple(after), self._id_of_end())
        self.has_own_template = template is not None
        if template is None:
            end = self._around.end
            unnamed = "" if eos_token or end is None else tokenizer.id_to_token(end)
            begins = bool(bos_token) and tokenizer.token_to_id(bos_token) in self._around.before
            template = fallback_template(begins, unnamed or "")
        variables = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._template = ChatTemplate(template, variables, tool_template)
        self.train_on: TrainOn = "assistant"
        self.images: ImageProcessor | None = None
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._know_tokens()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTokenizer":
        """Reads tokenizer.json (or tokenizer.model), its options, special tokens and templates, as far as present.

        Raises ValueError when there is no tokenizer, it is unreadable, or the template does not parse.
        """
        folder = Path(folder)
        tokenizer = read_tokenizer(folder)
        templates = find_templates(folder, read_config(folder / "tokenizer_config.json"))
        special = read_special_tokens(folder, tokenizer)
        variables = dict(special.named)
        bos, eos = (variables.pop(role, "") for role in ("bos_token", "eos_token"))
        around = special.before, special.after
        own, tool = templates.get("default"), templates.get("tool_use")
        return cls(tokenizer, own, bos, eos, variables, tool, around=around, ends=special.ends)

    def _id_of_end(self) -> int | None:
        """The token after a text: the tokenizer's own end, or the first of the model's; None where neither is named."""
        own = self.tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        there = (token for token in self._ends if self.tokenizer.id_to_token(token) is not None)
        return next(there, None) if own is None else own

    def _know_tokens(self) -> None:
        """Look again at which tokens there are."""
        added = sorted(self.tokenizer.get_added_tokens_decoder().values(), key=lambda token: -len(token.content))
        self._added = AddedTokens([t.content for t in added], [t.content for t in added if t.special])
        self.__dict__.pop("max_id", None)
        self.num_ids = self.max_id + 1

    def fit(self, vocab_size: int, new_tokens: Sequence[str] = ()) -> None:
        """Add special tokens, and have records refused that use an added token for which the model has no row.

        Warns of such tokens. Order: before anything is encoded. Raises: ValueError where other tokens lack rows.
        """
        if new_tokens:
            add_tokens(self.tokenizer, new_tokens)
            self._know_tokens()
        if self.max_id < vocab_size:
            return
        added = self.tokenizer.get_added_tokens_decoder()
        beyond = f"the tokenizer has ids up to {self.max_id}, but the model's vocab_size is {vocab_size}"
        if not all(token in added for token in range(vocab_size, self.max_id + 1)):
            raise ValueError(
                f"{beyond}; tokenizer.json and config.json are of different models: fetch both again, or give"
                " --resize-embeddings, which adds rows for all tokens"
            )
        self.num_ids = vocab_size
        logger.warning("%s: records with an added token beyond it are refused; --resize-embeddings adds rows", beyond)

    @property
    def date(self) -> datetime.date | None:
        """The day that the chat template writes; None where it writes none."""
        return self._template.date if self._template.reads_date else None

    def pin_date(self, date: str | None) -> None:
        """Have chat templates that write today's date write this one, YYYY-MM-DD; None leaves it today."""
        if date is not None:
            self._template.date = datetime.date.fromisoformat(date)

    @property
    def template(self) -> str:
        """The text of the chat template."""
        return self._template.text

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated answer: those at which transformers' generate stops.

        Where the model names none, the token that ends a text and the one that closes an assistant turn.
        """
        if self._ends:
            return frozenset(self._ends)
        turn = self._template.render([Message("user", "a"), Message("assistant", "b")]).text
        closing = [t for t in self._added.special if turn.rstrip().endswith(t)]
        ids = (self._around.end, *map(self.tokenizer.token_to_id, closing))
        return frozenset(i for i in ids if i is not None)

    def _warn_of_ends(self, found: Marked) -> None:
        """Tell of a conversation that ends in a token at which generation goes on."""
        text = found.text[: found.spans[-1].end].rstrip() if found.spans and self._ends else ""
        closing = next((token for token in self._added.special if text.endswith(token)), None)
        if closing is not None and self.tokenizer.token_to_id(closing) not in self._ends:
            self._warn_once(
                f"conversations end with {closing}, which is none of the ends that generation_config.json (or"
                f" config.json) names, so answers go on after it; add its id {self.tokenizer.token_to_id(closing)} to"
                " eos_token_id there"
            )

    @functools.cached_property
    def max_id(self) -> int:
        """The largest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def key(self) -> str:
        """A digest of all that decides which tokens a record becomes and which of them are trained."""
        template = self._template
        parts = [self.tokenizer.to_str(), template.text, template.tool_text, self.train_on, str(self.date)]
        parts += [self._around, self.num_ids]
        parts += sorted(template.variables.items())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_prompt(self, text: str | Turns, raw: bool = False, thinking: bool | None = None) -> list[int]:
        """Ids of a message or turns to be answered; raw: of a text to go on with, unended; else see `render_prompt`."""
        if raw and isinstance(text, str):
            return self._around.begun(self.encode_texts([text])[0].ids)
        return self.encode_texts([render_prompt(self, text, thinking)])[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def own_files(self) -> dict[str, str]:
        """Files that an export needs beside those of the model's folder: the template, where that had none."""
        return {} if self.has_own_template else {TEMPLATE_FILE: self.template}

    # ---- records to ids ---------------------------------------------------------------------------------------

    def encode_record(self, record: Record) -> TokenizedRecord:
        """Ids and labels of one record. Raises ValueError where `encode_records` leaves it out."""
        found = self.mark(record)
        encoding = self.encode_texts([found.text], record.text is None)[0] if found else None
        tokens = self.tokenized(record, found, encoding)
        self.check_ids(tokens)
        return tokens

    def mark(self, record: Record) -> Marked | None:
        """The record as text with its trained spans; None for one of tokens."""
        if record.tokens is not None:
            return None
        if record.text is not None:
            if self._around.end is None:
                self.notes[ENDLESS.format("texts have no token that ends them")] += 1
                self._warn_once(
                    "the tokenizer names no token that ends a text, so texts are trained without one; name it as"
                    " eos_token in tokenizer_config.json of the model's folder"
                )
            return Marked(record.text, [])
        found = self._mark_conversation(record)
        if found.num_rewritten:
            self.notes[REWRITTEN] += found.num_rewritten
            self._warn_once(
                "the chat template rewrites earlier turns; of such a conversation only the last are trained"
            )
        if not found.is_ended:
            self.notes[ENDLESS.format("conversations end without a token that ends a turn")] += 1
        self._warn_of_ends(found)
        if not self.has_own_template:
            self._warn_once(
                f"the model has no chat template; conversations are written with this one, which is exported with the "
                f"trained model (to use another one put {TEMPLATE_FILE} into the model's folder):\n{self.template}"
            )
        return found

    def _mark_conversation(self, record: Record) -> Marked:
        render = functools.partial(self._template.render, record=record)
        marks, refused = self._template.marks_generation(record), None
        for variant in variants_of(record, self.images is not None):
            try:
                return mark(variant, render, marks, self._added, self.train_on)
            except ValueError as error:
                if isinstance(error, LeftOutError) and self.images is None:
                    raise
                refused = refused or error
        raise refused or AssertionError("every record has a variant")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            logger.warning(text)
        self._warned.add(text)

    def encode_texts(self, texts: list[str], offsets: bool = True) -> list[Encoding]:
        """Encodings of texts, without the tokens that the tokenizer puts around a text."""
        encode = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the Rust side raises a bare Exception, and panics as a BaseException
            raise ValueError(
                f"the tokenizer cannot encode {shown(max(texts, key=len))}: {str(error)[:300]}; fetch tokenizer.json "
                "of the model again, or leave such records out"
            ) from None

    def tokenized(self, record: Record, found: Marked | None, encoding: Encoding | None) -> TokenizedRecord:
        """Ids and labels of a record from its marked text and the encoding of that; it may have tokens already."""
        if record.tokens is not None or found is None or encoding is None:
            assert record.tokens is not None, "conversations and texts are encoded"
            return record.tokens
        if record.text is not None:
            ids = self._around.ended(self._around.begun(encoding.ids))
            return TokenizedRecord(ids, ids)
        return TokenizedRecord(encoding.ids, labels_of(encoding, found.spans))

    def check_ids(self, tokens: TokenizedRecord) -> None:
        """Raise ValueError for an id that the tokenizer, or the model, does not have."""
        largest = max(tokens.input_ids, default=0)
        if largest > self.max_id:
            raise ValueError(f"input_ids hold {largest}, the tokenizer's largest id is {self.max_id}; tokenize again")
        if largest >= self.num_ids:
            raise ValueError(
                f"the token {shown(self.tokenizer.id_to_token(largest))} has id {largest}, but the model's embedding"
                f" has {self.num_ids} rows; give --resize-embeddings, which adds rows, leave such records out, or fetch"
                " tokenizer.json and config.json of one model"
            )


def labels_of(encoding: Encoding, spans: Sequence[Span]) -> list[int]:
    """The ids that have a loss, and IGNORE for others.

    A token that only overlaps a span, such as the space before an answer's first word, counts as part of it.
    """
    ids, offsets = encoding.ids, encoding.offsets
    labels = [IGNORE] * len(ids)
    for span in spans:
        first = bisect_right(offsets, span.start, key=lambda offset: offset[1])
        last = bisect_left(offsets, span.end, key=lambda offset: offset[0])
        if span.start < span.end:
            labels[first:last] = ids[first:last]
    return labels


def encode_with_images(
    tokenizer: ChatTokenizer,
    said: str | Turns,
    images: Sequence[str],
    folder: Path,
    thinking: bool | None = None,
    *,
    raw: bool = False,
) -> tuple[list[int], list[KeptImage]]:
    """Ids of a user's message or turns about images, and the images; raw: of a text to go on with, unended.

    images: paths, relative to the folder, or data URLs of those that stand where texts say `<image>` or before the
    first one; turns may have others as parts. In a raw text the model's own token may stand for one, too.
    Raises: ValueError as of records with images, and as `render_prompt`.
    """
    assert tokenizer.images is not None, "the tokenizer has a processor"
    if raw and isinstance(said, str):
        text = said.replace(tokenizer.images.token, MARK)
        record = parse_record({"text": text, "images": list(images)}, "in the prompt", folder=folder)
        return _with_own_tokens(tokenizer, record, (record.text or "").replace(PLACE, tokenizer.images.token), True)
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    given = {"messages": turns, **({"images": list(images)} if images else {})}
    record = parse_record(given, "in the prompt", folder=folder)
    return encode_asked(tokenizer, replace(record, template_options=_thinks(tokenizer, thinking)))


def encode_asked(tokenizer: ChatTokenizer, record: Record) -> tuple[list[int], list[KeptImage]]:
    """Ids of a conversation with images for the assistant to answer, and the images. Raises: see `expanded`."""
    return _with_own_tokens(tokenizer, record, _rendered(tokenizer, next(variants_of(record, in_parts=True))))


def _with_own_tokens(
    tokenizer: ChatTokenizer, record: Record, text: str, begun: bool = False
) -> tuple[list[int], list[KeptImage]]:
    """Ids of a text in which a token stands for each image of a record, and the images. begun: as a text begins."""
    assert tokenizer.images is not None, "the tokenizer has a processor"
    ids = tokenizer.encode_texts([text])[0].ids
    ids = tokenizer._around.begun(ids) if begun else ids
    found, own = tokenizer.images.taken(record, tokenizer.notes)
    return expanded(TokenizedRecord(ids, ids), tokenizer.images.place_id, own).input_ids, found


def _rendered(tokenizer: ChatTokenizer, record: Record) -> str:
    return tokenizer._template.render(record.messages, add_generation_prompt=True, record=record).text


def render_prompt(
    tokenizer: ChatTokenizer, said: str | Turns, thinking: bool | None = None, places: bool = False
) -> str:
    """A user's message or turns as the chat template writes them, for the assistant to answer.

    thinking: whether the assistant thinks first; None leaves it to the template. places: images, which follow, stand
    where texts say `<image>`. Raises: ValueError for a template that has no such switch.
    """
    record = Record(tuple(_messages_of(said)), template_options=_thinks(tokenizer, thinking))
    if places and any(MARK in (message.content or "") for message in record.messages):
        marked = [replace(m, content=m.content and m.content.replace(MARK, PLACE)) for m in record.messages]
        record = next(variants_of(replace(record, messages=tuple(marked), images=(ImageSource(MARK),)), in_parts=True))
    return _rendered(tokenizer, record)


def _thinks(tokenizer: ChatTokenizer, thinking: bool | None) -> dict[str, Any]:
    if thinking is not None and THINKING_SWITCH not in tokenizer.template:
        raise ValueError(f"the model's chat template has no {THINKING_SWITCH}; leave --thinking out")
    return {} if thinking is None else {THINKING_SWITCH: thinking}
