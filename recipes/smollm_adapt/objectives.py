"""Compares a draft's objectives from one start on SmolLM2: equal steps, a rate per arm, seeds as units.

    python -m recipes.smollm_adapt.objectives [--out recipes/smollm_adapt/results] [--arms hard_ce kl ...]

1 start   the layer in closed form, then some steps of soft KL on separate texts: the start of every arm
2 sweep   each arm at each learning rate, with a separate seed; the best on held-out answers other than those
          of the result
3 cells   each arm at its rate, for each seed: which answers, in which order

Hidden states of the frozen model are computed once. The draft's vocabulary has only the most frequent tokens;
a last column holds the target's mass on all others, so every divergence equals that over the full vocabulary
up to a constant. The losses are those of `rlpipe.drafts.loss`. The expected gradient of `e2e_chain` is the
exact gradient of the accepted drafts; so is that of `exact_window`, on windows that a draft generates.
Measured on held-out answers, in and out of domain, are the expected accepted drafts of a window of three
under rejection and target-only, exact in expectation over the target's tokens, and the values of Bebop's Fig.
10 and 11. Acceptance over the steps is measured on texts that the arm has not seen yet (Fig. 4). Finished
cells are not repeated.

`exact_window` and `ppow` train on windows that the draft generates (`windows`), with rlpipe's defaults: four
anchors of each answer, eight windows from each. Accepted drafts are also measured at other temperatures, on
answers sampled at them; at 0 both rules accept the drafts that are the target's most likely token.

The unit of every interval is the seed (Student's, 95%, over differences of arms at
equal seeds). Writes objectives.json and the picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes import theory
from recipes.runs import choose_rate, kept, rounded_over_seeds, seeds_to_decide
from recipes.smollm_adapt.texts import Text, answer_again, other_answers, read, shipped_answers
from recipes.smollm_adapt.windows import TextWindows, WindowLayer
from recipes.smollm_rl.make_layer import DEPTHS, choose_table, compute_states
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.paths import resolve_model
from rlpipe.config.ppow import PpowConfig
from rlpipe.convert.closed_form import Sample, fit_input_proj, start_layer
from rlpipe.convert.gguf import quiet
from rlpipe.drafts.loss import MtpStats, depth_targets, mtp_loss
from rlpipe.drafts.loss.stats import BY_DEPTH
from rlpipe.drafts.objectives.windows import LOSSES
from rlpipe.drafts.visit import accept_probabilities, visit_probabilities
from rlpipe.drafts.vocabulary import OUTSIDE
from rlpipe.drafts.windows.training import WindowTraining
from rlpipe.models.checkpoint import MTP_PREFIX

ARMS = ("kl", "e2e_tv", "hard_ce", "tv", "e2e_chain", "reverse_kl", "lk", "exact_window", "ppow")
BASELINES = ("kl", "e2e_tv")
START_SEED, SWEEP_SEED = 1001, 1000
RESULT = ("in domain", "out of domain")
OTHER_TEMPERATURES = (0.0, 0.7)
AT = {f"{held_out}, T = {t:g}": t for held_out in RESULT for t in OTHER_TEMPERATURES}


class Drafts:
    """The layer, the part of the head that it multiplies, and losses of some texts.

    windows: settings of the objectives that train on generated windows, None for the others.
    """

    def __init__(
        self, model: Any, table: Tensor, weights: dict[str, Tensor], windows: WindowTraining | None = None
    ) -> None:
        self.layer, self._model, self._table = WindowLayer(model, weights), model, table
        self._windows = windows
        self._head = model.get_output_embeddings().weight.detach()
        self.weights = self.layer.weights
        self._known = torch.full((len(self._head),), len(table))
        self._known[table] = torch.arange(len(table))

    def rows(self, texts: Sequence[Text], temperature: float = 1.0) -> dict[str, Tensor]:
        """Compute logits [N, K, D + 1], mask and tokens [N, K] of the anchors that draft any token.

        temperature: that of the texts, > 0; the logits are divided by it.
        """
        found: dict[str, list[Tensor]] = {"draft": [], "target": [], "mask": [], "tokens": []}
        ids, sampled, hidden, normaliser = (
            torch.nn.utils.rnn.pad_sequence([getattr(t, name) for t in texts], batch_first=True)
            for name in ("ids", "sampled", "hidden", "normaliser")
        )
        mask = depth_targets(ids, sampled, DEPTHS).mask.view(*ids.shape, DEPTHS)
        anchors = mask.any(-1)
        rows = self._head[self._table]
        for depth, state in enumerate(self.layer.unroll(hidden.float(), ids), 1):
            logits = F.linear(state[anchors].bfloat16(), rows).float() / temperature
            rest = logits.logsumexp(-1, keepdim=True) + OUTSIDE  # differentiable, as in `spread`
            found["draft"].append(torch.cat((logits, rest), -1))

            with torch.no_grad():
                at = hidden.roll(-depth, 1)[anchors], normaliser.roll(-depth, 1)[anchors]
                log_p = F.linear(at[0], rows).float() / temperature - at[1][:, None]
                other = torch.log1p(-log_p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
                found["target"].append(torch.cat((log_p, other), -1))
            found["tokens"].append(self._known[ids.roll(-depth - 1, 1)[anchors]])
        columns = {name: torch.stack(x, 1) for name, x in found.items() if x}
        return columns | {"mask": mask[anchors], "anchors": anchors}

    def loss(
        self, kind: str, texts: Sequence[Text], step: int = 0, *, by_visit: bool = False
    ) -> tuple[Tensor, MtpStats]:
        """Compute the loss of an objective, and statistics of the texts.

        step: updates so far. by_visit: weight each anchor by the probability that a verify step starts there.
        """
        with torch.set_grad_enabled(self._windows is None):
            rows = self.rows(texts)
            supervised = "e2e_tv" if self._windows else kind
            inputs: dict[str, Any] = {"mask": rows["mask"], "tokens": rows["tokens"]}
            if by_visit:
                inputs["anchors"] = visits(rows)
            loss, stats = mtp_loss(supervised, rows["draft"], rows["target"], **inputs)
        if self._windows is None:
            return loss, stats

        sampled = self._windows.loss(TextWindows(self._model, self.layer, self._table, texts), step)
        assert sampled is not None, "answers are longer than a window"
        total, totals = sampled
        return total / totals.weight, stats

    @torch.no_grad()
    def measure_greedy(self, texts: Sequence[Text]) -> dict[str, float]:
        """Compute accepted drafts of a window at temperature 0, on texts sampled at it."""
        windows = []
        for start in range(0, len(texts), 4):
            rows = self.rows(texts[start : start + 4])
            whole = rows["mask"].all(-1)
            right = rows["draft"][whole].argmax(-1) == rows["tokens"][whole]
            windows.append(right.float().cumprod(-1).sum(-1))
        accepted = torch.cat(windows).mean().item()
        return {"rejection": accepted, "target_only": accepted}

    @torch.no_grad()
    def measure(self, texts: Sequence[Text], temperature: float = 1.0) -> dict[str, float]:
        """Compute accepted drafts of a window, acceptance by depth, and other means over first drafts.

        "depth K" is the share of the drafts of depth K, among those that rejection reaches, that it accepts.
        temperature: that of the texts, > 0.
        """
        sums, windows = [], []
        for start in range(0, len(texts), 4):
            rows = self.rows(texts[start : start + 4], temperature)
            mask = rows["mask"]
            _, stats = mtp_loss("e2e_tv", rows["draft"], rows["target"], mask=mask, tokens=rows["tokens"])
            sums.append(stats)

            whole = mask.all(-1)
            log_q, log_p = (rows[name][whole].log_softmax(-1) for name in ("draft", "target"))
            tokens, best = rows["tokens"][whole][..., None], log_q.argmax(-1, keepdim=True)
            q_x, p_x = (x.gather(-1, tokens)[..., 0] for x in (log_q, log_p))
            alphas = torch.minimum(log_q.exp(), log_p.exp()).sum(-1)
            top = torch.where(tokens == best, 0.0, -torch.inf)[..., 0]
            target_only = log_p.gather(-1, best)[..., 0].exp()
            both = [(q_x, alphas), (top, target_only)]
            windows.append(torch.stack([theory.chain_reach_target(p_x, *pair) for pair in both], 1))
        stats = sum(sums[1:], sums[0])
        means = {name: (getattr(stats, name) / stats.count)[0].item() for name in BY_DEPTH if name != "top1"}
        reach = torch.cat(windows).mean(0)  # [rules, K]
        rejection, target_only = reach.sum(-1).tolist()
        depths = (reach[0] / torch.cat((torch.ones(1), reach[0, :-1]))).tolist()
        by_depth = {f"depth {depth}": value for depth, value in enumerate(depths, 1)}
        return {"rejection": rejection, "target_only": target_only, **by_depth, **means}


@torch.no_grad()
def visits(rows: dict[str, Tensor]) -> Tensor:
    """Compute the probability [N] that a verify step starts at each anchor of `Drafts.rows`."""
    anchors, tokens = rows["anchors"], rows["tokens"][..., None]
    log_q, log_p = (rows[name].log_softmax(-1).gather(-1, tokens)[..., 0] for name in ("draft", "target"))
    accept, mask = torch.zeros(2, *anchors.shape, tokens.shape[1])
    accept[anchors], mask[anchors] = accept_probabilities(log_q, log_p), rows["mask"].float()
    starts = anchors & (anchors.cumsum(1) == 1)  # the one answer of a text
    return visit_probabilities(accept, mask.bool(), starts)[anchors].float()


def batches(texts: Sequence[Text], *, seed: int, steps: int, batch: int) -> Iterator[list[Text]]:
    """Yield the texts of each step: permutations of all, one after another."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(texts)) for _ in range(steps * batch // len(texts) + 1)])
    for step in range(steps):
        yield [texts[i] for i in order[step * batch : (step + 1) * batch]]


