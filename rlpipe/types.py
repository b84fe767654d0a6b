"""The data that every layer shares: trajectories, groups, requests, counts. Imports no torch.

Owns the format of the data that travels between rollout, pipeline and trainer, and no behaviour except
sums. Flow: a `Prompt` is admitted; each of its `group_size` attempts becomes a `Trajectory` of one `Group`.
Each sampled token has its logprob, its entropy and the policy version that sampled it.

Values recorded per token are NumPy arrays, called columns. They are replaced, never changed in place: a
worker may hold them in shared memory, which is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

# Last sentence of the message of a stopped run; `launch` replaces it while there is no checkpoint.
CONTINUES = "Run again, it continues from the newest checkpoint."


class RunStopped(RuntimeError):
    """Raised to end a run by a documented rule; the user sees its message without a traceback."""


class FinishReason(StrEnum):
    """The reason for which generation of a turn ended."""

    STOP = "stop"  # a stop token was sampled (it is the last output token)
    LENGTH = "length"  # max_new_tokens or the context was exhausted
    ABORT = "abort"  # the caller aborted; the tokens so far are returned


class TrajectoryStatus(StrEnum):
    """Whether a trajectory may be trained on."""

    COMPLETE = "complete"  # has a reward
    MASKED = "masked"  # infrastructure failed: no reward, never trained on


@dataclass(slots=True, kw_only=True)
class SpecCounts:
    """Sums of speculative decoding, per depth; every ratio is derived from them.

    drafted[k]: number of verify steps that reached index k (0-based), that is, accepted all k earlier drafts.
    accepted[k]: number of those steps that also accepted the draft at index k.
    verify_steps: target forward passes that verified drafts.
    proposed: total number of draft tokens, gamma per verify step.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verify_steps: int = 0
    proposed: int = 0

    def add(self, other: SpecCounts) -> None:
        """Add other counts in place; a depth that only one of the two has counts as zero in the other."""
        for total, added in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            total.extend([0] * (len(added) - len(total)))
            for k, n in enumerate(added):
                total[k] += n

        self.verify_steps += other.verify_steps
        self.proposed += other.proposed

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / proposed draft tokens; nan if nothing was drafted."""
        return sum(self.accepted) / self.proposed if self.proposed else float("nan")

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted draft tokens / verify steps, in 1..gamma+1; nan without verify steps.

        >>> SpecCounts(drafted=[4, 3], accepted=[3, 1], verify_steps=4, proposed=8).acceptance_length
        2.0
        """
        return 1 + sum(self.accepted) / self.verify_steps if self.verify_steps else float("nan")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    temperature: divides target and draft logits alike; 0 means greedy.
    max_new_tokens: upper bound on output tokens.
    stop_token_ids: sampling one of them ends the turn; it is the last output token.
    seed: random seed; equal seeds and weights give equal outputs, regardless of concurrent requests.
    top_logprobs: number of most likely target tokens to return per position (0: none).
    record_drafts: return every draft token with its target and draft probability.
    routes: return the experts that processed each token, see `GenerateResult`.
    routes_from: index of the first token to return experts for; the caller already has the earlier ones.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_logprobs: int = 0
    record_drafts: bool = False
    routes: bool = False
    routes_from: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TokenColumns:
    """Base of dataclasses with one array per token column: sets the dtypes and compares by content.

    COLUMNS: dtype of each column, by field name. The constructor converts sequences to arrays; an array that
        already has the dtype is not copied.
    """

    COLUMNS: ClassVar[dict[str, type[np.generic]]] = {}

    def __post_init__(self) -> None:
        for name, dtype in self.COLUMNS.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        compared = [f.name for f in fields(self) if f.compare and f.name not in self.COLUMNS]
        return all(getattr(self, name) == getattr(other, name) for name in compared) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.COLUMNS
        )


def _no_tokens() -> np.ndarray:
    return np.zeros(0)


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateRequest(TokenColumns):
    """One turn to generate.

    prompt_ids: int32. session_id: id that all turns of one conversation share; an engine may reuse the KV
    cache of their common prefix.
    """

    COLUMNS: ClassVar[dict[str, type[np.generic]]] = {"prompt_ids": np.int32}

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    session_id: str | None = None


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """The drafts of one verify step of a request.

    position: index of the first draft token among the output tokens. tokens: the draft tokens, in the order
    of the tree's nodes (by depth if the tree is a chain). target_probs, draft_probs: target and draft
    probability of each draft token, conditional on the drafts before it; the draft probability is 1 for a
    token that was not sampled. num_accepted: number of accepted drafts.
    """

    position: int
    tokens: list[int]
    target_probs: list[float]
    draft_probs: list[float]
    num_accepted: int


def shifted(drafts: list[DraftStep], by: int) -> list[DraftStep]:
    """Return the verify steps with `by` added to every position."""
    return [replace(step, position=step.position + by) for step in drafts]


def routes_type(experts: int) -> type[np.integer]:
    """Return the smallest type that holds every expert's index and one more value for "not recorded".

    >>> routes_type(255), routes_type(256)
    (<class 'numpy.uint8'>, <class 'numpy.int16'>)
    """
    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16


