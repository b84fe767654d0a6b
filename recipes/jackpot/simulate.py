"""OBRS on simulated next-token distributions: Jackpot's Fig. 2 (a, b), and Z from few candidates.

Targets are sampled from Dirichlet distributions. They range from nearly certain to flat, as the distributions
of a language model do from token to token. The rollout's distribution is the target with one of two kinds of
noise, because the figure depends on the kind: noise in the logits (as of a model that drifted, or of a
different model), or a mixture with an independent sample.

    python recipes/jackpot/simulate.py [--out recipes/jackpot]

Writes `simulation.json`, and `simulation.svg` where matplotlib is installed. Takes half a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from rlpipe.algo.obrs import acceptance, kept_logprobs, kl, normalizer_bounds

HERE = Path(__file__).resolve().parent
VOCAB, ROWS = 2000, 512
LAMS = (0.5, 1.0, 1.5)
NOISE = {
    "logits": [0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0],
    "mixture": [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8],
}
CANDIDATES = (5, 10, 20, 40)
GAP = 1.0  # noise in the logits in the study of the normaliser
REPEATS = 400  # batches of ROWS tokens sampled, for the noise of kappa


def dirichlet(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Sample log-probabilities [rows, VOCAB] from Dirichlets with log-uniform concentration, 0.3 to 60."""
    spread = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    alpha = (math.log(0.3 / VOCAB) + spread * math.log(200)).exp().expand(rows, VOCAB)
    # in logs, since Gamma(alpha) underflows: G(alpha) = G(alpha + 1) U^(1 / alpha)
    shifted = torch._standard_gamma(alpha + 1, generator=generator).log()
    uniform = torch.rand(rows, VOCAB, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    return (shifted + uniform.log() / alpha).log_softmax(-1)


def rollout_of(target: torch.Tensor, kind: str, level: float, generator: torch.Generator) -> torch.Tensor:
    """Return the rollout's log-probabilities [rows, VOCAB]: the target with noise of one kind."""
    if kind == "logits":
        noise = torch.randn(target.shape, generator=generator, dtype=torch.float64)
        return (target + level * noise).log_softmax(-1)
    other = dirichlet(len(target), generator)
    return torch.logaddexp(target + math.log1p(-level), other + math.log(level))


def contraction(generator: torch.Generator) -> list[dict[str, object]]:
    """Compute acceptance and KL before and after, by kind and level of noise and lambda (means over rows)."""
    table = []
    for kind, levels in NOISE.items():
        for level in levels:
            target = dirichlet(ROWS, generator)
            rollout = rollout_of(target, kind, level, generator)
            p, q = target.exp(), rollout.exp()
            row: dict[str, object] = {
                "noise": kind,
                "level": level,
                "kl_before": kl(target, rollout).mean().item(),
            }
            for lam in LAMS:
                row[f"acceptance_{lam}"] = torch.minimum(q, p / lam).sum(-1).mean().item()
                row[f"kl_after_{lam}"] = kl(target, kept_logprobs(target, rollout, lam)).mean().item()
            table.append(row)
    return table


def estimates(target: torch.Tensor, rollout: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """Estimate Z [rows] from three sets: the paper's union, the rollout's top-k, top-k with a remainder."""
    theirs, ours = rollout.topk(k, -1).indices, target.topk(k, -1).indices
    lower, upper = normalizer_bounds(target.gather(-1, theirs), rollout.gather(-1, theirs), 1.0)
    union = torch.zeros_like(target).scatter(-1, theirs, 1).scatter(-1, ours, 1)
    both = (torch.minimum(target, rollout).exp() * union).sum(-1)
    return {"union": both, "rollout": lower, "rollout_tail": upper}


def normalizers(generator: torch.Generator) -> list[dict[str, object]]:
    """Compute bias and error of each estimate of Z, before and after calibration, at lambda 1.

    An error is that of one token's Z: the root mean square over rows (after calibration also over batches).
    """
    target = dirichlet(ROWS, generator)
    rollout = rollout_of(target, "logits", GAP, generator)
    exact = torch.minimum(target, rollout).exp().sum(-1)
    tokens = torch.multinomial(rollout.exp(), REPEATS, replacement=True, generator=generator)
    probs = acceptance(target.gather(-1, tokens), rollout.gather(-1, tokens), 1.0)
    draws = torch.rand(probs.shape, generator=generator, dtype=torch.float64)
    rates = {"accepted": (draws < probs).double().mean(0), "probability": probs.mean(0)}
    table = []
    for k in CANDIDATES:
        mass = rollout.topk(k, -1).values.exp().sum(-1).mean().item()
        for name, estimate in estimates(target, rollout, k).items():
            row: dict[str, object] = {
                "top_k": k,
                "rollout_mass": mass,
                "estimate": name,
                "z_ratio": (estimate.sum() / exact.sum()).item(),
                "error": (estimate - exact).square().mean().sqrt().item(),
            }
            for rate_name, rate in rates.items():
                kappa = rate / estimate.mean()
                calibrated = kappa[:, None] * estimate
                row |= {
                    f"kappa_{rate_name}": kappa.mean().item(),
                    f"kappa_sd_{rate_name}": kappa.std().item(),
                    f"z_ratio_{rate_name}": (calibrated.mean() / exact.mean()).item(),
                    f"error_{rate_name}": (calibrated - exact).square().mean().sqrt().item(),
                }
            table.append(row)
    return table


def draw(results: dict[str, object], out: Path) -> None:
    """Plot acceptance and KL (relative to KL before), and the error of one token's Z over the candidates."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlpipe"
    import matplotlib.pyplot as plt

    figure, (rates, divergence, error) = plt.subplots(1, 3, figsize=(11.5, 3.5))
    colours = dict(zip(LAMS, ("#009E73", "#0072B2", "#D55E00"), strict=True))
    for kind, style in (("logits", "-"), ("mixture", "--")):
        rows = [r for r in results["contraction"] if r["noise"] == kind]
        before = [r["kl_before"] for r in rows]
        for lam, colour in colours.items():
            look = {"color": colour, "ls": style, "marker": "o", "ms": 3, "lw": 1.2}
            rates.plot(before, [r[f"acceptance_{lam}"] for r in rows], label=f"λ = {lam}, {kind}", **look)
            after = [r[f"kl_after_{lam}"] for r in rows]
            divergence.plot(before, [x if x > 1e-12 else math.nan for x in after], **look)
    span = [min(r["kl_before"] for r in results["contraction"]), 3]
    divergence.plot(span, span, color="0.6", lw=1, zorder=0)
    rates.set(xscale="log", ylim=(0, 1.03), xlabel="KL(p || q) before, nat", ylabel="acceptance")
    divergence.set(
        xscale="log", yscale="log", xlabel="KL(p || q) before, nat", ylabel="KL(p || q') after, nat"
    )
    rates.legend(fontsize=7)
    names = {"union": "union (paper)", "rollout": "rollout's top-k", "rollout_tail": "with the rest"}
    for (name, label), colour in zip(names.items(), ("#D55E00", "#E69F00", "#0072B2"), strict=True):
        rows = [r for r in results["normalizers"] if r["estimate"] == name]
        ks = [r["top_k"] for r in rows]
        error.plot(ks, [r["error"] for r in rows], color=colour, ls=":", marker="o", ms=3, label=label)
        calibrated = [r["error_probability"] for r in rows]
        error.plot(ks, calibrated, color=colour, marker="o", ms=3, label=f"{label}, κ")
    error.set(xscale="log", yscale="log", xlabel="candidates k", ylabel="error of one token's Z, rms")
    error.set_xticks(CANDIDATES, CANDIDATES)
    error.minorticks_off()
    error.legend(fontsize=7)
    for axis in (rates, divergence, error):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def rounded(value: object) -> object:
    """Round to six significant digits; values below the rounding error of a sum become 0."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) > 1e-14 else 0.0


def main() -> None:
    """Simulate, write the results, and draw them."""
    parser = argparse.ArgumentParser(description="Jackpot's Fig. 2 and the top-k normaliser, simulated.")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(args.seed)
    results: dict[str, object] = {
        "settings": {"vocab": VOCAB, "rows": ROWS, "gap": GAP, "repeats": REPEATS, "seed": args.seed},
    }
    for name, study in (("contraction", contraction), ("normalizers", normalizers)):
        results[name] = [{k: rounded(v) for k, v in row.items()} for row in study(generator)]
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [f' "settings": {json.dumps(results["settings"])}']
    for name in ("contraction", "normalizers"):
        lines.append(f' "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in results[name]) + "\n ]")
    (args.out / "simulation.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{time.perf_counter() - started:.0f} s")
    try:
        draw(results, args.out / "simulation.svg")
    except ImportError:
        print("matplotlib is not installed: simulation.svg was not drawn (pip install matplotlib)")


if __name__ == "__main__":
    main()
