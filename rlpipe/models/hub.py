"""Downloads models of the Hugging Face hub into a cache, by their id `org/name` or `org/name@revision`.

huggingface_hub downloads into its cache (HF_HOME), with its token (HF_TOKEN, `hf auth login`) and address
(HF_ENDPOINT), and resumes after a broken connection. This module owns the choice of files, the checks before
a download, and the messages. Without a network, or with HF_HUB_OFFLINE=1, the copy in the cache is used.
Imports no torch.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 15.0  # timeout of a request to the hub
WANTED = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*preprocessor_config.json",
    "draft_vocab.json",
)
"""Patterns of a model's files that a run reads."""

SKIPPED = ("*/*", "consolidated*")
"""Patterns of files that are not read: files in folders, and Mistral's copies of the weights."""


def hub_id(path: str) -> tuple[str, str] | None:
    """Return id and revision ("" without one) if `path` names a model of the hub; None if the path exists.

    >>> hub_id("Qwen/Qwen3-0.6B"), hub_id("Qwen/Qwen3-0.6B@main"), hub_id("./Qwen/Qwen3-0.6B")
    (('Qwen/Qwen3-0.6B', ''), ('Qwen/Qwen3-0.6B', 'main'), None)
    """
    match = _ID.fullmatch(path)
    if match is None or Path(path).exists():
        return None
    return match["repo"], match["revision"] or ""


@functools.cache
def hub_directory(repo: str, revision: str, setting: str) -> Path:
    """Return the directory of a hub model in this machine's cache, after downloading missing files.

    Raises ValueError if there is no such model, it is gated, has no safetensors, or cannot be reached.
    """
    where = f"{setting}={repo}{revision and '@'}{revision}"
    # A commit never changes, so a complete copy of it needs no request.
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline or _COMMIT.fullmatch(revision):
        directory = _cached(repo, revision)
        if directory is not None:
            return directory
    if offline:
        raise _absent(where, repo, setting, "HF_HUB_OFFLINE is set")

    try:
        return _download(repo, revision, where)
    except ValueError:
        raise
    # huggingface_hub raises errors of its own, of its HTTP library and of the file system.
    except Exception as error:
        if refusal := _refusal(error, where, repo, revision):
            raise refusal from error

        directory = _cached(repo, revision)
        if directory is None:
            raise _absent(
                where, repo, setting, f"{_endpoint()} does not answer ({_described(error)})"
            ) from error
        _say(f"{where}: {_endpoint()} does not answer; using the copy in the cache, {directory}")
        return directory


def _download(repo: str, revision: str, where: str) -> Path:
    """Download files that the cache lacks. Raises ValueError, and errors of huggingface_hub."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi(endpoint=_endpoint()).model_info(repo, revision=revision or None, timeout=_TIMEOUT_S)
    files = [sibling.rfilename for sibling in info.siblings or []]
    _check_files(files, where, repo)

    # A branch may have new commits since it was downloaded.
    cached = _cached(repo, revision)
    if cached is not None and cached.name == info.sha:
        return cached
    _say(f"{where}: downloading commit {info.sha} into {_cache()}")
    return Path(
        snapshot_download(
            repo,
            revision=revision or None,
            cache_dir=_cache(),
            endpoint=_endpoint(),
            allow_patterns=list(WANTED),
            ignore_patterns=list(SKIPPED),
        )
    )


def _check_files(files: list[str], where: str, repo: str) -> None:
    """Refuse a repository without a model in safetensors, before its download. Raises ValueError."""
    from huggingface_hub.utils import filter_repo_objects

    read = filter_repo_objects(files, allow_patterns=list(WANTED), ignore_patterns=list(SKIPPED))

    def ending(*endings: str) -> str:
        return next((name for name in files if name.endswith(endings)), "")

    if "adapter_config.json" in files and "config.json" not in files:
        raise ValueError(
            f"{where} is a PEFT adapter, not a model: merge it into its base with peft's merge_and_unload() "
            "and save_pretrained(DIR), then name that folder."
        )
    if any(name.endswith(".safetensors") for name in read):
        if "config.json" in files:
            return
        raise ValueError(f"{where} has no config.json: name a model in the format of transformers.")

    if gguf := ending(".gguf"):
        raise ValueError(
            f"{where} has weights of llama.cpp's format only ({gguf}): name the repository that it was made "
            f"from, or run `hf download {repo} {gguf} --local-dir DIR` and `rlpipe fetch DIR/{gguf} --out "
            "MODEL`."
        )
    if pickled := ending(".bin", ".pt", ".pth"):
        raise ValueError(
            f"{where} has its weights only as {pickled}, which can run code when it is read, and no "
            "*.safetensors: look for a revision that has them (model.path=org/name@refs/pr/N), or convert it "
            "with transformers' save_pretrained."
        )
    raise ValueError(f"{where} has no *.safetensors file: name a repository with the weights of a model.")


def _cached(repo: str, revision: str) -> Path | None:
    """Return the directory of a complete copy in the cache; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(
            snapshot_download(
                repo,
                revision=revision or None,
                cache_dir=_cache(),
                local_files_only=True,
                allow_patterns=list(WANTED),
                ignore_patterns=list(SKIPPED),
            )
        )
        index = directory / "model.safetensors.index.json"
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    # The copy is absent or incomplete, or its index is cut off.
    except (OSError, ValueError, KeyError):
        return None

    complete = all((directory / shard).is_file() for shard in shards) and any(directory.glob("*.safetensors"))
    return directory if complete and (directory / "config.json").is_file() else None


