"""Jackpot's tables and figures in a small world, where every reward and divergence is exact.

    python -m recipes.jackpot.worlds [--out recipes/jackpot/worlds.json] [--groups pairs fp8 ...] [--seeds 8]

No language model is used. A prompt has a few right tokens at each of three positions, and an answer earns 1
if all of its tokens are right. The policy has logits for every prompt, position and preceding token. A
smaller model (`rank`) sees prompts and positions only through a few random features, so it cannot match the
policy. Losses, corrections and advantages are rlpipe's (`rlpipe.algo`); each model is a table.

Rollouts come from one of these: the policy; an older copy of it (`every` updates are made on one copy); its
weights in FP8 (e4m3, rounded by torch) or with noise; or a smaller actor, which learns by PPO and by
KL(policy || actor) (Eq. 8).
Each seed is a separate world. All worlds run side by side in one tensor; only kappa is measured over all of
them. Reported over the steps are the exact probability of a right answer (mean@k for any k), pass@4, and
KL(policy || rollout) at the sampled tokens. Differences are paired by world, with Student's 95% interval. A
group that --out already contains is not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.runs import rounded_over_seeds, seeds_to_decide
from rlpipe.algo.correction import make_rule
from rlpipe.algo.obrs import Obrs, ObrsMask, kl, normalizer_bounds
from rlpipe.algo.policy_loss import LossInputs, LossTotals, micro_batch_loss
from rlpipe.algo.rule import CorrectionInputs, CorrectionRule, TokenExtras, TokenWeights
from rlpipe.config.algo import AlgoConfig, ObrsCalibration, ObrsConfig, ObrsNormalizer, Proximal
from rlpipe.metrics.values import Value

PROMPTS, POSITIONS, VOCAB, RIGHT, GROUP = 8, 3, 24, 8, 16
OFF = {"clip_low": 1e9, "clip_high": 1e9, "clip_dual": 1e9}
RATES, NOISES = (0.05, 0.02), (0.1, 1.0)
EXACT = {"normalizer": ObrsNormalizer.EXACT, "top_k": VOCAB, "calibration": ObrsCalibration.NONE}
TOP_K = {"normalizer": ObrsNormalizer.TOPK, "calibration": ObrsCalibration.ACCEPTED}  # the paper's
SHOWN = 20  # points of a curve


@dataclass(kw_only=True, frozen=True)
class Arm:
    """A training run.

    rank: of the actor that generates; None if the policy generates. distill: weight of KL(policy || actor).
    target: the KL in nats that distill is steered to (section 8), None for a constant distill. ppo: weight of
    the actor's PPO. every: updates on rollouts of one copy. fp8: whether the rollout's weights are rounded.
    noise: standard deviation of the noise added to them. small: whether only the actor is trained. coin:
    whether the tokens that OBRS masks are replaced by as many random ones.
    """

    algo: Mapping[str, Any]
    obrs: Mapping[str, Any] = field(default_factory=lambda: EXACT)
    rank: int | None = None
    distill: float = 1.0
    target: float | None = None
    ppo: float = 1.0
    every: int = 1
    fp8: bool = False
    noise: float = 0.0
    small: bool = False
    coin: bool = False
    steps: int = 100
    lr: float = 0.05


def arm(correction: str, *, proximal: str = "start", clip: bool = True, **settings: Any) -> Arm:
    """Make the arm of a correction, given by name."""
    return Arm(
        algo={"correction": correction, "proximal": Proximal(proximal), **({} if clip else OFF)}, **settings
    )


def pair(rank: int) -> dict[str, Arm]:
    """Return the arms of Table 1 and Fig. 2c for an actor of some rank."""
    return {
        "on policy": arm("none"),
        "small, on policy": arm("none", rank=rank, small=True),
        "only KL": arm("none", rank=rank),
        "TIS and KL": arm("tis_token", rank=rank),
        "Jackpot": arm("obrs", rank=rank),
        "no correction, no KL": arm("none", rank=rank, distill=0.0),
        "TIS, no KL": arm("tis_token", rank=rank, distill=0.0),
        "OBRS, no KL": arm("obrs", rank=rank, distill=0.0),
    }


class Coin(ObrsMask):
    """A correction that masks as many tokens as OBRS, but at random: each at its position's rate 1 - Z."""

    def weigh(self, inputs: CorrectionInputs) -> TokenWeights:
        found, extras = super().weigh(inputs), inputs.extras
        assert extras.target_top is not None and extras.rollout_top is not None
        rate = normalizer_bounds(extras.target_top, extras.rollout_top, self.config.obrs.lam)[1]
        kept = extras.columns["uniforms"] < rate
        mask = torch.zeros_like(inputs.mask).masked_scatter(inputs.mask.bool(), kept.to(inputs.mask.dtype))
        return replace(found, mask=mask)


