"""Does entropy itself lower acceptance? This is measured by two interventions and by two slopes of a run.

    python recipes/mtp_adapt/interventional.py [--seeds 0 1 2] [--steps 30] [--runs runs/interventional]

Four slopes are measured for every seed on the shipped model. Acceptance is that of depth 1 under rejection,
1 - TV(p, q); entropy is that of p, in nats.

    temperature   the policy's own texts at T = 1, read again at each of --temperatures: the same contexts and
                  weights, but p and q are sharper or flatter. The slope is within contexts, over
                  temperatures.
    prompts       the same weights on different mixes of prompts. Half of the texts of each family of tasks
                  ranks the families by entropy. The other half gives the slope between the upper and the
                  lower third of the families.
    contexts      across the contexts at T = 1 (`cross_section`): tokens of high entropy against those of low
    steps         between the early steps of an RL run that starts there (`decompose`), as in Bebop's Figure 3

With each of these slopes, Eq. 16 splits the change of acceptance over the RL run. Results are means over
seeds with Student's 95% intervals. Writes results/interventional.json; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from runs import over_seeds, play  # noqa: E402

from recipes.tiny_model.layer import MtpLayer  # noqa: E402
from recipes.tiny_model.mtp import draft  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.diagnosis.decomposition import decompose, paired  # noqa: E402
from rlpipe.diagnosis.regression import cross_section  # noqa: E402
from rlpipe.metrics.runs import load_run  # noqa: E402
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights  # noqa: E402

RATE, ENTROPY = "spec/acceptance_rate/depth_1", "rollout/entropy"
QUIET = ["cluster=inline", "val.every=0", "run.save_every=0", "metrics.wandb=off", "metrics.report=false"]


class Reader:
    """Target and draft of the shipped model, over existing texts."""

    def __init__(self, path: Path) -> None:
        self._backbone = Qwen2ForCausalLM.from_pretrained(path).eval()
        self._layer = MtpLayer(self._backbone.config).eval()
        weights = {n.removeprefix(MTP_PREFIX): w for n, w in read_weights(path).items() if MTP_PREFIX in n}
        self._layer.load_state_dict(weights)

    @torch.inference_mode()
    def read(self, record: dict, temperatures: list[float]) -> tuple[np.ndarray, np.ndarray]:
        """Return acceptance and entropy [T, n] at the n contexts of a trajectory that drafted a token."""
        ids = torch.tensor(record["tokens"])[None]
        written = torch.tensor([v >= 0 for v, n in record["policy_versions"] for _ in range(n)])[None]
        drafts = draft(self._backbone, self._layer, ids, written, 1)
        alpha, entropy = [], []
        for temperature in temperatures:
            p, q = (
                (logprobs[0] / temperature).log_softmax(-1).exp()
                for logprobs in (drafts.target_logprobs, drafts.draft_logprobs)
            )
            alpha.append(torch.minimum(p, q).sum(-1))
            entropy.append(torch.special.entr(p).sum(-1))
        return torch.stack(alpha).numpy(), torch.stack(entropy).numpy()


def by_temperature(read: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Compute the slope within contexts: the mean of every context is subtracted."""
    alpha, entropy = (np.concatenate(part, axis=1) for part in zip(*read, strict=True))
    moved = entropy - entropy.mean(0)
    return float((moved * alpha).sum() / (moved * moved).sum())


def by_prompts(records: list[dict], read: list[tuple[np.ndarray, np.ndarray]], at: int) -> float:
    """Compute the slope between two mixes of families: half of the texts chooses them, the other measures."""
    families: dict[str, list[tuple[float, float]]] = {}
    for record, (alpha, entropy) in zip(records, read, strict=True):
        if alpha.shape[1]:
            means = float(alpha[at].mean()), float(entropy[at].mean())
            families.setdefault(record["prompt_id"].rpartition("-")[0], []).append(means)
    halves = [(one[::2], one[1::2]) for one in families.values() if len(one) > 1]
    halves.sort(key=lambda half: statistics.fmean(entropy for _, entropy in half[0]))
    mixes = halves[: len(halves) // 3], halves[-(len(halves) // 3) :]
    low, high = (np.mean([means for _, half in mix for means in half], 0) for mix in mixes)
    return float((high[0] - low[0]) / (high[1] - low[1]))


def measure(args: argparse.Namespace, reader: Reader, seed: int) -> dict[str, float]:
    """Compute all slopes of a seed, and the split of its RL run by each slope."""
    sample = play(
        "swe_rl",
        args.runs / f"sample-{seed}",
        *QUIET,
        f"run.seed={seed}",
        "run.steps=1",
        "pipeline.max_staleness=0",
        f"pipeline.prompts_per_step={args.prompts}",
        "pipeline.group_size=2",
        "metrics.rollouts_per_step=100000",
    )
    (file,) = (sample / "rollouts").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    read = [reader.read(record, args.temperatures) for record in records]
    at = args.temperatures.index(1.0)
    alpha, entropy = (np.concatenate([one[k][at] for one in read]) for k in (0, 1))
    clusters = np.concatenate([np.full(one[0].shape[1], i) for i, one in enumerate(read)])
    options = [f"run.seed={seed}", f"run.steps={args.steps}"]
    run = load_run(play("swe_rl", args.runs / f"rl-{seed}", *QUIET, *options))
    parts = decompose(*paired(run, RATE, ENTROPY))
    slopes = {
        "temperature": by_temperature(read),
        "prompts": by_prompts(records, read, at),
        "contexts": cross_section(alpha, entropy, clusters).value,
        "steps": parts.slope.value,
    }
    found = {f"slope/{name}": value for name, value in slopes.items()}
    for name, value in slopes.items():
        found[f"by entropy/{name}"] = value * parts.entropy_change
        found[f"rest/{name}"] = parts.total.value - value * parts.entropy_change
    return found | {
        "change of acceptance": parts.total.value,
        "change of entropy": parts.entropy_change,
        "contexts": len(alpha),
    }


def plain(values: list[float]) -> dict[str, object]:
    """Return mean and interval over seeds."""
    found = over_seeds(values)
    figures = {"mean": found.value, "low": found.low, "high": found.high}
    return {k: round(v, 4) for k, v in figures.items()} | {"by_seed": [round(v, 4) for v in values]}


def main() -> None:
    """Start the missing runs, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/interventional"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=160, help="of the sample, one text each")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0, 1.2, 1.4])
    args = parser.parse_args()
    reader = Reader(resolve("shipped:models/tiny"))
    seeds = [measure(args, reader, seed) for seed in args.seeds]
    settings = {name: value for name, value in vars(args).items() if name != "runs"}
    result = {"settings": settings, **{name: plain([one[name] for one in seeds]) for name in seeds[0]}}
    (HERE / "results" / "interventional.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
