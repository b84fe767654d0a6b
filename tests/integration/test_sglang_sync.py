"""New weights into a real SGLang server: bit for bit, for target and draft, or the canary says so."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from rlpipe.config.spec import SpecMode
from rlpipe.models.checkpoint import read_config, read_weights, write_checkpoint
from rlpipe.types import FinishReason
from rlpipe.weights.shared_memory import SharedBuckets
from rlpipe.weights.transports.shared import SharedMemoryTransport
from tests.helpers.broadcasts import Trainer
from tests.helpers.cli import ROOT
from tests.helpers.engines import generate, recomputed, request, transformers_logits, worst_logprob_error
from tests.helpers.sglang import configured, lossy, perturbed, repaired, running_server, target_only
from tests.helpers.trainers import trainer_logprobs

pytestmark = pytest.mark.integration
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.mark.parametrize("transfer", ["shared", "collective", "disk"])
def test_after_an_update_target_and_draft_are_bit_equal_to_what_was_sent(sglang, weights, transfer):
    new = perturbed(weights, 0.02)
    with configured(sglang, weight_transfer=transfer, bucket_mb=1):
        sglang.update_weights(new, 5)
    assert sglang.check_weights(new).passed
    old = sglang.check_weights(weights)
    assert len(old.target) == 59 and len(old.draft) == 13  # every tensor changed, and every one is checked
    assert generate(sglang, request("v", [5, 6], max_new_tokens=6))[0].versions.tolist() == [5] * 6
    figures = sglang.stats().sync
    print(f"{transfer}: {sum(w.nbytes for w in new.values())} bytes, {figures}")
    assert figures["weights/canary_failures"] == 0 and figures["weights/sync_seconds"] > 0
    assert sglang.stats().policy_version == 5 and not sglang.events


def test_a_delta_of_some_elements_leaves_the_bits_of_a_full_update(sglang, weights, monkeypatch):
    """In fused tensors of target and draft, while a request runs, which has tokens of both versions."""
    staged, send = [], SharedMemoryTransport.send

    async def noted(self, client, update):
        staged.append(update.staged)
        await send(self, client, update)

    monkeypatch.setattr(SharedMemoryTransport, "send", noted)
    versions = {5: perturbed(weights, 0.02)}
    draw = torch.Generator().manual_seed(0)
    versions[6] = {
        name: torch.where(torch.rand(tensor.shape, generator=draw) < 0.01, tensor * 1.5, tensor)
        for name, tensor in versions[5].items()
    }
    with configured(sglang, weight_transfer="shared", bucket_mb=1):
        sglang.update_weights(versions[5], 5)

        async def run():
            due = True
            async for result in sglang.stream(request("delta", [5, 6, 7], max_new_tokens=200)):
                if due and len(result.output_ids) >= 10:
                    due = False
                    await asyncio.to_thread(sglang.update_weights, versions[6], 6)
            return result

        result = asyncio.run(run())
    full, delta = staged
    whole = sum(tensor.nbytes for tensor in weights.values())
    print(f"{delta.num_elements} elements, {delta.num_bytes} bytes of {whole}; {sglang.stats().sync}")
    assert full is None and 0 < delta.num_bytes < 0.05 * whole
    assert sglang.check_weights(versions[6]).passed and not sglang.events
    assert set(result.versions.tolist()) == {5, 6}
    old = sglang.check_weights(versions[5])
    assert len(old.target) > 30 and old.draft, "tensors of both models were written to"


@pytest.fixture(params=["collective", "ipc"])
def trainer(sglang, request):
    """Brings weights to the shared server as a trainer does to all."""
    with configured(sglang, weight_transfer=request.param, bucket_mb=1):
        trainer = Trainer.of(sglang._config, read_config(TINY))
        yield trainer
        trainer.close()


def test_weights_that_a_trainer_broadcasts_are_bit_equal_on_the_server(sglang, trainer, weights):
    """Two updates in one group, then one whose draft is dropped: the trainer's checksums tell."""
    members, versions = [sglang.membership().server], {v: perturbed(weights, 0.02, seed=v) for v in (5, 6, 7)}
    for version in (5, 6):
        offer = trainer.offer(versions[version], version, members, again=version == 6)
        sglang.receive_weights(offer)
        assert sglang.check_weights(versions[version]).passed and not sglang.events
        assert generate(sglang, request("v", [5, 6], max_new_tokens=6))[0].versions.tolist() == [version] * 6
        assert sglang.membership().group == offer.group.name
        print(f"broadcast: {asyncio.run(offer.result()).num_bytes} bytes, {sglang.stats().sync}")
    offer = trainer.offer(versions[7], 7, members, again=True)
    lossy(sglang, target_only, times=len(offer.buckets))
    sglang.receive_weights(offer)
    assert [kind for kind, _ in sglang.events] == ["canary_failed"]
    assert "11 of the draft" in sglang.events[0][1]["what"]
    assert sglang.check_weights(versions[7]).passed  # sent again, to this server alone
    alone = sglang.membership().group != offer.group.name
    assert alone == (offer.group.backend == "gloo") and sglang.stats().policy_version == 7


