"""Drafting and verification of a step: a chain or a tree of draft tokens.

Owns the draft tokens, their slots in the cache and their verification; the decoder owns the passes before and
after. Both modules read the row table: its `hidden` is each row's depth-1 draft state from the step before
and, with several layers, the states of the other layers (see `depths`).

    chain   d_1 .. d_gamma, node i at slot and position total - 1 + i
    tree    node n of `spec.tree` at slot total - 1 + n, position total - 1 + depth(n), seen by its
            descendants only; then the keys of the accepted path move next to the root's

The draft's key of node n is stored one slot before the target's key, because the draft pairs the token with
the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.rollout.embedded.cpu_kernels import ChainStart
from rlpipe.rollout.embedded.depths import draft_deeper
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.rollout.embedded.span import Span
from rlpipe.spec.sampling import Stream, sample_cdf
from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import (
    TreeVerdict,
    Verdict,
    backend_for,
    rearrange_kv,
    verify_block,
    verify_chain,
    verify_greedy,
    verify_target_only,
    verify_tree,
    verify_tree_greedy,
)


@dataclass(slots=True)
class Part:
    """Tokens [B, q] of rows first, first + 1, ... in a pass. last: [B], index of each row's last real token.

    positions: [B, q] of the tokens, on the host.
    """

    first: int
    span: Span
    tokens: torch.Tensor
    last: torch.Tensor
    positions: np.ndarray

    @property
    def flat_last(self) -> torch.Tensor:
        """Indices of the rows' last real tokens among all tokens of the part."""
        return self.last + torch.arange(0, self.span.tokens, self.span.width, device=self.last.device)


@dataclass(slots=True)
class Drafted:
    """Drafts of the decoding rows.

    part: nodes 0 (pending) .. N, to verify. uniforms: [A, >= depth, streams]. probs: [A, >= N, D], q after
    each node over the tokens that the draft can propose; None if no token was sampled. columns: [A, N], the
    drafts as indices of D. parents: parent of each of the nodes 1..N.
    """

    part: Part
    uniforms: torch.Tensor
    probs: torch.Tensor | None
    columns: torch.Tensor
    parents: list[int]


@dataclass(slots=True)
class Verified:
    """Verified tokens that a step emits for the decoding rows.

    tokens: [A, depth + 1], valid up to accepted + 1. accepted: [A]. accept_prob: [A, depth], of the drafts on
    the emitted path. part: part of a target pass over which the draft catches up; its first `accepted` + 1
    tokens are the pending token and the accepted drafts. nodes: [A, depth + 1], rows of the verify pass where
    the emitted tokens were sampled, or None if these are all of its rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    accept_prob: torch.Tensor
    part: Part
    nodes: torch.Tensor | None = None


class Drafting(Protocol):
    """Drafts tokens for rows [0, decoding) and verifies them."""

    def draft(self, decoding: int, gamma: int) -> Drafted:
        """Draft `gamma` tokens ahead."""
        ...

    def verify(self, drafted: Drafted, choices: torch.Tensor) -> Verified:
        """Verify the drafts; choices: [A, nodes + 1, V], the target's distribution after each node."""
        ...


