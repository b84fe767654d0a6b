"""Held-out sets on which acceptance is measured.

Owns the choice of prompts: from an environment (`swe`: all its held-out sets), from one of its sets
(`swe.held_families`), or from a JSONL file of conversations. Generates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlpipe.adapt.conversations import ConversationSuite
from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.paths import resolve
from rlpipe.envs import make_suite
from rlpipe.envs.base import Suite

UNUSED_TRAINING = 16  # training tasks to make for an environment that is only evaluated


@dataclass(slots=True, kw_only=True)
class Domain:
    """One held-out set.

    name: name in metrics, ENV.SPLIT or the file's name. in_domain: whether prompts of its kind are trained
    on. suite: makes its episodes. instance_ids: ids of its prompts, in order.
    """

    name: str
    in_domain: bool
    suite: Suite
    instance_ids: list[str]


def make_domains(config: AdaptConfig, env: EnvConfig, suites: dict[EnvName, Suite]) -> list[Domain]:
    """Make all held-out sets that the settings name.

    Args:
        suites: by environment, see `make_suites`.

    Raises:
        ValueError: if a set does not exist, is named twice, or has no prompt left.
    """
    domains: list[Domain] = []
    for entry, in_domain in config.domains(env):
        name, _, split = entry.partition(".")
        if name in [e.value for e in EnvName]:
            suite = suites[EnvName(name)]
            splits = [split] if split else list(suite.splits())
            if split == "train":
                raise ValueError(f"adapt: {entry!r} is trained on; choose of {', '.join(suite.splits())}.")
            names = [f"{name}.{s}" for s in splits]
        else:
            suite = ConversationSuite(resolve(entry))
            splits, names = suite.splits(), [Path(entry).stem]

        for title, chosen in zip(names, splits, strict=True):
            ids = _selected(suite.instance_ids(chosen), config, title)
            domains.append(Domain(name=title, in_domain=in_domain, suite=suite, instance_ids=ids))

    # Names become parts of metric names, so they must be unique and plain.
    titles = [domain.name for domain in domains]
    if len(set(titles)) < len(titles) or not all(re.fullmatch(r"[\w.\-]+", title) for title in titles):
        raise ValueError(
            f"adapt.in_domain and adapt.out_of_domain name the sets {titles}: each must be there once, under "
            "a name of letters, digits, '_', '-' and '.'."
        )
    return domains


def make_suites(config: AdaptConfig, env: EnvConfig, seed: int) -> dict[EnvName, Suite]:
    """Make the environments that are needed; one that is only evaluated gets few training tasks."""
    suites = {}
    for name in config.environments(env):
        settings = replace(env, name=name)
        if name is not env.name:
            settings = replace(settings, reasoning=replace(env.reasoning, train_size=UNUSED_TRAINING))
        suites[name] = make_suite(settings, seed)
    return suites


def _selected(instance_ids: Sequence[str], config: AdaptConfig, title: str) -> list[str]:
    """Return the instances that `adapt.eval_offset` and `eval_prompts` select. Raises ValueError."""
    stop = config.eval_offset + config.eval_prompts if config.eval_prompts else None
    ids = list(instance_ids[config.eval_offset : stop])
    if not ids:
        raise ValueError(
            f"held-out set {title} has {len(instance_ids)} prompts, none after adapt.eval_offset="
            f"{config.eval_offset}: lower it."
        )
    return ids