def unrecorded(routes: np.ndarray) -> int:
    """Return the value that marks an unrecorded token in `routes`: the maximum of its dtype."""
    return np.iinfo(routes.dtype).max


def recorded(routes: np.ndarray | None) -> int:
    """Count the tokens before the first one whose routes are not recorded."""
    if routes is None:
        return 0
    without = np.flatnonzero(routes[:, 0, 0] == unrecorded(routes))
    return int(without[0]) if len(without) else len(routes)


def merged_routes(earlier: np.ndarray | None, later: np.ndarray | None, start: int = 0) -> np.ndarray | None:
    """Join the routes of the beginning of a text with those of the later tokens.

    Where both cover a token, the earlier routes win: a later pass may have processed it with other weights.

    Args:
        earlier: routes of the beginning, as in `GenerateResult`.
        later: routes of the tokens from `start` on.
        start: index of the first token of `later`.

    Raises:
        ValueError: some tokens before `start` have no recorded routes.
    """
    known = recorded(earlier)
    if later is not None and start > known:
        raise ValueError(
            f"routes from token {start} on do not join those of the first {known}: ask the engine for "
            f"routes_from={known}."
        )

    # If one of them covers every token, it is the result.
    if earlier is None:
        return later
    if later is None or start + len(later) < len(earlier):
        return earlier

    return np.concatenate((earlier[:known], later[known - start :]))


