"""The recipe mtp_adapt through the command line: real rollouts, Megatron, engine; resumed bit for bit."""

import json

import pytest
import torch

from rlpipe.adapt.estimates import estimate, figures
from rlpipe.adapt.evaluation import Evaluation
from rlpipe.config.sglang import SglangConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_weights
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import ROOT, run, undeclared
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration

SMALL = [
    "adapt.prompts=4",
    "adapt.samples=2",
    "adapt.batch=4",
    "adapt.eval_prompts=2",
    "adapt.eval_samples=1",
]
SMALL += ["adapt.in_domain=[swe.held_instances]", "adapt.out_of_domain=[]", "metrics.wandb=off"]
TINY = ROOT / "models" / "tiny"


def adapt(cwd, directory, *overrides):
    result = run("+recipe=mtp_adapt", f"run.dir={directory}", *SMALL, *overrides, cwd=cwd, timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    return cwd / directory


def assert_same_step(*runs):
    """Both moved the shipped draft by the same.

    Adam divides by the root of a gradient's square: where that is near nothing, rounding moves a weight too,
    so that single weights may differ more than all together.
    """
    first, second, shipped = (read_weights(path) for path in (*(run / "model" for run in runs), TINY))
    apart, moved = (
        torch.cat([(first[name] - other[name]).flatten() for name in first]) for other in (second, shipped)
    )
    share = (apart.norm() / moved.norm()).item()
    print(f"largest difference {apart.abs().max():.2e} of {moved.abs().max():.2e} moved, in all {share:.2e}")
    assert moved.abs().max() > 5e-5 and apart.abs().max() < 0.3 * moved.abs().max() and share < 1e-3


def test_a_resumed_run_ends_bit_equal_and_the_engine_loads_what_it_wrote(tmp_path):
    whole = adapt(tmp_path, "whole", "run.steps=2")
    parts = adapt(tmp_path, "parts", "run.steps=1", f"adapt.rollouts={whole / 'rollouts.jsonl'}")
    before = (whole / "rollouts.jsonl").read_bytes()
    adapt(tmp_path, "parts", "run.steps=2", f"adapt.rollouts={whole / 'rollouts.jsonl'}")
    assert (whole / "rollouts.jsonl").read_bytes() == before  # nothing was sampled again

    first, second, shipped = (read_weights(p) for p in (whole / "model", parts / "model", TINY))
    assert all(torch.equal(first[name], second[name]) for name in first)
    moved = {name for name in first if not torch.equal(first[name], shipped[name])}
    assert moved and all(is_mtp_weight(name) for name in moved)  # the backbone is frozen

    records = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [r["training/global_step"] for r in records] == [0, 1, 2]
    last = records[-1]
    for mode in ("rejection", "target_only"):
        # Before training nothing is generated with the draft.
        expected = f"adapt/swe.held_instances/{mode}/expected/tokens_per_step"
        assert all(1 < record[expected] <= 4 for record in records)
        assert f"adapt/swe.held_instances/{mode}/acceptance_rate" not in records[0]
        assert 0 < last[f"adapt/swe.held_instances/{mode}/acceptance_rate"] <= 1
    assert last["mtp/grad_norm"] > 0
    assert last["adapt/swe.held_instances/predicted_tokens_per_step"] > 1
    steps = [json.loads((d / "results.json").read_text())["evaluations"] for d in (whole, parts)]
    change = steps[0]["2"]["swe.held_instances"]["expected"]["rejection"]["tokens_per_step"]
    assert len(change) == 4 and 1 < change[0] <= 4
    assert list(steps[0]) == ["0", "2"] and list(steps[1]) == ["0", "1", "2"]
    counts = [json.loads((d / "evaluations" / "step_2.json").read_text()) for d in (whole, parts)]
    played = [c["domains"]["swe.held_instances"]["played"]["rejection"]["counts"] for c in counts]
    assert played[0] == played[1] and len(played[0]) == 2
    assert (parts / "report.html").is_file() and undeclared(parts) == []

    lost = parts / "evaluations" / "step_2.json"
    lost.unlink()
    adapt(tmp_path, "parts", "run.steps=2", f"adapt.rollouts={whole / 'rollouts.jsonl'}")
    again = json.loads(lost.read_text())["domains"]["swe.held_instances"]
    assert again["played"]["rejection"]["counts"] == played[1]

    more = ["run.steps=2", f"adapt.rollouts={whole / 'rollouts.jsonl'}", "adapt.out_of_domain=[reasoning]"]
    adapt(tmp_path, "parts", *more)  # a finished run measures the set it lacks, and only that
    domains = json.loads(lost.read_text())["domains"]
    assert domains["swe.held_instances"] == again
    assert len(domains["reasoning.held_out"]["played"]["rejection"]["counts"]) == 2

    for other in ("spec.gamma=2", "rollout.temperature=0.5"):  # what was measured would not compare
        anyway = "run.resume=anyway"
        refused = run("+recipe=mtp_adapt", "run.dir=parts", *SMALL, *more, other, anyway, cwd=tmp_path)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr
        assert f"{other}, but" in refused.stderr and "run.dir" in refused.stderr

    with running_engine(parts / "model") as engine:
        (result,) = generate(engine, request(1, [3, 4, 5], max_new_tokens=8))
    assert result.spec.verify_steps > 0


def test_two_ranks_on_rollouts_of_two_workers_train_the_draft_that_one_process_trains(tmp_path):
    sets = ["run.steps=2", "adapt.eval_first=false", "adapt.eval_modes=[rejection]", "draft.lr=1.0e-4"]
    alone = adapt(tmp_path, "alone", *sets)
    spread = ["cluster=ray", "trainer.dp=2", "rollout.workers=2"]
    together = adapt(tmp_path, "together", *sets, *spread)
    recorded = [
        {
            (line["index"], line["trajectory_id"]): line
            for line in map(json.loads, (out / "rollouts.jsonl").read_text().splitlines()[1:])
        }
        for out in (alone, together)
    ]
    assert recorded[0].keys() == recorded[1].keys() and len(recorded[0]) == 8
    for key, line in recorded[0].items():
        assert line["token_ids"] == recorded[1][key]["token_ids"]
    assert_same_step(alone, together)
    steps = [json.loads((out / "metrics.jsonl").read_text().splitlines()[0]) for out in (alone, together)]
    for name in ("mtp/loss", "mtp/grad_norm"):
        assert steps[0][name] == pytest.approx(steps[1][name], rel=1e-5), name

    adapt(tmp_path, "together", *sets, "run.steps=3")  # one process goes on from what two have saved


def test_servers_roll_out_and_evaluate_as_the_embedded_engine_does(tmp_path):
    """Either can be trained on what the other recorded, and acceptance differs by noise alone.

    With a server two ranks train, with the embedded engine this process.
    """
    needs_sglang()
    python = find_environment(SglangConfig(), on_gpu=False).python
    server = ["rollout=sglang", f"rollout.sglang.python={python}", "rollout.device=cpu"]
    sets = ["adapt.prompts=4", "adapt.eval_prompts=16", "adapt.eval_samples=2", "run.steps=1"]
    sets += ["adapt.eval_modes=[rejection]", "adapt.eval_first=false", "draft.lr=1.0e-4"]
    served = adapt(tmp_path, "served", *server, *sets, "cluster=ray", "trainer.dp=2")
    header, *lines = (json.loads(line) for line in (served / "rollouts.jsonl").read_text().splitlines())
    assert header["adapt.samples"] == 2 and len(lines) == 4 * 2
    for line in lines:  # exact entropies, not estimates by the tokens' logprobs
        assert len(line["entropies"]) == len(line["rollout_logprobs"]) == sum(line["loss_mask"]) > 0
        assert line["entropies"] != [-value for value in line["rollout_logprobs"]]

    embedded = adapt(tmp_path, "embedded", *sets, f"adapt.rollouts={served / 'rollouts.jsonl'}")
    assert_same_step(served, embedded)
    counts = [
        Evaluation.read(out / "evaluations" / "step_1.json").counts("swe.held_instances", "rejection")
        for out in (served, embedded)
    ]
    assert counts[0].keys() == counts[1].keys() and len(counts[0]) == 16
    for figure in figures(3):
        one, other = (estimate(played, figure) for played in counts)
        noise = (one.se**2 + other.se**2) ** 0.5
        print(figure, one, other)
        assert abs(one.value - other.value) <= 5 * noise + 0.02, figure


def test_a_rule_that_the_server_does_not_have_is_refused_at_launch(tmp_path):
    needs_sglang()
    python = find_environment(SglangConfig(), on_gpu=False).python
    overrides = ["rollout=sglang", f"rollout.sglang.python={python}", "rollout.device=cpu", "run.dir=out"]
    result = run("+recipe=mtp_adapt", *overrides, *SMALL, "adapt.eval_modes=[rejection,block]", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "spec.mode=block" in result.stderr and "rejection" in result.stderr


def test_a_file_of_conversations_is_trained_on(tmp_path):
    chat = [
        {"role": "user", "content": "core.py: band is wrong"},
        {"role": "assistant", "content": "grep -n '' core.py"},
        {"role": "tool", "content": "1:def band(x):\n2:    return x"},
        {"role": "assistant", "content": "submit"},
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text((json.dumps({"messages": chat}) + "\n") * 3)
    sets = [f"adapt.data={data}", f"adapt.in_domain=[{data}]", "run.steps=1", "adapt.eval_first=false"]
    out = adapt(tmp_path, "out", *sets)
    (record,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert record["mtp/loss"] > 0 and record["adapt/chats/rejection/acceptance_length"] >= 1
    assert not (out / "rollouts.jsonl").exists()


def test_a_malformed_conversation_ends_the_run_with_file_and_line(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": 3}\n')
    result = run("+recipe=mtp_adapt", "run.dir=out", f"adapt.data={data}", *SMALL, cwd=tmp_path)
    assert result.returncode == 2
    assert f"{data}:1" in result.stderr and "Traceback" not in result.stderr
