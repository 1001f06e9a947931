"""Model downloads against a loopback hub: complete, resumed, corrupted, refused."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from flexengine.checkpoint import download as download_module
from flexengine.checkpoint import hub as hub_module
from flexengine.checkpoint import hub_errors, hub_file, hub_listing
from flexengine.checkpoint.download import DownloadError, main, verify_manifest
from flexengine.checkpoint.reader import CheckpointReader

REPO = "org/tiny"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
MANIFEST = "flexengine_manifest.json"


@pytest.fixture
def repo(hub):
    """A sharded model, with files beside it that a download leaves alone."""
    weights = {name: torch.randn(200, 50) for name in "ab"}
    files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}" * 50,
        "chat_template.jinja": "{{ grüße }}".encode(),
        INDEX: json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
        **{shard: save({name: weights[name]}) for name, shard in zip("ab", SHARDS, strict=True)},
        "consolidated.safetensors": b"the same weights under other names",
        "pytorch_model.bin": b"pickle",
        "original/params.json": b"{}",
        "README.md": b"# tiny",
    }
    hub.repos[f"models/{REPO}"] = files
    hub.lfs.update([*SHARDS, "consolidated.safetensors", "pytorch_model.bin"])
    return files


def fetch(hub, target: Path, *arguments: str, retries: int = 0) -> int:
    options = ["--target", str(target), "--endpoint", hub.url, "--retries", str(retries)]
    return main(["model", REPO, *options, *arguments])


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_complete_model(hub, repo, tmp_path, capsys):
    target = tmp_path / "new" / "model"
    assert fetch(hub, target) == 0
    wanted = {"config.json", "tokenizer.json", "chat_template.jinja", INDEX, *SHARDS}
    assert names_in(target) == {*wanted, MANIFEST}
    assert all((target / name).read_bytes() == repo[name] for name in wanted)
    manifest = verify_manifest(target)
    assert (manifest["repo"], manifest["revision"], manifest["files"].keys()) == (REPO, hub.commit, wanted)
    with CheckpointReader.open(target) as reader:
        assert set(reader.tensors) == {"a", "b"}
    assert main(["verify", str(target)]) == 0
    lines = capsys.readouterr().out
    assert "complete: 6 files" in lines
    assert "\r" not in lines


def test_single_file_wins_over_shards(hub, repo, tmp_path):
    repo["model.safetensors"] = save({"a": torch.ones(3), "b": torch.ones(3)})
    assert fetch(hub, tmp_path) == 0
    assert names_in(tmp_path) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        MANIFEST,
    }


def test_second_run_fetches_nothing(hub, repo, tmp_path, capsys):
    assert fetch(hub, tmp_path) == 0
    hub.requests.clear()
    assert fetch(hub, tmp_path) == 0
    assert hub.requests == []
    assert "have config.json" in capsys.readouterr().out


def test_changed_local_file_is_fetched_again(hub, repo, tmp_path):
    assert fetch(hub, tmp_path) == 0
    hub.requests.clear()
    (tmp_path / "tokenizer.json").write_bytes(b"[]" * 50)  # same size, other contents
    with pytest.raises(DownloadError, match=r"1 of 6 files differ.*\n  tokenizer.json: SHA-256"):
        verify_manifest(tmp_path)
    assert fetch(hub, tmp_path) == 0
    assert [request.path for request in hub.requests] == ["tokenizer.json"]
    verify_manifest(tmp_path)


def test_resume_in_the_next_run_asks_for_the_rest(hub, repo, tmp_path, capsys):
    size, half = len(repo[SHARDS[1]]), 20_000
    hub.drop_after[SHARDS[1]] = half
    assert fetch(hub, tmp_path, "--workers", "1") == 1
    assert "connection" in capsys.readouterr().err
    assert MANIFEST not in names_in(tmp_path)
    assert SHARDS[1] not in names_in(tmp_path)
    hub.drop_after.clear()
    hub.requests.clear()
    assert fetch(hub, tmp_path) == 0
    assert [(r.path, r.start, r.sent_bytes) for r in hub.requests] == [(SHARDS[1], half, size - half)]
    assert (tmp_path / SHARDS[1]).read_bytes() == repo[SHARDS[1]]
    verify_manifest(tmp_path)
    assert ".flexengine_partial" not in os.listdir(tmp_path)


def test_retries_within_a_run_continue(hub, repo, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(hub_errors.time, "sleep", lambda seconds: (waits.append(seconds), hub.drop_after.clear()))
    hub.drop_after[SHARDS[0]] = 10_000
    assert fetch(hub, tmp_path, retries=1) == 0
    assert hub.starts(SHARDS[0]) == [0, 10_000]
    assert hub.sent_bytes(SHARDS[0]) == len(repo[SHARDS[0]])
    assert waits == [1.0]


def test_resume_from_a_server_without_ranges_starts_over(hub, repo, tmp_path):
    hub.drop_after[SHARDS[0]] = 10_000
    assert fetch(hub, tmp_path) == 1
    hub.drop_after.clear()
    hub.no_ranges = True
    assert fetch(hub, tmp_path) == 0
    verify_manifest(tmp_path)


def test_partial_file_longer_than_the_real_one(hub, repo, tmp_path):
    partial = tmp_path / hub_module.PARTIAL_FOLDER
    partial.mkdir()
    sha256 = hub.describe(f"models/{REPO}")["siblings"][list(repo).index(SHARDS[0])]["lfs"]["sha256"]
    file = hub_listing.RemoteFile(SHARDS[0], len(repo[SHARDS[0]]), sha256, None)
    (partial / hub_file.partial_name(file)).write_bytes(b"x" * (len(repo[SHARDS[0]]) + 5))
    assert fetch(hub, tmp_path) == 0
    verify_manifest(tmp_path)


@pytest.mark.parametrize("contents", [b"{}", b"[" + b"1, " * 100_000 + b"1]"], ids=["small", "large"])
def test_files_with_equal_contents_at_once(hub, repo, tmp_path, contents):
    equal = ["config.json", "added_tokens.json", "generation_config.json"]
    repo.update(dict.fromkeys(equal, contents))
    hub.together = dict.fromkeys(equal, threading.Barrier(len(equal)))
    assert fetch(hub, tmp_path) == 0
    assert [(tmp_path / name).read_bytes() == contents for name in equal] == [True] * len(equal)
    verify_manifest(tmp_path)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"{")], ids=["gone", "shorter"])
def test_partial_file_that_another_program_changes(hub, repo, tmp_path, capsys, monkeypatch, spoil):
    check = hub_file.FileFetch._check_contents

    def check_then_spoil(self):
        check(self)
        if self.file.path == "config.json":
            spoil(self.partial_path)

    monkeypatch.setattr(hub_file.FileFetch, "_check_contents", check_then_spoil)
    assert fetch(hub, tmp_path) == 1
    assert "config.json of model 'org/tiny'" in (message := capsys.readouterr().err)
    assert "another program" in message
    assert {"config.json", MANIFEST}.isdisjoint(names_in(tmp_path))


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_corrupted_contents_are_refused(hub, repo, tmp_path, capsys, name):
    hub.corrupt.add(name)
    assert fetch(hub, tmp_path) == 1
    message = capsys.readouterr().err
    assert name in message
    assert "SHA" in message
    assert "Traceback" not in message
    assert {name, MANIFEST}.isdisjoint(names_in(tmp_path))
    hub.corrupt.clear()
    assert fetch(hub, tmp_path) == 0
    verify_manifest(tmp_path)


def test_old_manifest_does_not_survive_a_failed_update(hub, repo, tmp_path):
    assert fetch(hub, tmp_path) == 0
    repo["config.json"] = b'{"model_type": "qwen3"}'
    hub.corrupt.add("config.json")
    assert fetch(hub, tmp_path) == 1
    assert MANIFEST not in names_in(tmp_path)


def test_listed_file_that_is_gone(hub, repo, tmp_path, capsys):
    hub.status[SHARDS[1]] = 404
    assert fetch(hub, tmp_path) == 1
    assert f"{SHARDS[1]} of model 'org/tiny'" in (message := capsys.readouterr().err)
    assert "HTTP 404" in message
    assert MANIFEST not in names_in(tmp_path)


def test_index_naming_an_absent_shard(hub, repo, tmp_path, capsys):
    del repo[SHARDS[1]]
    assert fetch(hub, tmp_path) == 1
    assert f"the repository lacks {SHARDS[1]}" in capsys.readouterr().err
    assert hub.starts(SHARDS[0]) == [], "weights must not be fetched before the index is known to be complete"


def test_no_safetensors(hub, repo, tmp_path, capsys):
    hub.repos[f"models/{REPO}"] = {name: repo[name] for name in ("config.json", "pytorch_model.bin")}
    assert fetch(hub, tmp_path / "x") == 1
    assert "no safetensors weights" in (message := capsys.readouterr().err)
    assert "found pytorch_model.bin" in message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 200_000,
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": ["a"]}',
        b"[]",
        b"\xff",
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=["deep", "number", "list", "no object", "no text", "long number"],
)
def test_damaged_index(hub, repo, tmp_path, capsys, index):
    repo[INDEX] = index
    assert fetch(hub, tmp_path) == 1
    assert INDEX in (message := capsys.readouterr().err)
    assert "org/tiny" in message
    assert MANIFEST not in names_in(tmp_path)


@pytest.mark.parametrize("flag", ["--allow-patterns", "--allow_patterns"])
def test_allow_patterns(hub, repo, tmp_path, capsys, flag):
    assert fetch(hub, tmp_path, flag, "*.json", "model-00001*") == 0
    assert names_in(tmp_path) == {"config.json", "tokenizer.json", INDEX, "original/params.json", SHARDS[0], MANIFEST}
    assert fetch(hub, tmp_path, flag, "*.json", "*.onnx") == 1
    assert "no file matches *.onnx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (None, "not found or not accessible (HTTP 404). Check ORG/NAME"),
        ((401, ""), "not found or not accessible (HTTP 401)"),
        ((403, "GatedRepo"), "access is gated (no HF_TOKEN is set). Accept the terms"),
        ((403, ""), "access refused (HTTP 403"),
        ((503, ""), "the hub answered HTTP 503"),
        ((429, ""), "HTTP 429"),
    ],
)
def test_refusals(hub, tmp_path, capsys, refuse, message):
    hub.refuse = refuse
    assert fetch(hub, tmp_path / "x") == 1
    output = capsys.readouterr().err
    assert message in output
    assert "model 'org/tiny' at revision 'main' from http://127.0.0.1" in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_revision(hub, repo, tmp_path, capsys):
    assert fetch(hub, tmp_path, "--revision", "v9") == 1
    assert "the revision does not" in capsys.readouterr().err
    assert fetch(hub, tmp_path, "--revision", hub.commit) == 0
    assert verify_manifest(tmp_path)["requested_revision"] == hub.commit


def test_bad_name_and_bad_target(hub, repo, tmp_path, capsys):
    assert main(["model", "a//b c", "--target", str(tmp_path), "--endpoint", hub.url]) == 1
    assert "not a valid repository name" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert fetch(hub, tmp_path / "file") == 1
    assert "is a folder, this is a file" in capsys.readouterr().err
    assert fetch(hub, tmp_path / "file" / "below") == 1
    assert "download failed" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        main(["model", REPO])
    assert exit_info.value.code == 2


def test_no_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    arguments = ["--endpoint", "http://127.0.0.1:9", "--retries", "0"]  # the discard port: nothing listens there
    assert main(["model", REPO, "--target", str(tmp_path), *arguments]) == 1
    assert "the connection failed" in capsys.readouterr().err


def test_names_that_leave_the_target_are_refused(hub, repo, tmp_path, capsys):
    repo["../evil.json"] = b"{}"
    assert fetch(hub, tmp_path / "x", "--allow-patterns", "*evil*") == 1
    assert "leaves the target folder" in capsys.readouterr().err
    assert not (tmp_path / "evil.json").exists()


def test_mirror_without_sizes_and_hashes(hub, repo, tmp_path):
    hub.unlisted_hashes = True
    assert fetch(hub, tmp_path) == 0
    assert verify_manifest(tmp_path)["files"][SHARDS[0]]["size"] == len(repo[SHARDS[0]])


def test_hashes_that_are_required(hub, repo, tmp_path, capsys):
    """A name of a revision, files without a hash, and an answer of another commit are refused; nothing is fetched."""
    assert fetch(hub, tmp_path / "a", "--require-hashes") == 1
    assert "revision 'main' of org/tiny is a name that may come to mean other files" in capsys.readouterr().err
    assert fetch(hub, tmp_path / "b", "--require-hashes", "--revision", "f" * 40) == 1
    assert fetch(hub, tmp_path / "c", "--require-hashes", "--revision", hub.commit) == 0
    verify_manifest(tmp_path / "c")
    capsys.readouterr()
    hub.unlisted_hashes = True
    assert fetch(hub, tmp_path / "d", "--require-hashes", "--revision", hub.commit) == 1
    assert "the hub lists no hash of 4 of 4 files of org/tiny, such as 'chat_template.jinja'" in capsys.readouterr().err
    assert [names_in(tmp_path / name) for name in "abd"] == [set()] * 3


def test_an_answer_of_another_commit_is_refused(hub, repo, tmp_path, capsys, monkeypatch):
    parsed = hub_listing._parsed
    monkeypatch.setattr(hub_listing, "_parsed", lambda *of: parsed(*of)._replace(commit="e" * 40))
    assert fetch(hub, tmp_path, "--require-hashes", "--revision", hub.commit) == 1
    assert "the answer is of commit eeee" in capsys.readouterr().err


def test_full_disk_is_known_beforehand(hub, repo, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage)
    assert fetch(hub, tmp_path) == 1
    assert "still to be fetched, the disk has 1000 bytes free" in capsys.readouterr().err


def test_two_downloads_into_one_folder(hub, repo, tmp_path, capsys):
    with hub_module.partial_folder(tmp_path):
        assert fetch(hub, tmp_path) == 1
    assert "another download is writing here" in capsys.readouterr().err


def test_token_goes_to_the_hub_but_not_to_its_storage(hub, repo, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch(hub, tmp_path) == 0
    sent = {request.path: request.authorization for request in hub.requests}
    assert sent["config.json"] == "Bearer hf_secret"
    assert sent[SHARDS[0]] is None


def test_interrupt(hub, repo, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(download_module, "fetch_files", interrupted)
    assert fetch(hub, tmp_path) == 130
    assert "again to continue" in capsys.readouterr().err


def test_manifest_that_is_absent_or_damaged(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert "did not finish" in capsys.readouterr().err
    for text in ("{", "[]", '{"files": {"a": 3}}', "[" * 200_000):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(DownloadError, match="not a manifest"):
            verify_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"files": {"a": {"size": 1, "sha256": ""}}}')
    with pytest.raises(DownloadError, match="a: missing"):
        verify_manifest(tmp_path)


@pytest.mark.parametrize(("offline", "status"), [("0", 0), ("1", 1)])
def test_script_and_environment(hub, repo, tmp_path, offline, status):
    script = Path(__file__).parents[2] / "download.py"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(script), "model", REPO, "--target", str(tmp_path / "x")]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert result.returncode == status, result.stderr
    if status:
        assert "HF_HUB_OFFLINE" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "x").exists()
    else:
        verify_manifest(tmp_path / "x")
        assert result.stderr == ""
