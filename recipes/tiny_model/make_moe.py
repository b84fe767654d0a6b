"""Makes models/tiny_moe, a small MoE with an MTP layer, from the small dense model.

    python -m recipes.tiny_model.make_moe [--run-dir DIR] [distill.steps=200 shape.experts=8 ...]

Flow: the dense model's MLPs are cut into experts (`moe.upcycle`) -> `distill` (the MoE learns the dense
model's distribution on traces of mixed quality, so that it behaves like the dense model before RL) -> `draft`
(the MTP layer learns the frozen MoE's distribution) -> RUN_DIR/model. An interrupted run continues when
started again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, Glm4MoeForCausalLM, Qwen2ForCausalLM

from recipes.tiny_model.data import Batches, traces_of
from recipes.tiny_model.make import compose
from recipes.tiny_model.moe import Balance, moe_config, save_mixture, upcycle
from recipes.tiny_model.mtp import mtp_loss
from recipes.tiny_model.settings import MoeSettings
from recipes.tiny_model.stage import load_finished, run_stage
from rlpipe.config.paths import resolve, shipped
from rlpipe.models.checkpoint import read_weights


def distillation_loss(
    teacher: Qwen2ForCausalLM, student: Glm4MoeForCausalLM, ids: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted mean of KL(teacher || student) in nats per token, and the overlap of the two.

    ids, weights: [B, T]; a position counts with the weight of the token that it predicts. Layers run in
    bfloat16 (weights stay float32), logits in float32.
    """
    chosen = weights[:, 1:] > 0
    weight = weights[:, 1:][chosen]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = student.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        with torch.no_grad():
            seen = teacher.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    q = F.linear(hidden[chosen].float(), student.lm_head.weight).log_softmax(-1)
    with torch.no_grad():
        p = F.linear(seen[chosen].float(), teacher.lm_head.weight).log_softmax(-1)
        overlap = torch.minimum(p.exp(), q.exp()).sum(-1)[weight == 1].mean().item()
    divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    return (divergence * weight).sum() / weight.sum(), {"overlap": overlap}


def make(settings: MoeSettings, run_dir: Path) -> Path:
    """Make the MoE; returns RUN_DIR/model, a checkpoint directory in GLM-4.5's layout."""
    torch.set_num_threads(settings.threads)
    run_dir.mkdir(parents=True, exist_ok=True)
    base = Path(resolve(settings.base))
    tokenizer = AutoTokenizer.from_pretrained(base)
    teacher = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model, layer = upcycle(read_weights(base), moe_config(teacher.config, settings.shape), settings.seed)
    lines = shipped("data/swe/train.jsonl").read_text().splitlines()[: settings.instances]
    records = [json.loads(line) for line in lines]
    seeds = [settings.seed * 100 + number for number in range(settings.demonstrations)]
    stage = settings.distill
    traces = [trace for seed in seeds for trace in traces_of(records, tokenizer, stage, seed)]
    for name, module, stage in (("distill", model, settings.distill), ("draft", layer, settings.draft)):
        if load_finished(name, module, run_dir):
            continue
        batches = Batches(traces, stage.batch_tokens, settings.seed, tokenizer.pad_token_id)
        balance = Balance(module, settings.balance)

        def loss_of(
            step: int, name: str = name, batches: Batches = batches, balance: Balance = balance
        ) -> tuple[Tensor, dict[str, float]]:
            if name == "distill":
                loss, figures = distillation_loss(teacher, model, *batches(step))
            else:
                loss, figures = mtp_loss(model, layer, *batches(step), settings.gamma)
            balance.step()
            return loss, figures | {"expert_load": balance.spread}

        run_stage(name, module, stage, loss_of, run_dir, settings.save_every)
        balance.close()
        module.eval()
    save_mixture(run_dir / "model", model, layer, base, settings.dtype.value)
    return run_dir / "model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny_moe"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a field of MoeSettings")
    args = parser.parse_args()
    try:
        settings = compose(args.overrides, MoeSettings)
    except ValueError as error:
        sys.exit(f"tiny_moe: {error}")
    args.run_dir.mkdir(parents=True, exist_ok=True)
    (args.run_dir / "config.yaml").write_text(OmegaConf.to_yaml(settings))
    print(make(settings, args.run_dir))


if __name__ == "__main__":
    main()
