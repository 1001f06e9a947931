"""Who writes the completions of a batch: the engine itself, or a vLLM server that is handed the adapters.

The server is spoken to by what vLLM documents: completions of token ids, of prompts with images as chats whose parts
are texts and pictures, and adapters that are loaded while it runs.
Source: https://docs.vllm.ai, "LoRA Adapters" (load_lora_adapter) and "OpenAI-Compatible Server" (completions, chat).
"""

from __future__ import annotations

import json
import secrets
import shutil
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.error import HTTPError

from flexengine.checkpoint.hub_errors import without_secrets
from flexengine.data import TokenizerProcess
from flexengine.data.batches import PromptBatch
from flexengine.data.image_places import PLACE
from flexengine.data.prompts import TokenizedPrompt
from flexengine.models.spec import ModelSpec
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team, is_first, told_by_first
from flexengine.runtime.engine import Engine
from flexengine.runtime.generation import Sampling
from flexengine.wording import shown

FOLDER = "generator"
"""The folder of the run in which a server finds adapters."""
ANSWER_S = 3600.0
"""Longest wait for a server; it answers once all completions of a batch are written."""
SIDE_BY_SIDE = 64
"""Prompts with images that a server is asked at a time; it answers as many together as it has room for."""
HOW_TO_START = "start it by VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank RANK"


class Draws(NamedTuple):
    """How completions are drawn. stop_ids: tokens that end one, and are its last."""

    most_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling


class Writer(Protocol):
    """Writes completions in the model as it is now."""

    def write(self, engine: Engine, batch: PromptBatch, count: int, draws: Draws) -> list[list[int]]:
        """Return `count` completions of each prompt, one behind the other. Raises: ValueError for what is in the way.

        Of several ranks, all make this call and get the same.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind of what was written for the writer."""
        ...


class EngineWriter:
    """Writes by the engine's own batched decoding."""

    def write(self, engine: Engine, batch: PromptBatch, count: int, draws: Draws) -> list[list[int]]:
        """See `Writer.write`."""
        repeated = [prompt for prompt in batch.input_ids for _ in range(count)]
        most, stop_ids, sampling = draws
        given = {"stop_ids": stop_ids, "keep_stop": True, "sampling": sampling, "images": batch.columns}
        return engine.generate(repeated, most, **given)

    def close(self) -> None:
        """See `Writer.close`."""


