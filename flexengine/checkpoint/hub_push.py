"""Uploads an export to the Hugging Face hub, after it is whole on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, constants

from flexengine.checkpoint.hub_errors import without_secrets
from flexengine.wording import HUB_MODEL


def check_repo(repo: str) -> None:
    """Raise ValueError unless this is the name of a repository, before anything is made for it."""
    match = HUB_MODEL.fullmatch(repo)
    if match is None or match["revision"]:
        raise ValueError(f"--push-to-hub {repo}: give the name of a repository on the hub, as ORG/NAME")


def push(folder: Path, repo: str) -> str:
    """Upload all files of a folder in one commit to a repository, which is made (private) where there is none.

    Returns its address. Raises: ValueError where the hub cannot be reached or refuses; the folder stays as it is.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload from flexengine")
    except Exception as error:  # httpx's, the hub's and the file system's
        why = f"{type(error).__name__}: {without_secrets(str(error))[:300]}".splitlines()[0]
        again = f"HF_TOKEN=... hf upload {repo} {os.path.relpath(folder)}"
        raise ValueError(
            f"{folder} is saved, but was not pushed to {repo} at {without_secrets(constants.ENDPOINT)}: {why}\n"
            f"  push it when the hub can be reached: {again}"
        ) from None
    return str(commit.commit_url)
