"""The EAGLE-3 draft: its unrolling against a naive one, its vocabulary, its checkpoint and its refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from rlpipe.config.draft_objectives import FROM_LOGITS
from rlpipe.config.drafters import Drafter
from rlpipe.config.eagle3 import Eagle3Config, Eagle3Shape
from rlpipe.drafts.eagle3_model import Eagle3
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.vocabulary import OUTSIDE
from rlpipe.models.checkpoint import read_config
from tests.helpers.eagle3_drafts import random_draft, write_random_draft
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
LAYERS, STEPS, LENGTH = 4, 4, 9


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("target"), "llama", layers=LAYERS)


def naive_states(draft: Eagle3, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """[K, T, H]: every anchor of one sequence for itself, its keys in a list, one query at a time.

    features: [T, F]. embeddings: [T + K + 1, H] by token position.
    """
    layer, shape, attention = draft.midlayer, draft.shape, draft.midlayer.self_attn
    dim = shape.head_dim

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in range(dim // 2):
            angle = torch.tensor(position * shape.rope.frequencies(dim)[i], dtype=torch.float64)
            a, b = x[:, i], x[:, i + dim // 2]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + dim // 2] = b * angle.cos() + a * angle.sin()
        return out

    def read(state, embedded, position):
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)])
        query = rotated(attention.q_proj(both).view(-1, dim), position)
        key = rotated(attention.k_proj(both).view(-1, dim), position)
        return query, key, attention.v_proj(both).view(-1, dim)

    def out(state, query, keys, values):
        heads = []
        for head in range(shape.heads):
            own = head * shape.kv_heads // shape.heads
            scores = torch.stack([query[head] @ key[own] for key in keys]) / dim**0.5
            weights = scores.softmax(0)
            heads.append(sum(w * value[own] for w, value in zip(weights, values, strict=True)))
        state = state + attention.o_proj(torch.cat(heads))
        x = layer.post_attention_layernorm(state)
        return state + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))

    found = torch.empty(STEPS, len(features), shape.hidden)
    first = [read(draft.fc(f), embeddings[t + 1], t) for t, f in enumerate(features)]
    for anchor in range(len(features)):  # what an engine has cached when it drafts from this anchor
        keys, values = [[x[i] for x in first[: anchor + 1]] for i in (1, 2)]
        state = draft.fc(features[anchor])
        for step in range(STEPS):
            query, key, value = read(state, embeddings[anchor + step + 1], anchor + step)
            if step:
                keys, values = [*keys, key], [*values, value]
            state = out(state, query, keys, values)
            found[step, anchor] = state
    return found


@torch.no_grad()
def test_steps_attend_as_they_do_when_drafting(target):
    """Against every anchor run for itself: step 1 of the past, and own later steps alone."""
    draft = random_draft(target)
    hidden = draft.shape.hidden
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, LENGTH, len(draft.shape.layers) * hidden, generator=generator)
    embeddings = torch.randn(2, LENGTH + STEPS + 1, hidden, generator=generator)
    ahead = torch.stack([embeddings[:, k : k + LENGTH] for k in range(1, STEPS + 1)])
    states = torch.stack(draft.unroll(features, ahead))
    for row in range(2):
        expected = naive_states(draft, features[row], embeddings[row])
        assert (states[:, row] - expected).abs().max() < 1e-4
    causal = draft.unroll(features, ahead[:1])[0]
    assert torch.equal(causal, states[0]) and (states[1] - states[0]).abs().max() > 0.1


@torch.no_grad()
def test_padding_on_the_right_changes_no_earlier_anchor(target):
    draft = random_draft(target)
    torch.manual_seed(0)
    features = torch.randn(1, LENGTH, draft.fc.in_features)
    ahead = torch.randn(STEPS, 1, LENGTH, draft.shape.hidden)
    whole = torch.stack(draft.unroll(features, ahead))
    short = torch.stack(draft.unroll(features[:, :5], ahead[:, :, :5]))
    assert (whole[:, :, :5] - short).abs().max() < 1e-4


def test_deeper_steps_train_the_states_they_read(target):
    """The training-time test's gradient reaches step 1 through the states, and fc through all steps."""
    draft = random_draft(target)
    features = torch.randn(1, 3, draft.fc.in_features)
    ahead = torch.randn(3, 1, 3, draft.shape.hidden, requires_grad=True)
    draft.unroll(features, ahead)[2][0, 1].sum().backward()
    assert (ahead.grad[:, 0].abs().amax(-1) > 0).tolist() == [
        [True, True, False],
        [False, True, False],
        [False, True, False],
    ]
    assert draft.fc.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", FROM_LOGITS)