class _RowDrafting:
    """Base of chain and tree: the rows' pending tokens, uniforms and temperatures."""

    def __init__(self, model: Model, table: RowTable) -> None:
        self._model, self._table = model, table

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the tokens that columns of the draft's logits stand for; its vocabulary may be reduced."""
        ids = self._model.draft_ids
        return columns if ids is None else ids[columns]

    def _over_vocabulary(self, probs: torch.Tensor) -> torch.Tensor:
        """Spread q [A, n, D] over all tokens of the target, [A, n, V]; others have probability 0."""
        ids = self._model.draft_ids
        if ids is None:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self._model.arch.vocab).index_copy_(-1, ids, probs)

    def _start(self, decoding: int, depth: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Return positions [A] of the pending tokens, the tokens [A], and the uniforms of later tokens."""
        table, rows = self._table, np.arange(decoding)
        last = table.total[:decoding] - 1
        outputs = (table.total[:decoding] - table.prompt[:decoding])[:, None] + np.arange(depth + 1)
        uniforms = self._upload(table.uniforms[rows[:, None], outputs])
        return last, self._upload(table.tokens[rows, last]), uniforms


class ChainDrafting(_RowDrafting):
    """Drafts a single path. Verification is rejection, block, target-only or greedy."""

    def __init__(self, model: Model, table: RowTable, mode: SpecMode) -> None:
        super().__init__(model, table)
        self._mode = mode
        self._samples = mode in (SpecMode.REJECTION, SpecMode.BLOCK)
        self._backend = backend_for(model.device)

    def _start(self, decoding: int, depth: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """Start the rows of a step; block verification takes all uniforms of a step from its first position.

        With block verification even the deepest drafts and coins influence how many drafts are accepted. If
        the next step used the same uniforms again, they would be conditioned on a rejection, and the output
        would be biased.
        """
        last, pending, uniforms = super()._start(decoding, depth)
        if self._mode is SpecMode.BLOCK:
            uniforms = uniforms[:, 0].unflatten(-1, (-1, len(Stream)))
        return last, pending, uniforms

    def draft(self, decoding: int, gamma: int) -> Drafted:
        """Draft gamma tokens for every row; gamma = 0 drafts none."""
        table, model = self._table, self._model
        last, pending, uniforms = self._start(decoding, gamma)

        positions = last[:, None] + np.arange(gamma + 1)
        span = model.span(0, self._upload(positions), last + gamma + 1, decoding=True)
        frontier, layers, rows = table.hidden[:decoding], model.depths, slice(0, decoding)

        if gamma and self._samples:
            start = ChainStart(
                states=frontier[:, 0],
                pending=pending,
                uniforms=uniforms[:, :gamma, Stream.DRAFT],
                temperature=table.divisor(rows),
                greedy=table.greedy_of(rows),
            )
            if (at_once := model.draft_chain(start, span)) is not None:
                stacked, chosen, q = at_once
                part = Part(0, span, stacked, torch.zeros_like(pending), positions)
                return Drafted(part, uniforms, q, chosen, list(range(gamma)))

        tokens, columns, probs = [pending], [], []
        window = frontier[:, :1]
        for depth in range(gamma):
            if 0 < depth < layers:
                window = draft_deeper(model, frontier, window, tokens[1:], last)
            elif depth:
                more = depth - layers  # how often the last layer has already drafted from its own outputs
                next_span = span.columns(more, more + 1)
                window = model.draft(tokens[-1], window[:, -1], [next_span], None, layers - 1).unsqueeze(1)

            # A greedy chain needs only the most likely token, no distribution.
            logits = model.draft_logits(window[:, -1])
            if self._samples:
                probs.append(table.choices(logits, rows))
                columns.append(table.sampler.sample(probs[-1], uniforms[:, depth, Stream.DRAFT]))
            else:
                columns.append(logits.argmax(-1))
            tokens.append(self._tokens(columns[-1]))

        stacked = torch.stack(tokens, 1)
        part = Part(0, span, stacked, torch.zeros_like(pending), positions)
        q = torch.stack(probs, 1) if probs else None
        chosen = torch.stack(columns, 1) if columns else stacked[:, 1:]
        return Drafted(part, uniforms, q, chosen, list(range(gamma)))

    def verify(self, drafted: Drafted, choices: torch.Tensor) -> Verified:
        """Verify the drafts by the rule of the mode; choices: [A, gamma + 1, V]."""
        part, uniforms = drafted.part, drafted.uniforms
        drafts, gamma = part.tokens[:, 1:], part.span.width - 1

        if not gamma:
            token = self._table.sampler.sample(choices[:, 0], uniforms[:, 0, Stream.RESIDUAL])
            return Verified(token.unsqueeze(1), part.last, choices.new_zeros(len(token), 0), part)

        verdict = self._verify(drafted, choices)
        accepted, next_token = verdict.num_accepted, verdict.next_token.unsqueeze(1)
        tokens = torch.cat((drafts, next_token), 1).scatter_(1, accepted.unsqueeze(1), next_token)
        return Verified(tokens, accepted, verdict.accept_prob, part)

    def _verify(self, drafted: Drafted, choices: torch.Tensor) -> Verdict:
        drafts, q = drafted.part.tokens[:, 1:], drafted.probs
        coins = drafted.uniforms[:, : drafts.shape[1], Stream.COIN]
        uniforms = coins, drafted.uniforms[:, 0, Stream.RESIDUAL]
        if self._mode is SpecMode.GREEDY:
            return verify_greedy(drafts, choices)
        if self._mode is SpecMode.TARGET_ONLY:
            return verify_target_only(drafts, None, choices, *uniforms, backend=self._backend)

        assert q is not None
        kernels = self._table.sampler.kernels_for(choices)
        if self._mode is SpecMode.REJECTION and kernels is not None:
            return kernels.verify_chain(drafted.columns, q, choices, *uniforms, ids=self._model.draft_ids)

        rule = verify_block if self._mode is SpecMode.BLOCK else verify_chain
        return rule(drafts, self._over_vocabulary(q), choices, *uniforms, backend=self._backend)


class LookupDrafting(ChainDrafting):
    """Drafts a single path without a model; see `Drafting`.

    A draft token is a function of the text, so q is 1. Verification is target-only or greedy; both are
    lossless.
    """

    def __init__(self, model: Model, table: RowTable, spec: SpecConfig) -> None:
        greedy = spec.mode is SpecMode.GREEDY
        super().__init__(model, table, spec.mode if greedy else SpecMode.TARGET_ONLY)
        self._spec = spec
        self._guess = DRAFTERS[spec.drafter].guess

    def draft(self, decoding: int, gamma: int) -> Drafted:
        """Draft gamma tokens for every row; gamma = 0 drafts none."""
        table, model = self._table, self._model
        last, pending, uniforms = self._start(decoding, gamma)

        guesses = np.zeros((decoding, gamma), np.int64)
        if gamma:
            for row, total in enumerate(table.total[:decoding]):
                guesses[row] = self._guess(table.tokens[row, :total], gamma, self._spec)

        positions = last[:, None] + np.arange(gamma + 1)
        span = model.span(0, self._upload(positions), last + gamma + 1, decoding=True)
        tokens = torch.cat((pending.unsqueeze(1), self._upload(guesses)), 1)
        part = Part(0, span, tokens, torch.zeros_like(pending), positions)
        return Drafted(part, uniforms, None, tokens[:, 1:], list(range(gamma)))


class TreeDrafting(_RowDrafting):
    """Drafts a static tree, in which a node may have several children.

    In rows that sample, the children are sampled without replacement. In greedy rows the children are the
    likeliest tokens, which all differ, because only the argmax can be accepted.
    """

    def __init__(self, model: Model, table: RowTable, tree: Tree) -> None:
        super().__init__(model, table)
        self._tree = tree
        self._depths = np.asarray(tree.depths)
        self._levels = [np.flatnonzero(self._depths == d) for d in range(tree.max_depth + 1)]
        # The first node of a level uses the streams of a chain; each further node uses two more streams.
        more = range(len(Stream), tree_streams(tree), 2)
        self._draft_streams = [int(Stream.DRAFT), *more]
        self._coin_streams = [int(Stream.COIN), *(stream + 1 for stream in more)]

        # An additional column represents the slots beyond the tree, which no node sees.
        mask = tree.ancestor_mask()
        self._sees = torch.cat((mask, torch.zeros_like(mask[:, :1])), 1).to(model.device)

    def draft(self, decoding: int, gamma: int) -> Drafted:
        """Draft a tree for every row; its shape replaces gamma."""
        table, model, tree = self._table, self._model, self._tree
        last, pending, uniforms = self._start(decoding, tree.max_depth)
        greedy = table.greedy[:decoding]

        rows, own = slice(0, decoding), self._span(last, draft=True)
        hidden = table.hidden[rows]  # [A, nodes of the level, H]
        tokens, chosen, probs = [pending.unsqueeze(1)], [], []

        for depth, level in enumerate(self._levels[1:]):
            if depth:
                nodes = self._levels[depth]
                span = own.columns(int(nodes[0]), int(nodes[-1]) + 1)
                state = hidden.repeat_interleave(len(nodes) // hidden.shape[1], 1)
                hidden = model.draft(tokens[-1].flatten(), state.flatten(0, 1), [span])
                hidden = hidden.unflatten(0, (decoding, -1))

            logits = model.draft_logits(hidden.flatten(0, 1)).unflatten(0, (decoding, -1))
            children = len(level) // logits.shape[1]
            if greedy.any():
                columns = _likeliest(logits, children)

            # If all rows are greedy, no distribution is needed.
            if not greedy.all():
                probs.append(table.choices(logits, rows))
                noise = uniforms[:, depth, self._draft_streams[: len(level)]]
                sampled = _siblings(probs[-1], noise.unflatten(1, (-1, children)))
                if greedy.any():
                    sampled = torch.where(self._upload(greedy)[:, None, None], columns, sampled)
                columns = sampled
            chosen.append(columns.flatten(1))
            tokens.append(self._tokens(chosen[-1]))

        positions = last[:, None] + self._depths
        part = Part(0, self._span(last), torch.cat(tokens, 1), torch.zeros_like(pending), positions)
        return Drafted(part, uniforms, self._over_nodes(probs), torch.cat(chosen, 1), list(tree.parents[1:]))

    def _over_nodes(self, probs: list[torch.Tensor]) -> torch.Tensor | None:
        """Join q of the levels that have children into [A, N + 1, D] for all nodes; None without levels."""
        if not probs:
            return None

        # Leaves have no children, so their distribution is never read.
        leaves = probs[0].new_zeros(len(probs[0]), len(self._levels[-1]), probs[0].shape[-1])
        return torch.cat([*probs, leaves], 1)

    def verify(self, drafted: Drafted, choices: torch.Tensor) -> Verified:
        """Verify the tree, and move the accepted path's keys next to the root's; choices: [A, N + 1, V]."""
        tree, part = self._tree, drafted.part
        verdict = self._verify(drafted, choices)
        batch, accepted = len(part.tokens), verdict.num_accepted
        last = part.positions[:, 0]
        rearrange_kv(self._model.target_cache[:, :, :batch], self._upload(last), verdict.kv_source)

        path = verdict.path.clamp(min=0)
        next_token = verdict.next_token.unsqueeze(1)
        tokens = torch.cat((part.tokens.gather(1, path), next_token), 1)
        tokens.scatter_(1, accepted.unsqueeze(1), next_token)
        nodes = torch.cat((torch.zeros_like(path[:, :1]), path), 1)
        positions = last[:, None] + np.arange(tree.max_depth + 1)
        chain = self._model.span(0, self._upload(positions), last + tree.max_depth + 1, decoding=True)
        emitted = Part(0, chain, part.tokens.gather(1, nodes), part.last, positions)

        probs = verdict.accept_prob.gather(1, (path - 1).clamp(min=0))
        return Verified(tokens, accepted, probs, emitted, nodes)

    def _verify(self, drafted: Drafted, choices: torch.Tensor) -> TreeVerdict:
        """Verify the tree of every row, greedily if all rows are greedy."""
        tree, tokens, uniforms = self._tree, drafted.part.tokens[:, 1:], drafted.uniforms
        if self._table.greedy[: len(tokens)].all():
            return verify_tree_greedy(tree, tokens, choices)

        assert drafted.probs is not None, "a row that samples has distributions"

        # In a mixed batch, a greedy row's q is 1 at the first child and 0 at the others. A token with q = 0
        # and p > 0 is always accepted, so the child that is the argmax is accepted for any coins.
        coins = [uniforms[:, d, self._coin_streams[: len(level)]] for d, level in enumerate(self._levels[1:])]
        return verify_tree(
            tree,
            tokens,
            self._over_vocabulary(drafted.probs),
            choices,
            torch.cat(coins, 1),
            uniforms[:, 0, Stream.RESIDUAL],
            replacement=False,
        )

    def _span(self, last: np.ndarray, *, draft: bool = False) -> Span:
        """Return the span of all nodes after the pending tokens at `last`; draft: for the draft's pass."""
        model, nodes = self._model, self._tree.num_drafts + 1
        root, contexts = last[:, None], last + nodes

        # A token sees all slots before the root, and its ancestors in the tree.
        node = model.slot_ids[: contexts.max()] - self._upload(root - draft)  # [A, slots], each slot's node
        seen = self._sees[:, node.clamp(0, nodes)].transpose(0, 1) | (node < 0).unsqueeze(1)
        return model.span(
            0,
            self._upload(root + self._depths - draft),
            contexts,
            slots=self._upload(root + np.arange(nodes) - draft),
            unseen=~seen,
            decoding=True,
        )


def _siblings(q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample the children of each node without replacement: q [A, n, V], uniforms [A, n, c] -> [A, n, c].

    If q has fewer tokens than a node has children, the last sampled token is repeated.
    """
    left, drawn = q.flatten(0, 1), []
    for column in uniforms.flatten(0, 1).unbind(-1):
        token = sample_cdf(left, column)
        drawn.append(token)
        without = left.scatter(1, token.unsqueeze(1), 0.0)
        left = torch.where(without.sum(1, keepdim=True) > 0, without, left)
    return torch.stack(drawn, -1).unflatten(0, q.shape[:2])


def _likeliest(logits: torch.Tensor, children: int) -> torch.Tensor:
    """Return the likeliest tokens after each node, best first: logits [A, n, V] -> [A, n, children].

    If there are fewer tokens than children, the last token is repeated.
    """
    tokens = logits.topk(min(children, logits.shape[-1]), -1).indices
    missing = children - tokens.shape[-1]
    return torch.cat((tokens, tokens[..., -1:].expand(*tokens.shape[:-1], missing)), -1)


def tree_streams(tree: Tree) -> int:
    """Return the number of uniforms per position: two per node of a depth (draft, coin), one residual."""
    return len(Stream) + 2 * (max(map(tree.depths.count, set(tree.depths))) - 1)