def test_a_request_lives_through_two_updates_and_each_token_is_its_versions(sglang, weights, tmp_path):
    """With the KV recomputed at each update, the trainer at version v agrees on v's tokens."""
    models = {0: TINY}
    versions = {0: weights, 1: perturbed(weights, 0.03, seed=1), 2: perturbed(weights, 0.03, seed=2)}
    for version in (1, 2):
        models[version] = tmp_path / str(version)
        write_checkpoint(models[version], versions[version], like=TINY)

    async def run():
        due = [(1, 20), (2, 80)]  # version, sent once so many tokens are there
        async for result in sglang.stream(request("long", [5, 6, 7], max_new_tokens=200)):
            if due and len(result.output_ids) >= due[0][1]:
                version, _ = due.pop(0)
                await asyncio.to_thread(sglang.update_weights, versions[version], version)
        return result

    result = asyncio.run(run())
    assert len(result.output_ids) == 200 and set(result.versions.tolist()) == {0, 1, 2}
    assert result.versions.tolist() == sorted(result.versions.tolist())
    by_model = {v: torch.tensor(trainer_logprobs(models[v], [([5, 6, 7], result)])[0]) for v in models}
    own = torch.stack([by_model[v][place] for place, v in enumerate(result.versions.tolist())])
    worst = (own - torch.tensor(result.logprobs)).abs().max().item()
    mixed_up = (by_model[0] - torch.tensor(result.logprobs)).abs().max().item()
    print(f"largest difference from its own version: {worst:.2e}, from version 0 throughout: {mixed_up:.2e}")
    assert worst < 1e-3 < mixed_up
    found = {v: recomputed(transformers_logits(models[v]), [5, 6, 7], result)[1] for v in models}
    exact = torch.stack([found[v][place] for place, v in enumerate(result.versions.tolist())])
    assert (exact - torch.tensor(result.entropies)).abs().max() < 1e-3


def test_requests_can_end_at_an_update_with_what_they_have(sglang, weights):
    async def run():
        task = asyncio.ensure_future(sglang.generate(request("long", [5, 6, 7], max_new_tokens=200)))
        await asyncio.sleep(0.4)
        await asyncio.to_thread(sglang.update_weights, weights, 3)
        return await task

    with configured(sglang, abort_on_update=True):
        result = asyncio.run(run())
    assert result.finish_reason is FinishReason.ABORT and 0 < len(result.output_ids) < 200
    assert set(result.versions.tolist()) == {0}
    assert generate(sglang, request("next", [5, 6], max_new_tokens=4))[0].versions.tolist() == [3] * 4


@pytest.mark.parametrize("transfer", ["shared", "collective"])
def test_a_dropped_draft_update_trips_the_canary_in_the_same_step(sglang, weights, transfer):
    """Eleven of the draft's thirteen: embedding and head are the target's own tensors."""
    lossy(sglang, target_only)
    with (
        configured(sglang, weight_transfer=transfer),
        pytest.raises(RuntimeError, match=r"does not hold version 1: 11 of the draft"),
    ):
        sglang.update_weights(perturbed(weights, 0.02), 1)
    assert [kind for kind, _ in sglang.events] == ["canary_failed"] * 2  # the first attempt and one retry
    assert sglang.events[0][1]["version"] == 1 and "11 of the draft" in sglang.events[0][1]["what"]
    assert sglang.stats().sync["weights/canary_failures"] == 2


