"""`python -m rlpipe.warmstart --run-dir DIR`: makes the tiny model with the default settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.config.warmstart import WarmstartConfig
from rlpipe.warmstart.train import run_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the tiny model; run again, it continues.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny_model"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    args = parser.parse_args()
    print(run_tiny_model(WarmstartConfig(seed=args.seed, threads=args.threads), args.run_dir))


if __name__ == "__main__":
    main()
