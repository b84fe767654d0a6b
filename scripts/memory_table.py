"""Estimates the memory of each process of a run: five model sizes in each GPU preset, as the doctor does.

    python scripts/memory_table.py > docs/memory.md

Only the `config.json` of each model is needed (MODELS); nothing is started. A test compares the page with
this script's output.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlpipe.cli.run import config_of
from rlpipe.config.run import Config
from rlpipe.config.trainer import check_parallel
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.memory_check import excess, remedy
from rlpipe.preflight.memory_estimate import GIB, checkpoint_memory, estimate, sent_bytes

PRESETS = ("one_gpu", "one_node", "one_node_shared", "many_nodes")
CARD = 80 * GIB
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
DENSE = {"model_type": "mimo", "num_nextn_predict_layers": 1, "max_position_embeddings": 32768}
MOE = {
    **{"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "max_position_embeddings": 40960,
}
SIZES: dict[str, tuple[tuple[int | bool, ...], dict[str, Any]]] = {
    "1.5B": ((1536, 8960, 28, 12, 2, 151936, True), DENSE),
    "7.8B": ((4096, 11008, 36, 32, 8, 151680, False), DENSE),
    "32B": ((5120, 27648, 64, 40, 8, 152064, False), DENSE),
    "30B-A3B": ((2048, 6144, 48, 32, 4, 151936, False), MOE | {"moe_intermediate_size": 768}),
    "235B-A22B": ((4096, 12288, 94, 64, 4, 151936, False), MOE | {"moe_intermediate_size": 1536}),
}
MODELS = {
    name: dict(zip(FIELDS, sizes, strict=True)) | {"head_dim": 128} | more
    for name, (sizes, more) in SIZES.items()
}
HEAD = """# Memory of each size

GiB, as `rlpipe doctor` estimates it before a run starts ([what is counted](clusters.md#what-fits)), with the
settings of each preset on GPUs of 80 GiB. All weights are trained in bf16; the model's MTP layer drafts
(`rejection`, gamma 3), except with MoEs, which have none. On a CPU the estimate was compared with
[measured peaks](developer/benchmark_log.md#how-close-is-the-memory-estimate), also
[of checkpoints](developer/benchmark_log.md#what-does-a-checkpoint-take); untested on GPU. Written by
`python scripts/memory_table.py`.

- **Trainer rank**: the rank with the highest peak. *State*: weights, gradients, optimizer. *Work*:
  activations and logits of a micro-batch. *Sent*: the buckets of weights, experts included, on their way to
  servers; they are needed when *work* is not.
- **Server**: each of its GPUs. *Graphs*: draft distributions that CUDA graphs retain, in one buffer for all
  batch sizes. *Other*: a prefill, the logits of a verify step, a bucket of weights.
- **Checkpoint**: host memory that saving adds on the host of rank 0, and on all hosts of the trainer
  together. Saving adds nothing on a GPU, because no rank gathers the optimizer state of another.
- **Fits**: `fits`, the settings to add, or no.
"""
COLUMNS = (
    *("model", "preset", "trainer ranks", "state", "work", "sent", "**rank**"),
    *("server GPUs", "weights", "KV", "graphs", "other", "checkpoint, rank 0", "all ranks", "fits"),
)


def write_models(folder: Path) -> None:
    """Write the `config.json` of each model."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def preset(folder: Path, model: str, cluster: str) -> Config:
    """Return the settings of a model in a preset."""
    drafts = [] if "num_nextn_predict_layers" in MODELS[model] else ["spec.mode=none", "draft.train=off"]
    settings = [f"cluster={cluster}", "rollout=sglang", f"model.path={folder / model}", *drafts]
    return config_of(["+recipe=swe_rl", *settings])[0]


def verdict(config: Config, model: dict[str, Any]) -> str:
    """Return "fits", the settings with which the model fits, or "no"."""
    try:
        check_parallel(config.trainer, model)
        if not excess(config, CARD, 0):
            return "fits"
    except ValueError:
        pass
    change = remedy(config, CARD, 0)
    return f"`{change}`" if change else "no"


def cells(folder: Path, model: str, cluster: str) -> list[str]:
    """Return one row of the table."""
    config = preset(folder, model, cluster)
    arch = read_architecture(read_config(folder / model))
    trainer, server = estimate(config, CARD)
    saved = checkpoint_memory(arch, config)
    of_all = checkpoint_memory(arch, config, all_ranks=True)

    parts = trainer.parts
    state = parts["weights"] + parts["reference"] + parts["gradients"] + parts["optimizer"]
    sizes = [
        state,
        parts["activations"] + parts["logits"],
        sent_bytes(arch, config, on_gpu=True),
        trainer.total,
    ]
    held = [server.parts[name] for name in ("weights", "kv", "graphs")]
    other = server.parts["activations"] + server.parts["bucket"]

    def gib(values: Sequence[int]) -> list[str]:
        return [f"{value / GIB:.1f}" for value in values]

    return [
        *(model, f"`{cluster}`", str(trainer.count), *gib(sizes)),
        *(str(server.count), *gib([*held, other, saved.total, of_all.total])),
        verdict(config, MODELS[model]),
    ]


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        for model in MODELS:
            for cluster in PRESETS:
                yield f"| {' | '.join(cells(Path(name), model, cluster))} |"


if __name__ == "__main__":
    print("\n".join(page()))
