"""The Triton kernels of verification. Imports triton; imported only by `launch.py`, on first use.

Owns arithmetic on the device, without checks. Every row of the batch is verified separately and every sum has
a fixed order, so a verdict depends neither on the run nor on the other rows.

    prefix_mass_kernel   (B, tiles, gamma - 1), block verification only: computes the mass of max(w p - q, 0)
                         for each depth and tile; block acceptance depends on it
    residual_kernel      (B, tiles): decides acceptance from p and q of the draft tokens (each program repeats
                         this, which is cheaper than a separate kernel), then computes the mass of each tile
                         of the one row that is sampled
    locate_kernel        (B,): finds the tile that contains the uniform, then the token in that tile

Arguments of a kernel are scalars and pointers, never tuples: Triton (3.6 and 3.8) loses a specialised value,
such as a stride of 1, inside a tuple argument. The last stride of all probabilities is 1.

The weights equal those of the torch reference: p - q in the precision of the inputs, all sums in float64.
A value that is not above zero, NaN included, has weight zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _drafted(
    b, tokens, coins, probs, GAMMA: tl.constexpr, DEPTHS: tl.constexpr, COMPUTE: tl.constexpr,
    ONE_HOT: tl.constexpr,
):  # fmt: skip
    """Load for each depth of row b: p and q of the draft token ([DEPTHS] COMPUTE), and the coin (float64).

    A draft token outside the vocabulary has p = 0, and is rejected. Depths above GAMMA have p = 0 and coin 1.
    """
    draft, target, draft_row, draft_depth, target_row, target_depth, vocab = probs
    depth = tl.arange(0, DEPTHS).to(tl.int64)
    token = tl.load(tokens + b * GAMMA + depth, mask=depth < GAMMA, other=-1)
    known = (token >= 0) & (token < vocab)

    # Masked elements are not read, because their addresses may be invalid.
    at = target + b * target_row + depth * target_depth + token
    p = tl.load(at, mask=known, other=0.0).to(COMPUTE)
    if ONE_HOT:
        q = tl.full([DEPTHS], 1.0, COMPUTE)
    else:
        at = draft + b * draft_row + depth * draft_depth + token
        q = tl.load(at, mask=known, other=1.0).to(COMPUTE)

    coin = tl.load(coins + b * GAMMA + depth, mask=depth < GAMMA, other=1.0)
    return p, q, coin


@triton.jit
def _prefix_scales(p, q, GAMMA: tl.constexpr, DEPTHS: tl.constexpr):
    """Return w_{i-1} and w_i for each depth i, [DEPTHS] float64: w_i = min(1, w_{i-1} p_i / q_i), w_0 = 1.

    q = 0 counts as the limit q -> 0: w_i is 1 where w_{i-1} p_i > 0, else 0.
    """
    depth = tl.arange(0, DEPTHS)
    before = tl.full([DEPTHS], 1.0, tl.float64)
    after = before
    scale = 1.0

    # The recurrence over depths selects elements with masks, because Triton cannot index a tensor.
    for i in tl.static_range(GAMMA):
        before = tl.where(depth == i, scale, before)
        joint = scale * tl.sum(tl.where(depth == i, p.to(tl.float64), 0.0), 0)
        drafted = tl.sum(tl.where(depth == i, q.to(tl.float64), 0.0), 0)
        ratio = joint / tl.where(drafted > 0.0, drafted, 1.0)
        scale = tl.where(joint < drafted, ratio, tl.where((joint >= drafted) & (joint > 0.0), 1.0, 0.0))
        after = tl.where(depth == i, scale, after)

    return before, after


@triton.jit
def _weights(
    v, b, row, scale, token, probs, GAMMA: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
    ONE_HOT: tl.constexpr,
):  # fmt: skip
    """Compute the residual and target weights of tokens v in row `row` of batch element b, float64.

    The bonus row GAMMA has no draft token: pass token -1 and scale 1 for it.
    """
    draft, target, draft_row, draft_depth, target_row, target_depth, vocab = probs
    inside = v < vocab
    at = target + b * target_row + row * target_depth + v
    p = tl.load(at, mask=inside, other=0.0).to(COMPUTE)

    # The residual is max(p - q, 0), or max(w p - q, 0) for a block. Without draft probabilities it is p, with
    # 0 at the draft token.
    if ONE_HOT:
        rest = tl.where(v == token, 0.0, p)
    else:
        at = draft + b * draft_row + row * draft_depth + v
        q = tl.load(at, mask=inside & (row < GAMMA), other=0.0).to(COMPUTE)
        if BLOCK:
            rest = scale.to(COMPUTE) * p - q
        else:
            rest = p - q

    return tl.where(rest > 0.0, rest, 0.0).to(tl.float64), tl.where(p > 0.0, p, 0.0).to(tl.float64)


@triton.jit
def prefix_mass_kernel(
    tokens, coins, draft, target, draft_row, draft_depth, target_row, target_depth, vocab, prefix_mass,
    GAMMA: tl.constexpr, DEPTHS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store a tile's sum of max(w_i p_{i+1} - q_{i+1}, 0) in prefix_mass[b, i - 1, tile], i = 1..GAMMA-1."""
    probs = draft, target, draft_row, draft_depth, target_row, target_depth, vocab
    b = tl.program_id(0).to(tl.int64)
    accepted = tl.program_id(2).to(tl.int64) + 1

    # Compute w for the prefix of `accepted` draft tokens.
    p, q, _ = _drafted(b, tokens, coins, probs, GAMMA, DEPTHS, COMPUTE, False)
    before, _ = _prefix_scales(p, q, GAMMA, DEPTHS)
    scale = tl.sum(tl.where(tl.arange(0, DEPTHS) == accepted, before, 0.0), 0)

    for k in tl.static_range(SPAN):
        tile = tl.program_id(1) * SPAN + k
        v = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        rest, _ = _weights(v, b, accepted, scale, -1, probs, GAMMA, COMPUTE, True, False)
        at = prefix_mass + (b * (GAMMA - 1) + accepted - 1) * TILES + tile
        tl.store(at, tl.sum(rest, 0), mask=tile < TILES)


