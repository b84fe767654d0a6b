"""Does reinforcement learning on windows beat more supervised training, and which part of it matters?

    python recipes/ppow/study.py [--runs runs/ppow_study] [--arms ppow hard_ce kl e2e_tv ...] [--seeds 0 1 2]

Stages, files and figures are those of recipes/mtp_adapt/study.py: every arm starts from one warm-up, has its
own learning rate, and takes equal steps on the same rollouts for each seed. Acceptance is measured in real
generation. Arms:

    ppow                          the recipe
    ppow_no_dist                  without the reward for closeness (PPOW Table 4)
    ppow_no_adaw                  without windows chosen by score (Table 4)
    ppow_plain                    without both (Table 4)
    ppow_expected                 the expected reward instead of the verified one
    hard_ce, kl, e2e_tv           continued supervised training (PPOW Fig. 3)

All arms train on the model's own texts, at every position or in windows sampled from them, and in every arm a
step reads the same trajectories. The cost of a step differs: ppow also runs the backbone on its windows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mtp_adapt"))

import study as adaptation

EVEN = ["ppow.hard_start=0", "ppow.hard_end=0"]
ARMS = {
    "ppow": [],
    "ppow_no_dist": ["ppow.proximity=0"],
    "ppow_no_adaw": EVEN,
    "ppow_plain": ["ppow.proximity=0", *EVEN],
    "ppow_expected": ["ppow.expected_reward=true"],
    "hard_ce": ["draft.objective=hard_ce"],
    "kl": ["draft.objective=kl"],
    "e2e_tv": ["draft.objective=e2e_tv"],
}
BASELINES = ["ppow", "hard_ce"]


class PpowStudy(adaptation.Study):
    """The stages of `mtp_adapt`'s study, for these arms."""

    def train(
        self, start: Path, objective: str, lr: float, stage: str, seed: int, evaluate: Sequence[str]
    ) -> Path:
        """Train an arm from the warm-up."""
        overrides = [f"model.path={start / 'model'}", f"draft.lr={lr}", "draft.min_lr=0"]
        overrides += ARMS[objective]
        if objective.startswith("ppow"):
            overrides.append("draft.objective=ppow")
        name = f"{stage}/{objective}_lr{lr:g}_seed{seed}"
        return self.run(name, *overrides, seed=seed, steps=self.args.steps, evaluate=evaluate)


def main() -> None:
    """Run the requested arms."""
    parser = adaptation.arguments(__doc__, "runs/ppow_study")
    parser.set_defaults(lrs=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    adaptation.compare(PpowStudy(runs=args.runs.resolve(), args=args), args.arms, BASELINES)


if __name__ == "__main__":
    main()
