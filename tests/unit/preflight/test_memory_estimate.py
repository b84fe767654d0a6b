"""The memory estimate: near what was measured, refused with what would fit, and shown as it is."""

import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlpipe.actors.ray_cluster import check_places
from rlpipe.cli.run import run_composed
from rlpipe.config.run import Config
from rlpipe.config.trainer import check_parallel
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight import memory_check
from rlpipe.preflight.memory_check import advice, check_checkpoint, check_memory, excess, remedy
from rlpipe.preflight.memory_estimate import (
    GIB,
    Memory,
    checkpoint_memory,
    conversation_bytes,
    engine_memory,
    estimate,
    parameters,
    sent_bytes,
    server_memory,
    trainer_memory,
)
from rlpipe.preflight.object_store import check_store, local_store, store_memory

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
MEASURED = json.loads((ROOT / "scripts" / "bench" / "results" / "memory_estimate.json").read_text())
CHECKPOINTS = json.loads((ROOT / "scripts" / "bench" / "results" / "checkpoint_peaks.json").read_text())
CARD = 80 * GIB
SIZES = {  # hidden, intermediate, layers, heads, kv heads, vocabulary, tied head
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7.8B": (4096, 11008, 36, 32, 8, 151680, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
HYBRID = {  # Qwen3.5-35B-A3B
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_nextn_predict_layers": 1,
}
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for each size, with `config.json` alone: an estimate reads no weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in SIZES.items():
        given = dict(zip(FIELDS, sizes, strict=True)) | {"model_type": "mimo", "head_dim": 128}
        given |= {"num_nextn_predict_layers": 1, "max_position_embeddings": 32768}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(given))
    mixture = dict(zip(FIELDS, (2048, 6144, 48, 32, 4, 151936, False), strict=True))
    mixture |= {"model_type": "qwen3_moe", "head_dim": 128, "max_position_embeddings": 40960}
    mixture |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    (folder / "30B-A3B").mkdir()
    (folder / "30B-A3B" / "config.json").write_text(json.dumps(mixture | {"norm_topk_prob": True}))
    return folder


def composed(*settings: str):
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        return compose(config_name="config", overrides=["+recipe=swe_rl", *settings])


def preset(models, size, cluster, *settings) -> Config:
    given = composed(f"cluster={cluster}", "rollout=sglang", f"model.path={models / size}", *settings)
    return OmegaConf.to_object(given)


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["name"])
def test_an_estimate_is_within_a_tenth_of_the_measured_peak(row):
    case = dict(row["case"])
    arch = read_architecture(MEASURED["model"] | case.pop("model", {}))
    config = OmegaConf.to_object(OmegaConf.merge(Config, case))
    memory = (engine_memory if "rollout" in case else trainer_memory)(arch, config)
    assert memory.total == pytest.approx(row["measured"], rel=0.1)


@pytest.mark.parametrize("row", CHECKPOINTS["rows"], ids=lambda row: row["name"])
def test_what_a_checkpoint_takes_is_within_a_twentieth_of_what_was_measured(row):
    case = dict(row["case"])
    arch = read_architecture(MEASURED["model"] | case.pop("model"))
    config = OmegaConf.to_object(OmegaConf.merge(Config, case))
    assert checkpoint_memory(arch, config).total == pytest.approx(row["save"], rel=0.05)


def tied_and_untied(size: str):
    sizes = dict(zip(FIELDS, SIZES[size], strict=True)) | {"model_type": "mimo", "head_dim": 128}
    sizes |= {"num_nextn_predict_layers": 1, "max_position_embeddings": 32768}
    return (read_architecture(sizes | {"tie_word_embeddings": tied}) for tied in (True, False))


@pytest.mark.parametrize(("on_gpu", "copies"), [(True, 1), (False, 2)])
def test_an_engine_stores_a_tied_head_apart_only_where_it_is_packed(on_gpu, copies):
    config = OmegaConf.to_object(OmegaConf.merge(Config, {"spec": {"mode": "none"}}))
    tied, untied = (engine_memory(arch, config, on_gpu=on_gpu).parts for arch in tied_and_untied("1.5B"))
    head = 1536 * 151936 * 4
    assert untied["weights"] - tied["weights"] == (2 - copies) * head
    assert tied["packed"] == 0 or not on_gpu