def _refusal(error: Exception, where: str, repo: str, revision: str) -> ValueError | None:
    """Return a ValueError for an error that a cached copy must not hide; None for others (no connection)."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    login = "run `hf auth login`, or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return ValueError(
            f"{where} is gated: accept its conditions at {_endpoint()}/{repo}, then {login} to a token of "
            "that account."
        )
    if isinstance(error, RevisionNotFoundError):
        return ValueError(
            f"{where}: {repo} has no branch, tag or commit {revision!r}: leave out @{revision}, or name one."
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        private = f"correct the id, or, if it is private, {login}"
        if "HF_TOKEN" in os.environ or status == 403:
            private = "correct the id, or use a token (HF_TOKEN, `hf auth login`) that may read it"
        if _may_be_folder(repo):
            private = f"download the model to that folder first ({_downloading(repo)}), {private}"
        return ValueError(
            f"{where}: there is no folder {Path(repo).resolve()}, and {_endpoint()} has no model {repo} that "
            f"this account can read ({status}): {private}."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return ValueError(
            f"{where} cannot be stored in {_cache()} ({error.strerror}): make room, or set HF_HOME to "
            "another folder."
        )
    return None


def _absent(where: str, repo: str, setting: str, why: str) -> ValueError:
    name = repo.partition("/")[2]
    if _may_be_folder(repo):
        return ValueError(
            f"{where}: there is no folder {Path(repo).resolve()}: download the model there first "
            f"({_downloading(repo)}). If {repo} is an id of the hub: it has no complete copy in {_cache()}, "
            f"and {why}."
        )
    return ValueError(
        f"{where}: there is no folder {Path(repo).resolve()} and no complete copy in {_cache()}, and {why}. "
        f"With a network the same command downloads what is missing. Otherwise run `hf download "
        f"{repo} --local-dir {name}` where there is one, copy the folder and set {setting}=./{name}, or set "
        "HF_ENDPOINT to a mirror."
    )


def _may_be_folder(repo: str) -> bool:
    """Return whether `repo` names a place in a folder that exists, such as models/NAME beside models/."""
    return Path(repo).parent.is_dir()


def _downloading(folder: str) -> str:
    return f"`hf download ORG/{Path(folder).name} --local-dir {folder}`"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _cache() -> Path:
    """Return the cache directory that environment variables set now; huggingface_hub reads them on import."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"


def _described(error: BaseException) -> str:
    """Return the type and first line of an error, or of its cause."""
    first: Any = error.__cause__ or error
    return f"{type(first).__name__}: {str(first).partition(chr(10))[0]}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