class ServerWriter:
    """Has a vLLM server write, which reads the adapters of every update from a folder of the run."""

    def __init__(self, url: str, run_folder: Path, team: Team | None, tokenizer: TokenizerProcess) -> None:
        self._server, self._team, self._tokenizer = Server(url), team, tokenizer
        self._folder, self._prefix = run_folder.resolve() / FOLDER, f"flexengine-{secrets.token_hex(4)}"
        self._name, self._update = "", -1
        told_by_first(team, lambda: shutil.rmtree(self._folder, ignore_errors=True))

    def write(self, engine: Engine, batch: PromptBatch, count: int, draws: Draws) -> list[list[int]]:
        """See `Writer.write`."""
        if self._update != engine.step_count:
            self._hand_over(engine)
        return told_by_first(self._team, lambda: self._answers(engine.model, batch, count, draws))

    def _hand_over(self, engine: Engine) -> None:
        """Write the adapters, have the server read them, and drop those of before.

        Every update has a name of its own, so that nothing that was computed with other adapters is found again.
        """
        name, before = f"{self._prefix}-{engine.step_count}", self._name
        engine.save_pretrained(self._folder / name)
        told_by_first(self._team, lambda: self._exchange(before, name))
        self._name, self._update = name, engine.step_count

    def close(self) -> None:
        """See `Writer.close`. A server that does not answer any more keeps what it has read."""
        if is_first(self._team) and self._name:
            with suppress(ValueError):
                self._server.call("/v1/unload_lora_adapter", {"lora_name": self._name})
            shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, before: str, name: str) -> None:
        if before:
            self._server.call("/v1/unload_lora_adapter", {"lora_name": before})
            shutil.rmtree(self._folder / before)
        self._server.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)})

    def _answers(self, model: ModelSpec, batch: PromptBatch, count: int, draws: Draws) -> list[list[int]]:
        """Ask for completions: of all prompts of text together, and of each with images by itself, side by side.

        What vLLM would take from the model's generation config is said.
        """
        sampling, placed = draws.sampling, None if model.given is None else model.given.token_id
        options = {
            "model": self._name, "n": count, "max_tokens": draws.most_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": sorted(draws.stop_ids), "return_token_ids": True,
            **({} if placed is None else {"logit_bias": {str(placed): -100.0}}),
        }  # fmt: skip
        pictured = [i for i, prompt in enumerate(batch.asked) if prompt.images]
        plain = [i for i in range(len(batch.input_ids)) if i not in pictured]
        found = dict[int, list[list[int]]]()
        if plain:
            answered = self._server.call("/v1/completions", {**options, "prompt": [batch.input_ids[i] for i in plain]})
            rows = self._tokens(answered, count * len(plain), model, draws)
            found |= {i: rows[count * n : count * (n + 1)] for n, i in enumerate(plain)}
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            asked = {i: {**options, "messages": self._messages(batch.asked[i])} for i in pictured}
            calls = {i: threads.submit(self._server.call, "/v1/chat/completions", body) for i, body in asked.items()}
            for i, call in calls.items():
                self._check_prompt(call.result(), batch.input_ids[i])
                found[i] = self._tokens(call.result(), count, model, draws)
        return [row for i in range(len(batch.input_ids)) for row in found[i]]

    def _messages(self, prompt: TokenizedPrompt) -> list[dict[str, Any]]:
        """Turns with pictures as parts."""
        pictures = ({"url": self._tokenizer.picture_of(image)} for image in prompt.images)
        turns = list[dict[str, Any]]()
        for turn in prompt.turns:
            parts = list[dict[str, Any]]()
            for i, text in enumerate(turn["content"].split(PLACE)):
                parts += [{"type": "image_url", "image_url": next(pictures)}] if i else []
                parts += [{"type": "text", "text": text}] if text else []
            turns.append({"role": turn["role"], "content": parts})
        return turns

    def _check_prompt(self, answered: Any, wanted: Sequence[int]) -> None:
        """Raise ValueError where a server has read a prompt as other tokens than the run trains."""
        found = answered.get("prompt_token_ids") if isinstance(answered, dict) else None
        if found != list(wanted):
            said = f"a prompt with images of {len(found)} tokens" if isinstance(found, list) else "no prompt_token_ids"
            raise self._server.wrong(
                f"{said}, which are not the {len(wanted)} that the run has (return_token_ids, which vLLM has since"
                " 0.10.2); serve the same base, with its own processor and chat template"
            )

    def _tokens(self, answered: Any, count: int, model: ModelSpec, draws: Draws) -> list[list[int]]:
        """The completions that a server answered, in their order."""
        try:
            choices = sorted(answered["choices"], key=lambda choice: choice["index"])
            answers = [choice["token_ids"] for choice in choices]
        except (LookupError, TypeError):
            answers = []
        if len(answers) != count:
            raise self._server.wrong(f"{len(answers)} completions, of {count} that were asked for")
        for answer in answers:
            if not _are_tokens(answer, model) or len(answer) > draws.most_tokens:
                raise self._server.wrong(
                    f"{shown(answer)} for the tokens of a completion (return_token_ids, which vLLM has since 0.10.2)"
                )
        return answers


def _are_tokens(answer: Any, model: ModelSpec) -> bool:
    """Whether this is a completion of a model, in which no token stands for an image."""
    if not isinstance(answer, list) or not answer or (model.given is not None and model.given.token_id in answer):
        return False
    return all(type(token) is int and 0 <= token < model.vocab_size for token in answer)


class Server:
    """A vLLM server at an address."""

    def __init__(self, url: str) -> None:
        self._url, self._shown = url.rstrip("/").removesuffix("/v1"), f"--generator {without_secrets(url)}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def check(self, max_seq_len: int) -> None:
        """Raise ValueError where nothing answers, or what is served takes shorter sequences than the run has."""
        found = self.call("/v1/models", None)
        try:
            longest = [model.get("max_model_len") for model in found["data"]]
        except (LookupError, TypeError, AttributeError):
            raise self.wrong("no list of models") from None
        if any(isinstance(length, int) and length < max_seq_len for length in longest):
            raise ValueError(
                f"{self._shown} serves sequences of at most {min(filter(None, longest))} tokens, and --max-seq-len is"
                f" {max_seq_len}; start it with --max-model-len {max_seq_len}"
            )

    def call(self, path: str, body: dict[str, Any] | None) -> Any:
        """Post a body, or get where there is none; returns what is answered, a text where that is no JSON.

        Raises: ValueError for a server that is not there or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(asked, timeout=ANSWER_S) as response:
                text = response.read().decode()
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise ValueError(f"{self._shown} refused {path} (HTTP {error.code}): {said}; {HOW_TO_START}") from None
        except OSError as error:
            raise ValueError(f"{self._shown} does not answer ({error}); {HOW_TO_START}") from None
        try:
            return json.loads(text)
        except ValueError:
            return text

    def wrong(self, what: str) -> ValueError:
        """Say that the server answered what it should not."""
        return ValueError(f"{self._shown} answered {what}; is it a vLLM server?")


def writer_of(config: TrainConfig, team: Team | None, tokenizer: TokenizerProcess) -> Writer:
    """Choose who writes, as the options say."""
    if config.generator is None:
        return EngineWriter()
    return ServerWriter(config.generator, config.run_folder, team, tokenizer)
