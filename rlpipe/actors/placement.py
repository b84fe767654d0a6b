"""Places a run's actors with one reservation of CPUs and GPUs, made before any actor starts.

A bundle of resources is always on one node. Each rollout worker has a bundle with the GPUs of its server, and
each tensor parallel group of the trainer has one bundle for all its ranks, so neither is divided over nodes.
Neighbouring groups are on the same node if several fit. With cluster.share_gpus worker n and rank n share a
bundle, and the bundles of a tensor parallel group are on one node.

Without a reservation Ray would place one actor at a time, on a random one of the best nodes, and wait forever
for a server if no single node has enough free GPUs left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.config.run import Config

PLACED_S = 120.0  # limit for Ray to reserve the resources of a run
_OWN_CHOICE_S = 5.0  # limit for Ray to choose nodes by itself; it takes less than one second if all fit
_POLL_S = 1.0
Bundle = dict[str, float]


class Placement:
    """The resources reserved for a run. gpus: whether the cluster has GPUs. Raises ValueError."""

    def __init__(self, config: Config, *, gpus: bool) -> None:
        run_mode, trainer = config.run.half, config.trainer
        self._tp = trainer.tp
        self._workers = config.rollout.workers * run_mode.generates
        self._left: list[int] = []  # bundles of drained workers
        self._of_added: dict[int, int] = {}  # worker that joined -> the drained worker's bundle that it uses
        self._groups: list[PlacementGroup] = []
        self._shared = config.cluster.share_gpus

        if self._shared:
            # Use a bundle for each pair, as Ray would put two workers on one GPU of a larger bundle.
            pairs: list[Bundle] = [{"CPU": 2, "GPU": 1}] * trainer.tp
            for _ in range(config.rollout.workers // trainer.tp):
                self._reserve(pairs, "STRICT_PACK")
            return

        gpus_per_worker = config.rollout.gpus_per_worker if gpus else 0
        servers: list[Bundle] = [_bundle(1, gpus_per_worker)] * self._workers
        teams = trainer.world_size // trainer.tp * run_mode.trains
        self._reserve([*servers, *[_bundle(trainer.tp, trainer.tp if gpus else 0)] * teams], "PACK")
        self._team_bundles = self._by_node(range(self._workers, self._workers + teams))

    def of_worker(self, number: int) -> dict[str, Any]:
        """Return the options that place a worker; a joining one uses the bundle of a drained one, if any."""
        if self._shared:
            return self._options(self._groups[number // self._tp], number % self._tp)
        if number >= self._workers and number not in self._of_added:
            if not self._left:
                return {}
            self._of_added[number] = self._left.pop()
        return self._options(self._groups[0], self._of_added.get(number, number))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the options that place a trainer rank."""
        if self._shared:
            return self._options(self._groups[rank // self._tp], rank % self._tp)
        return self._options(self._groups[0], self._team_bundles[rank // self._tp])

    @property
    def free(self) -> int:
        """Return the number of workers that can join on the resources of drained workers."""
        return len(self._left)

    def leave(self, number: int) -> None:
        """Record that a worker was drained."""
        bundle = self._of_added.pop(number, number)
        if bundle < self._workers:
            self._left.append(bundle)

    def close(self) -> None:
        """Release all resources."""
        while self._groups:
            remove_placement_group(self._groups.pop())

    def _reserve(self, bundles: list[Bundle], strategy: str) -> None:
        """Reserve all bundles, or none. Raises ValueError, which names bundles that do not fit."""
        # Let Ray choose the nodes first: then it can also move the bundles of a lost node to another.
        group = placement_group(bundles, strategy=strategy)
        if group.wait(_OWN_CHOICE_S):
            self._groups.append(group)
            return
        remove_placement_group(group)

        # Ray fills node after node and may fail to place a bundle although all would fit: then name the
        # nodes.
        deadline = time.monotonic() + PLACED_S
        while True:
            free = _free_nodes()
            wanted = [_sum(bundles)] if strategy == "STRICT_PACK" else bundles
            places = plan(wanted, list(free.values()))
            if None not in places:
                nodes = [list(free)[place] for place in places if place is not None]
                group = self._on_nodes(bundles, nodes * (len(bundles) // len(nodes)))
                if group.wait(_OWN_CHOICE_S):
                    self._groups.append(group)
                    return
                remove_placement_group(group)

            if time.monotonic() > deadline:
                self.close()
                raise ValueError(_missing(wanted, list(free.values())))
            time.sleep(_POLL_S)

    @staticmethod
    def _on_nodes(bundles: list[Bundle], nodes: list[str]) -> PlacementGroup:
        """Reserve each bundle on the node with the given id."""
        selectors = [{"ray.io/node-id": node} for node in nodes]
        return placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)

    def _by_node(self, bundles: Sequence[int]) -> list[int]:
        """Sort bundles by their nodes, so that neighbouring groups of the trainer share a node."""
        nodes = placement_group_table(self._groups[0])["bundles_to_node_id"]
        return sorted(bundles, key=lambda bundle: (nodes[bundle], bundle))

    @staticmethod
    def _options(group: PlacementGroup, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}


def plan(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> list[int | None]:
    """Return the node for each bundle, None if there is no capacity for it.

    The largest bundles are placed first, each on the node where the least capacity remains.

    >>> plan([{"GPU": 2}, {"GPU": 4}, {"GPU": 4}], [{"GPU": 6}, {"GPU": 3}])
    [0, 0, None]
    """
    remaining = [dict(node) for node in nodes]
    places: list[int | None] = [None] * len(bundles)
    for bundle in sorted(range(len(bundles)), key=lambda n: _size(bundles[n]), reverse=True):
        wanted = bundles[bundle].items()
        fitting = [
            node for node, free in enumerate(remaining) if all(free.get(name, 0) >= n for name, n in wanted)
        ]
        if not fitting:
            continue

        places[bundle] = node = min(fitting, key=lambda node: _size(remaining[node]))
        for name, size in wanted:
            remaining[node][name] -= size
    return places


def _size(bundle: Bundle) -> tuple[float, float]:
    return bundle.get("GPU", 0), bundle.get("CPU", 0)


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def _free_nodes() -> dict[str, Bundle]:
    """Return the free CPUs and GPUs of each node, by its id."""
    free = ray._private.state.available_resources_per_node()  # pyright: ignore
    return {id: {name: node.get(name, 0) for name in ("CPU", "GPU")} for id, node in free.items()}


def _missing(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> str:
    """Return the error message if Ray cannot place a run."""
    places = plan(bundles, nodes)
    left = Counter(_words(b) for b, place in zip(bundles, places, strict=True) if place is None)
    lacking = " and ".join(f"{count} x ({words})" for words, count in left.items()) or "what it needs"
    free = "; ".join(f"{count} x ({words})" for words, count in Counter(map(_words, nodes)).items())
    return (
        f"Ray has not placed the run after {PLACED_S:.0f} s: a server and a tensor parallel group of the "
        f"trainer are on one node each, and there is no place for {lacking}. Free on the nodes: "
        f"{free or 'nothing'}. Lower rollout.sglang.tp, rollout.workers, trainer.tp or trainer.dp, end what "
        "else runs on the cluster, or join nodes to it."
    )


def _words(bundle: Bundle) -> str:
    return ", ".join(f"{size:g} {name}s" for name, size in bundle.items())
