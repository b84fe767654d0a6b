"""How many drafts are accepted, by rule, depth and temperature, and how fast does that fall with temperature?

The embedded engine generates the turns of conversations about held-out SWE instances at several temperatures.
The conversations are a demonstrator's, so that all rules see the same past (see `rollout_speed.py`). The
engine drafts a chain of gamma tokens, verified by target_only, rejection (chain) or block, or a tree.
Reported per rule and temperature:

alpha      by depth: accepted / reached, given that all shallower drafts were accepted
length     tokens per verify step, 1 + accepted / steps
slopes     two least-squares slopes. One is per unit of temperature: of the length and of alpha at depth 1,
           over the temperatures. The other is per nat of the target's entropy at the drafted position: of
           alpha at depth 1, over all drafts. It uses acceptance probabilities, not the sampled outcomes
block      for every drafted chain, asserts from the recorded p and q that Pr(accepted >= depth) is at least
           as large under block as under chain, and reports how much longer block's steps are on these drafts

Standard errors are clustered by conversation. Intervals are the 2.5 and 97.5 percentiles of a bootstrap over
conversations; every conversation is run at every temperature.

    python scripts/bench/acceptance.py --json OUT [--conversations 256] [--model models/tiny]
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rollout_speed import TURN_TOKENS, Workload, swe_workloads  # noqa: E402

from recipes.theory import block_reach_drafted, chain_reach_drafted  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.rollout.embedded import EmbeddedEngine  # noqa: E402
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams, SpecCounts  # noqa: E402

RULES = ("target_only", "rejection", "block", "tree")
TEMPERATURES = (0.6, 1.0, 1.4)
GAMMA, TREE = 3, [2, 2, 1]
ROWS, CONTEXT = 32, 512
RESAMPLES = 1000


@dataclass(slots=True)
class Conversation:
    """Counts of one conversation under one rule and temperature.

    counts: of all turns. chains: [N, 2, gamma], p and q of the drafts. first: [n, 2], target entropy in nats
    and acceptance probability of each draft of depth 1.
    """

    counts: SpecCounts = field(default_factory=SpecCounts)
    chains: list[list[list[float]]] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)

    @property
    def reach(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Pr(accepted >= depth), [N, gamma], for chain and block; target_only is chain with q = 1."""
        p, q = torch.tensor(self.chains, dtype=torch.float64).reshape(-1, 2, GAMMA).unbind(1)
        return chain_reach_drafted(p, q), block_reach_drafted(p, q)

    def add(self, result: GenerateResult, rule: str) -> None:
        """Add a turn."""
        self.counts.add(result.spec)
        for step in result.drafts or ():
            p, q = step.target_probs, step.draft_probs
            if rule != "tree":
                self.chains.append([p, q])
                self.first.append((float(result.entropies[step.position]), min(1.0, p[0] / q[0])))


def play(model: Path, rule: str, temperature: float, work: Workload) -> list[Conversation]:
    """Run all conversations under one rule."""
    config = RolloutConfig(max_running=ROWS, max_context=CONTEXT, threads=1, device="cpu")
    engine = EmbeddedEngine(config, SpecConfig(mode=rule, gamma=GAMMA, tree=TREE), model)
    played = [Conversation() for _ in work.conversations]

    async def converse(number: int, room: asyncio.Semaphore) -> None:
        async with room:
            for turn, prompt in enumerate(work.conversations[number]):
                sampling = SamplingParams(
                    temperature=temperature,
                    max_new_tokens=work.max_new_tokens,
                    stop_token_ids=work.stops,
                    seed=100 * number + turn,
                    record_drafts=True,
                )
                request = GenerateRequest(
                    request_id=f"{number}/{turn}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    session_id=str(number),
                )
                played[number].add(await engine.generate(request), rule)
            engine.end_session(str(number))

    async def converse_all() -> None:
        room = asyncio.Semaphore(ROWS)
        await asyncio.gather(*(converse(number, room) for number in range(len(played))))

    asyncio.run(converse_all())
    engine.close()
    return played


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> list[float]:
    """Return [sum / sum, its standard error] by linearisation; each entry is a cluster."""
    total, count = denominators.sum(), len(denominators)
    value = numerators.sum() / total
    errors = numerators - value * denominators
    return [float(value), float(np.sqrt(count / (count - 1) * (errors**2).sum()) / total)]


def acceptance(played: list[Conversation]) -> dict[str, Any]:
    """Return acceptance by depth and acceptance length, each with its standard error."""
    drafted, accepted = (
        np.array([getattr(one.counts, name) or [0] * GAMMA for one in played], float)
        for name in ("drafted", "accepted")
    )
    steps = np.array([one.counts.verify_steps for one in played], float)
    return {
        "alpha": [ratio(accepted[:, k], drafted[:, k]) for k in range(GAMMA)],
        "length": ratio(accepted.sum(1) + steps, steps),
        "verify_steps": int(steps.sum()),
    }


def block_against_chain(played: list[Conversation]) -> dict[str, Any]:
    """Return both rules' lengths on the same recorded drafts; assert that block accepts at least as many."""
    reaches = [one.reach for one in played]
    gains = torch.cat([block - chain for chain, block in reaches])
    worst = gains.min().item()
    assert worst >= -1e-9, f"block reaches {-worst} less far than chain on some draft"
    lengths = np.array([[(1 + reach.sum(-1)).sum().item() for reach in both] for both in reaches])
    steps = np.array([len(chain) for chain, _ in reaches], float)
    return {
        "drafted_chains": int(steps.sum()),
        "chains_that_block_judges_better": int((gains.amax(-1) > 1e-9).sum()),
        "smallest_difference_of_reach": worst,
        "chain_length": ratio(lengths[:, 0], steps),
        "block_length": ratio(lengths[:, 1], steps),
        "block_minus_chain": ratio(lengths[:, 1] - lengths[:, 0], steps),
    }


