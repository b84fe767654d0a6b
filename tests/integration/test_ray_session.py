"""Ray started for one run: who can reach it, what it leaves, what its actors import. Real Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import environment

pytestmark = pytest.mark.integration

SCRIPT = """
import json, os, sys
from contextlib import suppress
import psutil
from rlpipe.actors.ray_session import RaySession
from rlpipe.config.run import Config

session = RaySession(Config(), sys.exit)
import ray

@ray.remote
def look():
    import my_suite
    return my_suite.__file__, os.getpid()

module, worker = ray.get(look.remote())
mine = psutil.Process()
processes = [mine, *mine.children(recursive=True)]
listening, in_our_group = [], []
for process in processes:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # Ray ends workers that it does not need
        sockets = process.net_connections("inet")
        listening += [c.laddr.ip for c in sockets if c.status == "LISTEN"]
        if process != mine and os.getpgid(process.pid) == os.getpgrp():
            in_our_group.append(process.name())
folder = session._folder
told = {
    "module": module,
    "listening": listening,
    "worker": worker in {p.pid for p in processes},
    "in_our_group": in_our_group,
    "mode": oct(folder.stat().st_mode & 0o777),
    "token": os.environ["RAY_AUTH_MODE"],
}
if sys.argv[1:] == ["at_once"]:
    session.stop(at_once=True)
else:
    session.stop()
told["left"] = []
for process in processes[1:]:
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != "zombie":
            told["left"].append(process.name())
told["folder"] = folder.exists()
print(json.dumps(told), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["at_once", "in_order"])
def test_ray_listens_on_loopback_asks_for_a_token_and_leaves_nothing(tmp_path, how):
    (tmp_path / "my_suite.py").write_text("")
    user = environment()
    user["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=user, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["worker"] and told["listening"]
    assert {ip.removeprefix("::ffff:") for ip in told["listening"]} == {"127.0.0.1"}
    assert told["mode"] == "0o700" and told["token"] == "token"
    assert told["in_our_group"] == [], "a signal to the driver's group would end Ray before the driver"
    assert told["left"] == [] and not told["folder"]
    assert Path(told["module"]) == tmp_path / "my_suite.py", "what the user put on PYTHONPATH is found"


def test_code_of_the_user_that_imports_ray_finds_it_closed(tmp_path):
    """The suite is imported before Ray starts; a run that began with an open Ray is refused."""
    (tmp_path / "my_suite.py").write_text(
        "import os, ray\nfrom rlpipe.envs.swe.suite import SweSuite\n"
        "print('seen', os.environ['RAY_AUTH_MODE'], len(os.environ['RAY_AUTH_TOKEN']), flush=True)\n"
        "def make(config, seed):\n    raise ValueError('enough')\n"
    )
    user = environment()
    user["PYTHONPATH"] += f":{tmp_path}"
    arguments = ["+recipe=swe_rl", "env.suite=my_suite:make", f"run.dir={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "rlpipe.run", *arguments]
    done = subprocess.run(command, env=user, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "seen token 64" in done.stdout and "enough" in done.stderr, done.stdout + done.stderr


def test_ray_that_was_imported_open_is_refused():
    script = (
        "import ray\nfrom rlpipe.actors.ray_session import close_ray\nfrom rlpipe.config.run import Config\n"
        "close_ray(Config())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before" in done.stderr
