"""Adapters: nothing at the start, then dense weights in effect, which leave the trainer merged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.lora import LoraConfig, LoraTargets
from rlpipe.config.trainer import Precision, Recompute, TrainerConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_weights
from tests.helpers.adapters import (
    IDS,
    PUSH,
    differentiate_and_train,
    fill,
    gradient,
    pushed,
)
from tests.helpers.cli import ROOT, SMALL, run
from tests.helpers.float64 import in_float64
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, make_batch, make_trainer, stored_weights
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

TINY = ROOT / "models" / "tiny"
LORA = TrainerConfig(lr=1e-2, eps=1e-3, lora=LoraConfig(rank=4, alpha=6.0))
ATTENTION = replace(LORA, lora=replace(LORA.lora, targets=LoraTargets.ATTENTION))
ONLINE = DraftConfig(train=DraftTrain.ONLINE, lr=1e-2)
ALGO = AlgoConfig(kl_coef=0.1)
FAMILIES = {
    "mimo": ({"family": "mimo"}, LORA),
    "qwen3 wide heads, tied": ({"family": "qwen3", "head_dim": 12, "tie": True}, LORA),
    "llama": ({"family": "llama", "kv_heads": 4}, LORA),
    "qwen3 moe": ({"family": "qwen3_moe"}, ATTENTION),
}
PROJECTIONS = {  # of peft, in the order of our adapters
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "proj": ["self_attn.o_proj"],
    "fc1": ["mlp.gate_proj", "mlp.up_proj"],
    "fc2": ["mlp.down_proj"],
}


@pytest.fixture
def trainer_of():
    """Trainers that are closed at the end: a process has one at a time."""
    made = []

    def make(*args, **kwargs):
        while made:
            made.pop().close()
        made.append(make_trainer(*args, **kwargs))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path / "model", "mimo", vocab=64)


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_adapters_change_nothing_and_merged_ones_say_what_they_do(tmp_path, trainer_of, name):
    family, config = FAMILIES[name]
    path = write_random_checkpoint(tmp_path / "model", vocab=61, **family)
    base = trainer_of(path).model.logits(IDS).detach()
    trainer = trainer_of(path, config)
    assert torch.equal(trainer.model.logits(IDS), base)
    assert equal(trainer.export_weights(), stored_weights(path))
    fill(trainer.model)
    with torch.no_grad(), trainer.model.without_adapters():
        assert torch.equal(trainer.model.logits(IDS), base)
    trainer.save_hf(tmp_path / "merged")
    with torch.no_grad():
        logits, exact = trainer.model.logits(IDS), in_float64(trainer.model).logits(IDS)
    weights = {n: p.detach().clone() for n, p in merged_parameters(trainer.model)}
    assert (logits - base).abs().max() > 0.5
    plain = trainer_of(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(plain.model.logits(IDS), logits, atol=1e-4, rtol=0)
        model = in_float64(plain.model)
        model.load_state_dict(weights, strict=False)
        torch.testing.assert_close(model.logits(IDS), exact, atol=1e-10, rtol=0)


def merged_parameters(model):
    for name, parameter in model.named_parameters():
        if not name.startswith("adapters."):
            yield name, model.merged(parameter)


def test_logits_and_gradients_are_pefts(tmp_path, trainer_of):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    path = write_random_checkpoint(tmp_path / "model", "qwen2", vocab=64)
    trainer = trainer_of(path, LORA)
    fill(trainer.model)
    logits = pushed(trainer.model)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        PeftConfig(
            r=LORA.lora.rank,
            lora_alpha=LORA.lora.alpha,
            target_modules=[name.split(".")[1] for names in PROJECTIONS.values() for name in names],
        ),
    )
    pairs = []
    for key, adapter in trainer.model.adapters.items():
        layer, kind = key.split("_")
        names = PROJECTIONS[kind]
        slopes = gradient(adapter.a).chunk(len(names))
        for name, a, da, b in zip(names, adapter.a.chunk(len(names)), slopes, adapter.b, strict=True):
            module = theirs.get_submodule(f"base_model.model.model.layers.{layer}.{name}")
            low, high = module.lora_A["default"].weight, module.lora_B["default"].weight
            bound = a.shape[1] ** -0.5  # both uniform up to it
            assert 0.8 * bound < a.abs().max() <= bound and 0.8 * bound < low.abs().max() <= bound
            with torch.no_grad():
                low.copy_(a)
                high.copy_(b)
            pairs += [(da, low), (gradient(b), high)]
    other = theirs(IDS).logits
    (other * PUSH.to(other.dtype)).sum().backward()
    torch.testing.assert_close(logits, other.detach(), atol=1e-4, rtol=0)
    assert len(pairs) == 2 * 2 * 7
    for mine, parameter in pairs:
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", Recompute)
def test_gradients_are_those_of_the_dense_weight_in_float64(path, trainer_of, recompute):
    """Gradients of W + s B A: the gradient G of the dense weight makes s G A^T of B and s B^T G of A."""
    trainer = trainer_of(path, replace(LORA, recompute=recompute))
    model = in_float64(trainer.model)
    fill(model)
    logits = pushed(model)
    dense = {}
    for name, parameter in list(model.named_parameters()):
        if name.startswith("decoder.") and "linear" in name and name.endswith("weight"):
            with torch.no_grad():
                parameter.copy_(model.merged(parameter))
            dense[parameter] = parameter.requires_grad_()
        assert (parameter.grad is not None) == name.startswith("adapters."), name
    with model.without_adapters():
        torch.testing.assert_close(pushed(model), logits, atol=1e-10, rtol=0)
    scale, checked = LORA.lora.alpha / LORA.lora.rank, 0
    for weight, adapter in model.adapters._of.items():
        parts = (x.chunk(len(adapter.b)) for x in (adapter.a, adapter.a.grad))
        for a, da, b, slope in zip(*parts, adapter.b, split(weight.grad, adapter), strict=True):
            torch.testing.assert_close(b.grad, scale * slope @ a.T, atol=1e-8, rtol=1e-8)
            torch.testing.assert_close(da, scale * b.T @ slope, atol=1e-8, rtol=1e-8)
            checked += 1
    assert checked == 2 * 7


def split(dense, adapter):
    """Rows of a fused weight by projection: a query group after another, each with its q, k and v."""
    if len(adapter.b) == 1:
        return [dense]
    sizes = [len(b) for b in adapter.b]
    groups = 2 if len(sizes) == 3 else 1
    grouped = dense.view(groups, -1, dense.shape[1]).split([size // groups for size in sizes], dim=1)
    return [part.reshape(-1, dense.shape[1]) for part in grouped]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Gradients and two steps alone and split, and a step from one process's checkpoint on two; by rank."""
    folder = tmp_path_factory.mktemp("runs")
    models = {
        "mimo": (write_random_checkpoint(folder / "mimo", "mimo", vocab=61), LORA, ONLINE),
        "qwen3_moe": (
            write_random_checkpoint(folder / "moe", "qwen3_moe", vocab=61),
            ATTENTION,
            DraftConfig(),
        ),
    }
    even = write_random_checkpoint(folder / "even", "mimo", vocab=64)
    groups = [make_groups(seed, vocab=61) for seed in range(3)]

    def one(model, work, files=None, **sizes):
        path, config, mtp = models[model]
        parts = {"path": path, "config": replace(config, **sizes), "algo": ALGO, "mtp": mtp, "groups": work}
        return Run(**parts, **(files or {}))

    alone = {model: one(model, groups[:2]) for model in models}
    alone["first"] = one("mimo", groups[:2], {"save": folder / "saved"})
    alone["then"] = one("mimo", groups[2:], {"load": folder / "saved"})
    split = {
        "mimo/tp": one("mimo", groups[:2], tp=2),
        "mimo/dp": one("mimo", groups[:2], dp=2, distributed_optimizer=True),
        "mimo/cp": one("mimo", groups[:2], cp=2),
        "mimo/pp": one("mimo", groups[:2], pp=2),
        "mimo/sp": one("mimo", groups[:2], tp=2, sp=True),
        "qwen3_moe/tp": one("qwen3_moe", groups[:2], tp=2),
        "qwen3_moe/ep": one("qwen3_moe", groups[:2], dp=2, ep=2),
        "then/tp": one("mimo", groups[2:], {"load": folder / "saved"}, tp=2),
        "then/pp": one("mimo", groups[2:], {"load": folder / "saved"}, pp=2),
    }
    told = differentiate_and_train(0, 1, folder, even, LORA, alone)
    ranks = run_ranks(differentiate_and_train, 2, folder, even, replace(LORA, tp=2), split)
    return told, ranks