def train(
    drafts: Drafts, kind: str, steps: Iterable[Sequence[Text]], *, lr: float, by_visit: bool = False
) -> list[list[float]]:
    """Train by AdamW after three steps of warm-up, on the texts of each step. by_visit: see `Drafts.loss`.

    Returns the acceptance [steps, K] of each step's texts, measured before the update on them. Until texts
    repeat, these are texts that the draft has not seen.
    """
    weights, curve = list(drafts.weights.values()), []
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step, texts in enumerate(steps, 1):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 3)
        optimizer.zero_grad()
        loss, stats = drafts.loss(kind, texts, step - 1, by_visit=by_visit)
        loss.backward()
        curve.append([round(x, 4) for x in (stats.alpha / stats.count).tolist()])
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return curve


class Study:
    """Texts, the start and finished cells. Shared inputs of the cells are computed once and stored."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        self._path = resolve_model("smollm2")
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.bfloat16).eval()
        self.args = args
        args.kept.mkdir(parents=True, exist_ok=True)
        texts, start = (args.kept / f"{name}.pt" for name in ("texts", "start"))
        if not texts.is_file():
            torch.save(self._read(), texts)
        self._table, fitted, sets = torch.load(texts)
        self._texts = {name: [Text(*one) for one in some] for name, some in sets.items()}
        if not start.is_file():
            torch.save(self._make_start([Sample(ids=ids, sampled=sampled) for ids, sampled in fitted]), start)
        self._start = torch.load(start)

    def _read(self) -> tuple[Tensor, list[Any], dict[str, list[Any]]]:
        """Return the draft's table, the sequences to fit the start on, and the texts of each set."""
        args, count = self.args, self.args.eval_texts
        training, held_out = shipped_answers(self._model.config.vocab_size)
        ends = args.fitted + args.warm_steps * args.batch
        order = np.random.default_rng(0).permutation(len(training))[: ends + args.texts]
        chosen = [training[i] for i in order]
        parts = {
            "warm": chosen[args.fitted : ends],
            "training": chosen[ends:],
            "sweep": held_out[:count],
            "in domain": held_out[count : 2 * count],
            "out of domain": other_answers(self._path, count),
        }
        for temperature in OTHER_TEMPERATURES:
            sampling = {"seed": 7, "temperature": temperature}
            inside, outside = (f"{held_out}, T = {temperature:g}" for held_out in RESULT)
            parts[inside] = answer_again(self._path, parts["in domain"], **sampling)
            parts[outside] = other_answers(self._path, count, **sampling)
        return (
            choose_table(training, args.table, self._model.config.vocab_size),
            [astuple(sample) for sample in chosen[: args.fitted]],
            {
                name: [astuple(text) for text in read(self._model, part, AT.get(name, 1.0))]
                for name, part in parts.items()
            },
        )

    def _make_start(self, fitted: Sequence[Sample]) -> dict[str, Tensor]:
        """Fit the closed form and warm it up by soft KL."""
        _, states = compute_states(self._model, fitted, set(range(len(fitted))))
        projection, _ = fit_input_proj(states, self._model.config.rms_norm_eps)
        drafts = Drafts(self._model, self._table, start_layer(self._model, projection, torch.float32))
        if warm := self._texts["warm"]:
            steps = batches(warm, seed=START_SEED, steps=self.args.warm_steps, batch=self.args.batch)
            train(drafts, "kl", steps, lr=1e-3)
        return {MTP_PREFIX + name: w.detach().clone() for name, w in drafts.weights.items()}

    def start(self) -> dict[str, Any]:
        """Measure the start on the sets of the result, unless this is done already."""
        return kept(self.args.kept / "start.json", lambda: self._measure(self._drafts(), (*RESULT, *AT)))

    def _drafts(self, windows: WindowTraining | None = None) -> Drafts:
        return Drafts(self._model, self._table, self._start, windows)

    def _measure(self, drafts: Drafts, sets: Iterable[str]) -> dict[str, dict[str, float]]:
        """Measure a draft on sets, each at its temperature."""
        measured = {}
        for name in sets:
            temperature = AT.get(name, 1.0)
            texts = self._texts[name]
            measured[name] = (
                drafts.measure(texts, temperature) if temperature else drafts.measure_greedy(texts)
            )
        return measured

    def cell(self, arm: str, lr: float, seed: int) -> dict[str, Any]:
        """Train and measure an arm, unless this is done already; in the sweep, on the sweep's texts only."""

        def compute() -> dict[str, Any]:
            args, started, windows = self.args, time.process_time(), None
            if arm in LOSSES:
                settings = {"depths": DEPTHS, "steps": args.steps, "seed": seed}
                windows = WindowTraining(PpowConfig(), DraftObjective(arm), **settings)
            drafts = self._drafts(windows)
            steps = batches(self._texts["training"], seed=seed, steps=args.steps, batch=args.batch)
            found: dict[str, Any] = {"arm": arm, "lr": lr, "seed": seed}
            found["curve"] = train(drafts, arm, steps, lr=lr)
            found["seconds"] = round(time.process_time() - started, 1)
            sets = ["sweep"] if seed == SWEEP_SEED else [*RESULT, *AT]
            found |= self._measure(drafts, sets)
            print(f"{arm} lr {lr:g} seed {seed}: {found[sets[0]]['rejection']:.3f}", flush=True)
            return found

        return kept(self.args.kept / f"{arm}_lr{lr:g}_seed{seed}.json", compute)


