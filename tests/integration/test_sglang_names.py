"""Families that SGLang starts on a GPU only: its own loading code finds a place for all that is sent."""

from __future__ import annotations

import json
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.sglang import SglangConfig
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights, stored_name
from rlpipe.rollout.sglang.environment import find_environment
from rlpipe.weights.canary import DRAFT, Shard, server_parts
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parents[1] / "helpers" / "sglang_names.py"
SHARED = {"lm_head.weight", "model.embed_tokens.weight"}  # a draft has the target's


def test_every_parameter_that_the_canary_expects_is_loaded_whole_from_what_is_sent(tmp_path):
    given = []
    for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        path = write_random_checkpoint(tmp_path / family, family, vocab=64)
        config, weights = read_config(path), read_weights(path)
        shard = Shard(kv_heads=2, delta=read_architecture(config).delta)
        parts = server_parts(weights, shard, config, dtype=torch.float32, drafter=Drafter.MTP)
        sizes = {name: [sum(part.numel() for part in pieces)] for name, pieces in parts.items()}
        given.append(
            {
                "model": family,
                "config": {k: v for k, v in config.items() if k not in ("text_config", "vision_config")},
                "sent": {stored_name(name, config): list(w.shape) for name, w in weights.items()},
                "target": {name: size for name, size in sizes.items() if not name.startswith(DRAFT)},
                "draft": {n.removeprefix(DRAFT): s for n, s in sizes.items() if n.startswith(DRAFT)},
            }
        )
    interpreter = find_environment(SglangConfig(), on_gpu=False).python
    # -P: helpers/sglang.py must not stand for sglang
    done = subprocess.run(
        [str(interpreter), "-P", str(SCRIPT)], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"target"')]
    for one, found in zip(given, lines, strict=True):
        assert len(found["target"]) > 20 and len(found["draft"]) > 12
        for role, loaded in found.items():
            missed = {name for name, count in loaded.items() if count != prod(one[role][name])}
            assert missed <= (SHARED if role == "draft" else set()), one["model"]
