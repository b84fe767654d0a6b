"""Checks before the first request that rlpipe's code is the same in all ranks of a server.

Each tensor parallel rank samples drafts separately, from the same random numbers. A rank in which SGLang
could not install a hook, or whose kernels failed, would sample other drafts. Then drafts and keys and values
would differ between ranks, without an error. So a server does not start if its ranks differ, and after the
comparison no rank may switch to other code on its own.
"""

from __future__ import annotations

from typing import Any

import torch

WAITING = "its ranks have not compared their hooks yet"


class Compared:
    """Result of the comparison. ranks: number of ranks that agree; 0 before the comparison."""

    ranks = 0


def compare(status: str, parallel: Any) -> None:
    """Compare the status of this rank with the status of all other ranks; collective.

    parallel: SGLang's tensor-parallel group. Raises RuntimeError with the status of each rank if they differ.
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
    """Raise if other ranks would continue with the kernels that failed here with `error`."""
    if Compared.ranks > 1:
        raise RuntimeError(
            f"rlpipe's kernels failed on one of {Compared.ranks} ranks, whose drafts would part from those "
            f"of the others: {type(error).__name__}: {error}"
        ) from error