def test_any_loss_is_finite_over_the_whole_vocabulary(target, kind):
    """A token outside the reduced vocabulary has (almost) no probability, and alpha is the exact overlap."""
    ids = [3, 4, 9, 20, 63]
    torch.manual_seed(0)
    draft = random_draft(target, ids=ids)
    states = torch.randn(1, 6, 2, draft.shape.hidden)
    target_logits = torch.randn(6, 2, draft.shape.vocab)
    tokens = torch.full((6, 2), 5)
    logits = draft.logits(states[0])
    q = logits.softmax(-1)
    own = draft.lm_head(draft.norm(states[0])).softmax(-1)
    assert torch.allclose(q[..., ids], own, atol=1e-6) and q.sum(-1).sub(1).abs().max() < 1e-5
    outside = [v for v in range(draft.shape.vocab) if v not in ids]
    assert logits.log_softmax(-1)[..., outside].max() < OUTSIDE + 1e-3
    starts = torch.zeros(1, 6, dtype=torch.bool)
    starts[0, 0] = True
    mask = torch.ones(6, 2, dtype=torch.bool)
    loss, stats = mtp_loss(kind, logits, target_logits, mask=mask, tokens=tokens, turn_starts=starts)
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in draft.lm_head.parameters())
    overlap = torch.minimum(own, target_logits.softmax(-1)[..., ids]).sum(-1).sum(0)
    assert torch.allclose(stats.alpha.float(), overlap, atol=1e-4)


@pytest.mark.parametrize("ids", [None, [0, 5, 6, 40]])
def test_a_saved_draft_is_read_back_bit_for_bit(target, tmp_path, ids):
    draft = random_draft(target, ids=ids, layers=[0, 2])
    draft.save(tmp_path / "draft")
    again = Eagle3.load(tmp_path / "draft", read_config(target))
    assert again.shape == draft.shape and again.shape.layers == (0, 2)
    assert again.state_dict().keys() == draft.state_dict().keys() == draft.shape.weight_shapes().keys()
    assert all(torch.equal(a, again.state_dict()[name]) for name, a in draft.state_dict().items())
    if ids:
        assert again.ids.tolist() == ids
        stored = load_file(tmp_path / "draft" / "model.safetensors")
        assert stored["d2t"].tolist() == [0, 4, 4, 37] and stored["t2d"].nonzero().flatten().tolist() == ids


def edited(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))


REFUSED = {
    "hidden size": ({"hidden_size": 64}, "hidden=64, the target 32"),
    "vocabulary": ({"vocab_size": 65}, "vocab=65, the target 64"),
    "layer ids": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, "between 0 and 3"),
    "layer named twice": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, "each once"),
    "default layers of a small target": ({"eagle_config": {}}, "between 0 and 3"),
    "another model": ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 draft"),
    "another equation": ({"norm_before_fc": True}, "norm_before_fc"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers"),
    "draft vocabulary": ({"draft_vocab_size": 70}, "draft_vocab_size=70"),
    "weights": ({"draft_vocab_size": 10}, "lm_head.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_draft_that_does_not_fit_is_refused(target, tmp_path, case):
    changes, message = REFUSED[case]
    path = write_random_draft(tmp_path / "draft", target)
    edited(path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        Eagle3.load(path, read_config(target))
    assert "spec.draft_path" in str(error.value)


def test_a_mapping_outside_the_vocabulary_is_refused(target, tmp_path):
    path = write_random_draft(tmp_path / "draft", target, ids=[0, 1, 2])
    weights = load_file(path / "model.safetensors")
    weights["d2t"] = torch.tensor([0, 0, 99])
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t"):
        Eagle3.load(path, read_config(target))


def test_a_target_that_rotates_a_part_of_its_heads_is_refused(tmp_path):
    target = read_config(write_random_checkpoint(tmp_path, "glm4_moe"))
    with pytest.raises(ValueError, match=r"'glm4_moe' rotates 4 of 8 numbers: draft with its MTP layer"):
        DRAFTERS[Drafter.EAGLE3].check_trained(SimpleNamespace(), target)


def test_a_missing_directory_and_impossible_settings_are_refused(target, tmp_path):
    config = read_config(target)
    with pytest.raises(ValueError, match=r"adapt\.drafter=eagle3"):
        Eagle3.load(tmp_path / "nothing", config)
    with pytest.raises(ValueError, match=r"eagle3\.layers=\[9\]"):
        Eagle3Shape.for_target(config, [9])
    with pytest.raises(ValueError, match="vocabulary of 64"):
        Eagle3Shape.for_target(config, draft_vocab=65)
    with pytest.raises(ValueError, match=r"eagle3\.draft_vocab=-1"):
        Eagle3Config(draft_vocab=-1)
    with pytest.raises(ValueError, match=r"eagle3\.start"):
        Eagle3Config(start="x", layers=[1])
