"""All SWE instances of a run: one training set, any number of held-out sets.

Owns which sets exist and where an instance runs. No instance is in two sets.
"""

from __future__ import annotations

from rlpipe.config.env import EnvConfig, SandboxBackend
from rlpipe.envs.base import TRAIN, SplitTable
from rlpipe.envs.sandbox import make_tree_runner
from rlpipe.envs.swe.episode import SweEpisode
from rlpipe.envs.swe.instances import Instance, load_instances


def load_splits(config: EnvConfig) -> dict[str, dict[str, Instance]]:
    """Load the instances by split and id, training first.

    Raises ValueError for a bad file, a set shared between splits, or a backend that cannot run them.
    """
    splits = {TRAIN: load_instances(config.train_file, "env.train_file")}
    for name, file in zip(config.held_out_names, config.held_out_files, strict=True):
        splits[name] = load_instances(file, "env.held_out_files")

    # An instance in two sets would let a run train on what it is validated on.
    split_by_id: dict[str, str] = {}
    for split, instances in splits.items():
        for instance in instances.values():
            _check_backend(instance, split, config.sandbox.backend)
            other = split_by_id.setdefault(instance.instance_id, split)
            if other != split:
                raise ValueError(
                    f"instance {instance.instance_id!r} is in both {other!r} and {split!r}: "
                    "a held-out set must share nothing with training; remove it from one."
                )

    return splits


def _check_backend(instance: Instance, split: str, backend: SandboxBackend) -> None:
    if bool(instance.files) != (backend is SandboxBackend.BUBBLEWRAP):
        what = "brings its files" if instance.files else "lives in a container image"
        backends = "bubblewrap" if instance.files else "docker or singularity"
        raise ValueError(
            f"instance {instance.instance_id!r} of {split!r} {what}, which "
            f"env.sandbox.backend={backend} cannot run: set it to {backends}."
        )


class SweSuite(SplitTable):
    """A suite of repair tasks. Splits: `train`, and the names of `env.held_out_files`."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        splits = load_splits(config)
        super().__init__({name: list(instances) for name, instances in splits.items()})

        self._instances = {k: v for instances in splits.values() for k, v in instances.items()}
        self._runner = make_tree_runner(config.sandbox)
        self.max_turns = config.max_turns

    def episode(self, instance_id: str) -> SweEpisode:
        """Start a fresh attempt. Raises InfrastructureError when its container does not start."""
        from rlpipe.envs.swe.workspace import ImageWorkspace, TreeWorkspace

        instance = self._instances[instance_id]
        if instance.files:
            workspace = TreeWorkspace(instance, self._runner, self._config)
        else:
            workspace = ImageWorkspace(instance, self._config)

        return SweEpisode(instance, workspace, self._config)

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (outcomes that were reused, outcomes in all) since the start; zeros without a memo."""
        return self._runner.counts
