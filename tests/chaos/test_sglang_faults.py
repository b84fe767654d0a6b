"""A real SGLang server is killed, hangs, or dies of an update: the next one serves the right version.

The first three disturb the shared engine, whose server is replaced each time; the last, the main job.
"""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest
import torch

from rlpipe.config.sglang import SglangConfig
from rlpipe.models.checkpoint import read_config, read_weights, write_checkpoint
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.broadcasts import Trainer
from tests.helpers.cli import ROOT, SMALL, marked_processes, prompt_states, start
from tests.helpers.engines import recomputed, request, transformers_logits
from tests.helpers.killed_runs import Held
from tests.helpers.sglang import configured, lossy, needs_sglang, perturbed

pytestmark = pytest.mark.chaos
TINY = ROOT / "models" / "tiny"
PROMPT = [5, 6, 7]
TOKENS = 200


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Versions 1 and 2: their weights, and a directory for each."""
    folder, shipped = tmp_path_factory.mktemp("versions"), read_weights(TINY)
    found = {}
    for version in (1, 2):
        found[version] = perturbed(shipped, 0.03, seed=version), folder / str(version)
        write_checkpoint(found[version][1], found[version][0], like=TINY)
    return found


@pytest.fixture
def disturbed(sglang, versions):
    """The shared server at version 1, watched closely."""
    with configured(sglang, health_timeout=5.0, bucket_mb=1):
        sglang.update_weights(versions[1][0], 1)
        yield sglang


def kill_server(engine):
    """kill -9 of SGLang's main process; the group's leader is ours."""
    for child in psutil.Process(engine.server.pid).children():
        child.kill()


def stop_server(engine):
    """SIGSTOP of all its processes: they live, and say nothing."""
    os.killpg(engine.server.pid, signal.SIGSTOP)


def turns_through(engine, fault):
    """Results of turns that run when `fault` happens, which may take long."""

    async def play():
        asked = [request(f"t{n}", PROMPT, max_new_tokens=TOKENS) for n in range(8)]
        turns = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        async with asyncio.timeout(30):
            while engine.stats().running < len(asked):
                await asyncio.sleep(0.05)
        assert not any(turn.done() for turn in turns)  # in the middle of generation
        await asyncio.to_thread(fault, engine)
        return await asyncio.gather(*turns)

    return asyncio.run(play())


def check_served(engine, results, version, held):
    """Whole turns, each token of `version` and with its model's logprob, drafted by its draft."""
    weights, model = held
    assert [result.versions.tolist() for result in results] == [[version] * TOKENS] * 8
    logits = transformers_logits(model)
    for result in results[:3]:
        logprobs, _ = recomputed(logits, PROMPT, result)
        assert (logprobs - torch.tensor(result.logprobs)).abs().max() < 1e-3
    assert all(result.spec.verify_steps for result in results)
    assert engine.stats().policy_version == version and engine.check_weights(weights).passed


@pytest.mark.parametrize(("fault", "kind"), [(kill_server, "server_died"), (stop_server, "server_hung")])
def test_turns_of_a_server_that_is_lost_are_played_by_the_next(disturbed, versions, fault, kind):
    results = turns_through(disturbed, fault)
    assert [kind for kind, _ in disturbed.events] == [kind, "server_restarted"]
    check_served(disturbed, results, 1, versions[1])


@pytest.mark.parametrize("way", ["worker", "trainer"])
def test_a_server_killed_during_an_update_is_replaced_by_one_on_the_new_weights(disturbed, versions, way):
    """trainer: the weights are on their way from there, by broadcast."""
    pieces, new = [], versions[2][0]

    def killing(path, body):
        pieces.append(path)
        if len(pieces) == 3:
            kill_server(disturbed)
        return body

    def update(engine):
        lossy(engine, killing)  # of this server's client; the next one has its own
        if way == "worker":
            engine.update_weights(new, 2)
            return
        with configured(engine, weight_transfer="collective"):
            trainer = Trainer.of(engine._config, read_config(TINY))
            offer = trainer.offer(new, 2, [engine.membership().server])
            engine.receive_weights(offer)
            assert "broke off" in asyncio.run(offer.result()).failure
            trainer.close()

    results = turns_through(disturbed, update)
    assert len(pieces) == 3

    # The connection of the request and that of the broadcast break at once. If the broadcast's is noticed
    # first, the failed broadcast is told before the server's death.
    kinds = [kind for kind, _ in disturbed.events]
    assert kinds[-2:] == ["server_died", "server_restarted"]
    assert kinds[:-2] in ([], ["broadcast_failed"] if way == "trainer" else [])
    check_served(disturbed, results, 2, versions[2])


def test_a_run_goes_on_and_trains_every_prompt_once_when_its_server_is_lost(tmp_path):
    """kill -9, then a hang, of the server below a worker that lives."""
    needs_sglang()
    python = find_environment(SglangConfig(), on_gpu=False).python
    process, marker = start(
        "+recipe=swe_rl",
        "rollout=sglang",
        *SMALL,
        "run.steps=7",
        "val.every=0",
        "rollout.device=cpu",
        f"rollout.sglang.python={python}",
        "rollout.sglang.weight_transfer=collective",  # the trainer has the weights of the next server
        "rollout.sglang.health_timeout=5",
        "rollout.sglang.update_timeout=30",  # a server that hangs while it takes weights is found after this
        cwd=tmp_path,
        lines=2,
        timeout=240,
    )
    events = tmp_path / "out" / "events.jsonl"

    def told(kind):
        return [e for e in map(json.loads, events.read_text().splitlines()) if e["kind"] == kind]

    lost, held = [], []
    for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        deadline = time.monotonic() + 240
        while len(told("server_restarted")) < restarts:
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
            time.sleep(0.1)
        servers = [p for p in marked_processes(marker) if "sglang.launch_server" in " ".join(p.cmdline())]
        assert servers
        lost += servers
        held.append(Held(server.pid for server in servers))
        for server in servers:
            server.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert not any(server.is_running() for server in lost) and not any(one.left() for one in held)
    faults = [*told("server_died"), *told("server_hung"), *told("rollout_worker_died")]
    assert [fault["kind"] for fault in faults] == ["server_died", "server_hung"], faults
    restarted = told("server_restarted")
    assert [e["restarts"] for e in restarted] == [1, 2]
    assert prompt_states(tmp_path / "out") == {"trained": 14}
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["training/global_step"] for r in records] == list(range(8))
    assert max(r.get("training/off_policy/trajectory_staleness/max", 0) for r in records) <= 1
    assert records[-1]["rollout/server/0/restarts"] == 2
    assert all(r["training/global_step"] - r["weights/version"] in (0, 1) for r in records[1:])
    assert records[-1]["weights/version"] == 7
