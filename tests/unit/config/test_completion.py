"""A real bash completes what the script says."""

import subprocess

import pytest

from rlpipe import cli
from rlpipe.config.completion import script

pytestmark = pytest.mark.unit
COMMANDS = ["run", "report", "runs"]


def completed(line: str) -> list[str]:
    given = script("bash", COMMANDS) + f"COMP_LINE={line!r} COMP_POINT={len(line)}\n_rlpipe\n"
    done = subprocess.run(
        ["bash", "--norc"], input=given + 'printf "%s\\n" "${COMPREPLY[@]}"', capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rlpipe re", ["report"]),
        ("rlpipe run spec.gam", ["spec.gamma="]),
        ("rlpipe run +recipe=swe", ["swe_rl"]),
        ("rlpipe run +recipe=swe_rl spec.mode=re", ["rejection"]),
        ("rlpipe check spec.adaptive=", ["true", "false"]),
        ("rlpipe run no_such", []),
    ],
)
def test_bash_completes(line, words):
    assert completed(line) == words


def test_the_command_prints_it_and_refuses_other_shells(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
    assert cli.main(["completion", "csh"]) == 2
    assert "bash, zsh" in capsys.readouterr().err
