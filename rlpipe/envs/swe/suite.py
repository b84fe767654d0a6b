"""All SWE instances of a run: one training set and any number of held-out sets.

Decides which sets exist and in which kind of sandbox an instance runs. No instance is in two sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.config.env import EnvConfig, SandboxBackend
from rlpipe.envs.base import TRAIN, SplitTable
from rlpipe.envs.sandbox import make_tree_runner
from rlpipe.envs.swe.agent import SweAgentEpisode, agent_of
from rlpipe.envs.swe.checkout import check_mirrors
from rlpipe.envs.swe.episode import SweEpisode
from rlpipe.envs.swe.instances import Instance, load_instances

if TYPE_CHECKING:
    from rlpipe.envs.swe.workspace import Workspace


def load_splits(config: EnvConfig) -> dict[str, dict[str, Instance]]:
    """Load the instances by split and id, with the training split first.

    Raises ValueError for a bad file, for an instance in two splits, or for a backend that cannot run them.
    """
    splits = {TRAIN: load_instances(config.train_file, "env.train_file")}
    for name, file in zip(config.held_out_names, config.held_out_files, strict=True):
        splits[name] = load_instances(file, "env.held_out_files")

    # If an instance were in two sets, the run could train on its validation data.
    split_by_id: dict[str, str] = {}
    for split, instances in splits.items():
        for instance in instances.values():
            _check_backend(instance, split, config)
            other = split_by_id.setdefault(instance.instance_id, split)
            if other != split:
                raise ValueError(
                    f"instance {instance.instance_id!r} is in both {other!r} and {split!r}: "
                    "a held-out set must share nothing with training; remove it from one."
                )

    if config.repos:
        everything = [instance for instances in splits.values() for instance in instances.values()]
        check_mirrors(config, [instance for instance in everything if not instance.files])
    return splits


def _check_backend(instance: Instance, split: str, config: EnvConfig) -> None:
    """Raise ValueError for an instance that the sandbox's backend cannot run."""
    bubblewrap = config.sandbox.backend is SandboxBackend.BUBBLEWRAP
    if bubblewrap and not instance.files and not config.repos:
        raise ValueError(
            f"instance {instance.instance_id!r} of {split!r} lives in a container image, which "
            "env.sandbox.backend=bubblewrap cannot run: set it to docker or singularity, or name a folder "
            "of git mirrors in env.repos."
        )
    if instance.files and not bubblewrap:
        raise ValueError(
            f"instance {instance.instance_id!r} of {split!r} brings its files, which "
            f"env.sandbox.backend={config.sandbox.backend} cannot run: set it to bubblewrap."
        )


class SweSuite(SplitTable):
    """A suite of bug-fixing tasks. Splits: `train` and the names in `env.held_out_files`."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        splits = load_splits(config)
        super().__init__({name: list(instances) for name, instances in splits.items()})

        self._instances = {k: v for instances in splits.values() for k, v in instances.items()}
        self._runner = make_tree_runner(config.sandbox)
        self.max_turns = config.max_turns
        self._agent = agent_of(config)

    def episode(self, instance_id: str) -> SweEpisode | SweAgentEpisode:
        """Start a new attempt at an instance. Raises InfrastructureError if its container does not start."""
        from rlpipe.envs.swe.workspace import CheckoutWorkspace, TreeWorkspace

        instance, workspace = self._instances[instance_id], self.workspace(instance_id)
        if self._agent is None:
            return SweEpisode(instance, workspace, self._config)
        assert isinstance(workspace, TreeWorkspace | CheckoutWorkspace), "agents run in bubblewrap"
        return SweAgentEpisode(instance, workspace, self._agent)

    def workspace(self, instance_id: str) -> Workspace:
        """Return a new repository of an instance. Raises InfrastructureError if its sandbox fails."""
        from rlpipe.envs.swe.workspace import CheckoutWorkspace, ImageWorkspace, TreeWorkspace

        instance = self._instances[instance_id]
        if instance.files:
            return TreeWorkspace(instance, self._runner, self._config)
        if self._config.sandbox.backend is SandboxBackend.BUBBLEWRAP:
            return CheckoutWorkspace(instance, self._config)
        return ImageWorkspace(instance, self._config)

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (reused outcomes, all outcomes) as numbers since the start; zeros without a cache."""
        return self._runner.counts
