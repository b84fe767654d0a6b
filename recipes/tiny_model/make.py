"""Makes the tiny model: skill, imitation, MTP layer, checkpoint.

    python -m recipes.tiny_model.make [--run-dir DIR] [skill.steps=2400 shape.hidden_size=96 ...]

Flow: instances and tokenizer -> `skill` (copy drill, then careful traces) -> `imitation` (traces of
demonstrators of mixed quality, nothing masked: the behaviour that RL then selects from) -> `mtp` (the
draft layer learns the frozen backbone's distribution on conversations the model wrote itself) ->
RUN_DIR/model. Each stage leaves its weights in RUN_DIR, so changing a later stage repeats no earlier one. An
interrupted run continues when started again. The settings are those of settings.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from recipes.tiny_model.data import Batches, CopyDrill, load_instances, traces_of
from recipes.tiny_model.demonstrators import Demonstrator, demonstrate
from recipes.tiny_model.layer import MtpLayer
from recipes.tiny_model.model import build_backbone, save_checkpoint
from recipes.tiny_model.mtp import build_mtp, mtp_loss
from recipes.tiny_model.settings import Settings, StageConfig
from recipes.tiny_model.stage import load_finished, run_stage
from recipes.tiny_model.tokenizer import save_tokenizer, train_bpe

TOKENIZER_TEXTS = 3000


def load_tokenizer(
    config: Settings, records: list[dict], run_dir: Path
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Return the tokenizer, trained on traces of the first instances and cached in RUN_DIR/tokenizer."""
    path = run_dir / "tokenizer"
    if not path.is_dir():
        rng = random.Random(config.seed)
        kinds = (Demonstrator.CAREFUL, Demonstrator.RETRY)
        chats = [demonstrate(rng, r, kind) for r in records[:TOKENIZER_TEXTS] for kind in kinds]
        bpe = train_bpe(("\n".join(m["content"] for m in chat) for chat in chats), config.vocab_size)
        save_tokenizer(bpe, path, config.shape.max_positions)
    return Tokenizer.from_file(str(path / "tokenizer.json")), AutoTokenizer.from_pretrained(path)


def weighted_loss(model: Qwen2ForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Compute the weighted cross entropy of next tokens; logits only for positive weights.

    ids, weights: [B, T]. The forward pass runs in bfloat16 (weights stay float32), the logits in float32.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    target, weight = ids[:, 1:], weights[:, 1:]
    chosen = weight > 0
    target, weight = target[chosen], weight[chosen]
    logits = F.linear(hidden[chosen].float(), model.lm_head.weight)
    losses = F.cross_entropy(logits, target, reduction="none")
    with torch.no_grad():
        written = weight == 1
        right = (logits[written].argmax(-1) == target[written]).float().mean().item()
        figures = {"written_loss": losses[written].mean().item(), "written_accuracy": right}
    return (losses * weight).sum() / weight.sum(), figures


def train_backbone(
    config: Settings,
    model: Qwen2ForCausalLM,
    records: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
) -> None:
    """Run the stages `skill` and `imitation` on `model`, in place."""
    stages = (("skill", config.skill, config.seed), ("imitation", config.imitation, config.seed + 1))
    for name, stage, seed in stages:
        if load_finished(name, model, run_dir):
            continue
        traces = traces_of(records[: _needed(stage)], tokenizer, stage, seed)
        batches = Batches(traces, stage.batch_tokens, seed, tokenizer.pad_token_id)
        drill = CopyDrill(traces, tokenizer, stage.batch_tokens, seed)

        def loss_of(
            step: int, batches: Batches = batches, drill: CopyDrill = drill, stage: StageConfig = stage
        ) -> tuple[Tensor, dict[str, float]]:
            drilling = step < stage.drill * stage.steps and step % 2 == 0
            loss, figures = weighted_loss(model, *(drill if drilling else batches)(step))
            return loss, {"drill_" * drilling + key: value for key, value in figures.items()}

        run_stage(name, model, stage, loss_of, run_dir, config.save_every)


def _needed(stage: StageConfig) -> int:
    """Return a number of instances that a stage cannot exhaust: traces average at least 64 tokens."""
    return stage.steps * stage.batch_tokens // 64


def train_mtp(
    config: Settings,
    model: Qwen2ForCausalLM,
    records: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
) -> MtpLayer:
    """Run the stage `mtp`: train the draft layer on new traces of the mix that the backbone imitates."""
    stage = replace(config.mtp, mix=config.imitation.mix, mask_wrong=False)
    layer = build_mtp(model)
    if load_finished("mtp", layer, run_dir):
        return layer
    traces = traces_of(records[: _needed(stage)], tokenizer, stage, config.seed + 2)
    batches = Batches(traces, stage.batch_tokens, config.seed + 2, tokenizer.pad_token_id)
    model.eval()

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        return mtp_loss(model, layer, *batches(step), config.gamma)

    run_stage("mtp", layer, stage, loss_of, run_dir, config.save_every)
    return layer


def run_tiny_model(config: Settings, run_dir: Path) -> Path:
    """Make the tiny model; returns RUN_DIR/model, a checkpoint directory in MiMo layout.

    If it was killed, the next call continues where it stopped.
    """
    records, bpe, tokenizer, model = prepare(config, run_dir)
    train_backbone(config, model, records, tokenizer, run_dir)
    layer = train_mtp(config, model, records, tokenizer, run_dir)
    save_checkpoint(run_dir / "model", model, layer, bpe, dtype=config.dtype.value)
    return run_dir / "model"


def prepare(
    config: Settings, run_dir: Path
) -> tuple[list[dict], Tokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM]:
    """Return instances, tokenizer and the untrained backbone; set the number of threads."""
    torch.set_num_threads(config.threads)
    run_dir.mkdir(parents=True, exist_ok=True)
    records = load_instances(config, run_dir)
    bpe, tokenizer = load_tokenizer(config, records, run_dir)
    model = build_backbone(
        config.shape, bpe.get_vocab_size(), tokenizer.eos_token_id, tokenizer.pad_token_id, config.seed
    )
    return records, bpe, tokenizer, model


T = TypeVar("T")


def compose(overrides: list[str], settings: type[T] = Settings) -> T:
    """Apply `key=value` overrides to the defaults. Raises ValueError for an unknown key or invalid value."""
    try:
        composed = OmegaConf.merge(OmegaConf.structured(settings), OmegaConf.from_dotlist(overrides))
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(f"{overrides}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny_model"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a field of Settings")
    args = parser.parse_args()
    try:
        settings = compose(args.overrides)
    except ValueError as error:
        sys.exit(f"tiny_model: {error}")
    args.run_dir.mkdir(parents=True, exist_ok=True)
    (args.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(settings))
    print(run_tiny_model(settings, args.run_dir))


if __name__ == "__main__":
    main()
