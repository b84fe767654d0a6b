"""Replaces the models of the Hugging Face hub in a configuration by their directories on this machine."""

from __future__ import annotations

from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.models.hub import hub_id


def fetch_models(config: Config) -> None:
    """Download every model that a setting names by its id, and put its directory into the setting.

    The driver does this once, so that all processes read the same commit. A cluster of several machines
    needs the directory on each of them, as with a local model: HF_HOME on a shared file system.
    Raises ValueError when one cannot be obtained.
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
