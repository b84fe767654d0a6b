"""Servers that die or hang are replaced on the newest weights; the server here is a fake process."""

import asyncio
import json
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.sglang import SglangEngine, arguments, engine, replica
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.environment import SglangEnvironment
from rlpipe.types import FinishReason
from rlpipe.weights import sync
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.offer import Member, Offer, Rendezvous
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.session import WeightSession
from rlpipe.weights.transports.shared import SharedMemoryTransport
from tests.helpers import fake_sglang
from tests.helpers.cli import ROOT
from tests.helpers.engines import generate, request

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"
SERVER = "rollout/server/{k}/"


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An engine in front of fake servers; `folder` tells them how to behave."""
    started = []

    def command(config, spec, path, *, port, on_gpu, version):
        started.append((str(path), version))
        return [fake_sglang.__file__, str(port), str(version), str(tmp_path)]

    async def check(self, client, expecting, *, draft, again=None):
        await expecting
        return CanaryReport()

    environment = SglangEnvironment(python=sys.executable, on_gpu=False)
    monkeypatch.setattr(engine, "check_launch", lambda *_: environment)
    monkeypatch.setattr(arguments, "command", command)
    monkeypatch.setattr(arguments, "check_server_info", lambda *_: None)
    monkeypatch.setattr(sync.WeightSync, "check", check)
    monkeypatch.setattr(replica, "_END_SECONDS", 0.2)
    monkeypatch.setattr(replica, "_POLL_SECONDS", 0.05)
    config = RolloutConfig(engine="sglang", device="cpu")
    config.sglang.health_timeout = 0.4
    events = []
    running = SglangEngine(
        config, SpecConfig(), TINY, log_dir=tmp_path, on_event=lambda kind, **f: events.append((kind, f))
    )
    running.folder, running.events, running.started, running.settings = tmp_path, events, started, config
    yield running
    for name in ("slow", "broken", "deaf"):
        (tmp_path / name).unlink(missing_ok=True)
    running.close()


def kinds(fake):
    return [kind for kind, _ in fake.events]


def kill(fake):
    """kill -9 of the server itself, not of what started it."""
    for child in psutil.Process(fake.server.pid).children():
        child.kill()


def hang(fake):
    os.killpg(fake.server.pid, signal.SIGSTOP)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("fault", "kind"), [(kill, "server_died"), (hang, "server_hung")])
def test_turns_of_a_lost_server_are_played_by_one_on_the_newest_weights(fake, weights, fault, kind):
    fake.update_weights(weights, 3)

    async def run():
        (fake.folder / "slow").touch()
        turns = [asyncio.ensure_future(fake.generate(request(n, [5], max_new_tokens=4))) for n in range(3)]
        await asyncio.to_thread(until, lambda: fake.stats().running == 3)
        fault(fake)
        await asyncio.to_thread(until, lambda: kind in kinds(fake))
        (fake.folder / "slow").unlink()
        return await asyncio.gather(*turns)

    results = asyncio.run(run())
    assert [r.versions.tolist() for r in results] == [[3] * 4] * 3
    assert kinds(fake) == [kind, "server_restarted"]
    (model, first), (folder, second) = fake.started
    assert (model, first, second) == (str(TINY), 0, 3) and folder != model
    stats = fake.stats()
    assert stats.policy_version == 3 and stats.generated_tokens == 12
    assert stats.server == {SERVER + "running": 0, SERVER + "waiting": 0, SERVER + "restarts": 1}


def test_an_idle_server_that_dies_is_replaced_before_anyone_asks(fake):
    kill(fake)
    until(lambda: "server_restarted" in kinds(fake))
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [0, 0]
    assert kinds(fake) == ["server_died", "server_restarted"]


def test_an_update_its_server_dies_of_is_complete_when_the_next_serves(fake, weights):
    (fake.folder / "deadly").touch()
    fake.update_weights(weights, 5)
    assert kinds(fake) == ["server_died", "server_restarted"]
    assert [version for _, version in fake.started] == [0, 5] and fake.stats().policy_version == 5
    assert not (fake.folder / "updates").exists()  # nothing was sent to the new one: it started so
    fake.update_weights(weights, 6)
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [6, 6]
    assert not list(fake.folder.glob("sglang-weights-*"))


def test_an_update_reports_who_verified_drafts_since_the_one_before(fake, weights):
    def judged(**steps):
        report = {"judged": {name.replace("_", " "): count for name, count in steps.items()}}
        (fake.folder / "info").write_text(json.dumps({"internal_states": [{"rlpipe_plugin": report}]}))

    judged(rlpipe=30, greedy=10)
    fake.update_weights(weights, 1)
    judged(rlpipe=40, greedy=10, rlpipe_without_kernels=30)
    fake.update_weights(weights, 2)
    sync = fake.stats().sync
    assert sync["spec/verified_without_kernels"] == 0.75 and sync["spec/verified_by_sglang"] == 0
    fake.update_weights(weights, 3)
    assert "spec/verified_without_kernels" not in fake.stats().sync, "no step was verified in between"


@pytest.fixture
def asked(fake, monkeypatch):
    """Waits until a question is asked that the server does not answer."""
    questions = []
    answers = SglangClient.answers

    async def noted(self, path, *timeout):
        questions.append(path)
        return await answers(self, path, *timeout)

    monkeypatch.setattr(SglangClient, "answers", noted)

    async def unanswered():
        (fake.folder / "deaf").touch()
        before = len(questions)
        await asyncio.to_thread(until, lambda: len(questions) > before)

    return unanswered


def test_a_server_that_hangs_behind_an_update_is_found_after_its_health_timeout(
    fake, weights, asked, monkeypatch
):
    """The question under way was asked while the server took weights, and might have lasted as long."""
    fake.settings.sglang.update_timeout = 1e6

    async def check(self, client, expecting, *, draft, again=None):
        if len(fake.started) == 1:
            await asked()
            hang(fake)
            (fake.folder / "deaf").unlink()
        return CanaryReport()

    monkeypatch.setattr(sync.WeightSync, "check", check)
    updating = threading.Thread(target=fake.update_weights, args=(weights, 3), daemon=True)
    server = fake.server
    updating.start()
    try:
        until(lambda: "server_restarted" in kinds(fake))
    finally:
        if server.is_running():  # not found: it would hold up the end of the test
            server.stop()
    updating.join()
    assert kinds(fake) == ["server_hung", "server_restarted"] and fake.stats().policy_version == 3


def test_a_server_that_loads_is_not_lost_for_a_question_from_before(fake, weights, asked, monkeypatch):
    fake.settings.sglang.health_timeout = 1.0
    question = None

    async def given():
        nonlocal question
        question = question or asyncio.ensure_future(asked())
        await question
        return weights

    async def check(self, client, expecting, *, draft, again=None):
        await asyncio.sleep(3.0)  # as long as large weights take
        (fake.folder / "deaf").unlink()
        return CanaryReport()

    monkeypatch.setattr(sync.WeightSync, "check", check)
    fake._call(fake._updates.bring(replica.DesiredWeights(weights=given, version=3)))
    assert not fake.events and fake.stats().policy_version == 3


def offered(fake, weights, version, members):
    """An offer to these servers; `weights` may be what its trainer raises."""

    async def kept():
        if isinstance(weights, Exception):
            raise weights
        return weights

    group = Rendezvous(host="", port=1, name="g", size=2, backend="gloo")
    buckets = [list(read_weights(TINY).items())]
    return Offer(
        version=version, group=group, members=members, ranks=1, buckets=buckets, result=kept, weights=kept
    )


def test_a_server_outside_the_group_is_given_the_weights_alone(fake, weights):
    fake.receive_weights(offered(fake, weights, 4, ["another"]))
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [4, 4]
    assert not fake.events and fake.membership() == Member(server=fake._replica.server_id, group="")


def test_a_server_whose_broadcast_broke_off_is_given_the_weights_alone(fake, weights, monkeypatch):
    async def broken(self, client, offer, member, *, flush):
        raise ServerError("the group broke off")

    monkeypatch.setattr(sync.WeightSync, "receive", broken)
    fake.receive_weights(offered(fake, weights, 4, [fake.membership().server]))
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [4, 4]
    assert fake.events == [("broadcast_failed", {"version": 4, "error": "the group broke off"})]


def test_a_server_that_dies_of_a_broadcast_is_replaced_by_one_on_the_weights(fake, weights, monkeypatch):
    async def dies(self, client, offer, member, *, flush):
        kill(fake)
        raise ServerUnreachable("it is gone")

    monkeypatch.setattr(sync.WeightSync, "receive", dies)
    before = fake.membership().server
    fake.receive_weights(offered(fake, weights, 4, [before]))
    assert kinds(fake) == ["server_died", "server_restarted"] and fake.membership().server != before
    assert [version for _, version in fake.started] == [0, 4] and fake.stats().policy_version == 4


def test_without_a_trainer_that_has_the_weights_the_next_server_serves_version_0(fake, weights):
    fake.receive_weights(offered(fake, weights, 4, []))
    lost = offered(fake, RuntimeError("the trainer was lost"), 4, [])
    fake._replica.desired.weights = lost.weights
    kill(fake)
    until(lambda: "server_restarted" in kinds(fake))
    assert kinds(fake) == ["server_died", "weights_lost", "server_restarted"]
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [0, 0]
    fake.update_weights(weights, 5)
    assert generate(fake, request("r", [5], max_new_tokens=2))[0].versions.tolist() == [5, 5]


def test_a_server_that_never_comes_back_ends_in_a_clear_error(fake):
    fake.settings.sglang.max_restarts = 2
    (fake.folder / "broken").touch()
    kill(fake)
    with pytest.raises(RuntimeError, match=r"failed 3 times .*rollout.sglang.max_restarts=2.*ended while"):
        generate(fake, request("r", [5], max_new_tokens=2))
    with pytest.raises(RuntimeError, match="max_restarts=2"):  # and stays so
        generate(fake, request("r", [5], max_new_tokens=2))
    assert kinds(fake) == ["server_died"] * 3
    for _, fields in fake.events[1:]:
        assert "ended while starting" in fields["error"] and "broken on purpose" in fields["error"]


def test_faults_are_counted_anew_after_an_update(fake, weights):
    fake.settings.sglang.max_restarts = 1
    for version in (1, 2, 3):
        kill(fake)
        until(lambda count=version: kinds(fake).count("server_restarted") == count)
        fake.update_weights(weights, version)
    assert fake.stats().server[SERVER + "restarts"] == 3


def test_a_turn_waiting_for_a_server_can_be_aborted(fake):
    (fake.folder / "broken").touch()
    fake.settings.sglang.max_restarts = 1000

    async def run():
        kill(fake)
        waiting = asyncio.ensure_future(fake.generate(request("w", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().waiting == 1)
        fake.abort(["w"])
        return await waiting

    result = asyncio.run(run())
    assert result.finish_reason is FinishReason.ABORT and result.output_ids.tolist() == []


def test_a_turn_aborted_on_a_server_that_then_hangs_is_played_by_no_other(fake):
    fake.settings.sglang.health_timeout = 1.5  # where a busy machine answers late, nothing must look hung yet

    async def run():
        (fake.folder / "slow").touch()
        aborted = asyncio.ensure_future(fake.generate(request("w", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().running == 1)
        fake.abort(["w"])
        await asyncio.to_thread(fake.membership)  # on the engine's loop, after the abort
        hang(fake)
        (fake.folder / "slow").unlink()
        result = await aborted
        again = await fake.generate(request("w", [5], max_new_tokens=2))
        return result, again

    result, again = asyncio.run(run())
    assert result.finish_reason is FinishReason.ABORT and result.output_ids.tolist() == []
    assert again.output_ids.tolist() == [7, 7]


def test_one_who_leaves_does_not_take_the_restart_with_him(fake):
    async def run():
        (fake.folder / "slow").touch()
        leaving = asyncio.ensure_future(fake.generate(request("a", [5], max_new_tokens=2)))
        staying = asyncio.ensure_future(fake.generate(request("b", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().running == 2)
        kill(fake)
        await asyncio.to_thread(until, lambda: "server_died" in kinds(fake))
        leaving.cancel()
        (fake.folder / "slow").unlink()
        return await staying

    assert len(asyncio.run(run()).output_ids) == 2


def test_a_request_that_alone_fails_is_repeated_and_the_server_stays(fake, monkeypatch):
    whole, failures = fake._http.generate, [2]

    async def flaky(body):
        if failures[0]:
            failures[0] -= 1
            raise ServerUnreachable("it took too long")
        return await whole(body)

    fake._http.generate = flaky
    assert len(generate(fake, request("r", [5], max_new_tokens=2))[0].output_ids) == 2
    failures[0] = 3
    with pytest.raises(ServerUnreachable):
        generate(fake, request("r", [5], max_new_tokens=2))
    assert not fake.events and fake.stats().server[SERVER + "restarts"] == 0


def test_a_thousand_requests_that_fail_at_once_ask_their_server_once(fake, monkeypatch):
    asked, look = [], replica.Replica._failure_kind

    async def noted(self, patience):
        asked.append(patience)
        return await look(self, patience)

    monkeypatch.setattr(replica.Replica, "_failure_kind", noted)

    async def storm():
        recover = fake._replica.recover
        return await asyncio.gather(*(recover(fake._replica.client, "timed out") for _ in range(1000)))

    assert fake._call(storm()) == [False] * 1000 and len(asked) == 1
    assert fake._call(fake._replica.recover(fake._replica.client, "later")) is False and len(asked) == 2


def test_a_restart_on_demand_lets_running_turns_end_first(fake, weights):
    fake.update_weights(weights, 2)

    async def run():
        (fake.folder / "slow").touch()
        running = asyncio.ensure_future(fake.generate(request("a", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().running == 1)
        restarting = asyncio.ensure_future(asyncio.to_thread(fake.restart))
        await asyncio.sleep(0.2)
        late = asyncio.ensure_future(fake.generate(request("b", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().waiting == 1)
        assert fake.stats().server[SERVER + "restarts"] == 0
        (fake.folder / "slow").unlink()
        await restarting
        return await running, await late

    assert [r.versions.tolist() for r in asyncio.run(run())] == [[2, 2]] * 2
    assert kinds(fake) == ["server_restarted"]


def test_a_paused_engine_is_paused_on_its_next_server_too(fake, monkeypatch):
    fake.pause()
    paused = []
    post = replica.SglangClient.post

    async def noted(self, path, body, timeout=None):
        paused.append(path)
        return await post(self, path, body, timeout)

    monkeypatch.setattr(replica.SglangClient, "post", noted)
    kill(fake)
    until(lambda: "server_restarted" in kinds(fake))
    assert paused == ["/pause_generation"]


def test_closing_while_no_server_serves_ends_what_waits(fake):
    (fake.folder / "broken").touch()
    fake.settings.sglang.max_restarts = 1000

    async def run():
        kill(fake)
        waiting = asyncio.ensure_future(fake.generate(request("w", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().waiting == 1)
        await asyncio.to_thread(fake.close)
        return await waiting

    result = asyncio.run(run())
    assert result.finish_reason is FinishReason.ABORT and not fake.server.is_running()


def test_a_turn_whose_server_is_closed_under_it_ends_as_aborted(fake):
    async def run():
        (fake.folder / "slow").touch()
        turn = asyncio.ensure_future(fake.generate(request("a", [5], max_new_tokens=2)))
        await asyncio.to_thread(until, lambda: fake.stats().running == 1)
        fake._turns.wait_until_idle = lambda: asyncio.sleep(0)  # the fake does not abort
        await asyncio.to_thread(fake.close)
        return await turn

    assert asyncio.run(run()).finish_reason is FinishReason.ABORT


def test_a_server_answers_to_the_key_of_its_start_alone_and_nobody_else_can_read_it(fake):
    [child] = psutil.Process(fake.server.pid).children()
    line = child.cmdline()
    settings = Path(line[line.index("--config") + 1])
    http = fake._replica.client._client
    url, key = str(http.base_url).rstrip("/"), http.headers["Authorization"].removeprefix("Bearer ")
    assert len(key) >= 32 and not settings.exists()
    for process in (child, psutil.Process(fake.server.pid)):
        assert key not in " ".join(process.cmdline()) and key not in process.environ().values()
    assert fake.server.log.stat().st_mode & 0o077 == 0
    for headers in ({}, {"Authorization": "Bearer guessed"}):
        assert httpx.get(f"{url}/server_info", headers=headers).status_code == 401
    assert httpx.get(f"{url}/server_info", headers={"Authorization": f"Bearer {key}"}).is_success


def test_every_key_can_stand_behind_its_option(fake, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"\xf8" * count)  # in base64: -Pj4-Pj4...
    fake.restart()
    assert kinds(fake) == ["server_restarted"]


def test_a_turn_longer_than_the_timeout_ends_when_its_tokens_do(fake):
    fake.settings.sglang.request_timeout = 6.0  # of the next server; the turn takes eight seconds
    fake.restart()
    (fake.folder / "trickle").touch()
    result = generate(fake, request("long", [5], max_new_tokens=41))[0]
    assert len(result.output_ids) == 41 and result.finish_reason is FinishReason.LENGTH
    assert fake.stats().generated_tokens == 41  # none of it was asked for twice


def recorded(fake, monkeypatch):
    """What is done for updates, in order: hashes and checkpoints here, requests to the server."""
    calls = []

    def note(owner, name, what):
        real = getattr(owner, name)

        def wrapped(self, *args, **options):
            calls.append(what or args[0].strip("/"))
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    note(sync.WeightSync, "_checksums", "hash")
    note(WeightSession, "checkpoint", "write")
    note(sync.WeightSync, "check", "check")
    note(SglangClient, "post", "")
    return calls


def test_a_server_is_paused_only_after_weights_are_written_and_for_a_gpu_hashed(fake, weights, monkeypatch):
    calls = recorded(fake, monkeypatch)
    fake.settings.sglang.weight_transfer = WeightTransfer.DISK
    loaded = ["pause_generation", "update_weights_from_disk"]
    fake.update_weights(weights, 3)
    assert sorted(calls[:2]) == ["hash", "write"], "both while the server decodes"
    assert calls[2:] == [*loaded, "continue_generation", "check", "continue_generation"]
    calls.clear()
    fake._sync.on_gpu = True  # such a server hashes at once, before it continues
    fake.update_weights(weights, 4)
    assert sorted(calls[:2]) == ["hash", "write"]
    assert calls[2:] == [*loaded, "check", "continue_generation"]
    calls.clear()
    fake.settings.sglang.weight_transfer = WeightTransfer.SHARED
    fake._updates._deltas = False
    fake.update_weights(weights, 5)
    begun = ["pause_generation", "begin_weight_update", "update_weights_from_tensor"]
    assert calls == ["hash", *begun, "end_weight_update", "check", "continue_generation"]


def noted_sends(monkeypatch):
    """The type of what was staged for each update that is sent by shared memory, from now on."""
    sent, send = [], SharedMemoryTransport.send

    async def noted(self, client, update):
        sent.append(type(update.staged).__name__)
        await send(self, client, update)

    monkeypatch.setattr(SharedMemoryTransport, "send", noted)
    return sent


def test_a_delta_that_fails_its_check_is_followed_by_full_weights_then_and_from_then_on(
    fake, weights, monkeypatch
):
    """Here the first check fails whatever was sent; a server without a family's layout would do the same."""
    reports = [CanaryReport(), CanaryReport(target=["model.norm.weight"]), CanaryReport(), CanaryReport()]

    async def check(self, client, expecting, *, draft, again=None):
        await expecting
        return reports.pop(0)

    monkeypatch.setattr(sync.WeightSync, "check", check)
    sent = noted_sends(monkeypatch)
    fake.settings.sglang.weight_transfer = WeightTransfer.SHARED
    for version in (3, 4, 5):
        fake.update_weights(dict(weights), version)
    assert sent == ["NoneType", "Delta", "NoneType", "NoneType"] and not reports
    assert kinds(fake) == ["canary_failed"]