def slope(sums: np.ndarray) -> float:
    """Compute the least-squares slope from the sums [n, x, y, xx, xy]."""
    n, x, y, xx, xy = sums
    return (n * xy - x * y) / (n * xx - x * x)


def slopes(by_temperature: dict[float, list[Conversation]]) -> dict[str, Any]:
    """Return slopes of a rule's acceptance as [value, low, high]; `resampled` has all resampled slopes."""
    sums = []  # [temperatures, conversations, 6], of entropy, acceptance and length of steps
    for played in by_temperature.values():
        rows = [np.array(one.first).reshape(-1, 2).T for one in played]
        lengths = [len(x) + one.reach[0].sum().item() for (x, _), one in zip(rows, played, strict=True)]
        sums.append(
            [
                [len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), length]
                for (x, y), length in zip(rows, lengths, strict=True)
            ]
        )
    sums, heat = np.array(sums), np.array(list(by_temperature))
    rng = np.random.default_rng(0)
    count = sums.shape[1]
    found: dict[str, list[float]] = {
        "length_per_unit_of_temperature": [],
        "alpha_per_unit_of_temperature": [],
        "alpha_per_nat_of_entropy": [],
    }
    for draw in [np.arange(count), *(rng.integers(0, count, count) for _ in range(RESAMPLES))]:
        total = sums[:, draw].sum(1)
        for name, column in (("length", 5), ("alpha", 2)):
            line = np.polyfit(heat, total[:, column] / total[:, 0], 1)
            found[f"{name}_per_unit_of_temperature"].append(float(line[0]))
        found["alpha_per_nat_of_entropy"].append(float(slope(total.sum(0)[:5])))
    return {name: interval(values) for name, values in found.items()} | {"resampled": found}


def interval(values: list[float]) -> list[float]:
    """Return the first value, with the 2.5 and 97.5 percentiles of the resampled values after it."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return [values[0], float(low), float(high)]


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, list[float]]:
    """Return the slopes of one rule minus those of another, over the same resampled conversations."""
    return {
        name: interval([a - b for a, b in zip(values, theirs["resampled"][name], strict=True)])
        for name, values in ours["resampled"].items()
    }


def rounded(value: Any) -> Any:
    """Round the floats of nested data to four digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(results: dict[str, Any]) -> None:
    """Print the table and the conclusion."""
    print(f"{'rule':12s} {'T':>4s}  {'alpha by depth (standard error)':42s} length")
    for name, row in results["acceptance"].items():
        rule, temperature = name.split(" T=")
        alphas = "  ".join(f"{value:.3f} ({error:.3f})" for value, error in row["alpha"])
        value, error = row["length"]
        print(f"{rule:12s} {temperature:>4s}  {alphas:42s} {value:.3f} ({error:.3f})")
    for name, row in results["block_against_chain"].items():
        value, error = row["block_minus_chain"]
        print(
            f"block - chain, {name}: {value:+.4f} ({error:.4f}) tokens a step on the same "
            f"{row['drafted_chains']} drafts, never below (least {row['smallest_difference_of_reach']:.1e})"
        )
    for rule, row in results["slopes"].items():
        for what, (value, low, high) in row.items():
            print(f"{rule}: {what} {value:+.3f} [{low:+.3f}, {high:+.3f}]")
    print(results["seen"])


def seen(lines: dict[str, Any], gap: dict[str, list[float]]) -> str:
    """Return a sentence on Bebop Fig. 12a: does rejection's length fall less with temperature here too?"""
    name = "length_per_unit_of_temperature"
    value, low, high = gap[name]
    verdict = "flatter" if low > 0 else "steeper" if high < 0 else "not told apart"
    slopes = ", ".join(f"{rule} {line[name][0]:+.3f}" for rule, line in lines.items())
    return (
        f"Acceptance length against temperature, rejection compared with target_only: {verdict}. Slopes in "
        f"tokens per unit of temperature: {slopes}; difference {value:+.3f} [{low:+.3f}, {high:+.3f}]."
    )


def main() -> None:
    """Run all arms, compare them and write one JSON."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--model", type=Path, default=resolve("shipped:models/tiny"))
    args, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)
    started = time.perf_counter()
    work = swe_workloads(args.model)["turns"]
    work.conversations = work.conversations[: args.conversations]
    played = {
        (rule, temperature): play(args.model, rule, temperature, work)
        for rule, temperature in itertools.product(RULES, TEMPERATURES)
    }
    lines = {
        rule: slopes({t: played[rule, t] for t in TEMPERATURES}) for rule in ("target_only", "rejection")
    }
    gap = difference(lines["rejection"], lines["target_only"])
    for line in lines.values():
        del line["resampled"]
    results = rounded(
        {
            "acceptance": {f"{rule} T={t}": acceptance(played[rule, t]) for rule, t in played},
            "block_against_chain": {
                f"drafts of {rule} T={t}": block_against_chain(played[rule, t])
                for rule, t in played
                if rule in ("rejection", "block")
            },
            "slopes": lines | {"rejection less target_only": gap},
            "seen": seen(lines, gap),
        }
    )
    show(results)
    report = {
        "question": "acceptance of the shipped model's drafts by rule, depth and temperature",
        **provenance(args, load),
        "seconds": round(time.perf_counter() - started),
        "fixed": {
            "turns": sum(map(len, work.conversations)),
            "turn_tokens": TURN_TOKENS,
            "temperatures": TEMPERATURES,
            "gamma": GAMMA,
            "tree": TREE,
            "resamples": RESAMPLES,
        },
        "results": results,
    }
    write_result(args.json, report)


if __name__ == "__main__":
    main()
