"""Settings of earlier versions: renamed and removed settings. Imports no torch.

Owns both tables. Command lines and YAML files with an old name are refused, with a hint to the new name
(`rlpipe.cli.suggestions`). Records of earlier runs are read under the new names (`with_current_names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "mtp": "draft",  # renamed in 0.2, because it also trains EAGLE-3 drafts
}
"""Old name -> new name of a setting or section."""

REMOVED = {
    "rollout.top_p": "rollouts are sampled from the full distribution, because the trainer would have to "
    "replay the retained set of every token. Lower rollout.temperature for sharper samples",
    "rollout.top_k": "rollouts are sampled from the full distribution, because the trainer would have to "
    "replay the retained set of every token. Lower rollout.temperature for sharper samples",
    "rollout.sglang.draft_path": "an MTP layer is read from the model's own checkpoint. Put it there, or "
    "name an EAGLE-3 draft by spec.drafter=eagle3 spec.draft_path=FOLDER",
    "rollout.sglang.health_interval": "health requests are a third of rollout.sglang.health_timeout apart, "
    "10 seconds at most. Set that one",
    "rollout.sglang.canary_retries": "weights that did not arrive are sent once more. Leave it out",
    "rollout.sglang.decode_steps_between_prefills": "it is an option of SGLang's. Give it as "
    "rollout.sglang.extra_arguments=[--prefill-decode-interval,N]",
    "env.sandbox.memo_mb": "remembered outcomes take 256 MB at most. Leave it out, or set "
    "env.sandbox.memo=false to remember none",
}
"""Name -> the reason for its removal, and the setting to use instead."""


def current_name(name: str) -> str:
    """Return the current name of a setting: the same name, unless it or its section was renamed.

    >>> current_name("mtp.train"), current_name("mtp"), current_name("spec.gamma")
    ('draft.train', 'draft', 'spec.gamma')
    """
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def outdated_setting(name: str, value: str) -> ValueError | None:
    """Return the error for a name that existed only in an earlier version; None for any other name.

    >>> str(outdated_setting("mtp.train", "online"))
    'mtp.train is now draft.train: write draft.train=online.'
    """
    if name in REMOVED:
        return ValueError(f"{name}={value}: there is no such setting any more: {REMOVED[name]}.")

    current = current_name(name)
    if current != name:
        example = current if value == "..." else f"{current}={value}"
        return ValueError(f"{name} is now {current}: write {example}.")
    return None


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.yaml of any version, with sections and settings under their current names.

    Values are not changed. Removed settings also stay in the result; no code reads them.

    >>> with_current_names({"mtp": {"train": "off"}, "spec": {"gamma": 3}})
    {'draft': {'train': 'off'}, 'spec': {'gamma': 3}}
    """

    def walk(prefix: str, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and value:
                walk(f"{name}.", value)
            else:
                *sections, last = current_name(name).split(".")
                target = renamed
                for each in sections:
                    target = target.setdefault(each, {})
                target[last] = value

    renamed: dict[str, Any] = {}
    walk("", settings)
    return renamed
