"""Which drafter: the MTP layer, an EAGLE-3 draft or suffix lookup, in- and out-of-domain, sampled and greedy.

Each arm decodes the same prompts in its own process; the arms take turns (see rollout_speed.py). Prompts are
turns of conversations about held-out SWE instances, which the model and its draft were trained for, and
reasoning tasks, which they were not. The main figure is the acceptance length; tokens per second need an
otherwise idle machine.

    python scripts/bench/drafters.py --json OUT [--batch 8] [--repeats 3] [--gamma 3] [--draft DIR]

--draft: directory of an EAGLE-3 draft for the same model, as `+recipe=eagle3` leaves it in RUN/draft.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from harness import bench_parser, load_average, paired_ratio, write_result  # noqa: E402
from rollout_speed import (  # noqa: E402
    TURN_TOKENS,
    EngineArm,
    Workload,
    decoding_provenance,
    measure,
    summary,
    swe_workloads,
)

from rlpipe.config.env import EnvConfig, EnvName  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.envs import make_suite  # noqa: E402
from rlpipe.rollout.chat import ChatFormat  # noqa: E402


def reasoning(model: Path) -> Workload:
    """Return the first turns of held-out reasoning tasks."""
    chat, suite = ChatFormat.from_pretrained(model), make_suite(EnvConfig(name=EnvName.REASONING))
    prompts = [chat.initial(suite.episode(i).messages()) for i in suite.instance_ids("held_out")[:64]]
    return Workload([[prompt] for prompt in prompts], chat.stop_token_ids, TURN_TOKENS)


def spec_of(drafter: str, gamma: int, draft: Path | None = None) -> SpecConfig:
    """Return the settings for decoding with a drafter, or with `none`. draft: directory of an EAGLE-3 draft.

    At temperature 0 every rule accepts the same drafts as greedy verification.
    """
    if drafter == "none":
        return SpecConfig(mode="none")
    mode = "target_only" if drafter == "suffix" else "rejection"
    path = str(draft) if drafter == "eagle3" else ""
    return SpecConfig(mode=mode, gamma=gamma, drafter=drafter, draft_path=path)


def workloads(model: Path, conversations: int) -> dict[str, Workload]:
    """Return in- and out-of-domain prompts, greedy and sampled. conversations: how many of each."""
    domains = {"swe turns": swe_workloads(model)["turns"], "reasoning": reasoning(model)}
    return {
        f"{domain}, T = {temperature:g}": replace(
            work, conversations=work.conversations[:conversations], temperature=temperature
        )
        for domain, work in domains.items()
        for temperature in (0.0, 1.0)
    }


def main() -> None:
    """Run all arms and write one JSON."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--shipped", type=Path, default=resolve("shipped:models/tiny"))
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 draft, for a further arm")
    args = parser.parse_args()
    load, results = load_average(), {}
    drafters = ["none", "mtp", "suffix", *(["eagle3"] if args.draft else [])]
    arms = {
        name: partial(
            EngineArm,
            args.shipped,
            spec_of(name, args.gamma, args.draft),
            args.batch,
            args.threads,
            "float32",
        )
        for name in drafters
    }
    for cell, work in workloads(args.shipped, args.conversations).items():
        speeds, counts = measure(arms, work, args.batch, args.threads, args.repeats)
        rows: dict[str, Any] = {arm: summary(speeds[arm], counts[arm]) for arm in arms}
        for arm in arms.keys() - {"none"}:
            rows[arm]["speed against none"] = paired_ratio(speeds[arm], speeds["none"])
        results[cell] = rows
        print(f"\n{cell}", flush=True)
        for arm, row in rows.items():
            print(f"  {arm:8s} {row}", flush=True)
    report = {
        "question": "acceptance length and speed by drafter",
        **decoding_provenance(args, load),
        "results": results,
    }
    write_result(args.json, report)


if __name__ == "__main__":
    main()
