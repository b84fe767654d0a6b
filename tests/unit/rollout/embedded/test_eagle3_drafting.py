"""What the engine drafts with EAGLE-3 is what the module that is trained gives for the same tokens."""

from __future__ import annotations

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.drafts.eagle3_model import Eagle3
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.spec.tree import Tree
from tests.helpers.driven_engine import GammaScript, Recorded, driven_engine
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.engines import request, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
TOLERANCE = 1e-4
PROMPTS = [[5, 9, 33, 2, 17], [60, 3, 3, 41, 8, 11, 29, 7], [12, 50], [12, 50]]
REDUCED = [0, 2, 3, 7, 8, 9, 12, 17, 29, 33, 41, 50, 51, 60, 63]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    """Qwen3 normalises queries and keys, which the draft does not."""
    return write_random_checkpoint(tmp_path_factory.mktemp("target"), request.param, layers=4)


def law_of(checkpoint, draft_path):
    """A function of token ids and drafts behind them to q after the last draft, [V]."""
    from transformers import AutoModelForCausalLM

    draft = Eagle3.load(draft_path, read_config(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    embed = read_weights(checkpoint)["model.embed_tokens.weight"]

    @torch.no_grad()
    def law(ids: list[int], drafts: list[int]) -> torch.Tensor:
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in draft.shape.layers], -1)
        embedded, anchors = embed[torch.tensor([*ids, *drafts])], len(ids) - 1
        ahead = torch.stack([embedded[None, k : k + anchors] for k in range(1, len(drafts) + 2)])
        return draft.logits(draft.unroll(features, ahead)[-1][0, -1]).softmax(-1)

    return law


@pytest.mark.parametrize(
    ("mode", "tree", "ids"),
    [("rejection", [1, 1, 1, 1], None), ("block", [1, 1, 1], REDUCED), ("tree", [2, 2, 1], REDUCED)],
)
def test_q_of_every_draft_is_that_of_the_training_forward(checkpoint, tmp_path, mode, tree, ids):
    path = write_random_draft(tmp_path / "draft", checkpoint, ids=ids)
    law, shape = law_of(checkpoint, path), Tree.from_branching(tree)
    paths = [[node for node in path if node >= 0] for path in shape.paths().tolist()]
    with driven_engine(
        checkpoint, mode, tree=tree, gamma=len(tree), drafter="eagle3", draft_path=path
    ) as driven:
        recorded = Recorded(driven)
        driven.submit(*(request(i, prompt, max_new_tokens=40) for i, prompt in enumerate(PROMPTS)))
        for _ in range(5):
            driven.round()
    assert len(recorded.steps) == 4
    for prefixes, tokens, drafted, _, _ in recorded.steps:
        for row, prefix in enumerate(prefixes):
            for node, path_to in enumerate(paths):
                if shape.children(node):
                    q = law(prefix, [int(tokens[row, n - 1]) for n in path_to])
                    q = q if ids is None else q[ids]
                    assert (drafted.probs[row, node] - q).abs().max() < TOLERANCE
        if ids:
            assert set(tokens.flatten().tolist()) <= set(ids)


@pytest.mark.parametrize("spell", [1, 3])
def test_the_draft_is_right_again_after_a_spell_without_drafts(checkpoint, tmp_path, spell):
    path = write_random_draft(tmp_path / "draft", checkpoint)
    law = law_of(checkpoint, path)
    policy = GammaScript(2, 2, *[0] * spell, 2)
    with driven_engine(checkpoint, policy=policy, drafter="eagle3", draft_path=path) as driven:
        recorded = Recorded(driven)
        driven.submit(*(request(i, prompt, max_new_tokens=40) for i, prompt in enumerate(PROMPTS)))
        for _ in range(spell + 4):
            driven.round()
    prefixes, tokens, drafted, *_ = recorded.steps[-1]
    for row, prefix in enumerate(prefixes):
        for depth in range(2):
            q = law(prefix, tokens[row, :depth].tolist())
            assert (drafted.probs[row, depth] - q).abs().max() < TOLERANCE


def test_the_draft_stays_and_reads_the_new_target_after_an_update(checkpoint, tmp_path):
    """Its own weights are kept; embedding and features are those of the weights in use."""
    path = write_random_draft(tmp_path / "draft", checkpoint)
    other = write_random_checkpoint(
        tmp_path / "other", read_config(checkpoint)["model_type"], layers=4, seed=1
    )
    law = law_of(other, path)
    options = {"drafter": "eagle3", "draft_path": path, "kv_on_update": "recompute"}
    with driven_engine(checkpoint, **options) as driven:
        driven.submit(request(0, PROMPTS[1], max_new_tokens=40))
        driven.round()
        driven.update(read_weights(other), 1)
        recorded = Recorded(driven)
        driven.round()
    ((prefixes, tokens, drafted, *_),) = recorded.steps
    for depth in range(3):
        q = law(prefixes[0], tokens[0, :depth].tolist())
        assert (drafted.probs[0, depth] - q).abs().max() < TOLERANCE


def test_greedy_decoding_with_a_draft_emits_the_argmax(checkpoint, tmp_path):
    path = write_random_draft(tmp_path / "draft", checkpoint, ids=REDUCED)
    logits = transformers_logits(checkpoint)
    with driven_engine(checkpoint, "greedy", drafter="eagle3", draft_path=path) as driven:
        (result,) = driven.generate(request(0, PROMPTS[0], max_new_tokens=20, temperature=0.0))
    ids = [*PROMPTS[0]]
    for token in result.output_ids.tolist():
        assert token == int(logits(ids)[-1].argmax())
        ids.append(token)


def test_costs_are_measured_with_the_draft_that_drafts(checkpoint, tmp_path, monkeypatch):
    """Adaptive gamma asks what this draft costs: the measurement runs its layer."""
    from rlpipe.rollout.embedded.eagle3 import Eagle3Draft

    path = write_random_draft(tmp_path / "draft", checkpoint)
    calls, step = [], Eagle3Draft.step
    monkeypatch.setattr(Eagle3Draft, "step", lambda self, *args: calls.append(1) or step(self, *args))
    spec = SpecConfig(drafter="eagle3", draft_path=str(path), gamma=2, adaptive=True)
    rollout = RolloutConfig(max_running=2, max_context=64, device="cpu")
    engine = EmbeddedEngine(rollout, spec, checkpoint)
    engine.close()
    # 1 + 5 rounds of batches 1 and 2: gamma 1 catches up, gamma 2 drafts deeper once besides
    assert len(calls) == 6 * 2 * (1 + 2)


def test_a_draft_needs_its_path_and_a_path_its_draft(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"spec\.draft_path=''"):
        SpecConfig(drafter="eagle3")
    with pytest.raises(ValueError, match=r"spec\.drafter=mtp"):
        SpecConfig(draft_path="somewhere")
    spec = SpecConfig(drafter="eagle3", draft_path=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="holds no EAGLE-3 draft"):
        EmbeddedEngine(RolloutConfig(max_context=64, device="cpu"), spec, checkpoint)
