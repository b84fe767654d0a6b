"""Every mistake of the table is refused before anything starts: status, what, value, remedy.

A process that has imported what a command would is forked for each mistake: the child is that command.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.cli import environment
from tests.helpers.mistakes import ENVIRONMENT, mistakes
from tests.helpers.processes import in_a_process

pytestmark = pytest.mark.integration
STARTED = 99
MISTAKES = list(mistakes())


def play(folder, given, module="rlpipe.run"):
    """Exit status and output of a command in a folder; one that would start a run ends with STARTED."""

    def command():
        out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        status = _command(folder, given, module)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    status = in_a_process(command)
    said = (folder / "said").read_text()
    (folder / "said").unlink()
    return status, said


def _command(folder, given, module):
    import rlpipe.launch

    rlpipe.launch.run_task = lambda *_: STARTED
    os.chdir(folder)
    sys.argv = ["rlpipe", *given]
    sys.path[:] = [path for path in sys.path if path]
    os.environ.pop("WANDB_API_KEY", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["NETRC"] = str(folder / "netrc")
    try:
        return sys.modules[module].main() or 0
    except SystemExit as left:
        return left.code or 0


def files(folder):
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_the_table_has_no_name_twice_and_at_least_150_mistakes():
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names) >= 150


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_refused_before_anything_starts(tmp_path, mistake):
    mistake.files(tmp_path)
    before = files(tmp_path)
    status, said = play(tmp_path, mistake.given)
    assert status == mistake.status, said
    assert "Traceback" not in said, said
    assert mistake.lacks(said) == [], said
    assert files(tmp_path) == before, "it left files behind"


@pytest.mark.parametrize(
    "reward", ["numpy.float32(0.5)", "torch.tensor(0.5)", "True", "1", "numpy.int64(1)", "numpy.bool_(True)"]
)
def test_numbers_of_other_libraries_are_accepted(tmp_path, reward):
    (tmp_path / "my_env.py").write_text(ENVIRONMENT.replace("reward=1.0", f"reward={reward}"))
    status, said = play(tmp_path, ["+recipe=reasoning_rl", "env.suite=my_env:make_suite"], "rlpipe.check")
    assert status == 0 and "16 steps with random answers" in said, said
    assert not (tmp_path / "runs").exists()


def test_a_sound_environment_starts(tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    given = ["+recipe=reasoning_rl", "env.suite=my_env:make_suite"]
    assert play(tmp_path, given)[0] == STARTED


def test_ray_is_told_to_ask_for_a_token_before_code_of_the_users_is_imported(tmp_path):
    told = "import json, os; open('told', 'w').write(json.dumps(os.environ.get('RAY_AUTH_MODE')))\n"
    (tmp_path / "my_env.py").write_text(told + ENVIRONMENT)
    given = [sys.executable, "-m", "rlpipe.check", "+recipe=reasoning_rl", "env.suite=my_env:make_suite"]
    done = subprocess.run(given, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "told").read_text()) == "token"
