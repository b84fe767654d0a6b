"""Prepares the models that a configuration names, before anything reads them.

A model of the Hugging Face hub is downloaded. For a model with another chat template, a directory of links
and that template is created. The configuration then names these directories.
"""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path

from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.run import Config
from rlpipe.models.hub import hub_id
from rlpipe.models.released import cache_directory

TEMPLATE = "chat_template.jinja"


def prepare_models(config: Config) -> None:
    """Replace the model names in the settings by directories of this machine.

    The driver does this once, so that all processes read the same files. As with a local model, a cluster of
    several machines needs the directories on each machine: put HF_HOME and XDG_CACHE_HOME on a shared file
    system.
    Raises ValueError when a model cannot be obtained, or its template cannot be used.
    """
    named = (
        ("model.path", config.model, "path"),
        ("decoupled.path", config.decoupled, "path"),
        ("spec.draft_path", config.spec, "draft_path"),
        ("eagle3.start", config.eagle3, "start"),
    )
    for setting, section, field in named:
        if hub_id(path := getattr(section, field)) is not None:
            setattr(section, field, str(resolve_model(path, setting)))

    if config.model.chat_template:
        directory = resolve_model(config.model.path)
        config.model.path = str(_with_template(directory, config.model.chat_template))


def _with_template(directory: Path, setting: str) -> Path:
    """Return a directory with the files of a model, but another chat template. Raises ValueError."""
    from rlpipe.preflight.checkpoint_and_machine import check_template

    file = resolve(setting)
    try:
        text = file.read_text(encoding="utf-8")
        files = [entry for entry in sorted(directory.iterdir()) if entry.name != TEMPLATE]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"model.chat_template={setting!r} cannot be read ({error}): name a file with a Jinja template; a "
            "relative path starts at the folder in which the run is started."
        ) from None
    check_template(file, text)

    # The directory's name is a hash of its content, so an edited template gets another directory.
    content = "\0".join([text, *(str(entry.resolve()) for entry in files)])
    name = f"{directory.name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    target = cache_directory("").parent / "templates" / name
    if target.is_dir():
        return target

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        for entry in files:
            (partial / entry.name).symlink_to(entry.resolve())
        (partial / TEMPLATE).write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        # Another launch may have created it in the meantime.
        with suppress(FileExistsError):
            partial.rename(target)
    except OSError as error:
        raise ValueError(
            f"model.chat_template={setting!r}: {target.parent} cannot be written ({error.strerror}): set "
            "XDG_CACHE_HOME to a folder that can."
        ) from None
    return target
