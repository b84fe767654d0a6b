"""Measures acceptance against the target's entropy under four rules; slopes have intervals over prompts.

    python -m recipes.smollm_adapt.rules [--out recipes/smollm_adapt/rules] [--texts 90] [--others 60]

The shipped MTP layer of SmolLM2 reads answers of the model at temperature 1. At every anchor with three
drafted tokens, exact probabilities are computed under all rules, so there is no sampling noise:

    first draft   rejection sum_v min(p, q), target-only p(argmax q), greedy 1[argmax p = argmax q]
    window of 3   expected accepted drafts under rejection, block and target-only, exact in expectation over
                  the target's tokens (`recipes.theory`)

Slopes per nat are taken over all contexts, within prompts, between the means of prompts, and by intervention
(the first draft at the same contexts, with target and draft at other temperatures). At temperature 0 every
lossless rule equals greedy. Intervals are 95%, by resampling prompts. The bounds of Bebop's Proposition 1 and
the structure of the mismatch |q - p| (Propositions 2, 4) are measured at the same contexts. Writes
results.json, rules.svg and rules.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from recipes import theory
from recipes.smollm_adapt.texts import Text, other_answers, read, shipped_answers
from recipes.smollm_rl.make_layer import Layer
from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.paths import resolve_model
from rlpipe.config.spec import SpecConfig
from rlpipe.convert.gguf import quiet
from rlpipe.drafts.loss import depth_targets
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights

FIRST = ("rejection", "target-only", "greedy")
WINDOW = ("rejection, window", "block, window", "target-only, window")
DEPTHS, DRAWS, BINS, SEED = 3, 2000, 8, 0
TEMPERATURES = (0.5, 0.7, 1.0, 1.3)


@torch.inference_mode()
def contexts(layer: Layer, text: Text, head: torch.Tensor, table: torch.Tensor) -> dict[str, np.ndarray]:
    """Compute entropies and acceptance at those anchors of a text that draft three tokens, [n] each.

    "RULE, reach" is [n, 3]: the expectation of entry j is Pr(at least j drafts accepted).
    """
    anchors = _anchors(text)
    known = torch.full((len(head),), -1)
    known[table] = torch.arange(len(table))

    states = layer.unroll(text.hidden[None].float(), text.ids[None])
    alphas, target_only, p_x, q_x, top, agree = ([] for _ in range(6))
    for depth, state in enumerate(states, 1):
        at, token = anchors + depth, text.ids[anchors + depth + 1]
        log_q = F.linear(state[0, anchors].bfloat16(), head[table]).float().log_softmax(-1)
        log_p = F.linear(text.hidden[at], head[table]).float() - text.normaliser[at, None]
        best = log_q.argmax(-1)

        # A token outside the draft's vocabulary has q = 0.
        index = known[token]
        drafted = log_q.gather(-1, index.clamp(min=0)[:, None])[:, 0]
        q_x.append(torch.where(index >= 0, drafted, -torch.inf))
        p_x.append((text.hidden[at] * head[token]).float().sum(-1) - text.normaliser[at])
        alphas.append(torch.minimum(log_p.exp(), log_q.exp()).sum(-1))
        target_only.append(log_p.gather(-1, best[:, None])[:, 0].exp())
        top.append(torch.where(index == best, 0.0, -torch.inf))
        agree.append((table[best] == text.top[at]).float())
        if depth == 1:
            exponents = [theory.mismatch_exponent(log_p.exp(), log_q.exp()).item()] if len(anchors) else []

    alphas, target_only, p_x, q_x, top = (torch.stack(x, -1) for x in (alphas, target_only, p_x, q_x, top))
    entropy = torch.stack([text.entropy[anchors + depth] for depth in range(1, DEPTHS + 1)], -1)
    largest = (F.linear(text.hidden[anchors + 1], head).float().amax(-1) - text.normaliser[anchors + 1]).exp()
    reach = {
        "rejection": theory.chain_reach_target(p_x, q_x, alphas),
        "block": theory.block_reach_target(p_x, q_x),
        "target-only": theory.chain_reach_target(p_x, top, target_only),
    }
    columns = {
        "entropy": entropy[:, 0],
        "entropy, window": entropy.mean(-1),
        "largest": largest,
        "rejection": alphas[:, 0],
        "target-only": target_only[:, 0],
        "greedy": agree[0],
        **{f"{rule}, window": values.sum(-1) for rule, values in reach.items()},
        **{f"{rule}, reach": values for rule, values in reach.items()},
    }
    return {name: x.double().numpy() for name, x in columns.items()} | {"exponent": np.array(exponents)}


@torch.inference_mode()
def first_drafts(
    layer: Layer, text: Text, head: torch.Tensor, table: torch.Tensor, temperatures: Sequence[float]
) -> dict[float, dict[str, np.ndarray]]:
    """Compute entropy and acceptance of first drafts at the anchors of `contexts`, [n] each, by temperature.

    The texts were sampled at temperature 1; at each context, target and draft use another temperature.
    """
    anchors = _anchors(text)
    state = layer.unroll(text.hidden[None].float(), text.ids[None])[0][0, anchors]
    drafted = F.linear(state.bfloat16(), head[table]).float()
    logits = F.linear(text.hidden[anchors + 1], head).float()

    columns = {}
    for temperature in temperatures:
        p, q = (logits / temperature).softmax(-1), (drafted / temperature).softmax(-1)
        columns[temperature] = {
            "entropy": torch.special.entr(p).sum(-1).double().numpy(),
            "rejection": torch.minimum(p[:, table], q).sum(-1).double().numpy(),
            "target-only": p.gather(-1, table[q.argmax(-1)][:, None])[:, 0].double().numpy(),
        }
    return columns


def _anchors(text: Text) -> torch.Tensor:
    """Return the positions of a text that draft DEPTHS tokens, [n]."""
    return depth_targets(text.ids[None], text.sampled[None], DEPTHS).mask.all(1).nonzero().flatten()


def slopes(x: list[np.ndarray], y: list[np.ndarray], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the slope of y on x over contexts, within prompts and between their means.

    x, y: arrays of each prompt. weights: [B, P], how often each resample contains each prompt. Returns [B]
    each.
    """
    sums = np.array(
        [[len(a), a.sum(), b.sum(), (a * a).sum(), (a * b).sum()] for a, b in zip(x, y, strict=True)]
    )
    count, sx, sy, sxx, sxy = sums.T
    n, tx, ty, txx, txy = (weights @ sums).T
    mx, my = sx / count, sy / count
    w = weights / weights.sum(1, keepdims=True)
    ex, ey = w @ mx, w @ my
    return {
        "contexts": (txy - tx * ty / n) / (txx - tx * tx / n),
        "within": (weights @ (sxy - sx * my)) / (weights @ (sxx - sx * mx)),
        "between": (w @ (mx * my) - ex * ey) / (w @ (mx * mx) - ex * ex),
    }


