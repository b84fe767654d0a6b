"""Tables of draft and target at every context of a trajectory, for the probe (`rlpipe.diagnosis.probe`).

Owns the columns, both for a draft model (`context_tables`) and for a draft that is looked up (`guesses_of`,
`as_candidates`, `lookup_table`). Runs no model: the trainers compute the inputs.

A context is a position from which depth 1 drafts a token of a turn. A turn's first token is never drafted: it
comes from the prefill. Depth k drafts the token k - 1 positions later, given the realised tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from rlpipe.batching.draft_layout import DraftBatch
from rlpipe.config.spec import SpecConfig
from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.visit import accept_probabilities
from rlpipe.types import Trajectory

Table = tuple[np.ndarray, dict[str, np.ndarray]]  # positions [n], statistics [n, K] by name, nan where masked
TABLE_ROWS = {  # name in a table -> field of Rows
    "rejection": "alpha",
    "target_entropy": "target_entropy",
    "draft_entropy": "draft_entropy",
    "kl": "kl",
    "reverse_kl": "reverse_kl",
    "target_above": "target_above",
    "draft_above": "draft_above",
}


def context_tables(
    rows: Rows, choices: Tensor, *, batch: DraftBatch, mask: Tensor, owner_rows: np.ndarray
) -> dict[int, Table]:
    """Tabulate the contexts of a micro-batch; return the tables by row of the packed batch.

    rows, mask: [N, K] for the turns of `batch`, N = R * L. choices: [2, N, K], p(argmax q) and whether the
    realised token is that argmax (`first_choices`). owner_rows: `MicroBatch.rows`. The arrays of a table are
    in the order of the tokens.
    """
    # One column per depth for each statistic, nan where no token is drafted.
    accept = accept_probabilities(rows.draft_logprob, rows.target_logprob)
    columns = {"target_only": choices[0], "top": choices[1], "accept": accept}
    columns |= {name: getattr(rows, field) for name, field in TABLE_ROWS.items()}
    drafted = mask.cpu().numpy()
    values = {
        name: np.where(drafted, column.float().cpu().numpy(), np.nan) for name, column in columns.items()
    }

    # Split the flat rows by trajectory.
    owners = np.repeat(batch.owners, batch.tokens.shape[1])
    first = batch.positions[batch.anchors.flatten()] + 2  # position of depth 1's token
    tables: dict[int, Table] = {}
    for owner in np.unique(batch.owners):
        selected = np.flatnonzero((owners == owner) & drafted[:, 0])
        tables[int(owner_rows[owner])] = (
            first[selected],
            {name: column[selected] for name, column in values.items()},
        )
    return tables


def guesses_of(
    trajectory: Trajectory, guess: Callable[[np.ndarray, int, SpecConfig], np.ndarray], spec: SpecConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the contexts [n] of a trajectory and the guesses at each, [n, spec.gamma].

    guess: the drafter's function (`drafts.kinds.DrafterFunctions`). A guess is -1 where it would not be
    verified: beyond the turn, or after a wrong guess. Guesses depend only on the text, so at fixed contexts
    they stay the same while the target changes.
    """
    tokens, sampled, depths = trajectory.token_ids, trajectory.loss_mask, spec.gamma
    positions = np.flatnonzero(sampled[1:] & sampled[:-1]) + 1
    guesses = np.full((len(positions), depths), -1)
    for number, position in enumerate(positions):
        guessed = guess(tokens[:position], depths, spec)
        for depth in range(depths):
            index = position + depth
            if index >= len(tokens) or not sampled[index]:
                break
            guesses[number, depth] = guessed[depth]
            if guessed[depth] != tokens[index]:
                break
    return positions, guesses


def as_candidates(trajectory: Trajectory, positions: np.ndarray, guesses: np.ndarray) -> Trajectory:
    """Return a copy of the trajectory with the guesses as candidates, to be scored by the target.

    positions: [n], contexts. guesses: [n, depths], token ids, -1 for none. `guesses_of` returns both.
    Candidate k of a token is the guess that depth k makes for it.
    """
    depths = guesses.shape[1]
    ids = np.full((len(trajectory.token_ids) + depths, depths), -1)
    for depth in range(depths):
        ids[positions + depth, depth] = guesses[:, depth]
    top = [[(int(token), 0.0) for token in row] for row in ids[: len(trajectory.token_ids)]]
    return replace(trajectory, top_logprobs=top)


def lookup_table(
    trajectory: Trajectory,
    positions: np.ndarray,
    guesses: np.ndarray,
    *,
    entropies: np.ndarray,
    logprobs: np.ndarray,
) -> Table:
    """Tabulate a looked-up draft: q is 1 at the guess g, so rejection and target-only accept g with p(g).

    positions, guesses: from `guesses_of`. entropies: [m], the target's at the m sampled tokens. logprobs:
    [m, K], the target's log-probabilities of the candidates there (`as_candidates`). KL(p || q) is infinite;
    the table has nan.
    """
    depths = guesses.shape[1]
    number = np.full(len(trajectory.token_ids) + depths, -1)  # index of each token among the sampled ones
    sampled = np.flatnonzero(trajectory.loss_mask[1:]) + 1
    number[sampled] = np.arange(len(sampled))

    # Depth k drafts the token k - 1 positions later.
    ahead = positions[:, None] + np.arange(depths)
    drafted, at = guesses >= 0, number[ahead]
    realised = np.append(trajectory.token_ids, np.full(depths, -2))[ahead]

    def column(values: np.ndarray | float) -> np.ndarray:
        return np.where(drafted, values, np.nan)

    if not len(positions):
        log_p = entropy = np.zeros((0, depths))
    else:
        log_p, entropy = logprobs[at, np.arange(depths)], entropies[at]
    p, hit = np.exp(log_p), (guesses == realised).astype(float)
    return positions, {
        "rejection": column(p),
        "target_only": column(p),
        "accept": column(hit),
        "top": column(hit),
        "target_entropy": column(entropy),
        "draft_entropy": column(0.0),
        "kl": np.full(guesses.shape, np.nan),
        "reverse_kl": column(-log_p),
        "target_above": column(1 - p),
        "draft_above": column((p < 1).astype(float)),
    }