def test_two_tensor_parallel_ranks_have_the_gradients_of_one_process(outcomes):
    alone, cut = outcomes[0]["gradients"], set()
    for rank, told in enumerate(outcomes[1]):
        found = told["gradients"]
        np.testing.assert_allclose(found["logits"], alone["logits"], atol=1e-9)
        for name, whole in alone["gradients"].items():
            dim = found["cuts"][name]
            wanted = whole if dim is None else np.split(whole, 2, axis=dim)[rank]
            np.testing.assert_allclose(found["gradients"][name], wanted, atol=1e-8, err_msg=name)
            cut |= {dim}
    assert cut == {None, 0, 1}


SPLITS = ["mimo/tp", "mimo/dp", "mimo/cp", "mimo/pp", "mimo/sp", "qwen3_moe/tp", "qwen3_moe/ep"]


@pytest.mark.parametrize("name", [*SPLITS, "then/tp", "then/pp"])
def test_split_trainers_and_their_checkpoints_do_what_one_process_does(outcomes, name):
    mine, theirs = outcomes[0][name.split("/")[0]], outcomes[1][0][name]
    for a, b in zip(mine["metrics"], theirs["metrics"], strict=True):
        for metric in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"):
            assert b[metric] == pytest.approx(a[metric], rel=1e-5, abs=1e-6), metric
    for weight, wanted in mine["weights"].items():
        np.testing.assert_allclose(theirs["weights"][weight], wanted, atol=1e-4, err_msg=weight)


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("precision", Precision)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    path, tmp_path, trainer_of, sharded, precision
):
    config = replace(LORA, distributed_optimizer=sharded, precision=precision)
    work = [make_batch(make_groups(seed, vocab=61), ALGO) for seed in range(4)]
    trainer = trainer_of(path, config, ALGO, ONLINE)
    for batch in work[:2]:
        trainer.train_step(batch)
    trainer.save(tmp_path / "checkpoint")
    held = dist_checkpointing.load_tensors_metadata(str(tmp_path / "checkpoint"))
    backbone = [n for n in held if n.startswith(("decoder.", "embedding.", "output_layer."))]
    assert not backbone and any(n.startswith("adapters.") for n in held)
    whole = [steps(trainer, batch) for batch in work[2:]]
    weights = trainer.export_weights()
    resumed = trainer_of(path, config, ALGO, ONLINE)
    resumed.load(tmp_path / "checkpoint")
    assert [steps(resumed, batch) for batch in work[2:]] == whole
    assert equal(resumed.export_weights(), weights)
    assert not equal(weights, read_weights(path))