PARTS = {
    "none": "none",
    "TIS": "tis_token",
    "OBRS": "obrs",
    "masking only": "obrs_mask",
    "weights only": "obrs_weight",
}
JACKPOT = arm("obrs", rank=6)


def parts(**settings: Any) -> dict[str, Arm]:
    """Return arms: no correction, TIS, OBRS, its parts, and a control that masks as many random tokens."""
    arms = {name: arm(rule, **settings) for name, rule in PARTS.items()}
    return arms | {"coin only": arm("obrs_mask", coin=True, **settings)}


STALE = {"proximal": "current", "clip": False, "every": 32, "steps": 128}
GROUPS: dict[str, dict[str, Arm]] = {
    "pair, rank 3": pair(3),
    "pair, rank 6": pair(6),
    "pair, rank 12": pair(12),
    "FP8, clip": {name: arm(rule, fp8=True) for name, rule in PARTS.items()},
    "32 updates, clip": {name: arm(PARTS[name], every=32, steps=128) for name in ("none", "OBRS")},
    "32 updates, no clip": {
        name: arm(rule, proximal="current", clip=False, every=32, steps=128) for name, rule in PARTS.items()
    },
    "c1": {f"{c:g}": replace(JACKPOT, obrs=EXACT | {"c1": float(c)}) for c in (2, 3, 4, 8)},
    "lambda": {f"{x:g}": replace(JACKPOT, obrs=EXACT | {"lam": x}) for x in (0.8, 0.9, 1.0, 1.1, 1.2)},
    "top k": {f"{k}": replace(JACKPOT, obrs=TOP_K | {"top_k": k}) for k in (2, 5, 10)} | {"all": JACKPOT},
    "long": {name: replace(pair(6)[name], steps=400) for name in ("on policy", "TIS and KL", "Jackpot")},
    "closed loop": {
        "weight 0.1": replace(JACKPOT, distill=0.1),
        "weight 1": JACKPOT,
        "KL to 0.05": replace(JACKPOT, distill=0.1, target=0.05),
    },
    **{f"parts, stale, rate {lr:g}": parts(lr=lr, **STALE) for lr in RATES},
    **{f"parts, actor, rate {lr:g}": parts(lr=lr, rank=6) for lr in RATES},
    **{f"parts, noise {noise:g}": parts(noise=noise) for noise in NOISES},
}


