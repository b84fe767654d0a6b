"""Scores a tiny model with the engine, collector and sandbox of real runs, and writes its model card.

    python -m recipes.tiny_model.score [--model models/tiny] [--instances 128] [--no-card]

Each instance of both held-out sets is run once greedily and 8 times at T = 1; acceptance is summed over the
trajectories at T = 1 (rejection, gamma = 3). The card that is written has the text for models/tiny; --no-card
only prints the figures.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from recipes.tiny_model.card import SETS, SetScores, write_card
from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.envs import make_suite
from rlpipe.types import SpecCounts, Trajectory, TrajectoryStatus

SAMPLES = 8


def solved(trajectories: list[Trajectory], samples: int) -> list[int]:
    """Return the number of solved attempts of each instance, in order."""
    masked = sum(t.status is TrajectoryStatus.MASKED for t in trajectories)
    if masked:
        raise RuntimeError(f"{masked} trajectories were masked by infrastructure failures: run again.")
    wins = [t.reward == 1.0 for t in trajectories]
    return [sum(wins[i : i + samples]) for i in range(0, len(wins), samples)]


async def score(model: str, instances: int, card: bool) -> None:
    """Run both sets and, if asked to, write the card into the model's directory."""
    config = Config(env=EnvConfig(name=EnvName.SWE))
    config.model.path = model
    suite, worker = make_suite(config.env, seed=0), RolloutWorker(config)
    scores: dict[str, SetScores] = {}
    acceptance: dict[str, float] = {}
    try:
        for name, title in SETS.items():
            ids = suite.instance_ids(name)[:instances]
            greedy = solved(await worker.evaluate(ids, 1, 0.0), 1)
            sampled = await worker.evaluate(ids, SAMPLES, 1.0)
            wins = solved(sampled, SAMPLES)
            scores[name] = SetScores(
                instances=len(ids),
                greedy=sum(greedy) / len(ids),
                sampled=sum(wins) / (SAMPLES * len(ids)),
                pass_at_8=sum(count > 0 for count in wins) / len(ids),
            )
            spec = SpecCounts()
            for trajectory in sampled:
                spec.add(trajectory.spec)
            acceptance[f"acceptance length, gamma = 3, rejection, T = 1 ({title})"] = spec.acceptance_length
            for depth, (kept, reached) in enumerate(zip(spec.accepted, spec.drafted, strict=True), start=1):
                acceptance[f"acceptance rate at depth {depth} ({title})"] = kept / reached
            print(name, scores[name], f"acceptance length {spec.acceptance_length:.3f}", flush=True)
    finally:
        await worker.close()
    if card:
        write_card(Path(resolve(model)), scores, acceptance)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--instances", type=int, default=128)
    parser.add_argument("--no-card", action="store_true")
    args = parser.parse_args()
    asyncio.run(score(args.model, args.instances, not args.no_card))
