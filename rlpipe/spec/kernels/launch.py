"""Verification through the Triton kernels: checks, tiles and launches.

Owns the host side. `rlpipe.spec.verify` states the rules, and `programs.py` has the arithmetic.
A call starts two kernels (block verification with gamma > 1: three) on the current stream, allocates
outputs and a few kilobytes per row, and never waits for the device.

Probabilities are float32 or float64. float16 and bfloat16 are converted exactly to float32, so that the
verdict equals the reference's on `probs.float()`. Rows and depths may have any strides. Probabilities are
copied only if the tokens of a row are not adjacent in memory. Columns of zeros (a padded vocabulary) are
never sampled. A NaN has weight zero and is never accepted.

Ties. The token is chosen by comparing u * total with a running sum of up to V float64 weights. Kernel and
reference add these in different orders, and each sum is off by less than V * 2**-53 of the total. So both
give the same token unless u is within V * 2**-52 of a boundary (3.4e-11 at V = 151,936); near a boundary both
neighbouring tokens are correct. Chain and target-only compare their coins exactly. Block verification
compares its coins with the same tolerance as tokens.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from rlpipe.spec.verify.verdict import Verdict

TILE = 1024  # tokens per partial sum; fixed, so that the verdict does not depend on the batch size
WARPS = 4


def verify_chain(
    tokens: torch.Tensor,
    draft: torch.Tensor | None,
    target: torch.Tensor,
    coins: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    block: bool = False,
) -> Verdict:
    """Run `rlpipe.spec.verify.verify_chain` on the device; with block=True, run `verify_block` instead.

    tokens: [B, gamma] int64, drafted. draft: [B, gamma, V] probabilities; None for `verify_target_only`.
    target: [B, gamma + 1, V] probabilities. coins: [B, gamma] float64 uniforms for acceptance. uniforms: [B]
    float64, for the residual. gamma may be 0; then only the bonus row is sampled.

    Raises ValueError for wrong shapes, dtypes or devices, and RuntimeError if the kernels cannot run.
    """
    _check(tokens, draft, target, coins, uniforms)

    # Compute the sizes of the launch. 16-bit inputs are computed in float32.
    programs, interpreted = _programs(target.device)
    batch, gamma = tokens.shape
    vocab = target.shape[2]
    double = torch.float64 in (target.dtype, target.dtype if draft is None else draft.dtype)
    compute = torch.float64 if double else torch.float32
    tiles = _cdiv(vocab, TILE)
    span = _span(batch, tiles, interpreted=interpreted)

    new = target.new_empty
    verdict = Verdict(
        num_accepted=new(batch, dtype=torch.int64),
        next_token=new(batch, dtype=torch.int64),
        accept_prob=new(batch, gamma, dtype=compute),
    )
    if not batch:
        return verdict

    # Allocate buffers that one kernel fills for the next. Without draft probabilities, the target's are
    # passed in their place, and the kernels do not read them.
    tokens, coins, uniforms = tokens.contiguous(), coins.contiguous(), uniforms.contiguous()
    one_hot, draft = draft is None, target if draft is None else draft
    mass = new(2, batch, tiles, dtype=torch.float64)
    scale = new(batch, dtype=torch.float64)
    prefix_mass = mass

    # Collect the arguments that all kernels share, then those that only some kernels need.
    draft, target = (_with_adjacent_tokens(probs) for probs in (draft, target))
    probs = (draft, target, *draft.stride()[:2], *target.stride()[:2], vocab)
    shape: dict[str, Any] = {
        "GAMMA": gamma,
        "TILES": tiles,
        "TILE": min(TILE, _power_of_two(vocab)),
        "COMPUTE": programs.tl.float64 if double else programs.tl.float32,
        "num_warps": WARPS,
        "enable_fp_fusion": False,  # w * p - q rounds twice, as the reference does
    }
    decide = {"DEPTHS": _power_of_two(max(gamma, 1)), "SPAN": span}
    find = {"TILE_SLOTS": _power_of_two(tiles), "BLOCK": block and gamma > 0, "ONE_HOT": one_hot}

    with torch.cuda.device_of(target):
        # Acceptance of a block depends on the mass of max(w p - q, 0) at every depth.
        if block and gamma > 1:
            prefix_mass = new(batch, gamma - 1, tiles, dtype=torch.float64)
            programs.prefix_mass_kernel[(batch, _cdiv(tiles, span), gamma - 1)](
                tokens, coins, *probs, prefix_mass, **shape, **decide
            )

        programs.residual_kernel[(batch, _cdiv(tiles, span))](
            tokens,
            coins,
            *probs,
            prefix_mass,
            verdict.num_accepted,
            verdict.accept_prob,
            scale,
            mass[0],
            mass[1],
            **shape,
            **decide,
            **find,
        )

        programs.locate_kernel[(batch,)](
            tokens,
            *probs,
            uniforms,
            verdict.num_accepted,
            scale,
            mass[0],
            mass[1],
            verdict.next_token,
            **shape,
            **find,
        )
    return verdict


verify_block = partial(verify_chain, block=True)


def verify_target_only(tokens: torch.Tensor, _: torch.Tensor | None, *others: torch.Tensor) -> Verdict:
    """Run `rlpipe.spec.verify.verify_target_only` on the device; draft probabilities are ignored."""
    return verify_chain(tokens, None, *others)


def _with_adjacent_tokens(probs: torch.Tensor) -> torch.Tensor:
    """Return probabilities [B, depths, V] with a last stride of 1; copy them only if it is not 1 already."""
    return probs if probs.stride(2) == 1 else probs.contiguous()


def _span(batch: int, tiles: int, *, interpreted: bool) -> int:
    """Choose the tiles per program: one if there are too few rows to fill a GPU; the result is the same.

    The interpreter runs programs one after another, each at a fixed cost, so there they get more tiles.
    """
    return min(tiles, 16 if interpreted else 1 if batch <= 8 else 4)


def _programs(device: torch.device) -> tuple[ModuleType, bool]:
    """Return the kernels, and whether they are interpreted.

    Raises RuntimeError if the kernels cannot run on `device`.
    """
    try:
        from rlpipe.spec.kernels import programs
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            'backend="triton" needs the package triton, which is not installed: '
            'pip install triton, or use backend="torch".'
        ) from error

    # With TRITON_INTERPRET=1 the kernels belong to another class.
    interpreted = not isinstance(programs.locate_kernel, programs.triton.runtime.jit.JITFunction)
    if device.type != "cuda" and not interpreted:
        raise RuntimeError(
            f'backend="triton" needs a CUDA device, the tensors are on {device}: move them to one, use '
            'backend="torch", or set TRITON_INTERPRET=1 before triton is first imported.'
        )
    return programs, interpreted


def _check(
    tokens: torch.Tensor,
    draft: torch.Tensor | None,
    target: torch.Tensor,
    coins: torch.Tensor,
    uniforms: torch.Tensor,
) -> None:
    """Raise ValueError for tensors that the kernels would read wrongly."""
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(
            f"draft_tokens is {tuple(tokens.shape)} {tokens.dtype}; it must be [B, gamma] torch.int64."
        )
    if target.dim() != 3 or not target.shape[2]:
        raise ValueError(f"target_probs is {tuple(target.shape)}; it must be [B, gamma + 1, V] with V > 0.")

    # The shapes of all other tensors follow from the shapes of these two.
    (batch, gamma), vocab = tokens.shape, target.shape[2]
    wanted = {
        "target_probs": (target, (batch, gamma + 1, vocab)),
        "accept_uniforms": (coins, (batch, gamma)),
        "residual_uniforms": (uniforms, (batch,)),
    }
    if draft is not None:
        wanted["draft_probs"] = (draft, (batch, gamma, vocab))

    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; with these drafts it must be {shape}.")
        if tensor.device != tokens.device:
            raise ValueError(
                f"{name} is on {tensor.device}, draft_tokens on {tokens.device}: move them to one device."
            )
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {tensor.dtype}; it must be a floating-point tensor.")
        if name.endswith("uniforms") and tensor.dtype != torch.float64:
            raise ValueError(
                f"{name} is {tensor.dtype}: the 24 bits of float32 cannot reach every token of a large "
                "vocabulary; draw it as torch.float64."
            )


def _cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << (n - 1).bit_length()
