"""Rollouts and probes made up from a law that is known: vocabularies are small, p and q are written down."""

from __future__ import annotations

import numpy as np

from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.metrics.rollouts import Recorder
from rlpipe.types import DraftStep, Trajectory


def recorder() -> Recorder:
    """One that must not fail."""

    def refuse(kind: str, **fields: object) -> None:
        raise AssertionError(f"{kind}: {fields}")

    return Recorder(refuse)


def tables_of(p: np.ndarray, q: np.ndarray, tokens: np.ndarray, name: str = "t") -> ProbeTable:
    """What the trainer would report. p, q: [n, K, V]. tokens: [n, K], the realised ones."""
    context, depth = np.ogrid[: p.shape[0], : p.shape[1]]
    best = q.argmax(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p, log_q = np.log(p), np.log(q)
        gap = log_p - log_q
    return ProbeTable(
        trajectory_id=name,
        positions=np.arange(p.shape[0]) * (p.shape[1] + 1) + 1,
        values={
            "rejection": np.minimum(p, q).sum(-1),
            "target_only": p[context, depth, best],
            "accept": np.minimum(1, q / p)[context, depth, tokens],
            "top": (best == tokens).astype(float),
            "target_entropy": -(p * log_p).sum(-1),
            "draft_entropy": -(q * log_q).sum(-1),
            "kl": (p * gap).sum(-1),
            "reverse_kl": -(q * gap).sum(-1),
            "target_above": (p * (p > q)).sum(-1),
            "draft_above": (q * (q > p)).sum(-1),
        },
    )


def distributions(rng: np.random.Generator, contexts: int, depths: int, vocab: int = 6) -> np.ndarray:
    """[contexts, depths, vocab] random distributions."""
    return rng.dirichlet(np.full(vocab, 0.6), (contexts, depths))


def verify(
    rng: np.random.Generator, p: np.ndarray, q: np.ndarray, rule: str
) -> tuple[np.ndarray, list[DraftStep]]:
    """Chain verification at every context: emitted tokens [n, K] (the draft's own behind the first rejection
    count for nothing), and the verify steps, at the positions of `tables_of`.
    """
    n, depths, vocab = p.shape
    emitted, steps = np.zeros((n, depths), dtype=int), []
    for i in range(n):
        tokens, target, draft, kept = [], [], [], depths
        for k in range(depths):
            token = int(q[i, k].argmax()) if rule == "target_only" else int(rng.choice(vocab, p=q[i, k]))
            own = 1.0 if rule == "target_only" else q[i, k, token]
            tokens.append(token)
            target.append(float(p[i, k, token]))
            draft.append(float(own))
            if kept == depths and rng.random() >= min(1.0, target[-1] / own):
                kept = k
        emitted[i] = tokens
        steps.append(
            DraftStep(
                position=i * (depths + 1) + 1,
                tokens=tokens,
                target_probs=target,
                draft_probs=draft,
                num_accepted=kept,
            )
        )
    return emitted, steps


def recorded_trajectory(steps: list[DraftStep], depths: int, version: int = 0) -> Trajectory:
    """A trajectory of one turn whose verify steps are these; a prompt token, then the prefill's."""
    length = len(steps) * (depths + 1) + 1
    return Trajectory(
        trajectory_id="t",
        group_id="g",
        instance_id="i",
        token_ids=list(range(length)),
        loss_mask=[0] + [1] * (length - 1),
        rollout_logprobs=[0.0] * length,
        entropies=[0.0] + [0.5] * (length - 1),
        versions=[-1] + [version] * (length - 1),
        prompt_length=1,
        num_turns=1,
        reward=1.0,
        drafts=steps,
    )
