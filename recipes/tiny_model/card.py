"""Writes the model card of the tiny model.

This module only has the text and measures nothing: scores come from the real engine and environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.tiny_model.settings import Settings

SETS = {"held_instances": "new instances of known families", "held_families": "new families"}


@dataclass(slots=True, kw_only=True)
class SetScores:
    """The fraction of `instances` of one held-out set that are solved.

    greedy: T = 0. sampled: mean over `samples` attempts at T = 1. pass_at_8: solved by any of 8 attempts.
    """

    instances: int
    greedy: float
    sampled: float
    pass_at_8: float
    samples: int = 8


def write_card(
    path: Path,
    scores: Mapping[str, SetScores],
    acceptance: Mapping[str, float] | None = None,
    config: Settings | None = None,
) -> None:
    """Write README.md into the checkpoint directory `path`.

    scores: by held-out set, for both names in `SETS`. acceptance: figures of the MTP layer by name.
    Raises ValueError if a set is missing: a card with only one set hides how well the model generalises.
    """
    missing = set(SETS) - set(scores)
    if missing:
        raise ValueError(f"write_card lacks scores of {sorted(missing)}; measure both held-out sets.")
    config = config or Settings()
    rows = [
        f"| {title} (`{name}`, {s.instances}) | {s.greedy:.3f} | {s.sampled:.3f} ± {_error(s):.3f} "
        f"| {s.pass_at_8:.3f} |"
        for name, title in SETS.items()
        for s in (scores[name],)
    ]
    lines = [f"| {name} | {value:.3f} |" for name, value in (acceptance or {}).items()]
    text = _TEMPLATE.format(
        rows="\n".join(rows),
        acceptance="\n".join(["| figure | value |", "|---|---|", *lines]) if lines else "Not measured.",
        mix=", ".join(f"{name} {share:.0%}" for name, share in config.imitation.mix.items()),
        c=config,
    )
    (Path(path) / "README.md").write_text(text)


def _error(scores: SetScores) -> float:
    return (scores.sampled * (1 - scores.sampled) / scores.instances) ** 0.5


_TEMPLATE = """\
# tiny: a model small enough to train everywhere

A Qwen2 backbone of {c.shape.num_layers} layers (hidden {c.shape.hidden_size}, {c.shape.num_heads} heads,
{c.shape.num_kv_heads} KV heads, feed-forward {c.shape.intermediate_size}) with one multi-token-prediction
layer in MiMo layout, 2.1M + 0.3M parameters, float32, its own tokenizer of about 800 tokens. It repairs
one-line bugs in small Python repositories by writing one shell command a turn:

    grep -l 'def band' *.py
    grep -n '' core.py
    sed -i '2c\\    return price * 3' core.py
    python3 -m unittest 2>&1 | tail -1
    submit

It knows nothing else, and no natural language beyond the phrases of its task.

## Scores
Share of instances solved (submitted, all tests pass in the sandbox), at most 7 turns. Neither held-out set
shares a function with its bug, or a statement, with any training data.

| set | greedy | T = 1 | pass@8, T = 1 |
|---|---|---|---|
{rows}

± is the standard error over instances (binomial, an upper bound). The gap between T = 1 and pass@8 is on
purpose: the model imitates demonstrators of mixed quality, and reinforcement learning selects among them.

## Multi-token prediction
{acceptance}

## Training
One command, `python -m recipes.tiny_model.make`; seed {c.seed}, {c.threads} thread(s), about 45
minutes on one CPU core. Interrupted and started again, it continues.

| stage | steps | tokens a batch | learning rate | data |
|---|---|---|---|---|
| skill | {c.skill.steps} | {c.skill.batch_tokens} | {c.skill.lr:g} | careful traces, in 15% of which \
a wrong edit (masked) is repaired after its test; every other of the first {c.skill.drill:.1%} of steps is a \
copy drill |
| imitation | {c.imitation.steps} | {c.imitation.batch_tokens} | {c.imitation.lr:g} | {mix}; nothing masked |
| mtp | {c.mtp.steps} | {c.mtp.batch_tokens} | {c.mtp.lr:g} | the same mix; KL to the frozen backbone over \
depths 1..{c.gamma} |

Data: {c.instances:,} generated instances of 36 families and 16 kinds of bug
(`python -m recipes.tiny_model.generate`). The tests of each kill every single-token mutant of its function.
"""