@pytest.mark.parametrize(
    ("rows", "parked"),
    [(256, 0), (192, 64), (64, 128)],  # 256 attempts at once
)
def test_conversations_beyond_the_rows_are_counted_up_to_twice_the_rows(models, rows, parked):
    settings = [f"rollout.max_running={rows}", "pipeline.prompts_per_step=16", "pipeline.group_size=8"]
    settings += ["pipeline.max_staleness=1", f"model.path={models / '1.5B'}", "rollout.workers=1"]
    config = OmegaConf.to_object(composed(*settings))
    (engine,) = (memory for memory in estimate(config) if memory.process == "embedded engine")
    arch = read_architecture(read_config(models / "1.5B"))
    assert engine.parts["parked"] == parked * conversation_bytes(arch, config)


def test_a_process_on_a_cpu_has_libraries_once_and_a_checkpoint_beside_the_steps(models):
    def parts(*settings):
        names = f"model.path={models / '1.5B'}", "cluster=inline", "draft.train=off", *settings
        return [memory.parts for memory in estimate(OmegaConf.to_object(composed(*names)))]

    ending, beside = parts("run.save_every=0"), parts("run.save_every=1", "run.steps=9")
    waiting = parts("run.save_every=1", "run.steps=9", "run.save_async=false")
    assert ending == waiting and [bool(part["libraries"]) for part in ending] == [True, False]

    trainer, engine = beside
    assert trainer["checkpoint"] == trainer["optimizer"] + 2 * trainer["weights"] > ending[0]["checkpoint"]
    assert engine["checkpoint"] == 0


def test_enough_was_measured():
    assert len(MEASURED["rows"]) >= 5 and {"trainer", "rollout"} <= {
        k for r in MEASURED["rows"] for k in r["case"]
    }


def test_parameters_are_those_of_all_weights_and_ranks_share_the_matrices(models):
    arch = read_architecture(read_config(models / "7.8B"))
    count = sum(map(_size, arch.weight_shapes(mtp=True).values()))
    assert sum(parameters(arch)) == count
    assert count / 4 < sum(parameters(arch, 4)) < 1.001 * count / 4


def test_every_rank_of_a_server_has_the_graphs_and_logits_of_all_tokens(models):
    """SGLang captures 67 sizes up to 512 requests; without the plugin each retains its distributions."""
    arch = read_architecture(read_config(models / "1.5B"))

    def parts(*settings):
        given = "spec.mode=rejection", "spec.gamma=3", "rollout.max_running=512", *settings
        return server_memory(arch, preset(models, "1.5B", "one_node", *given), CARD).parts

    one, four = (parts(f"rollout.sglang.tp={tp}") for tp in (1, 2))
    row = 4 * 3 * arch.vocab
    assert one["graphs"] == four["graphs"] == 512 * row
    stock = parts("rollout.sglang.plugin=false")["graphs"]
    assert stock == pytest.approx(19.8e9, rel=0.01) and stock == row * 10860
    assert parts("spec.mode=target_only")["graphs"] == parts("spec.mode=none")["graphs"] == 0

    logits = 512 * 4 * arch.vocab * 16
    assert four["activations"] > logits


