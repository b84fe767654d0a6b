"""The command `rlpipe`, and the table of its subcommands.

A subcommand is imported when it is called, so that `rlpipe help` and `rlpipe runs` load no heavy library.
`python -m rlpipe` is the same command, for shells without the script on PATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlpipe.config.openmp import spin_briefly


@dataclass(slots=True, kw_only=True, frozen=True)
class Command:
    """A subcommand. arguments: text of its usage line. main: called with the arguments after its name."""

    name: str
    arguments: str
    summary: str
    main: Callable[[Sequence[str]], int]


def run(arguments: Sequence[str]) -> int:
    """Run a recipe; returns the exit status."""
    from rlpipe.cli.run import main

    return main(arguments)


def check(arguments: Sequence[str]) -> int:
    """Check a run without starting it; returns the exit status."""
    from rlpipe.cli.check import main

    return main(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Check this machine; returns the exit status."""
    from rlpipe.cli.doctor import main

    return main(arguments)


def report(arguments: Sequence[str]) -> int:
    """Write or serve the HTML report; returns the exit status."""
    from rlpipe.cli.report import main

    return main(arguments)


def runs(arguments: Sequence[str]) -> int:
    """Print the table of runs; returns the exit status."""
    from rlpipe.cli.runs import main

    return main(arguments)


def analyse(arguments: Sequence[str]) -> int:
    """Print the summary of runs; returns the exit status."""
    from rlpipe.diagnosis.analysis import main

    return main(arguments)


def pool(arguments: Sequence[str]) -> int:
    """Add or drain rollout workers of a running job; returns the exit status."""
    from rlpipe.cli.pool import main

    return main(arguments)


def ledger(arguments: Sequence[str]) -> int:
    """Print and check the ledger of a run; returns the exit status."""
    from rlpipe.loop.ledger import main

    return main(arguments)


def workspace(arguments: Sequence[str]) -> int:
    """Make a W&B workspace of runs; returns the exit status."""
    from rlpipe.report.workspace import main

    return main(arguments)


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face directory; returns the exit status."""
    from rlpipe.cli.export import main

    return main(arguments)


def draft_vocab(arguments: Sequence[str]) -> int:
    """Choose the draft vocabulary of an MTP layer; returns the exit status."""
    from rlpipe.cli.draft_vocab import main

    return main(arguments)


def fetch(arguments: Sequence[str]) -> int:
    """Obtain a released model, or convert a GGUF file; returns the exit status."""
    from rlpipe.cli.fetch import main

    return main(arguments)


def graft(arguments: Sequence[str]) -> int:
    """Add an MTP layer to a dense model; returns the exit status."""
    from rlpipe.cli.graft import main

    return main(arguments)


def certify(arguments: Sequence[str]) -> int:
    """Test whether a server's tokens have its model's distribution; returns the exit status."""
    from rlpipe.cli.certify import main

    return main(arguments)


SETTINGS = "+recipe=NAME [KEY=VALUE ...]"
COMMANDS = (
    Command(name="run", arguments=SETTINGS, summary="run a recipe, or continue a run", main=run),
    Command(name="check", arguments=SETTINGS, summary="validate a run without starting it", main=check),
    Command(
        name="doctor",
        arguments="[--json] [+recipe=NAME ...]",
        summary="check this machine, or whether a run fits it",
        main=doctor,
    ),
    Command(name="report", arguments="RUN ...", summary="HTML report of runs, or a live page", main=report),
    Command(name="runs", arguments="[DIR]", summary="table of the run directories below DIR", main=runs),
    Command(
        name="analyse",
        arguments="RUN ... [--json]",
        summary="summary of a run in words, or all acceptance figures",
        main=analyse,
    ),
    Command(
        name="pool",
        arguments="list|add|drain RUN ...",
        summary="add or drain rollout workers of a running job",
        main=pool,
    ),
    Command(
        name="ledger", arguments="RUN", summary="what became of every prompt and trajectory", main=ledger
    ),
    Command(
        name="workspace", arguments="RUN ...", summary="W&B workspace and report of runs", main=workspace
    ),
    Command(
        name="export",
        arguments="RUN OUT [--step N]",
        summary="write a checkpoint as a Hugging Face directory",
        main=export,
    ),
    Command(
        name="draft-vocab",
        arguments="MODEL DATA ...",
        summary="choose the frequent tokens that an MTP layer drafts",
        main=draft_vocab,
    ),
    Command(
        name="fetch",
        arguments="NAME|GGUF [--out DIR]",
        summary="obtain a released model, or convert a GGUF file",
        main=fetch,
    ),
    Command(name="graft", arguments="MODEL OUT", summary="give a dense model an MTP layer", main=graft),
    Command(
        name="certify",
        arguments="URL --model PATH",
        summary="whether a server's tokens have its model's distribution",
        main=certify,
    ),
)


def usage() -> str:
    """Return the help of `rlpipe`: one line per subcommand."""
    heads = [f"{command.name} {command.arguments}" for command in COMMANDS]
    width = max(map(len, heads))
    lines = [f"  {head:<{width}}  {command.summary}" for head, command in zip(heads, COMMANDS, strict=True)]

    return "\n".join(
        [
            "usage: rlpipe COMMAND ...",
            "",
            "Reinforcement learning for language models with speculative rollouts.",
            "",
            *lines,
            "",
            "`rlpipe COMMAND --help` describes one; `rlpipe --version` prints the version.",
        ]
    )


def version() -> str:
    """Return the version of the installed rlpipe."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("rlpipe")
    except PackageNotFoundError:
        return "unknown (rlpipe is not installed here)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; return the exit status."""
    spin_briefly()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]

    if not arguments or arguments[0] in ("help", "-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("--version", "version"):
        print(f"rlpipe {version()}")
        return 0

    by_name = {command.name: command for command in COMMANDS}
    if arguments[0] not in by_name:
        print(f"rlpipe: {unknown_command(arguments[0], list(by_name))}", file=sys.stderr)
        return 2

    try:
        return by_name[arguments[0]].main(arguments[1:])
    # The reader of the output, such as `head`, has closed the pipe; a flush at exit must not fail again.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def unknown_command(name: str, known: Sequence[str]) -> str:
    """Return the error message for a first word that is not a subcommand."""
    from rlpipe.config.limits import did_you_mean

    # A setting instead of a subcommand: most likely, `run` is missing.
    if "=" in name:
        return f"{name!r} is a setting, and the command comes first. Did you mean `rlpipe run {name} ...`?"
    return f"unknown command {name!r}.{did_you_mean(name, known)} Choose one of {', '.join(known)}."


if __name__ == "__main__":
    sys.exit(main())