@dataclass(slots=True, kw_only=True, eq=False)
class GenerateResult(TokenColumns):
    """The answer of an engine; the other columns are parallel to output_ids.

    output_ids: int32. logprobs: target log-softmax(logits / temperature) at the sampled token, nats, float32.
    entropies: entropy of the same target distribution, nats, float32.
    versions: policy version that sampled each token, int32.
    top_logprobs: [(token_id, logprob), ...] per position, or None if not requested.
    drafts: every verify step, or None if not requested.
    routes: indices of the experts that processed each token in the pass that sampled the next token; None if
        not requested or if the model has no experts. Shape [prompt and output tokens from `routes_from` on,
        layers with experts, experts per token], dtype `routes_type`. A token without a record, such as the
        last one, has `unrecorded`.
    """

    COLUMNS: ClassVar[dict[str, type[np.generic]]] = {
        "output_ids": np.int32,
        "logprobs": np.float32,
        "entropies": np.float32,
        "versions": np.int32,
    }

    request_id: str
    output_ids: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    spec: SpecCounts
    top_logprobs: list[list[tuple[int, float]]] | None = None
    drafts: list[DraftStep] | None = None
    routes: np.ndarray | None = field(default=None, compare=False)
    routes_from: int = 0


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A task handed out by an environment suite.

    instance_id: stable id of the instance. group_id: id of this admission (unique in a run).
    seed: base seed of the group's sampling streams.
    """

    instance_id: str
    group_id: str
    seed: int = 0

    def trajectory_ids(self, group_size: int) -> list[str]:
        """Return the ids of the prompt's trajectories; they are fixed before generation starts.

        >>> Prompt(instance_id="i", group_id="g7").trajectory_ids(2)
        ['g7/0', 'g7/1']
        """
        return [f"{self.group_id}/{number}" for number in range(group_size)]


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory(TokenColumns):
    """One attempt at a prompt: all its tokens in order, with a mask of the sampled ones.

    token_ids (int32), loss_mask (bool), rollout_logprobs, entropies (float32) and versions (int32) are
    parallel; where loss_mask is False (prompt, tool output) the last three hold 0.0, 0.0 and -1.
    top_logprobs: as in `GenerateResult`, parallel to token_ids and [] for tokens that were not sampled;
        None unless they were requested.
    drafts: every verify step, with its position as an index of token_ids; None unless they were recorded.
    routes: as in `GenerateResult`, for the first tokens (later ones have none); None unless requested.
    segment_starts: indices in token_ids at which further conversations of the same attempt begin, because an
        agent edited its history or branched. The model processes each conversation separately. Tokens that
        repeat an earlier conversation count as context, so that every sampled token is trained on once.
    turn_ends: length of token_ids after each turn.
    turn_rewards: reward of each turn, with the sum `reward`; empty if masked or not recorded.
    reward: None unless status is COMPLETE. info: values from the environment (submitted, turns, exit status).
    side: index of the player in a game; 0 outside games.
    """

    COLUMNS: ClassVar[dict[str, type[np.generic]]] = {
        "token_ids": np.int32,
        "loss_mask": np.bool_,
        "rollout_logprobs": np.float32,
        "entropies": np.float32,
        "versions": np.int32,
    }

    trajectory_id: str
    group_id: str
    instance_id: str
    token_ids: np.ndarray = field(default_factory=_no_tokens)
    loss_mask: np.ndarray = field(default_factory=_no_tokens)
    rollout_logprobs: np.ndarray = field(default_factory=_no_tokens)
    entropies: np.ndarray = field(default_factory=_no_tokens)
    versions: np.ndarray = field(default_factory=_no_tokens)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    drafts: list[DraftStep] | None = None
    routes: np.ndarray | None = field(default=None, compare=False)
    prompt_length: int = 0
    num_turns: int = 0
    truncated: bool = False
    segment_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    status: TrajectoryStatus = TrajectoryStatus.COMPLETE
    spec: SpecCounts = field(default_factory=SpecCounts)
    info: dict[str, Any] = field(default_factory=dict)
    side: int = 0

    def append_context(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens that the model did not sample."""
        zeros = np.zeros(len(ids), np.bool_)
        self._append(ids, zeros, zeros, zeros, np.full(len(ids), -1))
        if self.top_logprobs is not None:
            self.top_logprobs += [[] for _ in ids]

    def append_sampled(self, result: GenerateResult) -> None:
        """Append one generated turn with all values recorded for its tokens.

        Raises ValueError when some turns have top_logprobs and others do not.
        """
        if result.top_logprobs is not None and not self.num_turns:
            self.top_logprobs = [[] for _ in self.token_ids]
        if (result.top_logprobs is None) != (self.top_logprobs is None):
            presence = "without" if result.top_logprobs is None else "with"
            raise ValueError(
                f"turn {self.num_turns} of trajectory {self.trajectory_id!r} came {presence} top_logprobs, "
                "unlike the turns before: request the same number in every turn."
            )

        if result.top_logprobs is not None and self.top_logprobs is not None:
            self.top_logprobs += result.top_logprobs
        if result.drafts is not None:
            self.drafts = (self.drafts or []) + shifted(result.drafts, len(self.token_ids))

        ones = np.ones(len(result.output_ids), np.bool_)
        self._append(result.output_ids, ones, result.logprobs, result.entropies, result.versions)
        self.routes = merged_routes(self.routes, result.routes, result.routes_from)
        self.spec.add(result.spec)
        self.num_turns += 1
        self.turn_ends.append(len(self.token_ids))

    def append_segment(self, other: Trajectory) -> None:
        """Append a conversation of the same attempt that does not continue this one; see `segment_starts`.

        Raises ValueError if it has routes: they are recorded for a single conversation only.
        """
        if other.routes is not None:
            raise ValueError(
                f"trajectory {self.trajectory_id!r}: routes are recorded of one conversation only."
            )
        start = len(self.token_ids)
        if start:
            self.segment_starts.append(start)
        else:
            self.prompt_length = other.prompt_length

        if other.top_logprobs is not None:
            self.top_logprobs = (self.top_logprobs or []) + other.top_logprobs
        if other.drafts is not None:
            self.drafts = (self.drafts or []) + shifted(other.drafts, start)

        self._append(*(getattr(other, name) for name in self.COLUMNS))
        self.spec.add(other.spec)
        self.num_turns += other.num_turns
        self.turn_ends += [start + end for end in other.turn_ends]

    def segments(self) -> list[slice]:
        """Return the slice of token_ids that each conversation occupies.

        >>> Trajectory(trajectory_id="t", group_id="g", instance_id="i", token_ids=[5, 6]).segments()
        [slice(0, 2, None)]
        """
        starts = [0, *self.segment_starts]
        ends = [*self.segment_starts, len(self.token_ids)]
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    def segment(self, tokens: slice) -> Trajectory:
        """Return one conversation, with all token columns and the reward, as a trajectory."""
        if not self.segment_starts:
            return self
        top = None if self.top_logprobs is None else self.top_logprobs[tokens]
        columns = {name: getattr(self, name)[tokens] for name in self.COLUMNS}
        return replace(self, **columns, top_logprobs=top, drafts=None, turn_ends=[], segment_starts=[])

    def _append(self, *values: Sequence[int] | np.ndarray) -> None:
        """Append values to every column; the arguments are in the order of COLUMNS."""
        for (name, dtype), column in zip(self.COLUMNS.items(), values, strict=True):
            setattr(self, name, np.concatenate((getattr(self, name), np.asarray(column, dtype))))

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest policy version among the sampled tokens; None if nothing was sampled."""
        sampled = self.versions[self.versions >= 0]
        return int(sampled.min()) if len(sampled) else None

    @property
    def response_length(self) -> int:
        """Return the number of sampled tokens."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(slots=True, kw_only=True)
class Group:
    """All trajectories of one prompt, once finished; `gen_seconds` and `env_seconds` are wall-clock times."""

    prompt: Prompt
    trajectories: list[Trajectory]
    gen_seconds: float = 0.0
    env_seconds: float = 0.0

    def sides(self) -> list[list[int]]:
        """Return the indices of the complete trajectories, one list per side of a game.

        Advantages compare the trajectories of one list only.
        """
        by_side: dict[int, list[int]] = {}
        for index, trajectory in enumerate(self.trajectories):
            if trajectory.status is TrajectoryStatus.COMPLETE:
                by_side.setdefault(trajectory.side, []).append(index)
        return list(by_side.values())

    def has_equal_rewards(self) -> bool:
        """Return whether all rewards within each side are equal, so that every advantage is zero."""
        rewards = [{self.trajectories[index].reward for index in side} for side in self.sides()]
        return bool(rewards) and all(len(different) == 1 for different in rewards)