def resampled(count: int) -> np.ndarray:
    """Return how often each resample contains each prompt, [1 + DRAWS, count]; the first has each once."""
    draws = np.random.default_rng(SEED).multinomial(count, np.full(count, 1 / count), DRAWS)
    return np.concatenate([np.ones((1, count)), draws])


def intervene(prompts: list[dict[float, dict[str, np.ndarray]]]) -> dict[str, Any]:
    """Compute means by temperature, and slopes over temperatures within contexts.

    prompts: for each prompt, the columns of `first_drafts` by temperature.
    """
    weights = resampled(len(prompts))
    sizes = weights @ np.array([len(one[1.0]["entropy"]) for one in prompts])
    found: dict[str, Any] = {}
    for temperature in prompts[0]:
        sums = {name: [one[temperature][name].sum() for one in prompts] for name in prompts[0][temperature]}
        found[f"{temperature:g}"] = {name: estimate(weights @ total / sizes) for name, total in sums.items()}

    for rule in ("rejection", "target-only"):
        products = []
        for one in prompts:
            x, y = (np.stack([one[t][name] for t in one]) for name in ("entropy", rule))  # [temperatures, n]
            x, y = x - x.mean(0), y - y.mean(0)
            products.append(((x * y).sum(), (x * x).sum()))
        xy, xx = (weights @ np.array(products)).T
        found[f"{rule}, slope"] = estimate(xy / xx)
    return found


