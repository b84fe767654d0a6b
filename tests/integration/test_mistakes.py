"""Every mistake of the table is refused before anything starts: status, what, value, remedy.

A process that has imported what a command would is forked for each mistake: the child is that command.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from rlpipe.loop.checkpoints import _seal
from tests.helpers.cli import ROOT, environment
from tests.helpers.mistakes import ENVIRONMENT, mistakes
from tests.helpers.processes import in_a_process
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
STARTED = 99
MISTAKES = list(mistakes())


def play(folder, given, module="rlpipe.cli.run"):
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
    # The addresses of objects differ between processes.
    said = re.sub(r"0x[0-9a-f]+", "0x", (folder / "said").read_text())
    (folder / "said").unlink()
    return status, said


def _command(folder, given, module):
    import rlpipe.launch

    rlpipe.launch.run_task = lambda *_: STARTED
    os.chdir(folder)
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing answers there
    sys.argv = ["rlpipe", *given]
    if module == "rlpipe.cli.doctor":  # all but what it says of the machine
        findings = list(sys.modules[module].check_run(given))
        sys.modules[module].show(findings)
        return int(any(finding.level == "missing" for finding in findings))
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
    status, said = play(tmp_path, ["+recipe=reasoning_rl", "env.suite=my_env:make_suite"], "rlpipe.cli.check")
    assert status == 0 and "16 steps with random answers" in said, said
    assert not (tmp_path / "runs").exists()


def test_a_sound_environment_starts(tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    given = ["+recipe=reasoning_rl", "env.suite=my_env:make_suite"]
    assert play(tmp_path, given)[0] == STARTED


def test_ray_is_told_to_ask_for_a_token_before_code_of_the_users_is_imported(tmp_path):
    told = "import json, os; open('told', 'w').write(json.dumps(os.environ.get('RAY_AUTH_MODE')))\n"
    (tmp_path / "my_env.py").write_text(told + ENVIRONMENT)
    given = [sys.executable, "-m", "rlpipe", "check", "+recipe=reasoning_rl", "env.suite=my_env:make_suite"]
    done = subprocess.run(given, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "told").read_text()) == "token"


def another_run(folder):
    """A run directory at step 1 with other settings, and a dump of another run."""
    checkpoint = folder / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "hf").write_text("")
    _seal(checkpoint, {"step": 1})
    (folder / "run" / "config.yaml").write_text("trainer:\n  lr: 0.5\n")
    (folder / "dump").mkdir()
    (folder / "dump" / "dump.json").write_text('{"format": 1}')


def gated_delta_nets(folder):
    vocab = json.loads((ROOT / "models" / "tiny" / "config.json").read_text())["vocab_size"]
    for family in ("qwen3_next", "qwen3_5"):
        write_random_checkpoint(folder / family, family, vocab=vocab)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(ROOT / "models" / "tiny" / name, folder / family)
        for template in (ROOT / "models" / "tiny").glob("*.jinja"):
            shutil.copy(template, folder / family)


SGLANG_HERE = f"rollout.sglang.python={sys.executable}"  # an interpreter without SGLang
LAUNCHES = {  # settings -> whether a launch without a GPU goes on to start processes
    "+recipe=swe_rl": True,
    "+recipe=swe_rl cluster=inline trainer.lora.rank=8": True,
    "+recipe=swe_rl run.dump=new run.half=rollout": True,
    "+recipe=mtp_adapt": True,
    "+recipe=mtp_adapt adapt.in_domain=[swe.nowhere]": False,
    "+recipe=mtp_adapt adapt.out_of_domain=[nowhere.jsonl]": False,
    f"+recipe=mtp_adapt rollout=sglang {SGLANG_HERE}": False,
    "+recipe=swe_rl run.dir=run": False,
    "+recipe=swe_rl run.dir=run run.resume=anyway": True,
    "+recipe=swe_rl run.dump=dump": False,
    "+recipe=swe_rl run.half=train run.dump=nowhere": False,
    "+recipe=swe_rl val.instances=100000": False,
    "+recipe=swe_rl cluster=one_node": False,
    "+recipe=swe_rl cluster.share_gpus=true": False,
    "+recipe=swe_rl rollout.max_running=1000000": False,
    f"+recipe=swe_rl rollout=sglang {SGLANG_HERE}": False,
    "+recipe=swe_rl model.path=qwen3_next draft.train=off spec.mode=none": False,
    "+recipe=swe_rl model.path=qwen3_5 rollout=sglang": False,
    "+recipe=swe_rl spec.gama=3": False,
}


def agreement(folder, given):
    """Exit status of a launch, which `check` and `doctor` must foretell in its words, leaving no file."""
    before = files(folder)
    foretold = {module: play(folder, given, module) for module in ("rlpipe.cli.check", "rlpipe.cli.doctor")}
    assert files(folder) == before
    status, said = play(folder, given)
    refusal = said.strip().splitlines()[-1].removeprefix("rlpipe: ") if status != STARTED else ""
    for module, (verdict, words) in foretold.items():
        assert (verdict == 0) == (status == STARTED), f"{module}: {words}\nlaunch: {said}"
        assert refusal in words, f"{module}: {words}\nlaunch: {said}"
    return status


@pytest.mark.parametrize(("settings", "starts"), LAUNCHES.items())
def test_doctor_and_check_say_of_a_launch_what_the_launch_says(tmp_path, settings, starts):
    if "model.path" in settings:
        gated_delta_nets(tmp_path)
    another_run(tmp_path)
    assert agreement(tmp_path, settings.split()) == (STARTED if starts else 2)


@pytest.mark.parametrize(
    "mistake",
    [m for m in MISTAKES if not m.given[0].startswith("--")][::24],
    ids=lambda mistake: mistake.name,
)
def test_doctor_and_check_refuse_mistakes_as_the_launch_does(tmp_path, mistake):
    mistake.files(tmp_path)
    assert agreement(tmp_path, mistake.given) == mistake.status
