"""Types for Ray's handles of rlpipe's actors: the methods that a run calls, and their results.

`handle.collect.remote(prompt, 4)` starts `RolloutWorker.collect` in the actor's process; await its return
value to get the result. Any argument may be an object reference instead of a value.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.metrics.values import Value
from rlpipe.types import GenerateRequest, GenerateResult, Group, Trajectory

if TYPE_CHECKING:
    from rlpipe.drafts.loss.stats import MtpStats
    from rlpipe.drafts.tables import Table
    from rlpipe.weights.buckets import Bucket
    from rlpipe.weights.offer import BroadcastResult, Member, Rendezvous
    from rlpipe.weights.payload import WeightPayload

T_co = TypeVar("T_co", covariant=True)


class Remote(Protocol[T_co]):
    """One method of an actor."""

    def remote(self, *args: Any) -> Awaitable[T_co]:
        """Start the method; await the returned object to get its result."""
        ...

    def options(self, *, concurrency_group: str) -> Remote[T_co]:
        """Return the method, bound to another thread of its actor."""
        ...


class RolloutHandle(Protocol):
    """The handle of a `RolloutWorker`."""

    collect: Remote[Group]
    evaluate: Remote[list[Trajectory]]
    generate: Remote[GenerateResult]
    hand_over: Remote[bool]
    next_turn: Remote[GenerateRequest]
    turn_generated: Remote[None]
    turn_failed: Remote[None]
    update_weights: Remote[dict[str, Value]]
    membership: Remote[Member]
    receive_weights: Remote[dict[str, Value]]
    metrics: Remote[dict[str, Value]]
    activity: Remote[str]
    take_events: Remote[list[tuple[str, dict[str, Any]]]]
    close: Remote[None]


class TrainerHandle(Protocol):
    """The handle of a `TrainerWorker`."""

    address: Remote[str | None]
    start: Remote[None]
    step: Remote[dict[str, Value]]
    probe: Remote[list[ProbeTable]]
    freeze_draft: Remote[None]
    export: Remote[WeightPayload | None]
    copy_weights: Remote[None]
    open_group: Remote[tuple[Rendezvous, list[Bucket]]]
    broadcast: Remote[BroadcastResult]
    newest: Remote[WeightPayload]
    begin_save: Remote[None]
    write_save: Remote[None]
    end_save: Remote[None]
    load: Remote[None]
    close: Remote[None]
    __ray_ready__: Remote[bool]
    __ray_call__: Remote[Any]


class AdaptHandle(Protocol):
    """The handle of an `AdaptRank`."""

    host: Remote[str]
    address: Remote[str]
    start: Remote[bool]
    adapt_step: Remote[dict[str, Value]]
    mtp_stats: Remote[MtpStats]
    draft_tables: Remote[list[Table | None]]
    export: Remote[WeightPayload | None]
    save: Remote[None]
    save_hf: Remote[None]
    load: Remote[None]
