"""Verifies a chain of drafts by rejection sampling from logits; also computes logprobs and entropies.

The rule is that of `rlpipe.spec.verify.verify_chain` (Leviathan et al., arXiv:2211.17192, Algorithm 1), and
tests compare the two. Here distributions are given as logits: p = softmax(logits / T), and q = softmax(z)
with z from `drafts`:

    draft x_i is accepted while u_i q_i(x_i) < p_i(x_i); then one token is sampled from
    max(p_i - q_i, 0) or, if all are accepted, from the row after the last draft

A greedy request's p is 1 at its argmax (`greedily`). SGLang, which then gets softmax(z), verifies batches
with other features (penalties, bias, grammar, top-k, top-p, min-p, seeds, watermarks, trees) and batches of
only greedy requests. `judged` counts the verify steps of requests, by the code that verified them or, for
SGLang, by the reason. On a GPU `kernels` do what `verify` does in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rlpipe_sglang import drafts as drawing
from rlpipe_sglang import record
from rlpipe_sglang.measure import entropy

judged: Counter[str] = Counter()  # verify steps of this process
TOGETHER = 2**19  # logits of the requests that torch verifies at once, so that they stay in the CPU's cache


class Verdict(NamedTuple):
    """Verdict on B chains of n - 1 drafts.

    accepted: [B] int64. tokens: [B, n] int64: drafts, then the last token at index `accepted`; tokens after
    it are not emitted. p, q: [B, n - 1], of each draft. logprobs: [B, n], of `tokens`. entropies: [B, n]
    float32, of the target's rows. Logprobs and entropies are at the request's temperature.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    logprobs: torch.Tensor
    entropies: torch.Tensor


