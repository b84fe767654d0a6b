"""A real SGLang server whose steps draft 0 to 3 tokens, as rlpipe's policy chooses."""

import numpy as np
import pytest
import torch

from rlpipe.certify.statistics import normal_quantile
from rlpipe.types import SpecCounts
from tests.helpers.cli import ROOT
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.engines import generate, request, transformers_logits
from tests.helpers.sglang import GAMMA, running_server
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.integration.test_sglang_engine import prompts

pytestmark = pytest.mark.integration
TINY = ROOT / "models" / "tiny"
BINS, ALPHA = 20, 1e-6


# A server takes half a minute to start, so each rule and each drafter is there once.
@pytest.fixture(scope="module", params=["rejection", "target_only, EAGLE-3"])
def turns(request, tmp_path_factory):
    """The model, and (prompt, result) of a lone request, then of a batch of 32.

    EAGLE-3: a random draft of a random model of three tokens. Its seed is one whose drafts the model mostly
    keeps (.7, then .5), as a third draft is counted only where two were kept.
    """
    mode, _, drafter = request.param.partition(", ")
    folder, model, draft, asked = tmp_path_factory.mktemp("logs"), TINY, None, prompts(33, seed=5, longest=12)
    if drafter:
        shape = {"vocab": 3, "layers": 4, "scale": 0.3, "head_scale": 0.3}
        model = write_random_checkpoint(folder / "model", "mimo", **shape)
        draft = write_random_draft(folder / "draft", model, layers=[0, 1, 2], seed=1)
        asked = [[token % 3 for token in prompt] for prompt in asked]
    with running_server(model, folder, mode, draft, adaptive=True) as engine:
        lone = ask(engine, asked[:1])
        return model, list(zip(asked, lone + ask(engine, asked[1:]), strict=True))


def ask(engine, asked):
    return generate(engine, *(request(i, p, temperature=1.0, max_new_tokens=80) for i, p in enumerate(asked)))


def score(model, turns, temperature, seed=0):
    """Chi-squared of where each token fell in its law, likely tokens first; number of tokens."""
    logits, rng, places = transformers_logits(model), np.random.default_rng(seed), []
    for prompt, result in turns:
        ids = result.output_ids.tolist()
        law = torch.softmax(logits([*prompt, *ids])[len(prompt) - 1 : -1].double() / temperature, -1)
        chosen = law.gather(1, torch.tensor(ids)[:, None])
        above = (law * (law > chosen)).sum(1)
        places += (above + chosen[:, 0] * torch.from_numpy(rng.random(len(ids)))).tolist()
    counts = np.histogram(places, BINS, (0, 1 + 1e-9))[0]
    expected = len(places) / BINS
    return ((counts - expected) ** 2).sum() / expected, len(places)


def test_tokens_have_the_law_of_the_target_whatever_the_width(turns):
    """alpha 1e-6, about 2,600 tokens. Power: tokens taken for those of a temperature of 1.7 must fail."""
    found, tokens = score(*turns, 1.0)
    wrong, _ = score(*turns, 1.7)
    print("tokens", tokens, "score", round(found, 2), "of a wrong law", round(wrong, 2))
    spread = 2 / (9 * (BINS - 1))  # Wilson and Hilferty
    bound = (BINS - 1) * (1 - spread + normal_quantile(ALPHA) * spread**0.5) ** 3
    assert found < bound < wrong


def test_the_width_changes_and_every_draft_is_counted(turns):
    for _, result in turns[1]:
        spec, count = result.spec, len(result.output_ids)
        assert 0 <= 1 + spec.verify_steps + sum(spec.accepted) - count <= GAMMA  # the last step may overrun
        assert sum(spec.drafted) <= spec.proposed <= GAMMA * spec.verify_steps
        kept = [spec.verify_steps, *spec.accepted]
        assert all(d <= k for d, k in zip(spec.drafted, kept, strict=False))
    whole = SpecCounts()
    for _, result in turns[1]:
        whole.add(result.spec)  # that of a turn of one token is empty
    assert 0 < whole.drafted[-1] < whole.drafted[0] < whole.verify_steps  # none in some steps, all in some
