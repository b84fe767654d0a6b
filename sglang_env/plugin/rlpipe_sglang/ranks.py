"""Ranks of a tensor-parallel server compare what rlpipe runs in them, before the first request.

Each rank draws its drafts by itself, from the same random numbers. A rank in which SGLang could not place a
hook, or whose kernels failed, draws others: then the ranks' drafts and keys and values differ, and nothing
raises. So a server whose ranks differ does not start, and once they have compared, none may change by itself.
"""

from __future__ import annotations

from typing import Any

import torch

WAITING = "its ranks have not compared their hooks yet"


class Compared:
    """ranks: so many have compared and agree; 0 before."""

    ranks = 0


def compare(status: str, parallel: Any) -> None:
    """Compare the status of this rank with those of all others; collective.

    parallel: SGLang's tensor-parallel group. Raises RuntimeError with the status of each where they differ.
    """
    statuses: list[Any] = [status]
    if parallel.world_size > 1:
        statuses = [None] * parallel.world_size
        torch.distributed.all_gather_object(statuses, status, group=parallel.cpu_group)

    if len(set(statuses)) > 1:
        each = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(statuses))
        raise RuntimeError(
            f"the ranks of this server would draft differently ({each}). Start it again, with "
            "rollout.sglang.plugin=false if it recurs."
        )
    Compared.ranks = len(statuses)


def require_alone(error: Exception) -> None:
    """Raise where other ranks would go on with the kernels that failed here with `error`."""
    if Compared.ranks > 1:
        raise RuntimeError(
            f"rlpipe's kernels failed on one of {Compared.ranks} ranks, whose drafts would part from those "
            f"of the others: {type(error).__name__}: {error}"
        ) from error