def verify(
    drafts: torch.Tensor,
    draft: torch.Tensor,
    target: torch.Tensor,
    temperatures: torch.Tensor,
    coins: torch.Tensor,
    uniforms: torch.Tensor,
) -> Verdict:
    """Verify `drafts` [B, n - 1] int64.

    draft: z [B, n - 1, V]. target: unscaled logits [B, n, V]. temperatures: [B, 1]. coins: [B, n - 1], and
    uniforms: [B], are float64 in [0, 1), independent of each other and of the drafts.
    """
    given = drafts, draft, target, temperatures, coins, uniforms
    size = max(1, TOGETHER // target.shape[1:].numel())
    if len(target) > size:
        parts = zip(*(x.split(size) for x in given), strict=True)
        return Verdict(*map(torch.cat, zip(*(verify(*part) for part in parts), strict=True)))
    batch, depths, _ = draft.shape
    rows = torch.arange(batch, device=drafts.device)
    log_p = (target / temperatures.unsqueeze(-1)).log_softmax(-1)
    log_p.clamp_(min=torch.finfo(log_p.dtype).min)  # like SGLang
    laws, proposals, chosen = log_p.softmax(-1), draft.softmax(-1), drafts.unsqueeze(-1)
    p = laws[:, :depths].gather(-1, chosen).squeeze(-1)
    q = proposals.gather(-1, chosen).squeeze(-1)
    accepted = (coins * q < p).cumprod(1, dtype=torch.int64).sum(1)

    whole = weights = laws[rows, accepted]
    if depths:
        at = accepted.clamp(max=depths - 1)
        rest = (whole - proposals[rows, at]).clamp_(min=0)
        # rounding can make the residual 0, which exact arithmetic cannot: then sample from the target
        partial = ((accepted < depths) & (rest.sum(-1) > 0)).unsqueeze(-1)
        weights = torch.where(partial, rest, whole)
    running = weights.cumsum(-1, dtype=torch.float64)
    last = drawing.first_beyond(running, uniforms.unsqueeze(-1))

    tokens = torch.cat([drafts, last], 1).scatter_(1, accepted.unsqueeze(-1), last)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropies = entropy(log_p, laws)
    return Verdict(accepted, tokens, p, q, logprobs, entropies)


def greedily(verdict: Verdict, rows: Sequence[int], drafts: torch.Tensor, target: torch.Tensor) -> None:
    """Change the verdict of greedy requests `rows` (top_k 1): accept drafts that are the target's argmax.

    p is 1 or 0. q is set to 1: acceptance does not depend on whether the draft is the argmax of z or was
    sampled. Log-probabilities and entropies are those at temperature 1, as in SGLang.
    """
    chosen = torch.tensor(rows, device=target.device)
    laws = target[chosen]
    best = laws.argmax(-1)
    same = drafts[chosen] == best[:, :-1]
    verdict.accepted[chosen] = same.cumprod(1, dtype=torch.int64).sum(1)
    verdict.tokens[chosen] = best  # tokens that are not emitted may have any value
    verdict.p[chosen], verdict.q[chosen] = (
        same.to(verdict.p.dtype),
        torch.ones_like(same, dtype=verdict.q.dtype),
    )
    logprobs = laws.to(verdict.logprobs.dtype).log_softmax(-1)
    verdict.logprobs[chosen] = logprobs.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def not_covered(
    spec: Any, sampling: Any, top_ks: Sequence[int], verify_input: Any, logits: torch.Tensor, others: Any
) -> str | None:
    """Return why SGLang must verify this batch; None if `verify` can. others: the batch's grammar."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    reasons = {
        "not rejection sampling": not spec.speculative_use_rejection_sampling,
        "block verification": spec.speculative_use_block_verification,
        "greedy": sampling.is_all_greedy,
        "top-k": any(1 < top_k < TOP_K_ALL for top_k in top_ks),
        "top-p": sampling.need_top_p_sampling,
        "min-p": sampling.need_min_p_sampling,
        "seed": sampling.sampling_seed is not None,
        "penalty": sampling.acc_additive_penalties is not None or sampling.acc_scaling_penalties is not None,
        "bias": sampling.logit_bias is not None,
        "grammar": others is not None,
        "watermark": sampling.has_watermark_candidates,
        "tree": verify_input.tree_topk != 1 or verify_input.max_tree_depth != verify_input.draft_token_num,
        "no draft law": verify_input.draft_probs is None
        or verify_input.draft_probs.shape[-1] != logits.shape[-1],
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sampled(
    original: Callable,
    verify_input: Any,
    batch: Any,
    output: Any,
    grammar: Any = None,
    *more: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around `eagle_sample`: return tokens, the number emitted per request, and each token's logits row."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative import spec_utils
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    if batch.forward_mode.is_idle():
        return original(verify_input, batch, output, grammar, *more, **options)
    logits, sampling, places = output.next_token_logits, batch.sampling_info, verify_input.draft_token_num
    limited = sampling.need_top_k_sampling  # includes greedy requests
    top_ks = [request.sampling_params.top_k for request in batch.reqs] if limited else ()
    reason = not_covered(get_spec(), sampling, top_ks, verify_input, logits, grammar)
    if spec_utils.SIMULATE_ACC_LEN > 0:
        reason = "simulated acceptance"
    if not drawing.keeps_logits():
        reason = "drafts of another kind"
    elif reason is not None and verify_input.draft_probs is not None:
        verify_input.draft_probs = verify_input.draft_probs.softmax(-1)
    size = len(batch.seq_lens)
    judged[reason or ("rlpipe without kernels" if drawing.failed else "rlpipe")] += size
    recorded = places > 1 and any(map(record.asks, batch.reqs))
    if reason is not None:
        laws = record.laws(verify_input, logits, sampling) if recorded else None
        found = original(verify_input, batch, output, grammar, *more, **options)
        if laws is not None:
            record.attach(output, *laws, found[1] - 1)
        return found

    sanitize_nan_logits(logits, "verify: target model logits")
    drafts = verify_input.draft_token.view(size, places)[:, 1:].long()
    chance = {"dtype": torch.float64, "device": logits.device}
    coins, uniforms = torch.rand(drafts.shape, **chance), torch.rand(size, **chance)
    draft = verify_input.draft_probs[:size, : places - 1]  # without drafts SGLang still requires a row
    given = drafts, draft, logits.view(size, places, -1), sampling.temperatures, coins, uniforms
    verdict = Verdict(*drawing.by_kernel("verify", verify, logits.device, *given))
    if greedy := [row for row, top_k in enumerate(top_ks) if top_k <= 1]:
        greedily(verdict, greedy, drafts, given[2])
    output.rlpipe_verdict = verdict
    if recorded:
        record.attach(output, drafts.clone(), verdict.p, verdict.q, verdict.accepted)
    kept = torch.arange(places, device=logits.device) <= verdict.accepted.unsqueeze(-1)
    predict = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
    predict[verify_input.retrieve_index.reshape(-1)] = verdict.tokens.int().reshape(-1)
    index = torch.where(kept, verify_input.retrieve_index, -1).int()
    lengths = verdict.accepted.int() + 1
    _same_on_all_ranks(predict, index, lengths)
    return predict, lengths, index


def warm_up(scheduler: Any) -> None:
    """Compile the kernels for sampling and verification, so that a failure is known before the start.

    SGLang's graph capture has already run the sampling kernels, but verification is outside of the graphs.
    """
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if scheduler.spec_algorithm.is_none() or not spec.speculative_use_rejection_sampling:
        return
    places, vocab = spec.speculative_num_draft_tokens, scheduler.model_config.vocab_size
    device = torch.device(scheduler.device)
    z = torch.zeros(1, places - 1, vocab, device=device)
    drafts = torch.zeros(1, places - 1, dtype=torch.int64, device=device)
    coins = torch.zeros(1, places - 1, dtype=torch.float64, device=device)
    target, temperatures = z.new_zeros(1, places, vocab), z.new_ones(1, 1)
    given = drafts, z, target, temperatures, coins, coins[:, 0]
    top_ks = torch.ones(1, dtype=torch.int32, device=device)
    drawing.by_kernel("draw", drawing.draw, device, target[:, 0], temperatures, top_ks)
    drawing.by_kernel("draw", drawing.draw, device, target[:, 0], None, top_ks)  # with z, as after a prefill
    drawing.by_kernel("verify", verify, device, *given)


def _same_on_all_ranks(*decided: torch.Tensor) -> None:
    """Use rank 0's decisions, like SGLang, because tensor-parallel ranks round differently."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for tensor in decided:
            group.broadcast(tensor, src=0)
