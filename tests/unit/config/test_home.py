"""A user without a writable home: libraries that write there on import work all the same."""

import os
import subprocess
import sys

import pytest

from tests.helpers.cli import environment

pytestmark = pytest.mark.unit
HOMELESS = "/proc/no-home"  # not even root can make it


def played(code, **variables):
    user = {k: v for k, v in environment().items() if not k.startswith("XDG")} | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=user, capture_output=True, text=True, timeout=120, check=False
    )


def test_without_a_home_the_sandbox_s_library_is_imported_with_a_temporary_one(tmp_path):
    code = "import minisweagent; print(minisweagent.global_config_dir)"
    broken = played(code, HOME=HOMELESS, TMPDIR=str(tmp_path), MSWEA_SILENT_STARTUP="1")
    assert broken.returncode and HOMELESS in broken.stderr, "what the library does by itself"

    works = played(f"import rlpipe.envs.sandbox, {code[7:]}", HOME=HOMELESS, TMPDIR=str(tmp_path))
    assert works.returncode == 0, works.stderr
    assert works.stdout.strip() == f"{tmp_path}/rlpipe-home-{os.getuid()}/mini-swe-agent"


def test_with_a_home_and_with_variables_of_the_user_nothing_changes(tmp_path):
    code = "from rlpipe.config.home import provide_home; import os; provide_home(); "
    code += "print(os.environ.get('MSWEA_GLOBAL_CONFIG_DIR'), os.environ.get('WANDB_CONFIG_DIR'))"
    assert played(code, HOME=str(tmp_path)).stdout.split() == ["None", "None"]
    given = played(code, HOME=HOMELESS, TMPDIR=str(tmp_path), WANDB_CONFIG_DIR="/mine").stdout.split()
    assert given == [f"{tmp_path}/rlpipe-home-{os.getuid()}/mini-swe-agent", "/mine"]
