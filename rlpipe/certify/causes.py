"""Names the faults that explain the failed lines of a certificate, so that one fault is reported once.

A fault makes the line that tests it fail, and often other lines too: if the server applies top-p, later
tokens also deviate. Each cause lists the lines that it explains; a failed line that no cause explains is
reported as its own cause. The order matters: later causes take earlier ones into account.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from rlpipe.certify.lines import (
    ACCEPTANCE,
    FIRST,
    GREEDY,
    LATER,
    LOGPROBS,
    TAIL,
    TEMPERATURE,
    Judge,
    Line,
)
from rlpipe.certify.statistics import Draws


@dataclass(slots=True, kw_only=True)
class Cause:
    """A named fault. explains: names of the lines that it explains. hint: what to change."""

    name: str
    text: str
    hint: str
    explains: tuple[str, ...]


def find_causes(judge: Judge, lines: Sequence[Line]) -> list[Cause]:
    """Return the causes of all failed lines; each failed line is explained by at least one."""
    failed = {line.name: line for line in lines if line.failed}
    causes: list[Cause] = []
    for rule in (_argmax, _truncated, _temperature, _distribution, _drafts, _stale, _logprobs, _greedy):
        explained = {name for cause in causes for name in cause.explains}
        cause = rule(judge, failed, explained)
        if cause is not None:
            causes.append(cause)
    return causes


_Failed = dict[str, Line]


def _argmax(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if every first token is the likeliest one, that is, the server does not sample."""
    samples = judge.evidence.at(1.0)
    best = judge.evidence.first.probs(1.0).argmax(1)
    if FIRST not in failed and TAIL not in failed:
        return None
    if not all((one.first == best[one.prompt]).all() for one in samples):
        return None
    return Cause(
        name="no sampling",
        text="at temperature 1 every first token is the likeliest one: the server decodes greedily.",
        hint="switch sampling on (transformers: do_sample=true in generation_config).",
        explains=(FIRST, TAIL, LATER, TEMPERATURE, LOGPROBS, ACCEPTANCE),
    )