def summary(cells: dict[str, list[dict[str, Any]]], start: dict[str, Any]) -> dict[str, Any]:
    """Compute means over seeds, gains over the start, and paired differences, each with its interval."""
    table: dict[str, Any] = {}
    for arm, found in cells.items():
        row: dict[str, Any] = {"seconds": round(sum(c["seconds"] for c in found) / len(found), 1)}
        for held_out in (*RESULT, *AT):
            for rule in ("rejection", "target_only"):
                values = [c[held_out][rule] for c in found]
                one = {
                    "mean": rounded_over_seeds(values),
                    "gain": rounded_over_seeds([v - start[held_out][rule] for v in values]),
                }
                for other in BASELINES:
                    if other in cells and other != arm:
                        theirs = [c[held_out][rule] for c in cells[other]]
                        gaps = [a - b for a, b in zip(values, theirs, strict=True)]
                        one[f"minus {other}"] = rounded_over_seeds(gaps)
                        one[f"seeds to decide, minus {other}"] = seeds_to_decide(gaps)
                row[f"{held_out}, {rule}"] = one
        for held_out in RESULT:
            for name in ("alpha", "kl", "reverse_kl", "target_above", "draft_above"):
                values = [c[held_out][name] for c in found]
                row[f"{held_out}, {name}"] = rounded_over_seeds(values)
                if "kl" in cells and arm != "kl":
                    theirs = [c[held_out][name] for c in cells["kl"]]
                    gaps = [a - b for a, b in zip(values, theirs, strict=True)]
                    row[f"{held_out}, {name}, minus kl"] = rounded_over_seeds(gaps)
            gaps = [c[held_out]["draft_entropy"] - c[held_out]["target_entropy"] for c in found]
            row[f"{held_out}, entropy gap"] = rounded_over_seeds(gaps)
        curves = np.array([c["curve"] for c in found])  # [seeds, steps, depths]
        row["acceptance by step and depth"] = curves.mean(0).round(4).tolist()
        if "kl" in cells and arm != "kl":
            # Equal seeds have equal answers at each step, so most of their noise cancels.
            third = max(1, curves.shape[1] // 3)
            gaps = (curves - np.array([c["curve"] for c in cells["kl"]]))[:, -third:].mean(1)
            row["last third minus kl, by depth"] = [rounded_over_seeds(depth) for depth in gaps.T.tolist()]
        table[arm] = row
    return table


def correlations(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Correlate the values of Bebop's Fig. 10 over all drafts; those of an arm are not independent."""
    found = {}
    for held_out in RESULT:
        alpha, kl, reverse = (
            np.array([c[held_out][n] for c in cells]) for n in ("alpha", "kl", "reverse_kl")
        )
        gap = np.array([c[held_out]["draft_entropy"] - c[held_out]["target_entropy"] for c in cells])
        pairs = {"entropy gap": gap, "KL(target||draft)": kl, "KL(draft||target)": reverse}
        found[held_out] = {n: round(float(np.corrcoef(x, alpha)[0, 1]), 3) for n, x in pairs.items()}
    return found | {"drafts": len(cells)}


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw the gain of each arm over the start, with its interval, in and out of domain."""
    table = results["table"]
    arms = sorted(table, key=lambda a: table[a]["in domain, rejection"]["gain"][0])
    gains = {
        held_out: [table[arm][f"{held_out}, rejection"]["gain"] for arm in arms]
        for held_out in ("in domain", "out of domain")
    }
    draw_gains(arms, gains, "more drafts accepted of 3 than at the start (95% over seeds)", file)


def draw_gains(arms: list[str], gains: Mapping[str, list[list[float]]], title: str, file: Path) -> None:
    """Draw two gains of each arm, one above the other: by label, a mean and its interval."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axis = figure.subplots()
    for offset, colour, (label, estimates) in zip((0.12, -0.12), PALETTE, gains.items(), strict=False):
        values = np.array(estimates)
        error = np.abs(values[:, 1:].T - values[:, 0])
        where = np.arange(len(arms)) + offset
        axis.errorbar(values[:, 0], where, xerr=error, fmt="o", ms=4, capsize=2, color=colour, label=label)

    axis.set_yticks(range(len(arms)), arms)
    axis.set_xlabel(title, color=TEXT)
    axis.axvline(0, color="0.6", lw=0.8)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(b=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("recipes/smollm_adapt/results"))
    parser.add_argument("--kept", type=Path, default=Path("runs/smollm_objectives"), help="texts and cells")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-4, 3e-4, 1e-3, 3e-3])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=3, help="texts of a step")
    parser.add_argument("--texts", type=int, default=96, help="to train on")
    parser.add_argument("--eval-texts", type=int, default=24, help="of each held-out set")
    parser.add_argument("--fitted", type=int, default=60, help="texts of the closed form")
    parser.add_argument("--table", type=int, default=2048, help="tokens of the draft")
    return parser.parse_args()


def main() -> None:
    """Run what is missing; write the results after every arm, and the picture."""
    args = arguments()
    torch.set_num_threads(1)
    study = Study(args)
    results: dict[str, Any] = {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "start": study.start(),
        "rates": {},
    }
    cells: dict[str, list[dict[str, Any]]] = {}
    for arm in args.arms:
        tried = {lr: study.cell(arm, lr, SWEEP_SEED)["sweep"]["rejection"] for lr in args.lrs}
        results["rates"][arm] = choose_rate(tried)
        cells[arm] = [study.cell(arm, results["rates"][arm]["lr"], seed) for seed in args.seeds]
        results["table"] = summary(cells, results["start"])
        results["correlations"] = correlations([c for found in cells.values() for c in found])
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "objectives.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "objectives.svg")
    for arm, row in results["table"].items():
        print(arm, {name: one["gain"] for name, one in row.items() if name.endswith("rejection")})
    print(results["correlations"])


if __name__ == "__main__":
    main()