def estimate(values: np.ndarray) -> list[float]:
    """Return the first value (all prompts once) and the 95% interval of the other values."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return [round(float(v), 4) for v in (values[0], low, high)]


def analyse(prompts: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Compute means, slopes, differences of slopes, bins and bounds over prompts that have contexts."""
    count, weights = len(prompts), resampled(len(prompts))
    sizes = np.array([len(one["entropy"]) for one in prompts])
    result: dict[str, Any] = {"prompts": count, "contexts": int(sizes.sum())}

    fits: dict[str, dict[str, np.ndarray]] = {}
    for names, entropy in ((FIRST, "entropy"), (WINDOW, "entropy, window")):
        x = [one[entropy] for one in prompts]
        for name in names:
            y = [one[name] for one in prompts]
            fits[name] = slopes(x, y, weights)
            totals = np.array([values.sum() for values in y])
            result[name] = {"mean": estimate(weights @ totals / (weights @ sizes))}
            result[name] |= {f"slope, {kind}": estimate(fit) for kind, fit in fits[name].items()}
            result[name]["bins"] = _bins(np.concatenate(x), np.concatenate(y))
        for name in names[1:]:
            result[f"{name} minus {names[0]}"] = {
                kind: estimate(fits[name][kind] - fits[names[0]][kind]) for kind in fits[name]
            }

    every = {
        key: np.concatenate([one[key] for one in prompts]) for key in ("entropy", "largest", "target-only")
    }
    exponents = np.array([one["exponent"][0] for one in prompts])
    result["exp(-H) <= max p"] = float((np.exp(-every["entropy"]) <= every["largest"] + 1e-4).mean())
    result["target-only <= max p"] = float((every["target-only"] <= every["largest"] + 1e-2).mean())
    result["mismatch exponent"] = estimate(weights @ exponents / count)
    return result


def _bins(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    parts = np.array_split(np.argsort(x, kind="stable"), BINS)
    return [[round(float(x[part].mean()), 4), round(float(y[part].mean()), 4)] for part in parts]


def draw(results: dict[str, Any], files: Sequence[Path]) -> None:
    """Draw acceptance by entropy: the first draft with the bound exp(-H), and windows of three."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, names, title in zip(
        panels, (FIRST, WINDOW), ("first draft accepted", "drafts accepted of 3"), strict=True
    ):
        for (held_out, found), style in zip(results.items(), ("-", "--"), strict=False):
            for name, colour in zip(names, PALETTE, strict=False):
                value, low, high = found[name]["slope, contexts"]
                label = f"{name.split(',')[0]}, {held_out}: {value:+.3f} [{low:+.3f}, {high:+.3f}]"
                panel.plot(
                    *zip(*found[name]["bins"], strict=True),
                    style,
                    marker="o",
                    ms=3,
                    color=colour,
                    label=label,
                )
        panel.set_title(title, color=TEXT, fontsize=11)
        panel.set_xlabel("entropy of the target (nats)", color=TEXT)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(b=False)
    nats = np.linspace(0, 4.5, 60)
    panels[0].plot(nats, np.exp(-nats), ":", color="0.5", label="exp(-H)")
    for panel in panels:
        panel.legend(title="slope per nat, 95%", fontsize=7, title_fontsize=7, frameon=False)
    for file in files:
        figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Read the texts, measure, analyse, write and draw."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("recipes/smollm_adapt/rules"))
    parser.add_argument("--texts", type=int, default=90, help="in domain (%(default)s)")
    parser.add_argument("--others", type=int, default=60, help="out of domain; 0: none (%(default)s)")
    args = parser.parse_args()

    path = resolve_model("smollm2")
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    vocabulary = model.config.vocab_size
    weights = {name: w for name, w in read_weights(path).items() if name.startswith(MTP_PREFIX)}
    layer, head = Layer(model, weights), model.get_output_embeddings().weight.detach()
    table = torch.tensor(read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), path, vocabulary))

    results = {}
    _, held_out = shipped_answers(vocabulary)
    for name, samples in (
        ("in domain", held_out[: args.texts]),
        ("out of domain", other_answers(path, args.others) if args.others else []),
    ):
        if not samples:
            continue
        texts = read(model, samples)
        measured = [contexts(layer, text, head, table) for text in texts]
        used = [number for number, one in enumerate(measured) if len(one["entropy"]) > 2]
        results[name] = analyse([measured[number] for number in used])
        heated = [first_drafts(layer, texts[number], head, table, TEMPERATURES) for number in used]
        results[name]["by temperature"] = intervene(heated)
        print(name, json.dumps({k: v for k, v in results[name].items() if k != "bins"}), flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": "smollm2", "temperature": 1.0, "draws": DRAWS, "depths": DEPTHS}
    (args.out / "results.json").write_text(
        json.dumps({"settings": settings, "sets": results}, indent=1) + "\n"
    )
    draw(results, [args.out / "rules.svg", args.out / "rules.png"])


if __name__ == "__main__":
    main()