def _truncated(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if the server cuts the distribution (top-p, top-k, min-p, or several of them).

    Then no sampled token is beyond some cumulative probability or rank, or below some share of the likeliest
    token's probability, although many are expected there.
    """
    if TAIL not in failed or TAIL in explained:
        return None
    first, samples = judge.evidence.first, judge.evidence.at(1.0)
    probs = first.probs(1.0)
    order = np.argsort(-probs, axis=1, kind="stable")
    rank_of = np.argsort(order, axis=1)
    ranked = np.take_along_axis(probs, order, 1)
    before = ranked.cumsum(1) - ranked
    row = np.concatenate([np.full(len(one.first), one.prompt) for one in samples])
    token = np.concatenate([one.first for one in samples])
    if (token < 0).any():
        return None

    # Each cut is at the last sampled token. Tokens beyond were expected; frequencies within are right.
    rank = rank_of[row, token]
    share = ranked / ranked[:, :1]
    by_rank = int(rank.max()) + 1
    by_sum = float(before[row, rank].max())
    by_share = float(share[row, rank].min())
    cuts = {
        f"beyond the {by_rank} likeliest": np.arange(probs.shape[1]) >= by_rank,
        f"beyond the likeliest {by_sum:.1%}": before > by_sum,
        f"less than {by_share:.1%} as likely as the likeliest": share < by_share,
    }
    expected = {limit: float((ranked * cut)[row].sum()) for limit, cut in cuts.items()}
    limit, missing = max(expected.items(), key=lambda one: one[1])

    kept = np.where(reduce(np.logical_or, cuts.values()), 0, ranked)
    inside = Draws(probs=kept / kept.sum(1, keepdims=True), row=row, cell=rank)
    fits = inside.p_value(np.random.default_rng(judge.seed), max_simulations=1000) >= judge.each
    if missing < -np.log(judge.each) or not fits:
        return None
    return Cause(
        name="truncated",
        text=f"no first token is {limit}, and {missing:.0f} such were expected: top-k, top-p, min-p or "
        "another cut is on.",
        hint="send top_p=1, top_k=-1 (0 in transformers) and min_p=0, or change the server's defaults.",
        explains=(FIRST, TAIL, LATER, TEMPERATURE, LOGPROBS, ACCEPTANCE),
    )


def _temperature(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if first tokens have a temperature other than the requested one."""
    if TEMPERATURE not in failed or TEMPERATURE in explained:
        return None
    requested = judge.evidence.temperature
    at_one, at = judge.temperatures[1.0], judge.temperatures[requested]
    if FIRST in failed and at_one.contains(1.0):
        return None  # the distribution is wrong, not only the temperature

    if at.contains(requested**2):
        how = "it is applied twice"
    elif at.contains(1.0) and at_one.contains(1.0):
        how = "it is not applied"
    else:
        how = "it is changed"
    return Cause(
        name="temperature",
        text=f"first tokens have a temperature of {at.value:.3f} where {requested:g} was requested, and of "
        f"{at_one.value:.3f} where 1 was: {how}.",
        hint="look for a second division of the logits, or a default that replaces the request's value.",
        explains=(TEMPERATURE, LATER, LOGPROBS, ACCEPTANCE, *(() if at_one.contains(1.0) else (FIRST, TAIL))),
    )


def _distribution(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if first tokens have a wrong distribution that no other cause explains."""
    names = [name for name in (FIRST, TAIL, TEMPERATURE) if name in failed and name not in explained]
    if not names:
        return None
    return Cause(
        name="another distribution",
        text="first tokens are not those of the checkpoint, at no temperature and no cut.",
        hint="check that the server has the same weights, tokenizer and number format, and no penalties.",
        explains=(FIRST, TAIL, LATER, TEMPERATURE, LOGPROBS, GREEDY, ACCEPTANCE),
    )


def _drafts(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if first tokens are right and later ones wrong: the verification of drafts is wrong."""
    if LATER not in failed or LATER in explained:
        return None
    features, numbers = judge.evidence.features, failed[LATER].numbers
    position, before = numbers["first_wrong_position"], numbers["p_by_position"][: features.gamma]
    bonus = bool(features.gamma) and position >= features.gamma + 2 and min(before) > 0.01
    return Cause(
        name="bonus token" if bonus else "verification" if features.drafts else "later tokens",
        text=f"first tokens are right, and later ones deviate, from position {position or 2} on"
        + (f": none before the token that follows {features.gamma} accepted drafts." if bonus else "."),
        hint="the token after accepted drafts must come from the model."
        if bonus
        else "check that drafts are accepted with min(1, p / q), with the q and temperature that drew them, "
        "and that a rejected draft is replaced from max(0, p - q).",
        explains=(LATER, ACCEPTANCE, GREEDY),
    )


def _stale(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if tokens are right, but acceptance differs from that of the checkpoint's draft."""
    if ACCEPTANCE not in failed or ACCEPTANCE in explained:
        return None
    numbers = failed[ACCEPTANCE].numbers
    less = numbers["server"] < numbers["own"]
    return Cause(
        name="stale draft" if less else "another draft",
        text="tokens are exact, but "
        + ("fewer" if less else "more")
        + " drafts are accepted than the checkpoint's own draft would have: the server drafts with other "
        "weights.",
        hint="update the draft together with the model.",
        explains=(ACCEPTANCE,),
    )


def _logprobs(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if the reported log-probabilities are not those of the sampled distribution."""
    if LOGPROBS not in failed or LOGPROBS in explained:
        return None
    before = failed[LOGPROBS].numbers["before_temperature"]
    return Cause(
        name="log-probabilities before temperature" if before else "log-probabilities",
        text="log-probabilities are those of the model at temperature 1, not those of the samples."
        if before
        else "log-probabilities differ from the reference by more than rounding.",
        hint="ask for processed log-probabilities (vLLM: --logprobs-mode processed_logprobs; llama.cpp: "
        "post_sampling_probs=true in every request)."
        if before
        else "check that they belong to the sampled tokens and the weights that sampled them.",
        explains=(LOGPROBS,),
    )


def _greedy(judge: Judge, failed: _Failed, explained: set[str]) -> Cause | None:
    """Return a cause if tokens at temperature 0 are not the likeliest ones."""
    if GREEDY not in failed or GREEDY in explained:
        return None
    return Cause(
        name="greedy",
        text="tokens at temperature 0 are less likely than others by more than rounding.",
        hint="check that temperature 0 takes the argmax, of drafts too.",
        explains=(GREEDY,),
    )
