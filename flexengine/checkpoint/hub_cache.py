"""Models of the Hugging Face hub by their ids, in the cache that transformers has, too.

huggingface_hub's own download fills it: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, tokens and xet mean what they mean there.
`flexengine download` fills a folder of a person's own instead.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from flexengine.checkpoint.adapter_config import ADAPTER_WEIGHTS
from flexengine.checkpoint.hub_errors import with_retries, without_secrets
from flexengine.checkpoint.layout import (
    ADAPTER_CONFIG,
    CHAT_TEMPLATES,
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    SUPPORT_FILES,
)
from flexengine.checkpoint.manifest import DownloadError
from flexengine.checkpoint.reader import find_files
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.wording import HUB_MODEL

logger = logging.getLogger(__name__)

RETRIES = 2
"""Attempts after the first: a name that was meant as a folder should not wait long for a hub that is not there."""
SUPPORT = (*SUPPORT_FILES, f"{CHAT_TEMPLATES}/*.jinja")

_commits: dict[tuple[str, str, str], str] = {}
"""The commit that a branch was at when this process first asked for it: all of a run is of one commit."""


def cached_model(model_id: str, with_weights: bool) -> Path:
    """Bring a model into the hub's cache; returns the folder of its commit there.

    model_id: ORG/NAME or ORG/NAME@REVISION. with_weights: False fetches configuration and tokenizer files alone. What
    the cache has is not fetched again; where the hub cannot be reached, the commit there is taken if it is whole.
    Raises: DownloadError for what is missing, refused or gated, and where the cache has a part alone.
    """
    folder = _fetched(model_id, SUPPORT)
    if not (folder / CONFIG_FILE).is_file():
        raise DownloadError(f"{model_id}: no {CONFIG_FILE} on the hub. Choose a full model repository.")
    if not with_weights or (_fetched(model_id, [SINGLE_FILE]) / SINGLE_FILE).is_file():
        return folder
    if not (_fetched(model_id, [INDEX_FILE]) / INDEX_FILE).is_file():
        raise DownloadError(
            f"{model_id}: no safetensors weights on the hub ({SINGLE_FILE} or {INDEX_FILE}). Choose a repository that"
            " has some, or a revision as ORG/NAME@REVISION."
        )
    try:
        shards = sorted(set((find_files(folder, INDEX_FILE)[0] or {}).values()))
    except CheckpointError as error:
        raise DownloadError(f"{error} Or choose another revision as ORG/NAME@REVISION.") from None
    _fetched(model_id, [glob.escape(name) for name in shards])
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise DownloadError(
            f"{model_id}: {INDEX_FILE} names {len(shards)} shards, the repository lacks {len(missing)} of them, such as"
            f" {missing[0]}. Choose another revision as ORG/NAME@REVISION."
        )
    return folder


def cached_code(model_id: str) -> Path:
    """Bring the Python files beside a model into the hub's cache; returns the folder of its commit there.

    They are not run here. Raises: DownloadError as `cached_model`.
    """
    return _fetched(model_id, ["*.py"])


def cached_adapter(adapter_id: str) -> Path:
    """Bring an adapter into the hub's cache; returns the folder of its commit there. adapter_id: as of a model.

    Raises: DownloadError as `cached_model`, also for a repository that holds no adapter.
    """
    folder = _fetched(adapter_id, [ADAPTER_CONFIG, ADAPTER_WEIGHTS, *SUPPORT])
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise DownloadError(
                f"{adapter_id}: no {name} on the hub. Choose a repository of adapters as PEFT has them."
            )
    return folder


def _fetched(model_id: str, patterns: Sequence[str]) -> Path:
    """Bring the files that match into the cache; returns the folder of the commit, whatever it holds."""
    match = HUB_MODEL.fullmatch(model_id)
    assert match is not None, model_id
    repo, revision = match["repo"], match["revision"] or constants.DEFAULT_REVISION
    key = (constants.ENDPOINT, repo, revision)
    asked = f"model {repo!r} at revision {revision!r} from {without_secrets(constants.ENDPOINT)}"

    def fetch() -> Path:
        try:
            wanted = _commits.get(key, revision)
            return Path(snapshot_download(repo, revision=wanted, allow_patterns=list(patterns)))
        except LocalEntryNotFoundError as error:  # raised for whatever kept the hub from being asked
            raise error.__cause__ or OfflineModeIsEnabled(str(error)) from None

    with _quiet_hub():
        folder = with_retries(fetch, asked, RETRIES, logger.warning)
    if key not in _commits:
        logger.info("model %s: commit %s in the hub's cache, %s", repo, folder.name, folder)
        _commits[key] = folder.name
    return folder


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Have the hub's client draw bars on terminals alone, and leave all that it would log to the messages here."""
    clients = [logging.getLogger(name) for name in ("httpx", "httpx2", "huggingface_hub")]
    levels, had_bars = [client.level for client in clients], not are_progress_bars_disabled()
    for client in clients:
        client.setLevel(logging.ERROR)
    if had_bars and not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        for client, level in zip(clients, levels, strict=True):
            client.setLevel(level)
        if had_bars:
            enable_progress_bars()