def steps(trainer, batch):
    step = trainer.train_step(batch)
    return {name: value.value() for name, value in step.items() if not name.startswith("timing_s")}


def test_the_draft_learns_fully_and_the_backbone_by_its_adapters_alone(path, trainer_of):
    start = read_weights(path)
    trainer = trainer_of(path, replace(LORA, lora=replace(LORA.lora, targets="mlp")), ALGO, ONLINE)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if n.startswith("decoder.")}
    first = [steps(trainer, make_batch(make_groups(seed, vocab=61), ALGO)) for seed in range(2)]
    assert first[0]["actor/kl_loss"] == 0 < first[1]["actor/kl_loss"]  # the reference has no adapters
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    changed = {n for n, w in trainer.export_weights().items() if not torch.equal(w, start[n])}
    assert changed == {n for n in start if is_mtp_weight(n) or ("model.layers." in n and ".mlp." in n)}
    optimized = sum(p.numel() for g in trainer.optimizer.inner.param_groups for p in g["params"])
    trained = [p for n, p in trainer.model.named_parameters() if n.startswith(("adapters.", "mtp."))]
    assert optimized == sum(p.numel() for p in trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_carry_the_merged_weights_of_the_export(path, trainer_of, dtype):
    trainer = trainer_of(path, LORA)
    fill(trainer.model)
    export = trainer.export_weights()
    sent = [pair for bucket in trainer.weight_buckets(1, dtype) for pair in bucket]
    planned = [pair for bucket in trainer.bucket_plan(1, dtype) for pair in bucket]
    assert equal(dict(sent), {name: weight.to(dtype) for name, weight in export.items()})
    assert [(n, t.shape, t.dtype) for n, t in sent] == [(n, t.shape, t.dtype) for n, t in planned]


def test_a_run_with_adapters_decodes_with_the_merged_weights(tmp_path):
    """Synchronous: every token is of the newest weights, so the trainer's logprobs of it are the engine's."""
    own = ["trainer.lora.rank=8", "trainer.lr=2e-3", "pipeline.max_staleness=0", "run.steps=3", "val.every=0"]
    settings = ["+recipe=swe_rl", "cluster=inline", "run.dir=out", "metrics.report=false", *SMALL, *own]
    result = run(*settings, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1:]
    learnt = [record["training/global_step"] for record in records if "actor/grad_norm" in record]
    later = [r for r in records if learnt and r["training/global_step"] > learnt[0]]
    assert later and all(r["training/rollout_probs_diff_max"] < 1e-4 for r in later)
    start, now = read_weights(TINY), read_weights(tmp_path / "out" / "checkpoints" / "step_3" / "hf")
    changed = {name for name in start if not torch.equal(start[name], now[name])}
    assert changed and all("_proj.weight" in name and not is_mtp_weight(name) for name in changed)
