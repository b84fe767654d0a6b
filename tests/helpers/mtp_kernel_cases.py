"""Cases in which the Triton backend must equal the torch backend; run on a device, or by an interpreter.

TRITON_INTERPRET=1 python -m tests.helpers.mtp_kernel_cases kinds cpu
python -m tests.helpers.mtp_kernel_cases kinds cuda
"""

from __future__ import annotations

import sys
from dataclasses import fields

import torch
from torch.testing import assert_close

from rlpipe.config.draft_objectives import FROM_LOGITS
from rlpipe.drafts.loss import MtpStats, mtp_loss
from rlpipe.drafts.loss.linear import linear_mtp_loss
from rlpipe.drafts.loss.torch_rows import Sums
from tests.helpers.mtp_reference import Case, random_case


def _call(backend: str, kind: str, case: Case, **settings: object) -> tuple[torch.Tensor, ...]:
    case.draft.grad = None
    loss, stats = mtp_loss(
        kind, case.draft, case.target, mask=case.mask, backend=backend, **case.kwargs(), **settings
    )
    loss.backward()
    return loss, case.draft.grad.clone(), stats


def _compare(kind: str, case: Case, **settings: object) -> None:
    loss, grad, stats = _call("triton", kind, case, **settings)
    expected, expected_grad, expected_stats = _call("torch", kind, case, **settings)
    assert_close(loss, expected, atol=2e-6, rtol=1e-5)
    half = case.draft.dtype == torch.bfloat16
    assert_close(grad, expected_grad, atol=1e-6, rtol=2e-2 if half else 1e-3)
    assert (grad[~case.mask] == 0).all()
    for field in fields(MtpStats):
        values = (getattr(s, field.name) for s in (stats, expected_stats))
        assert_close(*values, atol=1e-4, rtol=1e-4, msg=lambda text, name=field.name: f"{name}: {text}")


def vocabularies(device: str) -> None:
    """Sizes around tiles and octets, padding, masked rows that hold NaN, all masked."""
    for vocab in (1, 7, 127, 257, 4097, 151_936):
        size = {"batch": 1, "length": 3, "depths": 1} if vocab > 10_000 else {"depths": 2}
        case = random_case(vocab, **size)
        _compare("e2e_tv", case.to(torch.float32).to(device))
    case = random_case(2500).to(torch.float32).to(device)
    with torch.no_grad():
        case.draft[..., 2100:] = case.target[..., 2100:] = float("-inf")
        case.draft[~case.mask] = case.target[~case.mask] = float("nan")
    for kind in ("tv", "lk"):
        _compare(kind, case)
    case.mask.zero_()
    case.turn_starts.zero_()
    _compare("e2e_tv", case)


def kinds(device: str) -> None:
    """Every objective, with temperature."""
    for kind in FROM_LOGITS:
        _compare(kind, random_case(300).to(torch.float32).to(device), temperature=0.7)


def strides(device: str) -> None:
    """A target shared by depths as a view, and logits whose last dimension is not dense."""
    case = random_case(300).to(torch.float32).to(device)
    anchors, depths, vocab = case.draft.shape
    shared = torch.randn(anchors + depths - 1, vocab, device=device)
    case.target = shared.unfold(0, anchors, 1).permute(2, 0, 1)
    assert case.target.stride() == (vocab, vocab, 1)
    _compare("lk", case)
    case.draft = case.draft.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    _compare("e2e_chain", case)


def fused(device: str) -> None:
    """Head and loss in one, against the torch backend."""
    case = random_case(300).to(torch.float32).to(device)
    anchors, depths, _ = case.draft.shape
    target, weight = torch.randn(anchors, 8, device=device), torch.randn(300, 8, device=device)
    ahead = torch.stack([target.roll(-k, 0) for k in range(1, depths + 1)], 1)
    found = {}
    for backend in ("torch", "triton"):
        draft = (ahead + 0.1).requires_grad_()
        loss, _ = linear_mtp_loss(
            "e2e_tv",
            draft,
            target,
            head_weight=weight,
            mask=case.mask,
            chunk_bytes=5 * depths * 1200,
            backend=backend,
        )
        loss.backward()
        found[backend] = loss, draft.grad
    assert_close(found["triton"], found["torch"], atol=1e-5, rtol=1e-3)


def planted(device: str) -> None:
    """The comparison notices a bug: bits that give ties, or S, to the wrong side."""
    from rlpipe.drafts.kernels import tv

    right = tv.overlaps

    def ties_uncovered(draft, target, *rest, keep_bits):
        sums, bits = right(draft, target - 1e-4, *rest, keep_bits=keep_bits)
        return sums, bits

    def wrong_mass(*rest, keep_bits):
        sums, bits = right(*rest, keep_bits=keep_bits)
        sums[Sums.COVERED] = 1 - sums[Sums.COVERED]
        return sums, bits

    equal = random_case(300, noise=0.0).to(torch.float32).to(device)
    for mutant, case in (
        (ties_uncovered, equal),
        (wrong_mass, random_case(300).to(torch.float32).to(device)),
    ):
        tv.overlaps = mutant
        try:
            _compare("tv", case)
        except AssertionError:
            continue
        finally:
            tv.overlaps = right
        raise SystemExit(f"{mutant.__name__} was not noticed")


GROUPS = {f.__name__: f for f in (vocabularies, kinds, strides, fused, planted)}

if __name__ == "__main__":
    torch.manual_seed(0)
    GROUPS[sys.argv[1]](sys.argv[2])
    print(f"{sys.argv[1]}: equal")
