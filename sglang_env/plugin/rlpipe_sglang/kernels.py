"""Triton kernels that sample drafts and verify them from logits, for a server on a GPU.

The torch code in `drafts` and `verify` is the reference for the distribution. Here each logit is read once,
and the row that is sampled is read again in each of the last two kernels:

    draw_races      (B, tiles): store z = logits / T, and each tile's best race: its largest z_v - ln E_v,
                    with E_v from Philox bits
    pick_token      (B,): the best tile's token
    measure_rows    (B, 2n - 1, tiles): of each row, n of the target and n - 1 of z, per tile the maximum m,
                    sum e^(x - m) and sum e^(x - m) (x - m)
    judge_drafts    (B, tiles): p, q, acceptance, entropies, log-probabilities of the drafts, and the mass of
                    each tile of the row that is sampled
    emit_token      (B,): the last token, by the inverse CDF: first its tile, then the token

Logits of -inf, and all below -1e30, have probability 0. Sums over tiles have a fixed order, so a verdict does
not depend on the other requests in the batch. E_v has 64 random bits: with 24 bits a token of q < 6e-8 would
never be drafted. The code never waits for the device, so a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 2048
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _scaled(at, inside, temperature, COMPUTE: tl.constexpr):
    x = tl.load(at, mask=inside, other=float("-inf")).to(COMPUTE)
    return x / temperature if COMPUTE == tl.float64 else tl.div_rn(x, temperature)  # noqa: SIM300


@triton.jit
def _race(high, low, COMPUTE: tl.constexpr):
    """Compute E ~ Exp(1) from 64 bits: -ln(1 - u), with a series where 1 - u would be rounded."""
    u = high.to(COMPUTE) * 2.3283064365386963e-10 + (low.to(COMPUTE) + 0.5) * 5.421010862427522e-20
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u / 6)))))
    return tl.where(u < 0.03, series, -tl.log(tl.maximum(1 - u, 2.98e-8)))


@triton.jit
def draw_races(
    logits, row_stride, temperatures, top_ks, seed, z, races, tokens, vocab,
    TILES: tl.constexpr, TILE: tl.constexpr, KEEP: tl.constexpr, GREEDY: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Find each tile's best race. KEEP: scale logits and store z, else they are z. GREEDY: top_k may be 1."""
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = TILE // 2
    place = tl.arange(0, HALF)
    pair = (tile * HALF + place).to(tl.uint32)
    words = tl.philox(tl.load(seed), pair, b.to(tl.uint32) + pair * 0, pair * 0, pair * 0)
    best, token = float("-inf"), tile * TILE
    for half in tl.static_range(2):
        v = tile * TILE + half * HALF + place
        inside = v < vocab
        temperature = tl.load(temperatures + b).to(COMPUTE) if KEEP else 1.0
        at = logits + b * row_stride + v
        x = _scaled(at, inside, temperature, COMPUTE) if KEEP else tl.load(at, inside, float("-inf"))
        if KEEP:
            tl.store(z + b * vocab + v, x, mask=inside)
        score = x - tl.log(_race(words[2 * half], words[2 * half + 1], COMPUTE))
        if GREEDY:
            score = tl.where(tl.load(top_ks + b) <= 1, x, score)
        score = tl.where(score == score, score, float("-inf"))
        highest, first = tl.max(score, 0, return_indices=True)
        token = tl.where(highest > best, tile * TILE + half * HALF + first, token)
        best = tl.maximum(highest, best)
    tl.store(races + b * TILES + tile, best)
    tl.store(tokens + b * TILES + tile, token)


