"""Threads of torch sleep while they wait, unless the user chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlpipe.config.openmp import wait_passively

pytestmark = pytest.mark.unit

ENTRIES = {
    "command": "from rlpipe.cli.main import main; main(['--version'])",
    "python API": "import rlpipe; rlpipe.Config",
}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_choice_of_the_user_stays(name):
    variables = {name: "7"}
    wait_passively(variables)
    assert variables == {name: "7"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_policy_is_set_before_torch_reads_it(entry):
    report = "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    variables = {name: value for name, value in os.environ.items() if name not in chosen}

    done = subprocess.run(
        [sys.executable, "-c", f"{ENTRIES[entry]}\n{report}"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.splitlines()[-1] == "PASSIVE False"