class Model:
    """Logits for every prompt, position and preceding token, one table for each of S worlds.

    features: [S, prompts x positions, rank], which the weights multiply; None for one weight per row.
    """

    def __init__(self, base: Tensor, rank: int | None, generator: torch.Generator) -> None:
        self.features, start = None, base.clone()
        if rank is not None:
            rows = base.shape[1]
            self.features = torch.randn(len(base), rows, rank, generator=generator) / rank**0.5
            start = torch.linalg.lstsq(self.features, base).solution
        self.weights = [start.requires_grad_(), torch.zeros(len(base), VOCAB + 1, VOCAB, requires_grad=True)]

    def logprobs(self, rows: Tensor, before: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Return [S, N, V]; rows: [S, N] prompt and position; before: [S, N] preceding token or VOCAB."""
        table, bigram = weights or self.weights
        table = table if self.features is None else self.features @ table
        worlds = torch.arange(len(rows))[:, None]
        return (table[worlds, rows] + bigram[worlds, before]).log_softmax(-1)

    def copied(self, *, fp8: bool = False) -> list[Tensor]:
        """Return detached copies of the weights; fp8: whether to round them to e4m3."""
        copies = [w.detach().clone() for w in self.weights]
        return [w.to(torch.float8_e4m3fn).float() for w in copies] if fp8 else copies

    def noisy(self, noise: float, generator: torch.Generator) -> list[Tensor]:
        """Return detached copies of the weights, with normal noise added."""
        return [w + noise * torch.randn(w.shape, generator=generator) for w in self.copied()]


class World:
    """The right tokens [S, prompts, positions, V], and models that start from one table."""

    def __init__(self, seeds: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.seeds = seeds
        shape = (seeds, PROMPTS, POSITIONS, VOCAB)
        order = torch.rand(shape, generator=self.generator).argsort(-1)
        self.right = order < RIGHT
        self.base = torch.randn(seeds, PROMPTS * POSITIONS, VOCAB, generator=self.generator)

    def chance(self, model: Model) -> Tensor:
        """Compute the exact probability of a right answer to each prompt: [S, prompts]."""
        rows = torch.arange(PROMPTS * POSITIONS).repeat_interleave(VOCAB + 1).expand(self.seeds, -1)
        before = torch.arange(VOCAB + 1).repeat(PROMPTS * POSITIONS).expand(self.seeds, -1)
        with torch.no_grad():
            probs = model.logprobs(rows, before).exp()
        probs = probs.view(self.seeds, PROMPTS, POSITIONS, VOCAB + 1, VOCAB) * self.right[:, :, :, None]
        mass = probs[:, :, 0, VOCAB]
        for position in range(1, POSITIONS):
            mass = torch.einsum("spv,spvw->spw", mass, probs[:, :, position, :VOCAB])
        return mass.sum(-1)

    def play(self, model: Model, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Sample a group of answers to every prompt.

        Returns rows, before and tokens [S, N, T], the rollout's logprobs [S, N, T, V], advantages [S, N].
        """
        count = PROMPTS * GROUP
        prompts = torch.arange(PROMPTS).repeat_interleave(GROUP).expand(self.seeds, -1)
        before, found = torch.full_like(prompts, VOCAB), {"rows": [], "before": [], "tokens": [], "q": []}
        for position in range(POSITIONS):
            rows = prompts * POSITIONS + position
            with torch.no_grad():
                log_q = model.logprobs(rows, before, weights)
            tokens = torch.multinomial(log_q.exp().flatten(0, 1), 1, generator=self.generator)
            for name, value in zip(found, (rows, before, tokens.view(self.seeds, count), log_q), strict=True):
                found[name].append(value)
            before = found["tokens"][-1]
        columns = {name: torch.stack(value, 2) for name, value in found.items()}

        answered = self.right.gather(1, prompts[:, :, None, None].expand(-1, -1, POSITIONS, VOCAB)).gather(
            -1, columns["tokens"][..., None]
        )[..., 0]
        rewards = answered.all(-1).float().view(self.seeds, PROMPTS, GROUP)
        centred = rewards - rewards.mean(-1, keepdim=True)
        advantages = centred / (rewards.std(-1, keepdim=True) + 1e-6)
        return columns | {"advantages": advantages.flatten(1)}


def learn(
    model: Model, batch: Mapping[str, Tensor], config: AlgoConfig, rule: CorrectionRule | None, *, old: Tensor
) -> tuple[Tensor, Tensor, dict[str, Value]]:
    """Return rlpipe's loss, summed over worlds; the model's logprobs [S, N, T, V]; metrics.

    old: the policy at the start of the batch, [S, N, T, V].
    """
    flat = [batch[name].flatten(1) for name in ("rows", "before")]
    log_p = model.logprobs(*flat).view_as(batch["q"])
    chosen = [
        x.gather(-1, batch["tokens"][..., None])[..., 0].flatten(0, 1) for x in (log_p, old, batch["q"])
    ]
    mask = torch.ones_like(chosen[0])
    extras = TokenExtras()
    if isinstance(rule, Obrs):
        best, ids = batch["q"].flatten(0, 2).topk(rule.top_logprobs(VOCAB), -1)
        seen = old if rule.target_at_start else log_p.detach()
        uniforms = torch.rand(len(best), generator=torch.Generator().manual_seed(int(batch["tokens"].sum())))
        extras = TokenExtras(
            columns={"uniforms": uniforms}, rollout_top=best, target_top=seen.flatten(0, 2).gather(-1, ids)
        )
    inputs = LossInputs(
        logprobs=chosen[0],
        entropies=torch.zeros_like(mask),
        old_logprobs=chosen[1],
        rollout_logprobs=chosen[2],
        advantages=batch["advantages"].flatten()[:, None].expand_as(mask),
        mask=mask,
        reference_logprobs=None,
    )
    totals = LossTotals(tokens=mask.numel() / len(log_p), sequences=len(mask) / len(log_p), dp_size=1)
    loss, metrics = micro_batch_loss(inputs, totals, config, rule=rule, extras=extras)
    return loss, log_p, metrics


def train(settings: Arm, seeds: int) -> dict[str, Any]:
    """Train an arm; return exact figures over the steps, [points, S] or [points]."""
    world = World(seeds)
    policy = Model(world.base, settings.rank if settings.small else None, world.generator)
    has_actor = settings.rank is not None and not settings.small
    actor = Model(world.base, settings.rank, world.generator) if has_actor else policy
    config = AlgoConfig(obrs=ObrsConfig(**settings.obrs), **settings.algo)
    rule, own = Coin(config) if settings.coin else make_rule(config), AlgoConfig(correction="none")
    optimizer = torch.optim.Adam(policy.weights, lr=settings.lr)
    student = torch.optim.Adam(actor.weights, lr=settings.lr) if has_actor else None

    curve: dict[str, list[Any]] = {"step": [], "chance": [], "kl": [], "z_ratio": [], "kappa": []}
    distill, copy, start = torch.full((seeds,), settings.distill), policy.copied(), policy.copied()
    for step in range(settings.steps + 1):
        if step % settings.every == 0:
            start = policy.copied()
            copy = (actor if has_actor else policy).copied(fp8=settings.fp8)
            if settings.noise:
                copy = policy.noisy(settings.noise, world.generator)
        batch = world.play(actor, copy)
        flat = [batch[name].flatten(1) for name in ("rows", "before")]
        old = policy.logprobs(*flat, start).view_as(batch["q"])
        loss, log_p, metrics = learn(policy, batch, config, rule, old=old)
        gap = kl(log_p.detach(), batch["q"]).mean((1, 2))

        if step % max(1, settings.steps // SHOWN) == 0:
            curve["step"].append(step)
            curve["chance"].append(world.chance(policy))
            curve["kl"].append(gap)
            for name in ("z_ratio", "kappa"):
                value = metrics.get(f"rollout_corr/obrs_{name}")
                curve[name].append(None if value is None else round(value.value(), 4))
        if rule is not None:
            rule.observe(metrics)

        optimizer.zero_grad()
        loss.backward()
        if student is not None:
            student.zero_grad()
            ppo, log_q, _ = learn(actor, batch, own, None, old=batch["q"])
            (settings.ppo * ppo + (distill * kl(log_p.detach(), log_q).mean((1, 2))).sum()).backward()
            student.step()
            if settings.target is not None:
                nudge = (0.1 * (gap / settings.target - 1)).clamp(-0.2, 0.2).exp()
                distill = (distill * nudge).clamp(0.01, 100)
        optimizer.step()
    return curve


def summary(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's figures for comparison, by world, and its curves as means over worlds."""
    chances = torch.stack(curve["chance"])  # [points, S, prompts]
    reward, divergence = chances.mean(-1), torch.stack(curve["kl"])
    found: dict[str, Any] = {
        "reward": _rounded(reward[-1]),
        "pass@4": _rounded((1 - (1 - chances[-1]) ** 4).mean(-1)),
        "best": _rounded(reward.amax(0)),
        "kl, last half": _rounded(divergence[len(divergence) // 2 :].mean(0)),
        "steps": curve["step"],
        "reward over steps": _rounded(reward.mean(1)),
        "kl over steps": _rounded(divergence.mean(1)),
    }
    for name in ("z_ratio", "kappa"):
        if curve[name][0] is not None:
            found[f"{name} over steps"] = curve[name]
    return found


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{x:.4g}") for x in values.tolist()]


def compare(rows: dict[str, dict[str, Any]], against: str) -> None:
    """Add means with intervals over worlds, and differences paired by world."""
    for row in rows.values():
        row["mean"] = rounded_over_seeds(row["reward"])
        row["mean kl"] = rounded_over_seeds(row["kl, last half"])
        gaps = [a - b for a, b in zip(row["reward"], rows[against]["reward"], strict=True)]
        row[f"minus {against}"] = rounded_over_seeds(gaps)
        row[f"seeds to decide, minus {against}"] = seeds_to_decide(gaps)


BASELINES = {"c1": "3", "lambda": "1", "top k": "all", "long": "Jackpot", "closed loop": "weight 1"}


def baseline(group: str) -> str:
    """Return the arm of a group that the other arms are compared with."""
    return BASELINES.get(group, "Jackpot" if group.startswith("pair") else "OBRS")


def markdown(results: Mapping[str, Any]) -> str:
    """Format a table for each group."""
    lines = ["| | reward | minus | pass@4 | KL(policy, rollout) |", "|---|---|---|---|---|"]
    for group, rows in results["groups"].items():
        lines.append(f"| **{group}** | | {baseline(group)} | | |")
        for name, row in rows.items():
            gap, passed = row[f"minus {baseline(group)}"], sum(row["pass@4"]) / len(row["pass@4"])
            difference = "–" if name == baseline(group) else f"{gap[0]:+.3f} [{gap[1]:+.3f}, {gap[2]:+.3f}]"
            lines.append(
                f"| {name} | {row['mean'][0]:.3f} | {difference} | {passed:.3f} | {row['mean kl'][0]:.3g} |"
            )
    return "\n".join([*lines, ""])


PANELS = {
    "stale rollouts": [f"parts, stale, rate {lr:g}" for lr in RATES],
    "smaller actor": [f"parts, actor, rate {lr:g}" for lr in RATES],
    "noise on the rollout's weights": [f"parts, noise {noise:g}" for noise in NOISES],
}


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Draw each correction's final gain over no correction, for the groups that were run."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    arms = [*(arm for arm in reversed(PARTS) if arm != "none"), "coin only"]
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (title, groups) in zip(axes, PANELS.items(), strict=True):
        for offset, colour, group in zip((0.12, -0.12), PALETTE, groups, strict=False):
            if (rows := results["groups"].get(group)) is None:
                continue
            value, low, high = zip(*(rows[arm]["minus none"] for arm in arms), strict=True)
            error = [
                [v - x for v, x in zip(value, low, strict=True)],
                [x - v for v, x in zip(value, high, strict=True)],
            ]
            where = [number + offset for number in range(len(arms))]
            label = group.split(", ")[-1]
            axis.errorbar(value, where, xerr=error, fmt="o", ms=4, capsize=2, color=colour, label=label)
        axis.set_yticks(range(len(arms)), arms)
        axis.axvline(0, color="0.6", lw=0.8)
        axis.set_title(title, color=TEXT, fontsize=11)
        axis.set_xlabel("reward minus that of no correction", color=TEXT)
        axis.locator_params(axis="x", nbins=5)
        axis.legend(fontsize=8, frameon=False)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(b=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Run and compare the arms, write and draw the results, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("worlds.json"))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()

    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {"groups": {}}
    done: dict[str, dict[str, Any]] = {}  # an arm that is in several groups is trained once
    for group in args.groups:
        if group not in results["groups"]:
            for one in GROUPS[group].values():
                if repr(one) not in done:
                    done[repr(one)] = summary(train(one, args.seeds))
            rows = {name: dict(done[repr(one)]) for name, one in GROUPS[group].items()}
            compare(rows, baseline(group))
            if group.startswith("parts"):
                compare(rows, "none")
            results["groups"][group] = rows
            args.out.write_text(json.dumps(results | {"seeds": args.seeds}) + "\n")
    draw(results, args.out.with_suffix(".svg"))
    print(markdown(results))


if __name__ == "__main__":
    main()
