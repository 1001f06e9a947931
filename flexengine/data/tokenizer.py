"""Tokenizer of a model folder: text to ids, conversations to ids with the targets marked.

Ids come from tokenizer.json as it is (or from what transformers makes of tokenizer.model), the text of conversations
from the folder's chat template.
"""

import functools
import hashlib
import json
import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from flexengine.data.bad_records import BadRecords
from flexengine.data.masks import AddedTokens, LeftOutError, Marked, Rendered, TrainOn, mark
from flexengine.data.model_folder import TEMPLATE_FILE, find_templates, read_config, read_tokenizer, token_text
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord
from flexengine.data.templates import FALLBACK_TEMPLATE, ChatTemplate, variants_of
from flexengine.wording import shown

logger = logging.getLogger(__name__)

BATCH_CHARACTERS, BATCH_RECORDS = 2**21, 2**14
"""Text and records that are tokenized at once: enough for every core, and small beside a host budget."""
LONGEST_TEXT = 2**23
"""Characters of the longest record: a tokenizer takes about 100 bytes for each, so this is a GiB at most."""


class ChatTokenizer:
    """The tokenizer and the chat template of one model folder.

    train_on says what has a loss in conversations. left_out counts records that were not encoded, by reason, and notes
    counts what else is worth telling.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: dict[str, str] | None = None,
        tool_template: str | None = None,
    ) -> None:
        """special_tokens: further variables that templates may read, such as {"pad_token": "<pad>"}.

        tool_template: of conversations with tools, where a model has a template of its own for them.
        """
        tokenizer.no_truncation()  # tokenizer.json stores both as they were last used: a text would be cut silently
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.has_own_template = template is not None
        variables = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._template = ChatTemplate(FALLBACK_TEMPLATE if template is None else template, variables, tool_template)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.train_on: TrainOn = "assistant"
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        added = sorted(tokenizer.get_added_tokens_decoder().values(), key=lambda token: -len(token.content))
        self._added = AddedTokens([t.content for t in added], [t.content for t in added if t.special])
        self._ends = tuple(tokenizer.token_to_id(token) if token else None for token in (bos_token, eos_token))
        self._warned: set[str] = set()

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTokenizer":
        """Reads tokenizer.json (or tokenizer.model), tokenizer_config.json and chat_template.jinja, as far as present.

        Raises ValueError when there is no tokenizer, it is unreadable, or the template does not parse.
        """
        tokenizer = read_tokenizer(Path(folder))
        config = read_config(Path(folder) / "tokenizer_config.json")
        special = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
        bos, eos = (special.pop(key, "") for key in ("bos_token", "eos_token"))
        variables = {key: text for key, text in special.items() if text}
        templates = find_templates(Path(folder), config)
        return cls(tokenizer, templates.get("default"), bos, eos, variables, templates.get("tool_use"))

    @property
    def template(self) -> str:
        """The text of the chat template."""
        return self._template.text

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated answer: the end-of-sequence token and the token that closes an assistant turn."""
        turn = self._template.render([Message("user", "a"), Message("assistant", "b")]).text
        closing = [t for t in self._added.special if turn.rstrip().endswith(t)]
        ids = (self.tokenizer.token_to_id(token) for token in (self.eos_token, *closing) if token)
        return frozenset(i for i in ids if i is not None)

    @functools.cached_property
    def max_id(self) -> int:
        """The largest token id; a model needs vocab_size > max_id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def key(self) -> str:
        """A digest of all that decides which tokens a record becomes and which of them are trained."""
        template = self._template
        texts = (self.tokenizer.to_str(), template.text, template.tool_text, self.train_on)
        parts = [*texts, *sorted(template.variables.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of one user message, ready for the assistant to answer."""
        prompt = self._template.render([Message("user", text)], add_generation_prompt=True).text
        return self._encode([prompt])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def own_files(self) -> dict[str, str]:
        """Files that an export needs beside those of the model's folder: the template, where that had none."""
        return {} if self.has_own_template else {TEMPLATE_FILE: self.template}

    # ---- records to ids ---------------------------------------------------------------------------------------

    def encode_record(self, record: Record) -> TokenizedRecord:
        """Ids and labels of one record. Raises ValueError where encode_records leaves it out."""
        found = self._mark(record)
        return self._tokenized(record, found, self._encode([found.text], record.text is not None)[0] if found else None)

    def encode_records(self, records: Iterable[Record], bad: BadRecords | None = None) -> Iterator[TokenizedRecord]:
        """Ids and labels of all records but those left out, in order; many are tokenized at once, on all cores.

        bad: takes the records that cannot be encoded; without it the first of them raises ValueError.

        Loss is on what the assistant says and on the token that ends it, or on all of a plain text. A token that only
        overlaps an answer, such as the space before its first word, counts as part of it.
        """
        with ThreadPoolExecutor(1) as executor:  # while one batch is tokenized, the templates of the next are rendered
            running: Future[list[TokenizedRecord]] | None = None
            for batch in self._marked_batches(records, bad or BadRecords()):
                following = executor.submit(self._encode_batch, batch)
                yield from running.result() if running else ()
                running = following
            yield from running.result() if running else ()

    def _marked_batches(
        self, records: Iterable[Record], bad: BadRecords
    ) -> Iterator[list[tuple[Record, Marked | None]]]:
        """Records with their text and spans, about BATCH_CHARACTERS at a time, without those that are left out."""
        batch: list[tuple[Record, Marked | None]] = []
        num_characters = 0
        for record in records:
            try:
                found = self._mark(record)
                if found and len(found.text) > LONGEST_TEXT:
                    size = f"a text of {len(found.text)} characters"
                    raise ValueError(f"{size}; the longest is {LONGEST_TEXT}: split it into several records")
            except LeftOutError as error:
                self.left_out[str(error)] += 1
                continue
            except ValueError as error:
                bad.leave_out(ValueError(f"{record.where}: {error}" if record.where else str(error)))
                continue
            batch.append((record, found))
            num_characters += len(found.text) if found else BATCH_CHARACTERS // BATCH_RECORDS
            if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
                yield batch
                batch, num_characters = [], 0
        yield batch

    def _encode_batch(self, batch: list[tuple[Record, Marked | None]]) -> list[TokenizedRecord]:
        texts = [found.text for record, found in batch if record.text is not None and found]
        chats = [found.text for record, found in batch if record.messages and found]
        encoded = {True: iter(self._encode(texts, plain=True)), False: iter(self._encode(chats))}
        return [
            self._tokenized(record, found, next(encoded[record.text is not None]) if found else None)
            for record, found in batch
        ]

    def _mark(self, record: Record) -> Marked | None:
        """The record as text with its trained spans; None for one of tokens."""
        if record.tokens is not None:
            self._check_ids(record.tokens)
            return None
        if record.text is not None:
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

    def _encode(self, texts: list[str], plain: bool = False) -> list[Encoding]:
        """Encodings of texts, plain ones with the tokens that the tokenizer puts around a text (and no offsets)."""
        encode = self.tokenizer.encode_batch_fast if plain else self.tokenizer.encode_batch
        try:
            return encode(texts, add_special_tokens=plain)
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
            return self._with_ends(encoding.ids)
        ids, offsets = encoding.ids, encoding.offsets
        labels = [IGNORE] * len(ids)
        for span in found.spans:
            first = bisect_right(offsets, span.start, key=lambda offset: offset[1])
            last = bisect_left(offsets, span.end, key=lambda offset: offset[0])
            if span.start < span.end:
                labels[first:last] = ids[first:last]
        return TokenizedRecord(ids, labels)

    def _check_ids(self, tokens: TokenizedRecord) -> None:
        largest = max(tokens.input_ids, default=0)
        if largest > self.max_id:
            raise ValueError(f"input_ids hold {largest}, the tokenizer's largest id is {self.max_id}; tokenize again")

    def _with_ends(self, ids: list[int]) -> TokenizedRecord:
        bos, eos = self._ends
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return TokenizedRecord(ids, ids)