def test_pipeline_stages_share_the_layers_and_the_last_has_head_and_draft(models):
    arch = read_architecture(read_config(models / "7.8B"))
    first, last = (parameters(arch, layers=range(*ends)) for ends in ((0, 18), (18, 36)))
    copy = arch.vocab * arch.hidden  # of the embedding, for the draft
    assert sum(first) + sum(last) == sum(parameters(arch)) + copy and first[1] == 0 < last[1]

    def parts(*settings):
        config = preset(models, "7.8B", "one_node", "trainer.dp=1", "trainer.tp=1", *settings)
        return trainer_memory(arch, config, on_gpu=True).parts

    whole, staged = (parts("trainer.recompute=none", f"trainer.pp={pp}") for pp in (1, 2))
    assert staged["gradients"] < 0.6 * whole["gradients"]
    assert staged["activations"] in (whole["activations"], whole["activations"] // 2)  # first or last stage
    full = {sp: parts("trainer.recompute=full", f"trainer.sp={sp}", "trainer.tp=2") for sp in (False, True)}
    assert full[True]["activations"] == full[False]["activations"] // 2


def test_adapters_leave_the_backbone_without_gradients_optimizer_and_reference(models):
    def parts(*settings):
        config = preset(models, "7.8B", "one_node", "algo.kl_coef=0.1", "draft.train=off", *settings)
        return trainer_memory(read_architecture(read_config(models / "7.8B")), config).parts

    whole, low = parts(), parts("trainer.lora.rank=8", "trainer.distributed_optimizer=false")
    tp = 2 if whole["weights"] < 10 * GIB else 1
    count = 8 * 36 * (4 * 4096 + 2 * (4096 + 1024) // tp + 3 * 4096 + 3 * 11008 // tp)
    assert low["reference"] == 0 < whole["reference"]
    assert low["weights"] == whole["weights"] + 2 * count
    assert low["gradients"] == 4 * count and low["optimizer"] == 12 * count


def test_expert_parallel_ranks_share_the_experts_alone(models):
    arch = read_architecture(read_config(models / "30B-A3B"))
    shapes = arch.weight_shapes(mtp=False)
    experts = sum(_size(shape) for name, shape in shapes.items() if ".experts." in name)
    (whole, _), (shared, _) = parameters(arch), parameters(arch, ep=4)
    assert whole - shared == experts * 3 // 4
    replicated, apart = (
        trainer_memory(
            arch, preset(models, "30B-A3B", "one_node", "trainer.dp=4", "trainer.tp=1", f"trainer.ep={ep}")
        ).parts
        for ep in (1, 4)
    )
    assert apart["weights"] == 2 * shared and replicated["weights"] == 2 * whole
    assert apart["optimizer"] == replicated["optimizer"]  # sharded over all four ranks either way


def test_layers_with_delta_nets_and_with_attention_are_counted_each():
    arch = read_architecture(HYBRID)
    shapes = arch.weight_shapes(mtp=True)
    assert sum(parameters(arch)) == sum(map(_size, shapes.values()))
    assert 34e9 < sum(_size(s) for name, s in shapes.items() if ".mtp_layers." not in name) < 36e9
    config = OmegaConf.to_object(composed("rollout.max_context=32768", "spec.mode=none"))
    attention_alone = replace(arch, delta=replace(arch.delta, linear=(False,) * 40))
    assert conversation_bytes(arch, config) < 0.3 * conversation_bytes(attention_alone, config)


def test_a_mixture_that_does_not_fit_is_told_to_share_its_experts(models):
    config = preset(models, "30B-A3B", "one_node", "trainer.dp=8", "trainer.tp=1")
    assert "trainer.ep=" in remedy(config, CARD, 0)


def test_settings_that_depend_on_one_another_are_changed_together(models):
    """No two of four data parallel ranks that share the experts could go on doing so."""
    given = ("trainer.dp=4", "trainer.tp=1", "trainer.ep=4")
    config = preset(models, "30B-A3B", "one_node", *given)
    assert excess(config, CARD, 0)
    words = remedy(config, CARD, 0).split()
    assert words and not excess(preset(models, "30B-A3B", "one_node", *given, *words), CARD, 0)


def test_a_model_that_no_server_holds_is_not_searched_for_trainers(models, monkeypatch):
    asked = []
    monkeypatch.setattr(memory_check, "estimate", lambda *given: asked.append(given) or estimate(*given))
    config = preset(models, "32B", "many_nodes", "rollout.sglang.memory_fraction=0.01")
    assert not remedy(config, CARD, 0) and 0 < len(asked) < 10


@pytest.mark.parametrize(
    ("size", "cluster", "settings", "named"),
    [
        ("7.8B", "one_gpu", (), ["a GPU for each", "H200s", "adapters"]),  # the cards, their number, or less
        ("32B", "one_gpu", ("spec.mode=none",), ["H200s"]),
        ("32B", "one_gpu", ("spec.mode=none", "cluster.gpu_gb=140"), ["a GPU for each", "B200s"]),
        ("30B-A3B", "one_gpu", ("spec.mode=none", "trainer.lora.targets=attention"), ["a GPU for each"]),
    ],
)
def test_where_no_layout_fits_only_what_does_fit_is_named(models, size, cluster, settings, named):
    config = preset(models, size, cluster, *settings)
    card = int(config.cluster.gpu_gb * GIB)
    said = advice(config, card, 0)
    assert said.startswith("No layout fits. ") and said.endswith("a smaller model.")
    assert all(way in said for way in named), said
    ways = re.findall(r"\(([^()]+)\)", said)
    assert len(ways) >= len(named)
    for way in ways:
        changed = preset(models, size, cluster, *settings, *way.split())
        assert not excess(changed, int(changed.cluster.gpu_gb * GIB), 0), way
        check_parallel(changed.trainer, read_config(models / size))


def test_what_does_not_help_is_not_named(models):
    said = advice(preset(models, "32B", "one_gpu", "spec.mode=none"), CARD, 0)
    assert "adapters" not in said and "B200" not in said  # frozen weights alone fill the card; H200s suffice
    on_host = advice(preset(models, "32B", "ray", "spec.mode=none", "rollout.device=cpu"), 0, 64 * GIB)
    assert "GiB, or a smaller model" in on_host and "H200" not in on_host


def test_a_server_that_no_node_holds_is_refused_with_how_many_cards_it_needs(tmp_path):
    config = deepseek(tmp_path, "many_nodes", "rollout.sglang.tp=8", "trainer.tp=8", "trainer.dp=8")
    with pytest.raises(ValueError, match=r"weights 158\.9") as refusal:
        check_memory(config)
    assert "One server needs 32 such GPUs, and they must be on one node, of 8." in str(refusal.value)
    assert "Take B300s (cluster.gpu_gb=268" in str(refusal.value)


def nodes(*stores: float, gpus: float = 8.0):
    """Nodes as Ray lists them, with so many GiB of object store."""
    sizes = ({"CPU": 64.0, "GPU": gpus, "object_store_memory": store * GIB} for store in stores)
    return [{"NodeID": str(n), "Alive": True, "Resources": size} for n, size in enumerate(sizes)]


def test_a_server_is_not_spread_over_the_nodes_of_a_ray_cluster(models):
    check_places(preset(models, "7.8B", "many_nodes", "rollout.sglang.tp=8"), nodes(1, 1), "0")
    check_places(preset(models, "7.8B", "many_nodes", "rollout.sglang.tp=8"), nodes(1, gpus=0), "0")  # CPUs
    with pytest.raises(ValueError, match=r"sglang\.tp=16: .* has 8 GPUs\. Set rollout\.sglang\.tp=8"):
        check_places(preset(models, "7.8B", "many_nodes", "rollout.sglang.tp=16"), nodes(1, 1), "0")


LONG = ("rollout.max_context=32768", "trainer.micro_batch_tokens=32768", "rollout.replay_routes=true")
LONG += ("pipeline.prompts_per_step=64", "pipeline.group_size=8", "pipeline.max_staleness=1")


def test_the_object_store_must_hold_the_experts_of_a_step_and_of_what_waits(models):
    """512 trajectories of 32,768 tokens, 48 layers, 8 experts: 6.0 GiB, on the driver's node three times."""
    config = preset(models, "30B-A3B", "many_nodes", "spec.mode=none", *LONG)
    assert str(store_memory(config)).endswith("18.0 GiB (a step 6.0, waiting 12.0)")
    check_places(config, nodes(18, 6), "0")
    with pytest.raises(ValueError, match=r"take 18\.0 GiB .* the driver's node, which has 17\.0") as refusal:
        check_places(config, nodes(17, 6), "0")
    assert "ray start --object-store-memory=" in str(refusal.value)
    words = re.search(r"Set (\S+), (\S+) or (rollout\.replay_routes=false), or", str(refusal.value))
    for word in words.groups():
        fitting = preset(models, "30B-A3B", "many_nodes", "spec.mode=none", *LONG, word)
        check_places(fitting, nodes(17, 6), "0")
    with pytest.raises(ValueError, match=r"take 6\.0 GiB .* a node, which has 5\.0"):
        check_places(config, nodes(18, 5), "0")


def test_a_ray_of_the_runs_own_is_looked_at_before_it_starts(models, monkeypatch):
    monkeypatch.setattr(memory_check, "local_store", lambda: 10 * GIB)
    with pytest.raises(ValueError, match=r"take 18\.0 GiB .*docker run --shm-size"):
        check_memory(preset(models, "30B-A3B", "one_node", "spec.mode=none", *LONG))
    inline = preset(models, "30B-A3B", "one_node", "spec.mode=none", "cluster.mode=inline", *LONG)
    assert store_memory(inline) is None
    assert store_memory(preset(models, "30B-A3B", "one_node", "spec.mode=none")) is None


def test_the_object_store_must_hold_weights_that_pass_through_it(models):
    """By `shared` on the servers' GPUs; 15.2 GB are what `--shm-size=16g` leaves a container."""
    shared = preset(models, "7.8B", "one_node_shared", "rollout.sglang.weight_transfer=shared")
    parts = store_memory(shared).parts
    assert parts == {"weights": 2 * sum(parameters(read_architecture(read_config(models / "7.8B"))))}
    with pytest.raises(ValueError, match=r"one version of the weights takes 14\.6 GiB .* which has 14\.2"):
        check_store(shared, int(15.2e9))
    check_store(shared, 20 * GIB, 20 * GIB)
    with pytest.raises(ValueError, match=r"on a node, which has 10\.0: .* Set rollout.*weight_transfer=auto"):
        check_store(shared, 20 * GIB, 10 * GIB)
    for sent in ("one_node", "one_gpu", "one_node_shared", "many_nodes"):
        assert store_memory(preset(models, "7.8B", sent)) is None


def test_the_store_of_a_ray_here_is_what_ray_takes(monkeypatch):
    """Both are told of the same memory in use: other processes take and give some in between."""
    from ray._private import utils

    now = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    monkeypatch.setattr(utils, "get_used_memory", lambda: now.used)
    assert local_store() == pytest.approx(
        utils.resolve_object_store_memory(utils.estimate_available_memory()), rel=0.1
    )


def test_a_process_whose_parts_are_all_small_is_shown_without_them():
    assert str(Memory(process="trainer rank", parts={"weights": 1})) == "1 x trainer rank: 0.0 GiB"


def _size(shape):
    size = 1
    for n in shape:
        size *= n
    return size


def test_32k_tokens_of_a_small_model_train_on_one_card(models):
    config = preset(models, "1.5B", "one_gpu", "trainer.micro_batch_tokens=32768")
    assert estimate(config, CARD)[0].total < 40 * GIB
    dense = OmegaConf.to_object(
        composed(
            *("cluster=one_gpu", f"model.path={models / '1.5B'}", "rollout=sglang"),
            *("trainer.micro_batch_tokens=32768", "trainer.recompute=none"),
        )
    )
    assert excess(dense, CARD, 0)  # without recomputation it does not


@pytest.mark.parametrize("size, cluster", [("32B", "one_node"), ("32B", "many_nodes")])
def test_a_refusal_names_settings_that_fit(models, size, cluster):
    config = preset(models, size, cluster)
    assert excess(config, CARD, 0)
    words = remedy(config, CARD, 0).split()
    assert words and not excess(preset(models, size, cluster, *words), CARD, 0)


def test_a_run_that_does_not_fit_ends_with_status_2_before_anything_starts(models, tmp_path, capsys):
    given = composed(
        *("cluster=one_node", "rollout=sglang", f"model.path={models / '32B'}"),
        *(f"run.dir={tmp_path / 'run'}", "rollout.sglang.host=127.0.0.1"),
    )
    assert run_composed(OmegaConf.to_yaml(given, resolve=True)) == 2
    said = capsys.readouterr().err
    assert "the run would take" in said and "Set trainer.tp=" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_without_room_for_one_conversation_is_refused(models):
    given = ("trainer.dp=1", "trainer.tp=8", "rollout.sglang.memory_fraction=0.183")
    assert "to a server's keys and values" in excess(preset(models, "7.8B", "one_node", *given), CARD, 0)


def test_a_machine_without_gpus_is_held_to_its_own_memory():
    config = OmegaConf.to_object(composed("cluster=inline"))
    assert not excess(config, 0, 4 * GIB)
    assert "on a machine that has" in excess(config, 0, GIB // 16)


def test_a_checkpoint_takes_no_more_with_several_ranks_and_rank_0_its_share(models):
    arch = read_architecture(read_config(models / "7.8B"))
    count, trained = sum(parameters(arch)), parameters(arch)[0]
    config = preset(models, "7.8B", "one_node")  # tp 2, dp 2
    whole, first = checkpoint_memory(arch, config, all_ranks=True), checkpoint_memory(arch, config)
    assert whole.parts == {"optimizer": 12 * trained, "weights": 2 * count, "all weights": 2 * count}
    assert first.parts["all weights"] == 2 * count
    assert first.parts["optimizer"] == pytest.approx(3 * trained, rel=0.01)
    assert first.parts["weights"] == pytest.approx(count, rel=0.01)
    lora = preset(models, "7.8B", "one_node", "trainer.lora.rank=8", "draft.train=off")
    adapted = checkpoint_memory(arch, lora, all_ranks=True).parts
    assert adapted["weights"] == 0 and adapted["optimizer"] < 0.1 * count


def test_a_machine_whose_memory_a_checkpoint_exceeds_is_refused(models, monkeypatch):
    config = preset(models, "7.8B", "one_node")
    check_checkpoint(config, 128 * GIB)
    with pytest.raises(ValueError, match=r"a checkpoint, all hosts: 11\d\.\d GiB .*; 64\.0 GiB\)\. Take"):
        check_checkpoint(config, 64 * GIB)

    # A machine without GPUs, on which settings are only checked, is not the one that saves.
    monkeypatch.setattr(memory_check, "host_bytes", lambda: 64 * GIB)
    check_memory(config)
    monkeypatch.setattr(memory_check, "has_gpus", lambda: True)
    with pytest.raises(ValueError, match="a checkpoint would take"):
        check_memory(config)


def test_buckets_of_experts_hold_one_of_each_rank_that_shares_them(models):
    """`ep: 0` shares them among all data parallel ranks: 16 of them with two experts of 37.7 MB each."""
    arch = replace(read_architecture(read_config(models / "30B-A3B")), hidden=4096)
    config = preset(models, "30B-A3B", "many_nodes", "spec.mode=none", "trainer.tp=1", "trainer.dp=16")
    expert = 2 * 3 * 4096 * 768
    assert config.trainer.ep == 0 and sent_bytes(arch, config, on_gpu=True) == max(2 * 256 << 20, 32 * expert)


def deepseek(folder, *settings) -> Config:
    """DeepSeek-V3, of which a server on eight cards has 158.9 GiB of weights on each."""
    sizes = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"qk_nope_head_dim": 128, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1}
    sizes |= {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1}
    given = dict(zip(FIELDS, (7168, 18432, 61, 128, 128, 129280, False), strict=True)) | sizes
    given |= {"first_k_dense_replace": 3, "max_position_embeddings": 163840}
    (folder / "config.json").write_text(json.dumps(given))
    return preset(folder, "", *settings)


def test_a_conversation_with_latent_attention_keeps_one_vector_a_token(tmp_path):
    """DeepSeek-V3's: 576 numbers of a layer, where keys and values of all heads are 128 * (192 + 128)."""
    config = deepseek(tmp_path, "many_nodes", "rollout.max_context=32768")
    arch = read_architecture(read_config(tmp_path))
    kept = conversation_bytes(arch, config, tp=8)
    assert kept / (62 * 576 * 2) == pytest.approx(32768, rel=1e-3)
