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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.checkpoint.tokenizer_files import add_tokens, read_config, read_tokenizer
from flexengine.data.bad_records import BadRecords
from flexengine.data.masks import AddedTokens, LeftOutError, Marked, Rendered, TrainOn, mark
from flexengine.data.model_folder import TEMPLATE_FILE, ends_of_text, find_templates, read_special_tokens
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord
from flexengine.data.templates import ChatTemplate, fallback_template, variants_of
from flexengine.wording import shown

logger = logging.getLogger(__name__)

BATCH_CHARACTERS, BATCH_RECORDS = 2**21, 2**14
"""Text and records that are tokenized at once: enough for every core, and small beside a host budget."""
LONGEST_TEXT = 2**23
"""Characters of the longest record: a tokenizer takes about 100 bytes for each, so this is a GiB at most."""
SLOWEST_CHARACTERS_PER_S = 2**17
"""Of what is tokenized in a CPU second: the slowest tokenizers, without a split into words, take two to ten times."""

Batch = list[tuple[Record, Marked | None]]
"""Records with their texts and trained spans; None for those of tokens."""


Turns = Sequence[Mapping[str, str]]
"""Turns of a conversation, each with role and content."""


def _messages_of(said: str | Turns) -> list[Message]:
    """A user's message, or turns, as templates read them."""
    return [Message("user", said)] if isinstance(said, str) else [Message(t["role"], t["content"]) for t in said]


def _named(record: Record, error: ValueError) -> ValueError:
    """The error, with the place of the record."""
    return ValueError(f"{record.where}: {error}" if record.where else str(error))


