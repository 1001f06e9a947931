"""Answers requests one after the other, in the thread that owns the engine, while others wait in a bounded queue."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flexengine.data.answer_text import AnswerText
from flexengine.serving.protocol import Answer, Asked, RequestError

if TYPE_CHECKING:
    from flexengine.data.tokenizer_process import TokenizerProcess
    from flexengine.runtime.engine import Engine


class Piece(NamedTuple):
    """Text that is known of the answer to a prompt."""

    index: int
    text: str


class Answered(NamedTuple):
    """All answers of a request, and the tokens of prompts and answers."""

    answers: list[Answer]
    num_prompt: int
    num_answer: int


Message = Piece | Answered | RequestError


class Job:
    """A request on its way, told of piece by piece. given_up: nobody reads the answer any more."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.given_up = asked, threading.Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def tell(self, what: Message) -> None:
        """Hand on a piece, or what is the last to be told."""
        self._messages.put(what)

    def messages(self) -> Iterator[Message]:
        """What is told, as it comes, up to the end."""
        while True:
            what = self._messages.get()
            yield what
            if not isinstance(what, Piece):
                return


class Jobs:
    """Requests that wait, at most `most` of them beside the one that is answered."""

    def __init__(self, most: int) -> None:
        self._waiting: queue.Queue[Job] = queue.Queue(most)
        self._stopping = threading.Event()

    def add(self, asked: Asked) -> Job:
        """Have a request wait. Raises: RequestError where too many do, or no more are answered."""
        job = Job(asked)
        if self._stopping.is_set():
            raise _stopped()
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            text = f"{self._waiting.maxsize} requests wait already; try again later"
            raise RequestError(text, code="rate_limit_exceeded", status=429) from None
        return job

    def answer_all(self, engine: Engine, tokenizer: TokenizerProcess) -> None:
        """Answer requests until an interrupt, which is raised; those that wait are told."""
        job: Job | None = None
        try:
            while True:
                job = self._waiting.get()
                _answer(job, engine, tokenizer)
                job = None
        finally:
            self._stopping.set()
            if job is not None:
                job.tell(_stopped())
            while not self._waiting.empty():
                self._waiting.get_nowait().tell(_stopped())


def _stopped() -> RequestError:
    return RequestError("the server stops", code="server_stops", status=503)


def _answer(job: Job, engine: Engine, tokenizer: TokenizerProcess) -> None:
    """Answer one request, or tell why not."""
    if job.given_up.is_set():
        return
    start_s = time.perf_counter()
    try:
        found = _generate(job, engine, tokenizer)
    except RequestError as error:
        job.tell(error)
    except ValueError as error:  # of the prompt: the engine and the tokenizer name what they do not take
        job.tell(RequestError(str(error)))
    except Exception as error:
        traceback.print_exc()
        job.tell(RequestError(f"the server failed: {type(error).__name__}", status=500))
    else:
        job.tell(found)
        seconds = time.perf_counter() - start_s
        print(f"{found.num_answer} tokens after {found.num_prompt}, {seconds:.1f} s", file=sys.stderr, flush=True)


def _generate(job: Job, engine: Engine, tokenizer: TokenizerProcess) -> Answered:
    asked, longest = job.asked, engine.plan.request.max_seq_len
    found = [_read(prompt, tokenizer) for prompt in asked.prompts]
    prompts, pixels = [ids for ids, _ in found], found[0][1]  # a chat, which alone has images, is one prompt
    for ids in prompts:
        if len(ids) >= longest:
            text = f"the prompt has {len(ids)} tokens, of {longest} that are served; shorten it, or serve more"
            raise RequestError(
                f"{text} (--max-seq-len)", "messages" if asked.is_chat else "prompt", "context_length_exceeded"
            )
    texts = [AnswerText(tokenizer.decode, asked.stop) for _ in prompts]

    def tell(index: int, token: int) -> bool:
        if text := texts[index].add(token):
            job.tell(Piece(index, text))
        return texts[index].ended or job.given_up.is_set()

    most = asked.max_tokens or longest
    stop_ids = tokenizer.stop_ids
    engine.generate(prompts, min(most, longest), stop_ids=stop_ids, tell=tell, sampling=asked.sampling, images=pixels)
    answers = []
    for index, (ids, found) in enumerate(zip(prompts, texts, strict=True)):
        if rest := found.finish():
            job.tell(Piece(index, rest))
        is_full = len(found.tokens) >= min(most, longest - len(ids))
        answers.append(Answer(found.text, "length" if is_full and not found.ended else "stop"))
    return Answered(answers, sum(map(len, prompts)), sum(len(found.tokens) for found in texts))


def _read(prompt: Any, tokenizer: TokenizerProcess) -> tuple[list[int], dict[str, Any]]:
    """Ids of a prompt, those of ids are these, and the columns of its images' pixels."""
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt, raw=True), {}
    return (prompt, {}) if isinstance(prompt[0], int) else tokenizer.encode_turns(prompt)
