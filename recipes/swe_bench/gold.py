"""Grades each instance of a file with its own patch and without any: does this machine grade correctly?

    python recipes/swe_bench/gold.py FILE [--jobs N] [env.KEY=VALUE ...]

Settings are those of a run with env=swe. Prints the instances that are graded wrongly, and exits with 1 if
there are any.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlpipe.api.runs import compose
from rlpipe.config.env import EnvConfig, SandboxBackend
from rlpipe.envs import check_environment
from rlpipe.envs.base import TRAIN
from rlpipe.envs.swe.instances import Instance, load_instances
from rlpipe.envs.swe.suite import SweSuite


def solved(suite: SweSuite, instance: Instance, patch: str) -> bool:
    """Return whether an attempt that applies a patch resolves an instance. Raises InfrastructureError."""
    workspace = suite.workspace(instance.instance_id)
    try:
        if patch and workspace.run("git apply -", stdin=patch.encode()).exit_code:
            return False
        return workspace.grade().solved
    finally:
        workspace.close()


def where(config: EnvConfig) -> str:
    """Name the sandboxes in which the instances were graded."""
    checkouts = config.sandbox.backend is SandboxBackend.BUBBLEWRAP and config.repos
    return f"{config.sandbox.backend}{', checkouts of env.repos' if checkouts else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Grade the file that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="settings, key=value")
    args = parser.parse_intermixed_args(arguments)

    config = compose(["+recipe=swe_rl", f"env.train_file={args.file}", *args.overrides]).env
    # Only the file's instances are graded: the recipe's held-out instances cannot run in a container.
    config.held_out_files = []
    check_environment(config)
    suite = SweSuite(config)
    instances = load_instances(config.train_file, "FILE")
    wanted = [instances[name] for name in suite.instance_ids(TRAIN)]
    with ThreadPoolExecutor(args.jobs) as threads:
        gold = list(threads.map(lambda one: solved(suite, one, one.patch), wanted))
        empty = list(threads.map(lambda one: solved(suite, one, ""), wanted))

    for instance, right, wrong in zip(wanted, gold, empty, strict=True):
        if not right or wrong:
            print(f"{instance.instance_id}: gold patch {right}, empty {wrong}")
    total = len(wanted)
    print(
        f"{sum(gold)} of {total} gold patches resolve, {sum(empty)} of {total} empty ones ({where(config)})"
    )
    return int(sum(gold) < total or any(empty))


if __name__ == "__main__":
    raise SystemExit(main())
