"""Tokenizer of a model folder: text to ids, conversations to ids with the targets marked.

Ids come from tokenizer.json as it is (or from what transformers makes of tokenizer.model), conversations from
transformers' rendering of the folder's chat template. Templates are programs out of downloaded folders: they run in
transformers' sandbox, under a limit of time and size.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import re
import signal
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from flexengine.data.masks import AddedTokens, LeftOutError, Marked, Rendered, Span, TrainOn, mark
from flexengine.data.records import IGNORE, Message, Record, TokenizedRecord
from flexengine.wording import parse_json, shown

logger = logging.getLogger(__name__)

FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Used when the folder has no chat template."""
TEMPLATE_FILE = "chat_template.jinja"
MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_SECONDS = 20
"""Longest time that one rendering may take: real ones take microseconds a turn, an endless loop takes for ever."""
TEMPLATE_CHARACTERS = 2**28
"""Longest rendering, far above what any sequence length takes."""
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
    ) -> None:
        """special_tokens: further variables that templates may read, such as {"pad_token": "<pad>"}."""
        tokenizer.no_truncation()  # tokenizer.json stores both as they were last used: a text would be cut silently
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.has_own_template = template is not None
        self.template = FALLBACK_TEMPLATE if template is None else template
        self.bos_token, self.eos_token = bos_token, eos_token
        self.train_on: TrainOn = "assistant"
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._variables = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._marks_generation = MARKS_GENERATION.search(self.template) is not None
        added = sorted(tokenizer.get_added_tokens_decoder().values(), key=lambda token: -len(token.content))
        self._added = AddedTokens([t.content for t in added], [t.content for t in added if t.special])
        self._ends = tuple(tokenizer.token_to_id(token) if token else None for token in (bos_token, eos_token))
        self._warned: set[str] = set()
        _check_template(self.template)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTokenizer":
        """Reads tokenizer.json (or tokenizer.model), tokenizer_config.json and chat_template.jinja, as far as present.

        Raises ValueError when there is no tokenizer, it is unreadable, or the template does not parse.
        """
        tokenizer = _read_tokenizer(Path(folder))
        config = _read_config(Path(folder) / "tokenizer_config.json")
        special = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
        bos, eos = (special.pop(key, "") for key in ("bos_token", "eos_token"))
        variables = {key: text for key, text in special.items() if text}
        return cls(tokenizer, _find_template(Path(folder), config), bos, eos, variables)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generated answer: the end-of-sequence token and the token that closes an assistant turn."""
        turn = self._render([Message("user", "a"), Message("assistant", "b")]).text
        closing = [t for t in self._added.special if turn.rstrip().endswith(t)]
        ids = (self.tokenizer.token_to_id(token) for token in (self.eos_token, *closing) if token)
        return frozenset(i for i in ids if i is not None)

    @functools.cached_property
    def max_id(self) -> int:
        """The largest token id; a model needs vocab_size > max_id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def key(self) -> str:
        """A digest of all that decides which tokens a record becomes and which of them are trained."""
        parts = (self.tokenizer.to_str(), self.template, sorted(self._variables.items()), self.train_on)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of one user message, ready for the assistant to answer."""
        prompt = self._render([Message("user", text)], add_generation_prompt=True).text
        return self._encode([prompt])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def export_template(self, folder: Path) -> None:
        """Writes the template that the model was trained with, where its folder had none."""
        if not self.has_own_template:
            (folder / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")

    # ---- records to ids ---------------------------------------------------------------------------------------

    def encode_record(self, record: Record) -> TokenizedRecord:
        """Ids and labels of one record. Raises ValueError where encode_records leaves it out."""
        found = self._mark(record)
        return self._tokenized(record, found, self._encode([found.text], record.text is not None)[0] if found else None)

    def encode_records(self, records: Iterable[Record]) -> Iterator[TokenizedRecord]:
        """Ids and labels of all records but those left out, in order; many are tokenized at once, on all cores.

        Loss is on what the assistant says and on the token that ends it, or on all of a plain text. A token that only
        overlaps an answer, such as the space before its first word, counts as part of it.
        """
        with ThreadPoolExecutor(1) as executor:  # while one batch is tokenized, the templates of the next are rendered
            running: Future[list[TokenizedRecord]] | None = None
            for batch in self._marked_batches(records):
                following = executor.submit(self._encode_batch, batch)
                yield from running.result() if running else ()
                running = following
            yield from running.result() if running else ()

    def _marked_batches(self, records: Iterable[Record]) -> Iterator[list[tuple[Record, Marked | None]]]:
        """Records with their text and spans, about BATCH_CHARACTERS at a time, without those that are left out."""
        batch: list[tuple[Record, Marked | None]] = []
        num_characters = 0
        for record in records:
            try:
                found = self._mark(record)
            except LeftOutError as error:
                self.left_out[str(error)] += 1
                continue
            except ValueError as error:
                raise ValueError(f"{record.where}: {error}" if record.where else str(error)) from None
            if found and len(found.text) > LONGEST_TEXT:
                size = f"{record.where}: a text of {len(found.text)} characters"
                raise ValueError(f"{size}; the longest is {LONGEST_TEXT}: split it into several records")
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
            return self._render(messages, add_generation_prompt, record)

        refused: ValueError | None = None
        for variant in _variants(record):
            try:
                return mark(variant, render, self._marks_generation, self._added, self.train_on)
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

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, record: Record | None = None
    ) -> Rendered:
        """A conversation as text with what the template marks. Raises ValueError when the template refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes a second

        try:
            with time_limit(TEMPLATE_SECONDS):
                texts, marked = render_jinja_template(
                    [[message.for_template() for message in messages]],
                    tools=list(record.tools) or None if record else None,
                    chat_template=self.template,
                    return_assistant_tokens_mask=self._marks_generation,
                    add_generation_prompt=add_generation_prompt,
                    **{**self._variables, **(record.template_options if record else {})},
                )
            if len(texts[0]) > TEMPLATE_CHARACTERS:
                raise ValueError(f"it wrote {len(texts[0])} characters, the limit is {TEMPLATE_CHARACTERS}")
            texts[0].encode("utf-8")
        except MemoryError:
            raise
        except Exception as error:  # a template is a program out of a downloaded folder: it may fail in any way
            roles = ", ".join(message.role for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
            raise ValueError(
                f"the chat template refuses a conversation of {roles}: {error}; change the records or the model's "
                "chat template"
            ) from None
        return Rendered(texts[0], [Span(int(start), int(end)) for start, end in marked[0]] if marked else [])

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
            return self._checked(record.tokens)
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

    def _checked(self, tokens: TokenizedRecord) -> TokenizedRecord:
        largest = max(tokens.input_ids, default=0)
        if largest > self.max_id:
            raise ValueError(f"input_ids hold {largest}, the tokenizer's largest id is {self.max_id}; tokenize again")
        return tokens

    def _with_ends(self, ids: list[int]) -> TokenizedRecord:
        bos, eos = self._ends
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return TokenizedRecord(ids, ids)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what runs inside with a ValueError after so long; without effect outside the main thread."""

    def expire(*_: object) -> None:
        raise ValueError(f"it did not end within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _variants(record: Record) -> Iterator[Record]:
    """The record, and with tool calls also in the other forms in which templates want these.

    Arguments are an object or its JSON text; the content beside a call is absent or null.
    """
    yield record
    if any("tool_calls" in message.extra for message in record.messages):
        for text_arguments, null_content in ((True, False), (True, True), (False, True)):
            convert = functools.partial(_with_calls, text_arguments=text_arguments, null_content=null_content)
            yield dataclasses.replace(record, messages=tuple(map(convert, record.messages)))


def _with_calls(message: Message, text_arguments: bool, null_content: bool) -> Message:
    if "tool_calls" not in message.extra:
        return message
    calls = [call["function"] for call in message.extra["tool_calls"]]
    if text_arguments:
        calls = [{**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls]
    whole = [{**old, "function": new} for old, new in zip(message.extra["tool_calls"], calls, strict=True)]
    absent = {"content": None} if null_content and message.content is None else {}
    return dataclasses.replace(message, extra={**message.extra, "tool_calls": whole, **absent})


# ---- files of a model folder -----------------------------------------------------------------------------------


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = Tokenizer.from_file(str(path))
        elif (folder / "tokenizer.model").is_file():
            path = folder / "tokenizer.model"
            tokenizer = _converted(folder)
        else:
            raise FileNotFoundError
    except FileNotFoundError:
        raise ValueError(
            f"no tokenizer.json in {folder}; the data cannot be tokenized without it: fetch it with the model, or "
            "train on --data-source synthetic"
        ) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the Rust side raises a bare Exception, and panics as a BaseException
        raise ValueError(
            f"{path} cannot be read as a tokenizer: {str(error)[:300]}; fetch {path.name} of the model again"
        ) from None
    if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
        raise ValueError(f"{path} holds no token; fetch {path.name} of the model again")
    return tokenizer


def _converted(folder: Path) -> Tokenizer:
    """What transformers makes of a folder that has tokenizer.model only."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, {} where there is none. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    config = parse_json(path.read_bytes(), path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}; fetch the file again")
    return config


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: no UTF-8 text at byte {error.start}; fetch the file again") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; the one called "default" is for chats
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template in tokenizer_config.json is {shown(template)}, expected a text")
    return template


def _token_text(token: Any) -> str:
    """A special token is stored as its text, as {"content": text, ...}, or as null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _check_template(template: str) -> None:
    """Raises ValueError when a template does not parse."""
    import jinja2  # noqa: PLC0415
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes a second

    try:
        with time_limit(TEMPLATE_SECONDS):
            render_jinja_template([[]], chat_template=template)  # an empty conversation: parsing is what is tried
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template does not parse: line {error.lineno}: {error}; correct or remove it"
        ) from None
    except RecursionError:
        raise ValueError("the chat template does not parse: it is nested too deep; correct or remove it") from None
    except Exception:  # whether it takes the records is seen when they are there
        return
