"""A grown checkpoint says what the small one says: logits, MTP drafts, tokens and acceptance."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlpipe.config.paths import shipped
from tests.helpers.cli import ROOT
from tests.helpers.engines import generate, request, running_engine, transformers_logits

pytestmark = pytest.mark.integration
SIZES = {
    "hidden": 192,
    "heads": 9,
    "kv-heads": 3,
    "head-dim": 64,
    "intermediate": 700,
    "layers": 10,
    "vocab": 1000,
}


def grow(out, **changes):
    sizes = SIZES | {name.replace("_", "-"): value for name, value in changes.items()}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    script, small = ROOT / "scripts" / "grow_checkpoint", shipped("models") / "tiny"
    return subprocess.run(
        [sys.executable, script, small, out, *options, "--dtype", "float32"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    out = tmp_path_factory.mktemp("grown")
    done = grow(out)
    assert done.returncode == 0, done.stderr
    return out


def test_log_probabilities_are_the_small_models_and_added_tokens_have_none(grown):
    tokens = torch.randint(0, 800, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    small = transformers_logits(shipped("models") / "tiny")(tokens).log_softmax(-1)
    large = transformers_logits(grown)(tokens).log_softmax(-1)
    torch.testing.assert_close(large[:, :800], small, atol=2e-3, rtol=0)
    assert large[:, 800:].max() < -100


def test_turns_and_their_acceptance_are_the_small_models(grown):
    """Greedy: equal tokens need equal targets, equal counts need equal drafts at every depth."""
    prompts = [torch.randint(10, 800, (30,), generator=torch.Generator().manual_seed(s)) for s in range(4)]
    requests = [request(i, p.tolist(), temperature=0.0, max_new_tokens=40) for i, p in enumerate(prompts)]
    results = []
    for path in (shipped("models") / "tiny", grown):
        with running_engine(path, mode="rejection") as engine:
            results.append(generate(engine, *requests))
    for small, large in zip(*results, strict=True):
        assert large.output_ids.tolist() == small.output_ids.tolist()
        assert large.spec == small.spec
        assert len(small.output_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 128}, "--hidden 128: at least 129."),
        ({"head_dim": 48}, "--head-dim 48: a multiple of 32."),
        ({"heads": 3}, "--heads 3: at least 4."),
        ({"heads": 4, "kv_heads": 4}, "--heads 4 --kv-heads 4: 2 or more heads for each."),
    ],
)
def test_a_size_the_model_does_not_fit_in_is_refused(change, message, tmp_path):
    done = grow(tmp_path, **change)
    assert done.returncode == 2
    assert message in done.stderr