@pytest.mark.parametrize(
    ("name", "served", "role"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up_proj.weight", "target"),
        ("model.mtp_layers.0.input_proj.weight", "draft.model.input_proj.weight", "draft"),
    ],
)
def test_one_corrupted_number_trips_the_canary(sglang, weights, monkeypatch, name, served, role):
    new = perturbed(weights, 0.02)
    wrong = new | {name: new[name].clone()}
    wrong[name][1, 1] += 1e-3
    send = sglang._sync.send

    async def corrupted(client, update):
        await send(client, replace(update, weights=wrong))

    monkeypatch.setattr(type(sglang._sync), "send", lambda self, *arguments: corrupted(*arguments))
    with (
        configured(sglang, on_canary_failure="stop"),
        pytest.raises(RuntimeError, match=f"1 of the {role} .first {served}"),
    ):
        sglang.update_weights(new, 1)
    assert len(sglang.events) == 1  # stop means at once


@pytest.mark.parametrize(
    "weight", ["model.layers.3.mlp.down_proj.weight", "model.mtp_layers.0.input_proj.weight"]
)
def test_one_flipped_bit_in_shared_memory_trips_the_canary(sglang, weights, monkeypatch, weight):
    """Hashed are the weights, not what was laid of them."""
    write = SharedBuckets.write

    def flipped(memory, piece):
        said = write(memory, piece)
        for tensor in json.loads(bytes(said.tolist()))["tensors"]:
            if tensor["name"] == weight:
                memory._memory[0].bytes[tensor["offset"]] ^= 1
        return said

    monkeypatch.setattr(SharedBuckets, "write", flipped)
    role = "draft" if "mtp" in weight else "target"
    with (
        configured(sglang, on_canary_failure="stop", weight_transfer="shared", bucket_mb=1),
        pytest.raises(RuntimeError, match=f"does not hold version 1: 1 of the {role}"),
    ):
        sglang.update_weights(perturbed(weights, 0.02), 1)
    assert [kind for kind, _ in sglang.events] == ["canary_failed"]


def test_an_update_lost_once_is_sent_again(sglang, weights):
    new = perturbed(weights, 0.02)
    lossy(sglang, target_only, times=1)
    sglang.update_weights(new, 4)
    assert sglang.check_weights(new).passed and [kind for kind, _ in sglang.events] == ["canary_failed"]
    assert sglang.stats().sync["weights/canary_failures"] == 1
    assert generate(sglang, request("v", [5, 6], max_new_tokens=4))[0].versions.tolist() == [4] * 4


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(sglang, weights):
    short = {name: weight for name, weight in weights.items() if "mtp" not in name}
    with pytest.raises(ValueError, match=r"missing \['model.mtp_layers.*16\), unknown \[\] \(0\)"):
        sglang.update_weights(short, 9)
    with pytest.raises(ValueError, match=r"of another shape \['model.norm.weight'\]"):
        sglang.update_weights(weights | {"model.norm.weight": torch.ones(3)}, 9)
    assert sglang.check_weights(weights).passed and sglang.stats().policy_version == 0


def test_a_draft_that_cannot_be_updated_is_switched_off(tmp_path, weights):
    """The reaction no_speculation: a server without drafts serves the new version. Starts as target_only."""
    new = perturbed(weights, 0.02)
    with running_server(TINY, tmp_path / "logs", "target_only", on_canary_failure="no_speculation") as engine:
        logits = transformers_logits(TINY)
        (before,) = generate(engine, request("t", [5, 6, 7], max_new_tokens=60))
        assert worst_logprob_error(logits, [5, 6, 7], before) < 1e-4
        assert before.spec.verify_steps and engine.spec.mode is SpecMode.TARGET_ONLY

        lossy(engine, target_only)
        engine.update_weights(new, 7)
        repaired(engine)
        assert [kind for kind, _ in engine.events] == ["canary_failed"] * 2 + ["speculation_disabled"]
        assert engine.spec.mode is SpecMode.NONE and engine.check_weights(new).passed
        (after,) = generate(engine, request("t", [5, 6, 7], max_new_tokens=20))
        assert after.versions.tolist() == [7] * 20 and not after.spec.verify_steps
        engine.update_weights(weights, 8)
        assert generate(engine, request("t", [5, 6], max_new_tokens=3))[0].versions.tolist() == [8] * 3