@triton.jit
def residual_kernel(
    tokens, coins, draft, target, draft_row, draft_depth, target_row, target_depth, vocab, prefix_mass,
    num_accepted, accept_prob, row_scale, residual_mass, target_mass, GAMMA: tl.constexpr,
    DEPTHS: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    """Store num_accepted, accept_prob, row_scale, and both masses [B, TILES] of the row to sample from.

    The bonus row has no draft token; its scale is 1. All programs of a row repeat the acceptance decision.
    """
    probs = draft, target, draft_row, draft_depth, target_row, target_depth, vocab
    b = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    depth = tl.arange(0, DEPTHS).to(tl.int64)
    p, q, coin = _drafted(b, tokens, coins, probs, GAMMA, DEPTHS, COMPUTE, ONE_HOT)

    # A block accepts the longest prefix that passes. A chain accepts draft tokens up to the first rejection.
    if BLOCK:
        before, after = _prefix_scales(p, q, GAMMA, DEPTHS)
        inner = depth < GAMMA - 1
        slot = tl.arange(0, TILE_SLOTS)[None, :]
        at = prefix_mass + (b * (GAMMA - 1) + depth[:, None]) * TILES + slot
        mass = tl.sum(tl.load(at, mask=inner[:, None] & (slot < TILES), other=0.0), 1)

        passed_inner = inner & (coin * (mass + 1.0 - after) < mass)
        passed_last = (depth == GAMMA - 1) & (coin * q.to(tl.float64) < before * p.to(tl.float64))
        accepted = tl.max(tl.where(passed_inner | passed_last, depth + 1, 0), 0)
        scale = tl.where(accepted < GAMMA, tl.sum(tl.where(depth == accepted, before, 0.0), 0), 1.0)
        prob = after.to(COMPUTE)
    else:
        rejected = (depth < GAMMA) & ~(coin * q.to(tl.float64) < p.to(tl.float64))
        accepted = tl.min(tl.where(rejected, depth, GAMMA), 0)

        # Division rounds as in the reference; q = 0 counts as the limit q -> 0.
        divisor = tl.where(q > 0.0, q, 1.0)
        ratio = p / divisor if COMPUTE == tl.float64 else tl.div_rn(p, divisor)  # noqa: SIM300
        prob = tl.where(p < q, ratio, tl.where((p >= q) & (p > 0.0), 1.0, 0.0))
        scale = tl.full([], 1.0, tl.float64)

    # All programs of a row have the same result, so only one stores it.
    if group == 0:
        tl.store(accept_prob + b * GAMMA + depth, prob, mask=depth < GAMMA)
        tl.store(num_accepted + b, accepted)
        tl.store(row_scale + b, scale)

    # Sample from row `accepted`: the row of the first rejected draft token, or the bonus row.
    token = tl.load(tokens + b * GAMMA + accepted, mask=accepted < GAMMA, other=-1)
    for k in tl.static_range(SPAN):
        tile = group * SPAN + k
        v = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        rest, whole = _weights(v, b, accepted, scale, token, probs, GAMMA, COMPUTE, BLOCK, ONE_HOT)
        tl.store(residual_mass + b * TILES + tile, tl.sum(rest, 0), mask=tile < TILES)
        tl.store(target_mass + b * TILES + tile, tl.sum(whole, 0), mask=tile < TILES)


@triton.jit
def _first_beyond(mass, running, goal, SLOTS: tl.constexpr):
    """Return the first slot with positive mass and running > goal, else the last with positive mass, else 0.

    Slots without mass are masked because rounding in a parallel scan can raise them above the previous slot.
    """
    slot = tl.arange(0, SLOTS)
    first = tl.min(tl.where((mass > 0.0) & (running > goal), slot, SLOTS), 0)
    last = tl.max(tl.where(mass > 0.0, slot, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def locate_kernel(
    tokens, draft, target, draft_row, draft_depth, target_row, target_depth, vocab, residual_uniforms,
    num_accepted, row_scale, residual_mass, target_mass, next_token, GAMMA: tl.constexpr,
    TILES: tl.constexpr, TILE_SLOTS: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr, ONE_HOT: tl.constexpr,
):  # fmt: skip
    """Store next_token[b], sampled by inverse CDF from the residual; if this has no mass, from the target."""
    probs = draft, target, draft_row, draft_depth, target_row, target_depth, vocab
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TILE_SLOTS)
    rest_mass = tl.load(residual_mass + b * TILES + slot, mask=slot < TILES, other=0.0)
    whole_mass = tl.load(target_mass + b * TILES + slot, mask=slot < TILES, other=0.0)

    # Find the tile that contains the uniform, and the mass to cover inside this tile.
    empty = tl.max(rest_mass, 0) <= 0.0
    mass = tl.where(empty, whole_mass, rest_mass)
    running = tl.cumsum(mass, 0)
    total = tl.sum(tl.where(slot == TILES - 1, running, 0.0), 0)
    goal = tl.load(residual_uniforms + b) * total
    tile = _first_beyond(mass, running, goal, TILE_SLOTS)
    goal -= tl.sum(tl.where(slot == tile - 1, running, 0.0), 0)

    # Find the token inside the tile; its weights are computed again.
    accepted = tl.load(num_accepted + b)
    scale = tl.load(row_scale + b)
    token = tl.load(tokens + b * GAMMA + accepted, mask=accepted < GAMMA, other=-1)
    v = tile.to(tl.int64) * TILE + tl.arange(0, TILE).to(tl.int64)
    rest, whole = _weights(v, b, accepted, scale, token, probs, GAMMA, COMPUTE, BLOCK, ONE_HOT)
    mass = tl.where(empty, whole, rest)
    tl.store(next_token + b, tile.to(tl.int64) * TILE + _first_beyond(mass, tl.cumsum(mass, 0), goal, TILE))
