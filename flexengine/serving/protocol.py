"""OpenAI's protocol: what a request asks for, checked, and the JSON of answers, of their pieces and of errors.

Source: https://platform.openai.com/docs/api-reference (chat completions, completions, models, errors).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexengine.runtime.generation import Sampling
from flexengine.wording import did_you_mean, shown

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
DEFAULT_COMPLETION_TOKENS = 16
"""Longest answer of a completion that names none, as OpenAI has it; a chat answer may fill what is left."""
ROLES = ("system", "user", "assistant")
MOST_STOPS, MOST_PROMPTS, LARGEST_SEED = 4, 64, 2**32
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Parameters that say nothing of the answer."""
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Parameters that are taken with the values that change nothing alone."""


class RequestError(ValueError):
    """What a client can correct. status: of HTTP; param: of the body; code: by which OpenAI names the kind."""

    def __init__(self, text: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Defaults(NamedTuple):
    """What holds where a request says nothing. model: the name that it is served by. images: whether it sees some."""

    model: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    images: bool = False

    def check(self) -> None:
        """Raise RequestError for values that no request may have."""
        read_request(COMPLETIONS, {"prompt": "a"}, self)


Prompt = str | list[int] | list[dict[str, Any]]
"""A text or ids to go on with, or turns to answer."""


@dataclass(frozen=True)
class Asked:
    """A request. max_tokens: None for what is left. stop: texts that end an answer."""

    model: str
    is_chat: bool
    prompts: list[Prompt]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    stream: bool
    tells_usage: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; top_p says nothing where the likeliest is taken."""
        return Sampling(self.temperature, self.top_p if self.temperature else 1.0, self.seed)


# ---- requests -------------------------------------------------------------------------------------------------------


def read_request(path: str, body: Any, defaults: Defaults) -> Asked:
    """Read the body of a request for answers. Raises: RequestError naming the parameter."""
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object")
    is_chat, given = path == CHAT, {name: value for name, value in body.items() if value is not None}
    reader = _Reader(given)
    model = reader.take("model", str, defaults.model)
    if model != defaults.model:
        raise RequestError(
            f"there is no model {shown(model)}; {defaults.model} is served", "model", "model_not_found", 404
        )
    stream = reader.take("stream", bool, False)
    options = reader.take("stream_options", dict, {})
    most = reader.count("max_tokens", defaults.max_tokens if is_chat else DEFAULT_COMPLETION_TOKENS)
    given_as = reader.take("messages", list) if is_chat else reader.take("prompt", (str, list))
    asked = Asked(
        model, is_chat,
        prompts=[_turns(given_as, defaults.images)] if is_chat else _texts(given_as),
        max_tokens=reader.count("max_completion_tokens", most) if is_chat else most,
        temperature=reader.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=reader.number("top_p", defaults.top_p, 0.0, 1.0),
        seed=reader.take("seed", int, defaults.seed) % LARGEST_SEED,
        stop=_stops(reader.take("stop", (str, list), [])),
        stream=stream,
        tells_usage=bool(options.get("include_usage")) or not stream,
    )  # fmt: skip
    if asked.top_p == 0.0:
        raise RequestError("top_p must be above 0; temperature 0 takes the likeliest token", "top_p")
    reader.finish()
    return asked


class _Reader:
    """Takes parameters out of a body, and refuses what is left over."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._known = dict(given), set[str]()

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """A parameter of this kind. Raises: RequestError where it is missing and has no default."""
        self._known.add(name)
        if name not in self._given:
            if default is ...:
                raise RequestError(f"{name} is missing", name, "missing_required_parameter")
            return default
        value, kinds = self._given[name], kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            raise RequestError(f"{name} is {shown(value)}, expected {_words_of(kinds)}", name, "invalid_type")
        return value

    def count(self, name: str, default: int | None) -> int | None:
        """A whole number above 0."""
        value = self.take(name, int, default)
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}", name, "invalid_value")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within these bounds."""
        value = self.take(name, (int, float), default)
        if not least <= value <= most:
            raise RequestError(f"{name} must be from {least:g} to {most:g}, got {shown(value)}", name, "invalid_value")
        return float(value)

    def finish(self) -> None:
        """Raise RequestError for a parameter that would change the answer and is not built, or that nobody knows."""
        for name, value in self._given.items():
            if name in ONLY and value not in ONLY[name]:
                raise RequestError(f"{name}={shown(value)} is not built here; leave it out", name, "unsupported_value")
            if name not in self._known and name not in ONLY and name not in WITHOUT_EFFECT:
                hint = did_you_mean(name, {*self._known, *ONLY})
                raise RequestError(f"{shown(name)} is no parameter{hint}", name, "unknown_parameter")