@triton.jit
def pick_token(races, tokens, drafts, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr):
    """Store in drafts[b] the token of the tile with the best race."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TILE_SLOTS)
    best = tl.load(races + b * TILES + slot, mask=slot < TILES, other=float("-inf"))
    _, tile = tl.max(best, 0, return_indices=True)
    tl.store(drafts + b, tl.load(tokens + b * TILES + tile).to(tl.int64))


@triton.jit
def measure_rows(
    draft, draft_row, draft_depth, target, target_row, target_depth, temperatures, sums, vocab,
    PLACES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store sums[b, row, :, tile]: m, sum e^(x - m), sum e^(x - m) (x - m). rows: PLACES of p, then of z."""
    b, row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    v = tile * TILE + tl.arange(0, TILE)
    inside = v < vocab
    if row < PLACES:
        place = target + b * target_row + row * target_depth
        x = _scaled(place + v, inside, tl.load(temperatures + b).to(COMPUTE), COMPUTE)
    else:
        start = draft + b * draft_row + (row - PLACES) * draft_depth
        x = tl.load(start + v, mask=inside, other=float("-inf")).to(COMPUTE)
    x = tl.where(x > LOWEST, x, LOWEST)
    highest = tl.max(x, 0)
    below = x - highest
    weight = tl.where(inside, tl.exp(below), 0.0)
    at = sums + ((b * (2 * PLACES - 1) + row) * 3) * TILES + tile
    tl.store(at, highest)
    tl.store(at + TILES, tl.sum(weight, 0))
    tl.store(at + 2 * TILES, tl.sum(weight * below, 0))


@triton.jit
def _row_sums(sums, b, rows, there, PLACES: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr):
    """Compute log sum e^x and the entropy of rows [R] of request b; 0 where `there` is false."""
    slot = tl.arange(0, TILE_SLOTS)[None, :]
    at = sums + ((b * (2 * PLACES - 1) + rows[:, None]) * 3) * TILES + slot
    mask = there[:, None] & (slot < TILES)
    m = tl.load(at, mask=mask, other=LOWEST)
    s = tl.load(at + TILES, mask=mask, other=0.0)
    h = tl.load(at + 2 * TILES, mask=mask, other=0.0)
    highest = tl.max(m, 1)
    below = m - highest[:, None]
    weight = tl.exp(below)
    total = tl.sum(s * weight, 1)
    total = tl.where(there, total, 1.0)
    return highest + tl.log(total), tl.log(total) - tl.sum(weight * (h + s * below), 1) / total


@triton.jit
def _masses(
    v, b, row, draft, draft_row, draft_depth, target, target_row, target_depth, temperature, target_lse,
    draft_lse, vocab, PLACES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Compute max(p - q, 0) and p of tokens v in a row of request b; after the last draft q is 0."""
    inside = v < vocab
    x = _scaled(target + b * target_row + row * target_depth + v, inside, temperature, COMPUTE)
    p = tl.where(inside & (x > LOWEST), tl.exp(x - target_lse), 0.0)
    drafted = inside & (row < PLACES - 1)
    z = tl.load(draft + b * draft_row + row * draft_depth + v, mask=drafted, other=float("-inf")).to(COMPUTE)
    q = tl.where(drafted & (z > LOWEST), tl.exp(z - draft_lse), 0.0)
    return tl.where(p > q, p - q, 0.0).to(tl.float64), p.to(tl.float64)


@triton.jit
def judge_drafts(
    tokens, coins, draft, draft_row, draft_depth, target, target_row, target_depth, temperatures, sums, vocab,
    accepted_out, tokens_out, p_out, q_out, logprobs, entropies, normalizers, residual_mass, target_mass,
    PLACES: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr,
    TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Compute the verdict except the last token; normalizers [B, PLACES, 2]: ln sum e^x of p and of z."""
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, SLOTS).to(tl.int64)
    depth = place < PLACES - 1
    temperature = tl.load(temperatures + b).to(COMPUTE)
    target_lse, entropy = _row_sums(sums, b, place, place < PLACES, PLACES, TILES, TILE_SLOTS)
    draft_lse, _ = _row_sums(sums, b, place + PLACES, depth, PLACES, TILES, TILE_SLOTS)
    token = tl.load(tokens + b * (PLACES - 1) + place, mask=depth, other=0)
    coin = tl.load(coins + b * (PLACES - 1) + place, mask=depth, other=1.0)
    x = _scaled(target + b * target_row + place * target_depth + token, depth, temperature, COMPUTE)
    z = tl.load(draft + b * draft_row + place * draft_depth + token, mask=depth, other=float("-inf"))
    z = z.to(COMPUTE)
    p = tl.where(x > LOWEST, tl.exp(x - target_lse), 0.0)
    q = tl.where(z > LOWEST, tl.exp(z - draft_lse), 0.0)
    rejected = depth & ~(coin * q.to(tl.float64) < p.to(tl.float64))
    accepted = tl.min(tl.where(rejected, place, PLACES - 1), 0)
    own_target = tl.sum(tl.where(place == accepted, target_lse, 0.0), 0)
    own_draft = tl.sum(tl.where((place == accepted) & depth, draft_lse, 0.0), 0)
    if tile == 0:
        tl.store(accepted_out + b, accepted)
        tl.store(tokens_out + b * PLACES + place, token, mask=depth)
        tl.store(p_out + b * (PLACES - 1) + place, p, mask=depth)
        tl.store(q_out + b * (PLACES - 1) + place, q, mask=depth)
        tl.store(logprobs + b * PLACES + place, tl.maximum(x, LOWEST) - target_lse, mask=depth)
        tl.store(entropies + b * PLACES + place, entropy.to(tl.float32), mask=place < PLACES)
        tl.store(normalizers + (b * PLACES + place) * 2, target_lse, mask=place < PLACES)
        tl.store(normalizers + (b * PLACES + place) * 2 + 1, draft_lse, mask=depth)
    v = tile * TILE + tl.arange(0, TILE)
    rest, whole = _masses(
        v, b, accepted, draft, draft_row, draft_depth, target, target_row, target_depth, temperature,
        own_target, own_draft, vocab, PLACES, COMPUTE,
    )  # fmt: skip
    tl.store(residual_mass + b * TILES + tile, tl.sum(rest, 0))
    tl.store(target_mass + b * TILES + tile, tl.sum(whole, 0))


