"""A language model as lm-eval asks for one, over an engine's streamed forward and its generation.

Needs the package lm-eval (pip install "flexengine-train[lm-eval]"). Source:
https://github.com/EleutherAI/lm-evaluation-harness, `lm_eval.api.model.TemplateLM`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
from torch import Tensor

from flexengine.data.answer_text import AnswerText
from flexengine.data.image_pixels import joined
from flexengine.data.tokenizer_process import TokenizerProcess
from flexengine.ops.custom_loss import IGNORE_INDEX, LogitsBlock
from flexengine.ops.given_rows import Columns
from flexengine.runtime.generation import Sampling

if TYPE_CHECKING:
    from flexengine.runtime.engine import Engine

DEFAULT_NEW_TOKENS = 256
"""Longest answer of a task that names none, as lm-eval has it."""
KNOWN = ("do_sample", "temperature", "top_p", "until", "max_gen_toks")

Scored = tuple[float, bool]
"""Log-probability of a continuation, and whether each of its tokens was the likeliest."""


class Asked(NamedTuple):
    """Ids of a text, and the columns of its images' pixels."""

    ids: list[int]
    columns: dict[str, Tensor]


class FlexLM(TemplateLM):
    """An engine for `lm_eval.simple_evaluate(model=...)`.

    The longest text has one token less than the engine's max_seq_len, as lm-eval feeds a model all tokens but the last.
    Longer contexts lose their beginning, which lm-eval does, too; `num_cut` counts them. One with images is never cut.
    """

    def __init__(self, engine: Engine, tokenizer: TokenizerProcess, seed: int = 0) -> None:
        """tokenizer: of the engine's model, made before the engine, with the model's processor where the engine takes
        images. seed: of answers that are drawn.
        """
        super().__init__()
        self.engine, self._tokenizer, self._seed = engine, tokenizer, seed
        self.max_length = engine.plan.request.max_seq_len - 1
        self.num_cut = 0
        self._before = tokenizer.encode_prompt("", raw=True)

    @property
    def MULTIMODAL(self) -> bool:  # noqa: N802 - lm-eval's name
        """Whether tasks may ask about images."""
        return self.engine.model.given is not None

    # ---- texts ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises ValueError where the tokenizer names none."""
        return self._id(self._tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: the token that begins a text, or else the one that ends it."""
        return self._id(self._tokenizer.eos_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id)

    @staticmethod
    def _id(token: int | None) -> int:
        if token is None:
            raise ValueError("the tokenizer names no token that ends a text; name it as eos_token in its config")
        return token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, begun as the tokenizer begins one unless add_special_tokens is False."""
        ids = self._tokenizer.encode_prompt(string, raw=True)
        return ids[len(self._before) :] if add_special_tokens is False else ids

    @property
    def tokenizer_name(self) -> str:
        """The model's name."""
        return self.engine.model.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises ValueError for one whose answer a task begins."""
        if not add_generation_prompt:
            raise ValueError("tasks that begin the answer (gen_prefix) are not built with chat templates")
        return self._tokenizer.render_prompt(chat_history, places=self.MULTIMODAL)

    def _asked(self, text: str, images: Sequence[Any]) -> Asked:
        """A text whose places of images are written `<image>`, or as the chat template wrote them."""
        if not images:
            return Asked(self.tok_encode(text), {})
        return Asked(*self._tokenizer.encode_with_images(text, [_data_url(image) for image in images], raw=True))

    def _together(self, asked: Iterable[Asked], most_tokens: float = float("inf")) -> Iterator[list[Asked]]:
        """Cut questions into lists of as many tokens, those of images by themselves, as a call takes."""
        given, found, tokens, rows = self.engine.model.given, list[Asked](), 0, 0
        for one in asked:
            own = one.ids.count(given.token_id) if given is not None and one.columns else 0
            if given is not None and own > given.max_tokens:
                raise ValueError(
                    f"a question has {own} tokens of images, of at most {given.max_tokens}; raise max_image_tokens"
                )
            if found and (tokens + len(one.ids) > most_tokens or (given and rows + own > given.max_tokens)):
                yield found
                found, tokens, rows = [], 0, 0
            found.append(one)
            tokens, rows = tokens + len(one.ids), rows + own
        if found:
            yield found

    # ---- log-probabilities ------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Scored]:
        """Score continuations of contexts, which may have images."""
        if all(len(request.args) == 2 for request in requests):
            return super().loglikelihood(requests, disable_tqdm)
        starts = list[int]()
        wholes = (self._whole(request, starts) for request in requests)
        found = list[Scored]()
        for group in self._together(wholes, self.engine.plan.request.max_global_batch_tokens):
            own = starts[len(found) : len(found) + len(group)]
            rows = [self._row(one.ids[:start], one.ids[start:]) for one, start in zip(group, own, strict=True)]
            found += self._scores(rows, joined([one.columns for one in group if one.columns]))
        for request, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return found

    def _whole(self, request: Any, starts: list[int]) -> Asked:
        """A context and its continuation; starts: takes where this begins. Spaces between them are of the latter."""
        context, rest, images = *request.args[:2], _images_of(request)
        if not context and not images:
            starts.append(1)
            return Asked([self.prefix_token_id, *self.tok_encode(rest, add_special_tokens=False)], {})
        bare = context.rstrip()
        whole = self._asked(context + rest, images)
        self._check_fits(whole, self.max_length + 1)
        starts.append(max(1, len(self._asked(bare, images).ids)))
        return whole

    def _check_fits(self, asked: Asked, most: int) -> None:
        """Raise ValueError for a text with images that would be cut."""
        if asked.columns and len(asked.ids) > most:
            raise ValueError(
                f"a question with images has {len(asked.ids)} tokens, of at most {most}, and is not cut, as that would"
                " cut an image; raise max_seq_len"
            )

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Scored]:
        """Score continuations, the longest first, as many together as the engine takes."""
        found = dict[int, Scored]()
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for numbers in self._batches(order, [len(context) + len(rest) for _, context, rest in requests]):
            rows = [self._row(*requests[i][1:]) for i in numbers]
            found |= zip(numbers, self._scores(rows), strict=True)
            for i in numbers:
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return [found[i] for i in range(len(requests))]

    def _batches(self, order: Iterable[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """Cut an order into batches of as many tokens as a call takes."""
        most, numbers, total = self.engine.plan.request.max_global_batch_tokens, list[int](), 0
        for i in order:
            length = min(lengths[i], self.max_length + 1)
            if numbers and total + length > most:
                yield numbers
                numbers, total = [], 0
            numbers.append(i)
            total += length
        if numbers:
            yield numbers

    def _row(self, context: list[int], rest: list[int]) -> tuple[list[int], list[int]]:
        """Ids and labels of a continuation, with as much of its context as fits."""
        if len(rest) > self.max_length:
            raise ValueError(f"a continuation has {len(rest)} tokens, of at most {self.max_length}; raise max_seq_len")
        ids = (context + rest)[-(self.max_length + 1) :]
        self.num_cut += len(ids) < len(context) + len(rest)
        return ids, [IGNORE_INDEX] * (len(ids) - len(rest)) + rest

    def _scores(self, rows: list[tuple[list[int], list[int]]], columns: Columns | None = None) -> list[Scored]:
        """Run one forward pass; the logits of a few tokens at a time are read where the loss would be."""
        sums, greedy = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.bool)

        def read(block: LogitsBlock) -> Tensor:
            log_probs = torch.log_softmax(block.logits, dim=-1).gather(1, block.labels[:, None])[:, 0]
            sequences, likeliest = block.sequences.cpu(), block.logits.argmax(dim=-1) == block.labels
            sums.index_add_(0, sequences, log_probs.detach().cpu().double())
            greedy[sequences[~likeliest.cpu()]] = False
            return log_probs.sum()

        ids, labels = zip(*rows, strict=True)
        self.engine.evaluate({"input_ids": list(ids), "labels": list(labels), **(columns or {})}, loss=read)
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows that each score what no other does."""
        owners, windows = list[int](), list[tuple[None, list[int], list[int]]]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                owners.append(number)
                windows.append((None, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += score
        for request, score in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return sums

    # ---- answers ----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a text that ends them; requests with the same options go together."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        found = dict[int, str]()
        for numbers in groups.values():
            asked = (self._asked(requests[i].args[0], _images_of(requests[i])) for i in numbers)
            found |= zip(numbers, self._answers(asked, requests[numbers[0]].args[1]), strict=True)
            for i in numbers:
                self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
        return [found[i] for i in range(len(requests))]

    def _answers(self, asked: Iterable[Asked], given: dict[str, Any]) -> Iterator[str]:
        options: dict[str, Any] = {**normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)}
        if unknown := [name for name in options if name not in KNOWN]:
            raise ValueError(f"generation_kwargs of a task name {', '.join(unknown)}, which are not built here")
        most, room = options["max_gen_toks"], self.max_length - options["max_gen_toks"]
        if room < 1:
            raise ValueError(f"a task asks for answers of {most} tokens, of {self.max_length}; raise max_seq_len")
        ends = self._tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stop = [text for text in (*options["until"], ends) if text]
        stop_ids, temperature = {*self._tokenizer.stop_ids, self.eot_token_id}, options["temperature"] or 0.0
        for number, group in enumerate(self._together(asked)):
            for one in group:
                self._check_fits(one, room)
                self.num_cut += len(one.ids) > room
            texts = [AnswerText(self._tokenizer.decode, stop) for _ in group]
            sampling = Sampling(temperature, options.get("top_p", 1.0) if temperature else 1.0, self._seed + number)
            self.engine.generate(
                [one.ids[-room:] for one in group], most, stop_ids=stop_ids, tell=_ending(texts), sampling=sampling,
                images=joined([one.columns for one in group if one.columns]),
            )  # fmt: skip
            for text in texts:
                text.finish()
                yield text.text


def _images_of(request: Any) -> list[Any]:
    """The images of a request. Raises: ValueError for one with sound."""
    beside = request.args[2] if len(request.args) > 2 else {}
    if beside.get("audio"):
        raise ValueError("a task asks about sound, which is not built; leave it out of --tasks")
    return list(beside.get("visual") or ())


def _data_url(image: Any) -> str:
    """An image of lm-eval, one of PIL or a path or address as records have it, without loss."""
    if isinstance(image, str):
        return image
    if not hasattr(image, "save"):
        raise ValueError(f"a task gives images as {type(image).__name__}; give those of PIL, or their paths")
    out = io.BytesIO()
    plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")
    plain.save(out, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _ending(texts: list[AnswerText]) -> Callable[[int, int], bool]:
    """Add tokens to answers, and end those that one of their texts ends."""

    def tell(number: int, token: int) -> bool:
        texts[number].add(token)
        return texts[number].ended

    return tell
