"""The main job with real SGLang servers, and what is said at launch when one cannot run."""

import json
import socket

import pytest

from rlpipe.config.sglang import SglangConfig
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import SMALL, prompt_states, run
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration
JOB = ["+recipe=swe_rl", "rollout=sglang", "run.dir=out", *SMALL, "run.steps=3", "val.every=3"]


@pytest.fixture
def python():
    """rollout.sglang.python as this machine has it."""
    needs_sglang()
    return f"rollout.sglang.python={find_environment(SglangConfig(), on_gpu=False).python}"


def test_three_steps_with_a_real_server_and_rejection_sampling(tmp_path, python):
    result = run(*JOB, python, "rollout.device=cpu", cwd=tmp_path, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/global_step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record["critic/rewards/mean"] is not None
        assert 0.3 < record["spec/acceptance_rate"] <= 1 and record["spec/gamma"] == 3
        assert record["weights/version"] == record["training/global_step"]
        assert record["weights/canary_failures"] == 0
        assert record["training/off_policy/trajectory_staleness/max"] <= 1
    if records[1]["actor/grad_norm"]:
        assert records[1]["training/rollout_probs_diff_max"] < 1e-3
    assert prompt_states(tmp_path / "out") == {"trained": 6}
    (log,) = (tmp_path / "out" / "logs").glob("sglang-*.log")
    assert "speculative_use_rejection_sampling=True" in log.read_text().replace("': ", "=")


def refused(tmp_path, *overrides):
    result = run(*JOB, "cluster=inline", "rollout.device=cpu", *overrides, cwd=tmp_path, timeout=60)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr


def test_a_wrong_interpreter_is_said_at_launch(tmp_path):
    message = refused(tmp_path, "rollout.sglang.python=/no/such/python")
    assert "'/no/such/python'" in message and "scripts/install_sglang" in message


def test_a_taken_port_is_said_at_launch(tmp_path, python):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(tmp_path, python, f"rollout.sglang.port={port}")
    assert f"rollout.sglang.port={port}" in message and "rollout.sglang.port=0" in message
