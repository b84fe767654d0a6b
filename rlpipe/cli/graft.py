"""`rlpipe graft MODEL OUT`: writes a copy of a dense model with an additional MTP layer for drafting."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Graft an MTP layer and print its acceptance; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe graft",
        description="Write a copy of a dense model (llama, mistral, qwen2, qwen3) with an MTP layer: its "
        "last decoder layer after a projection fitted by least squares on sequences of the model. "
        "`rlpipe run +recipe=mtp_adapt model.path=OUT` trains it further.",
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, or the name of a fetched model")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    parser.add_argument(
        "--rollouts", type=Path, metavar="FILE", help="fit on these: adapt.rollouts, or lists of token ids"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="sample answers to these, one a line (the model's own)"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="tokens to sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    options = parser.parse_args(arguments)

    from rlpipe.config.paths import resolve_model
    from rlpipe.convert.graft import graft

    started = time.monotonic()
    try:
        result = graft(
            resolve_model(options.model, "MODEL"),
            options.out.expanduser().resolve(),
            rollouts=options.rollouts,
            prompts=_read_prompts(options.prompts) if options.prompts else None,
            tokens=options.tokens,
            seed=options.seed,
        )
    except (ValueError, OSError) as error:
        print(f"rlpipe graft: {error}", file=sys.stderr)
        return 2

    print(result.table())
    print(f"ready in {time.monotonic() - started:.0f} s: model.path={options.out}")
    return 0


def _read_prompts(file: Path) -> list[str]:
    """Return the non-empty lines of a file. Raises ValueError if there are none."""
    prompts = [line for line in file.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {file} has no line: write a message of a user on each.")
    return prompts