def test_no_delta_is_sent_to_a_server_whose_last_update_failed(fake, weights, monkeypatch):
    """It may hold weights of both versions; a delta to the third would leave them there."""
    failing = []

    async def check(self, client, expecting, *, draft, again=None):
        await expecting
        return CanaryReport(target=list(failing))

    monkeypatch.setattr(sync.WeightSync, "check", check)
    sent = noted_sends(monkeypatch)
    fake.settings.sglang.weight_transfer = WeightTransfer.SHARED
    fake.update_weights(dict(weights), 3)
    failing.append("model.norm.weight")
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    with pytest.raises(RuntimeError, match="does not hold version 4"):
        fake.update_weights(changed, 4)
    failing.clear()
    for version in (5, 6):
        fake.update_weights(dict(weights), version)
    assert sent == ["NoneType"] * 4 + ["Delta"], "full to version 5, and a delta once it is known again"


def test_weights_that_are_sent_again_are_not_hashed_or_written_again(fake, weights, monkeypatch):
    reports = [CanaryReport(draft=["draft.model.norm.weight"]), CanaryReport()]

    async def check(self, client, expecting, *, draft, again=None):
        await expecting
        return reports.pop(0)

    monkeypatch.setattr(sync.WeightSync, "check", check)
    calls = recorded(fake, monkeypatch)
    fake.settings.sglang.weight_transfer = WeightTransfer.DISK
    fake.update_weights(weights, 3)
    assert kinds(fake) == ["canary_failed"] and not reports
    assert calls.count("hash") == calls.count("write") == 1 and calls.count("update_weights_from_disk") == 2


def test_a_server_that_is_replaced_is_checked_without_hashing_its_weights_again(fake, weights, monkeypatch):
    fake.update_weights(weights, 3)
    calls = recorded(fake, monkeypatch)
    kill(fake)
    until(lambda: "server_restarted" in kinds(fake))
    assert "check" in calls and "hash" not in calls
