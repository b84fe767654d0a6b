"""Makes models/tiny_tools: the shipped tiny model learns to call tools, by imitation.

    python -m recipes.agent_rl.make_model [--run-dir runs/tiny_tools]

There are three stages, starting from models/tiny: `skill` (careful traces), `imitation` (demonstrators of
mixed quality, from whose behaviours RL then selects), `mtp` (the draft layer is trained again on the frozen
backbone). The result is RUN_DIR/model. An interrupted run continues when started again.

The tokenizer gets nine added tokens for the markers of a call, such as Qwen's <tool_call>. They use the rows
that pad the embedding to a multiple of 16, so no shape changes. The chat template shows each tool by its
signature.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from recipes.agent_rl.demonstrators import NAMES, Demonstrator, demonstrate
from recipes.tiny_model.data import Batches, Trace, encode_all
from recipes.tiny_model.layer import MtpLayer
from recipes.tiny_model.make import weighted_loss
from recipes.tiny_model.model import save_checkpoint
from recipes.tiny_model.mtp import mtp_loss
from recipes.tiny_model.settings import StageConfig
from recipes.tiny_model.stage import load_finished, run_stage
from recipes.tiny_model.tokenizer import CHAT_TEMPLATE
from rlpipe.config.paths import shipped
from rlpipe.envs.tools.generate import TRAIN_FAMILIES, make_instance
from rlpipe.envs.tools.library import make_tools
from rlpipe.envs.tools.suite import ids
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights

FIRST = 1_000_000_000  # above the indices that runs train on and validate with
ADDED = (
    *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'),
    *("calculate", "expression", "document"),
)
SIGNATURES = (  # a newline after a block would be trimmed
    "{% for tool in tools %}{{ tool['function']['name'] }}("
    "{{ tool['function']['parameters']['properties'] | join(', ') }})"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
TEMPLATE = f"{{% if tools %}}<|system|>{SIGNATURES}<|end|>{{% endif %}}{CHAT_TEMPLATE}"


def _skill() -> StageConfig:
    return StageConfig(
        steps=1000, lr=1.5e-3, mix={"careful": 0.6, "programmer": 0.3, "retry": 0.1}, context_weight=0.1
    )


def _imitation() -> StageConfig:
    mix = {"careful": 0.32, "programmer": 0.08, "retry": 0.05, "hasty": 0.2, "in_the_head": 0.2}
    return StageConfig(steps=120, lr=5e-4, warmup=20, mix=mix | {"at_once": 0.15}, context_weight=0.1)


@dataclass(slots=True, kw_only=True)
class Settings:
    """seed: of data order and demonstrators. instances: training instances. gamma: depths of the draft."""

    seed: int = 0
    instances: int = 24_000
    gamma: int = 3
    save_every: int = 250
    skill: StageConfig = field(default_factory=_skill)
    imitation: StageConfig = field(default_factory=_imitation)
    mtp: StageConfig = field(default_factory=lambda: StageConfig(steps=120, batch_tokens=2048, lr=1e-3))


def signatures() -> str:
    """Return the text that TEMPLATE writes for the tools; a test checks that the two are equal."""
    tools = make_tools(NAMES, {}, None)
    return "\n".join(f"{tool.name}({', '.join(tool.parameters['properties'])})" for tool in tools)


def extended(base: Path) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Return the base tokenizer with the tokens ADDED, as objects of `tokenizers` and of transformers."""
    bpe, tokenizer = Tokenizer.from_file(str(base / "tokenizer.json")), AutoTokenizer.from_pretrained(base)
    for one in (bpe, tokenizer.backend_tokenizer):
        one.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    return bpe, tokenizer


def traces(
    settings: Settings, stage: StageConfig, tokenizer: PreTrainedTokenizerBase, part: int
) -> list[Trace]:
    """Make one trace per instance, by a demonstrator sampled from the stage's mix. part: selects a stream."""
    rng = random.Random(settings.seed * 10 + part)
    kinds, weights = [Demonstrator(kind) for kind in stage.mix], list(stage.mix.values())
    first = FIRST * (1 + part)
    opening = {"role": "system", "content": signatures()}
    chats = [
        [opening, *demonstrate(rng, make_instance(name), rng.choices(kinds, weights)[0])]
        for name in ids(TRAIN_FAMILIES, range(first, first + settings.instances))
    ]
    return encode_all(tokenizer, chats, stage)


def make(settings: Settings, run_dir: Path, base: Path | None = None) -> Path:
    """Make the model; returns RUN_DIR/model, a checkpoint directory in MiMo layout."""
    base = base or shipped("models/tiny")
    run_dir.mkdir(parents=True, exist_ok=True)
    bpe, tokenizer = extended(base)
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32, tie_word_embeddings=True)
    if bpe.get_vocab_size() > model.config.vocab_size:
        raise ValueError(f"{base} has {model.config.vocab_size} embeddings, not {bpe.get_vocab_size()}.")
    for part, (name, stage) in enumerate((("skill", settings.skill), ("imitation", settings.imitation))):
        if not load_finished(name, model, run_dir):
            found = traces(settings, stage, tokenizer, part)
            batches = Batches(found, stage.batch_tokens, settings.seed, tokenizer.pad_token_id)

            def loss_of(step: int, batches: Batches = batches) -> tuple[torch.Tensor, dict[str, float]]:
                return weighted_loss(model, *batches(step))

            run_stage(name, model, stage, loss_of, run_dir, settings.save_every)
    layer = MtpLayer(model.config)
    weights = read_weights(base)
    layer.load_state_dict(
        {k.removeprefix(MTP_PREFIX): v for k, v in weights.items() if k.startswith(MTP_PREFIX)}
    )
    if not load_finished("mtp", layer, run_dir):
        mixed = traces(settings, settings.imitation, tokenizer, 2)
        batches = Batches(mixed, settings.mtp.batch_tokens, settings.seed + 2, tokenizer.pad_token_id)
        model.eval()
        run_stage(
            "mtp",
            layer,
            settings.mtp,
            lambda i: mtp_loss(model, layer, *batches(i), settings.gamma),
            run_dir,
            settings.save_every,
        )
    save_checkpoint(run_dir / "model", model, layer, bpe, TEMPLATE)
    return run_dir / "model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tiny_tools"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(make(Settings(seed=args.seed), args.run_dir))