def _words_of(kinds: tuple[type, ...]) -> str:
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    return " or ".join(words.get(kind, "an object") for kind in kinds)


def _turns(messages: list[Any], images: bool) -> Prompt:
    if not messages:
        raise RequestError("messages is empty; give at least one", "messages")
    return [_turn(f"messages[{i}]", message, images) for i, message in enumerate(messages)]


def _turn(where: str, message: Any, images: bool) -> dict[str, Any]:
    """One turn, with the texts of its parts joined where it has no images."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RequestError(f"{where} has role {shown(role)}; choose one of {', '.join(ROLES)}", f"{where}.role")
    content = message.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    elif isinstance(content, list) and any(_is_image(part) for part in content):
        content = [_part(f"{where}.content[{i}]", part, images) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(f"{where} has no text as content; others are not built here", f"{where}.content")
    if message.get("tool_calls"):
        raise RequestError("tool_calls are not built here; leave them out", f"{where}.tool_calls")
    return {"role": role, "content": content}


def _part(where: str, part: Any, images: bool) -> dict[str, str]:
    """A part of a turn with images, which come with the request: nothing is fetched, and no file of this machine read.

    Raises: RequestError for another part, an image elsewhere, or one where none are seen.
    """
    if _is_text(part):
        return {"type": "text", "text": part["text"]}
    given = part.get("image_url") if _is_image(part) else None
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise RequestError(f"{where} is neither a text nor an image_url with a url; others are not built here", where)
    if not images:
        raise RequestError(f"{where} is an image, and this server was begun without --max-image-tokens N", where)
    if not url.startswith("data:"):
        raise RequestError(
            f"{where} names the image {shown(url)}, and nothing is fetched here; send it as a data URL"
            " (data:image/png;base64,...)",
            where,
        )
    return {"type": "image", "image": url}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _texts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of a completion: a text, ids, or a list of either."""
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} texts; give 1 to {MOST_PROMPTS}", "prompt")
    for i, one in enumerate(prompts):
        if not one or not (isinstance(one, str) or _are_ids(one)):
            raise RequestError(f"prompt {i} is {shown(one)}, expected a text or token ids", "prompt", "invalid_type")
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _stops(stop: str | list[Any]) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop is {shown(stop)}, expected 1 to {MOST_STOPS} texts, none of them empty", "stop")
    return tuple(texts)


# ---- answers --------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A whole answer. reason: stop or length."""

    text: str
    reason: str


def usage(num_prompt: int, num_answer: int) -> dict[str, int]:
    """Count tokens; the one that ends an answer is none of its own."""
    total = num_prompt + num_answer
    return {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": total}


def whole_answer(asked: Asked, answers: list[Answer], used: dict[str, int]) -> dict[str, Any]:
    """The JSON of a request that is answered at once."""

    def choice(index: int, answer: Answer) -> dict[str, Any]:
        said: dict[str, Any] = {"text": answer.text}
        if asked.is_chat:
            said = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": answer.reason}

    return {**_head(asked, ""), "choices": [choice(i, a) for i, a in enumerate(answers)], "usage": used}


def first_pieces(asked: Asked) -> list[dict[str, Any]]:
    """What a stream begins with: who speaks in a chat."""
    delta = {"delta": {"role": "assistant", "content": ""}}
    return [_piece(asked, i, delta, None) for i in range(len(asked.prompts))] if asked.is_chat else []


def piece(asked: Asked, index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    """A piece of an answer; reason: that it ends, after the last piece."""
    delta = {} if reason and not text else {"content": text}
    return _piece(asked, index, {"delta": delta} if asked.is_chat else {"text": text}, reason)


def last_piece(asked: Asked, used: dict[str, int]) -> dict[str, Any]:
    """What a stream that tells its usage ends with."""
    return {**_head(asked, ".chunk"), "choices": [], "usage": used}


def _piece(asked: Asked, index: int, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
    return {**_head(asked, ".chunk"), "choices": [choice]}


def _head(asked: Asked, suffix: str) -> dict[str, Any]:
    kind, prefix = (f"chat.completion{suffix}", "chatcmpl") if asked.is_chat else ("text_completion", "cmpl")
    return {"id": f"{prefix}-{asked.id}", "object": kind, "created": asked.created, "model": asked.model}


def models(name: str, created: int) -> dict[str, Any]:
    """The list of the one model."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "flexengine"}]}
