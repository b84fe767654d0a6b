"""The main job with two real SGLang servers, and what is said at launch when one cannot run."""

import json
import re
import socket

import pytest

from rlpipe.config.sglang import SglangConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import ROOT, SMALL, prompt_states, run
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration
JOB = ["+recipe=swe_rl", "rollout=sglang", "run.dir=out", *SMALL, "run.steps=3", "val.every=3"]


@pytest.fixture
def python():
    """rollout.sglang.python as this machine has it."""
    needs_sglang()
    return f"rollout.sglang.python={find_environment(SglangConfig(), on_gpu=False).python}"


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """The directory of three steps with two servers; each writes down what it was asked."""
    needs_sglang()
    folder = tmp_path_factory.mktemp("two_servers")
    written = '["--log-requests","--log-requests-level","3","--log-requests-format","json"]'
    result = run(
        *JOB,
        f"rollout.sglang.python={find_environment(SglangConfig(), on_gpu=False).python}",
        "rollout.device=cpu",
        "rollout.workers=2",
        "rollout.sglang.weight_transfer=collective",
        "rollout.sglang.bucket_mb=1",
        f"rollout.sglang.extra_arguments={written}",
        "metrics.rollouts_per_step=8",
        cwd=folder,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "out"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_three_steps_with_real_servers_and_rejection_sampling(two_servers):
    records = lines(two_servers / "metrics.jsonl")
    assert [record["training/global_step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record["critic/rewards/mean"] is not None
        assert 0.3 < record["spec/acceptance_rate"] <= 1
        # The newest version may be on its way while its step is recorded; the last one is waited for.
        assert record["training/global_step"] - record["weights/version"] in (0, 1)
        assert record["training/off_policy/trajectory_staleness/max"] <= 1
    assert records[-1]["weights/version"] == 3
    # a step whose trajectories were all there before it began decodes nothing: it has no gamma
    assert {record["spec/gamma"] for record in records[1:] if "spec/gamma" in record} == {3}
    if "actor/grad_norm" in records[1]:  # a batch without signal leaves the policy untouched
        assert records[1]["training/rollout_probs_diff_max"] < 1e-3
    assert prompt_states(two_servers) == {"trained": 6}  # the ledger is complete
    for log in server_logs(two_servers):
        assert "speculative_use_rejection_sampling=True" in log.read_text().replace("': ", "=")


def server_logs(directory):
    first, second = (directory / "logs").glob("sglang-*.log")
    return first, second


def test_two_servers_are_given_each_version_by_one_broadcast(two_servers):
    """One group of the trainer and both, for all three versions; the worst of both canaries is reported."""
    joined = [
        re.findall(r"init custom process group: .* rank=(\d), world_size=(\d), group_name=([\w-]+)", text)
        for text in (log.read_text() for log in server_logs(two_servers))
    ]
    assert sorted(one[:2] for (one,) in joined) == [("1", "3"), ("2", "3")]
    assert len({name for ((_, _, name),) in joined}) == 1
    records = lines(two_servers / "metrics.jsonl")[1:]
    sent = sum(w.nbytes for name, w in read_weights(ROOT / "models" / "tiny").items())
    for record in records[1:]:  # the first version arrives during the second step
        assert record["weights/bytes"] == sent and record["weights/canary_failures"] == 0
        assert record["weights/sync_seconds"] > 0 and record["timing_s/update_weights"] > 0
    faults = {"broadcast_failed", "canary_failed", "server_died", "rollout_worker_died"}
    assert not faults & {event["kind"] for event in lines(two_servers / "events.jsonl")}


def test_a_conversation_stays_on_its_server(two_servers):
    """Each prompt of a trajectory, which holds its turns so far, was asked of one server only."""
    asked = []
    for log in server_logs(two_servers):
        told = [
            line[line.index("{") :] for line in log.read_text().splitlines() if '"request.finished"' in line
        ]
        asked.append({tuple(json.loads(line)["obj"]["input_ids"]) for line in told})
    played = [one for file in (two_servers / "rollouts").glob("*.jsonl") for one in lines(file)]
    used = []
    for trajectory in played:
        prompts = turn_prompts(trajectory)
        (server,) = [n for n in (0, 1) if prompts[0] in asked[n]]
        assert all(prompt in asked[server] and prompt not in asked[1 - server] for prompt in prompts)
        used += [server] * (len(prompts) > 1)
    # which server has which conversation depends on their speed; both were asked, and some had several turns
    assert len(played) >= 6 and used and all(asked)


def turn_prompts(trajectory):
    """The tokens before each turn that was sampled; policy_versions: (version, how many), -1 is context."""
    prompts, place, before = [], 0, None
    for version, count in trajectory["policy_versions"]:
        if version >= 0 and before == -1:
            prompts.append(tuple(trajectory["tokens"][:place]))
        place, before = place + count, version
    return prompts


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