class ChatTokenizer:
    """The tokenizer and the chat template of one model folder.

    train_on says what has a loss in conversations. left_out counts records that were not encoded, by reason, and notes
    counts what else is worth telling. num_ids: ids that the model has rows for, by default all; a record
    with another one is refused.
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
        self._around = ends_of_text(tokenizer) if around is None else around
        self._end = self._id_of_end()
        self.has_own_template = template is not None
        if template is None:
            unnamed = "" if eos_token or self._end is None else tokenizer.id_to_token(self._end)
            begins = bool(bos_token) and tokenizer.token_to_id(bos_token) in self._around[0]
            template = fallback_template(begins, unnamed or "")
        variables = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._template = ChatTemplate(template, variables, tool_template)
        self.train_on: TrainOn = "assistant"
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
        ids = (self._end, *map(self.tokenizer.token_to_id, closing))
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
        parts += [[list(ids) for ids in self._around], self._end, self.num_ids]
        parts += sorted(template.variables.items())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_prompt(self, text: str | Turns, raw: bool = False) -> list[int]:
        """Ids of a user's message or of turns, for the assistant to answer; raw: of a text to go on with, unended."""
        if raw and isinstance(text, str):
            return self._begun(self._encode([text])[0].ids)
        return self._encode([render_prompt(self, text)])[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def own_files(self) -> dict[str, str]:
        """Files that an export needs beside those of the model's folder: the template, where that had none."""
        return {} if self.has_own_template else {TEMPLATE_FILE: self.template}

    # ---- records to ids ---------------------------------------------------------------------------------------

    def encode_record(self, record: Record) -> TokenizedRecord:
        """Ids and labels of one record. Raises ValueError where encode_records leaves it out."""
        found = self._mark(record)
        encoding = self._encode([found.text], record.text is None)[0] if found else None
        tokens = self._tokenized(record, found, encoding)
        self._check_ids(tokens)
        return tokens

    def encode_records(self, records: Iterable[Record], bad: BadRecords | None = None) -> Iterator[TokenizedRecord]:
        """Ids and labels of all records but those left out, in order; many are tokenized at once, on all cores.

        bad: takes the records that cannot be encoded; without it the first of them raises ValueError.
        Loss is on what the assistant says and on the token that ends it, or on all of a plain text. A token that only
        overlaps an answer, such as the space before its first word, counts as part of it.
        """
        bad = bad or BadRecords()
        with ThreadPoolExecutor(1) as executor:  # while one batch is tokenized, the templates of the next are rendered
            running: tuple[Batch, Future[list[TokenizedRecord]]] | None = None
            for batch in self._marked_batches(records, bad):
                following = batch, executor.submit(self._encode_batch, batch)
                yield from self._checked(*running, bad) if running else ()
                running = following
            yield from self._checked(*running, bad) if running else ()

    def _checked(
        self, batch: Batch, encoded: Future[list[TokenizedRecord]], bad: BadRecords
    ) -> Iterator[TokenizedRecord]:
        """The tokens of a batch, without records that use a token for which the model has no row."""
        if batch:
            num_characters = sum(len(found.text) for _, found in batch if found)
            report_alive(batch[0][0].where, num_characters / SLOWEST_CHARACTERS_PER_S)
        for (record, _), tokens in zip(batch, encoded.result(), strict=True):
            try:
                self._check_ids(tokens)
            except ValueError as error:
                bad.leave_out(_named(record, error))
            else:
                yield tokens

    def _marked_batches(self, records: Iterable[Record], bad: BadRecords) -> Iterator[Batch]:
        """Records with their text and spans, about BATCH_CHARACTERS at a time, without those that are left out."""
        batch: Batch = []
        num_characters = 0
        for record in records:
            report_alive(record.where)
            try:
                found = self._mark(record)
                if found and len(found.text) > LONGEST_TEXT:
                    size = f"a text of {len(found.text)} characters"
                    raise ValueError(f"{size}; the longest is {LONGEST_TEXT}: split it into several records")
            except LeftOutError as error:
                self.left_out[str(error)] += 1
                continue
            except ValueError as error:
                bad.leave_out(_named(record, error))
                continue
            batch.append((record, found))
            num_characters += len(found.text) if found else BATCH_CHARACTERS // BATCH_RECORDS
            if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                yield batch
                batch, num_characters = [], 0
        yield batch

    def _encode_batch(self, batch: Batch) -> list[TokenizedRecord]:
        texts = [found.text for record, found in batch if record.text is not None and found]
        chats = [found.text for record, found in batch if record.messages and found]
        encoded = {True: iter(self._encode(texts, offsets=False)), False: iter(self._encode(chats))}
        return [
            self._tokenized(record, found, next(encoded[record.text is not None]) if found else None)
            for record, found in batch
        ]

    def _mark(self, record: Record) -> Marked | None:
        """The record as text with its trained spans; None for one of tokens."""
        if record.tokens is not None:
            return None
        if record.text is not None:
            if self._end is None:
                self.notes["texts have no token that ends them, so that the model may not learn to stop"] += 1
                self._warn_once(
                    "the tokenizer names no token that ends a text, so texts are trained without one; name it as"
                    " eos_token in tokenizer_config.json of the model's folder"
                )
            return Marked(record.text, [])
        found = self._mark_conversation(record)
        if found.num_rewritten:
            self.notes["answers are context only, since the chat template rewrites them in later turns"] += (
                found.num_rewritten
            )
            self._warn_once(
                "the chat template rewrites earlier turns; of such a conversation only the last are trained"
            )
        if not found.is_ended:
            self.notes[
                "conversations end without a token that ends a turn, so that the model may not learn to stop"
            ] += 1
        self._warn_of_ends(found)
        if not self.has_own_template:
            self._warn_once(
                f"the model has no chat template; conversations are written with this one, which is exported with the "
                f"trained model (to use another one put {TEMPLATE_FILE} into the model's folder):\n{self.template}"
            )
        return found

    def _mark_conversation(self, record: Record) -> Marked:
        def render(messages: Sequence[Message], add_generation_prompt: bool) -> Rendered:
            return self._template.render(messages, add_generation_prompt, record)

        marks, refused = self._template.marks_generation(record), None
        for variant in variants_of(record):
            try:
                return mark(variant, render, marks, self._added, self.train_on)
            except LeftOutError:
                raise
            except ValueError as error:
                refused = refused or error
        assert refused is not None, "every record has a variant"
        raise refused

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            logger.warning(text)
        self._warned.add(text)

    def _encode(self, texts: list[str], offsets: bool = True) -> list[Encoding]:
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

    def _tokenized(self, record: Record, found: Marked | None, encoding: Encoding | None) -> TokenizedRecord:
        if record.tokens is not None or found is None or encoding is None:
            assert record.tokens is not None, "conversations and texts are encoded"
            return record.tokens
        if record.text is not None:
            ids = self._ended(self._begun(encoding.ids))
            return TokenizedRecord(ids, ids)
        ids, offsets = encoding.ids, encoding.offsets
        labels = [IGNORE] * len(ids)
        for span in found.spans:
            first = bisect_right(offsets, span.start, key=lambda offset: offset[1])
            last = bisect_left(offsets, span.end, key=lambda offset: offset[0])
            if span.start < span.end:
                labels[first:last] = ids[first:last]
        return TokenizedRecord(ids, labels)

    def _check_ids(self, tokens: TokenizedRecord) -> None:
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

    def _begun(self, ids: list[int]) -> list[int]:
        """A text's ids with those that the tokenizer puts before it; a text may have them already."""
        before = list(self._around[0])
        return ids if ids[: len(before)] == before else before + ids

    def _ended(self, ids: list[int]) -> list[int]:
        """A text's ids with those that the tokenizer puts behind it, and its end, each once."""
        end = [] if self._end is None else [self._end]
        for behind in (list(self._around[1]), end):
            if ids[len(ids) - len(behind) :] != behind:
                ids = ids + behind
        return ids


def render_prompt(tokenizer: ChatTokenizer, said: str | Turns) -> str:
    """A user's message or turns as the chat template writes them, for the assistant to answer."""
    return tokenizer._template.render(_messages_of(said), add_generation_prompt=True).text