@triton.jit
def _first_beyond(mass, running, goal, SIZE: tl.constexpr):
    """Return the first slot with mass > 0 and running > goal, else the last with mass > 0, else 0."""
    slot = tl.arange(0, SIZE)
    first = tl.min(tl.where((mass > 0.0) & (running > goal), slot, SIZE), 0)
    return tl.minimum(first, tl.max(tl.where(mass > 0.0, slot, 0), 0))


@triton.jit
def emit_token(
    uniforms, draft, draft_row, draft_depth, target, target_row, target_depth, temperatures, vocab,
    accepted_out, tokens_out, logprobs, normalizers, residual_mass, target_mass,
    PLACES: tl.constexpr, TILES: tl.constexpr, TILE_SLOTS: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the last token and its logprob at `accepted` and, like the reference, after the last draft."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TILE_SLOTS)
    rest = tl.load(residual_mass + b * TILES + slot, mask=slot < TILES, other=0.0)
    whole = tl.load(target_mass + b * TILES + slot, mask=slot < TILES, other=0.0)
    empty = tl.max(rest, 0) <= 0.0
    mass = tl.where(empty, whole, rest)
    running = tl.cumsum(mass, 0)
    goal = tl.load(uniforms + b) * tl.sum(tl.where(slot == TILES - 1, running, 0.0), 0)
    tile = _first_beyond(mass, running, goal, TILE_SLOTS)
    goal -= tl.sum(tl.where(slot == tile - 1, running, 0.0), 0)

    accepted = tl.load(accepted_out + b)
    temperature = tl.load(temperatures + b).to(COMPUTE)
    own = normalizers + (b * PLACES + accepted) * 2
    target_lse = tl.load(own)
    draft_lse = tl.load(own + 1, mask=accepted < PLACES - 1, other=0.0)
    v = tile * TILE + tl.arange(0, TILE)
    rest, whole = _masses(
        v, b, accepted, draft, draft_row, draft_depth, target, target_row, target_depth, temperature,
        target_lse, draft_lse, vocab, PLACES, COMPUTE,
    )  # fmt: skip
    mass = tl.where(empty, whole, rest)
    last = (tile * TILE + _first_beyond(mass, tl.cumsum(mass, 0), goal, TILE)).to(tl.int64)
    row = tl.where(tl.arange(0, 2) == 0, accepted, PLACES - 1)
    x = _scaled(target + b * target_row + row * target_depth + last, row >= 0, temperature, COMPUTE)
    lse = tl.load(normalizers + (b * PLACES + row) * 2)
    tl.store(tokens_out + b * PLACES + row, last + row * 0)
    tl.store(logprobs + b * PLACES + row, tl.maximum(x, LOWEST) - lse)


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor | None, top_ks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute z float32 [B, V], and sample drafts [B, 1] int64 from softmax(z).

    logits: [B, V]. temperatures: [B, 1]; None if `logits` are already z, which is then returned. top_ks: [B];
    a row with 1 gets the argmax.
    """
    batch, vocab = logits.shape
    tiles, keep = triton.cdiv(vocab, TILE), temperatures is not None
    z = logits.new_empty(batch, vocab, dtype=torch.float32) if keep else logits
    drafts = logits.new_empty(batch, 1, dtype=torch.int64)
    races = logits.new_empty(batch, tiles, dtype=torch.float32)
    tokens = logits.new_empty(batch, tiles, dtype=torch.int32)
    seed = torch.randint(2**62, (1,), device=logits.device)
    if batch:
        draw_races[(batch, tiles)](
            logits if logits.stride(1) == 1 else logits.contiguous(),
            logits.stride(0) if logits.stride(1) == 1 else vocab,
            temperatures.contiguous() if keep else logits,
            logits if top_ks is None else top_ks.contiguous(),
            seed,
            z,
            races,
            tokens,
            vocab,
            TILES=tiles,
            TILE=TILE,
            KEEP=keep,
            GREEDY=top_ks is not None,
            COMPUTE=tl.float32,
        )
        pick_token[(batch,)](races, tokens, drafts, TILES=tiles, TILE_SLOTS=triton.next_power_of_2(tiles))
    return z, drafts


def verify(
    drafts: torch.Tensor,
    draft: torch.Tensor,
    target: torch.Tensor,
    temperatures: torch.Tensor,
    coins: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute the fields of `verify.Verdict`; for the arguments see `verify.verify`. Keeps float64."""
    batch, places, vocab = target.shape
    compute = torch.float64 if target.dtype == torch.float64 else torch.float32
    tiles = triton.cdiv(vocab, TILE)
    new = target.new_empty
    accepted = new(batch, dtype=torch.int64)
    tokens = new(batch, places, dtype=torch.int64)
    p, q = new(2, batch, places - 1, dtype=compute)
    logprobs = new(batch, places, dtype=compute)
    entropies = new(batch, places, dtype=torch.float32)
    if batch:
        sums = new(batch, 2 * places - 1, 3, tiles, dtype=compute)
        normalizers = new(batch, places, 2, dtype=compute)
        mass = new(2, batch, tiles, dtype=torch.float64)
        draft, target = (x if x.stride(2) == 1 else x.contiguous() for x in (draft, target))
        laws = (draft, *draft.stride()[:2], target, *target.stride()[:2], temperatures.contiguous())
        shape = {
            "PLACES": places,
            "TILES": tiles,
            "TILE": TILE,
            "COMPUTE": tl.float64 if compute == torch.float64 else tl.float32,
        }
        slots = {"TILE_SLOTS": triton.next_power_of_2(tiles)}
        measure_rows[(batch, 2 * places - 1, tiles)](*laws, sums, vocab, **shape)
        judge_drafts[(batch, tiles)](
            drafts.contiguous(), coins.contiguous(), *laws, sums, vocab,
            accepted, tokens, p, q, logprobs, entropies, normalizers, *mass,
            **shape, **slots, SLOTS=triton.next_power_of_2(places),
        )  # fmt: skip
        emit_token[(batch,)](
            uniforms.contiguous(), *laws, vocab, accepted, tokens, logprobs, normalizers, *mass,
            **shape, **slots,
        )  # fmt: skip
    return accepted, tokens, p, q, logprobs, entropies
