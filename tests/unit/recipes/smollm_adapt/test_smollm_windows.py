"""Windows of the study's layer: its passes are those of texts that contain the drafted tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.smollm_adapt.objectives import Drafts
from recipes.smollm_adapt.texts import read
from recipes.smollm_adapt.windows import TextWindows, WindowLayer
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.convert.closed_form import Sample, start_layer
from rlpipe.drafts.windows.rollout import SampledWindows
from rlpipe.drafts.windows.training import WindowTraining

pytestmark = pytest.mark.unit

VOCAB, GROUP = 40, 2
TABLE = torch.tensor([0, 2, 3, 5, 8, 9, 12, 17, 20, 21, 25, 28, 30, 31, 35, 39])


class Case:
    """A random Llama in bfloat16, its layer, and two of its texts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=True,
        )
        self.model = LlamaForCausalLM(config).bfloat16().eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(6 if weight.dim() == 2 else 1)
        projection = torch.randn(32, 64) / 8
        self.weights = start_layer(self.model, projection, torch.float32)
        samples = [Sample(ids=torch.randint(0, VOCAB, (n,)), sampled=torch.arange(n) > 3) for n in (14, 11)]
        self.texts = read(self.model, samples)

    def windows(self) -> TextWindows:
        return TextWindows(self.model, WindowLayer(self.model, self.weights), TABLE, self.texts)


def sampled(rows: list[int], anchors: list[int]) -> SampledWindows:
    coins = torch.zeros(len(rows), GROUP, 3, dtype=torch.float64)
    return SampledWindows(
        owners=np.array(rows),
        turns=np.array(rows),
        columns=np.array(anchors),
        scores=torch.zeros(len(rows)),
        draft_uniforms=coins,
        coins=coins,
    )


def test_a_window_of_the_texts_own_tokens_has_the_states_of_the_text():
    case = Case()
    text = case.windows()
    rows, anchors = [0, 0, 1], [4, 7, 5]
    ids = torch.from_numpy(text.turns)
    hidden = torch.nn.utils.rnn.pad_sequence([t.hidden for t in case.texts], batch_first=True)
    whole = WindowLayer(case.model, case.weights).unroll(hidden.float(), ids)

    text.start(sampled(rows, anchors), GROUP)
    states = [text.draft(None).expand(-1, GROUP, -1)]
    for depth in (1, 2):
        follow = torch.stack([ids[r, a + 1 + depth] for r, a in zip(rows, anchors, strict=True)])
        states.append(text.draft(follow[:, None].expand(-1, GROUP)))
    for depth, state in enumerate(states):
        wanted = whole[depth][rows, anchors][:, None].expand(-1, GROUP, -1)
        torch.testing.assert_close(state, wanted, atol=0.05, rtol=0.05)


def test_the_model_reads_a_window_after_the_text_up_to_its_anchor():
    case = Case()
    text = case.windows()
    rows, anchors = [0, 0, 1], [4, 7, 5]
    text.start(sampled(rows, anchors), GROUP)
    tokens = torch.randint(0, VOCAB, (3, GROUP, 3))
    read_states, first = text.read(tokens), text.first()
    for w, (row, anchor) in enumerate(zip(rows, anchors, strict=True)):
        for g in range(GROUP):
            ids = torch.cat((case.texts[row].ids[: anchor + 2], tokens[w, g]))
            wanted = case.model.base_model(ids[None]).last_hidden_state[0]
            torch.testing.assert_close(read_states[w, g], wanted[anchor + 2 :], atol=0.1, rtol=0.1)
            torch.testing.assert_close(first[w], wanted[anchor + 1], atol=0.1, rtol=0.1)

    # The greedy window grows by a token at a time.
    text.greedy(tokens[:, 0, 0])
    torch.testing.assert_close(text.greedy(tokens[:, 0, 1]), read_states[:, 0, 1], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind", [DraftObjective.EXACT_WINDOW, DraftObjective.PPOW])
def test_an_objective_on_windows_trains_every_weight_of_the_layer(kind):
    case = Case()
    training = WindowTraining(PpowConfig(), kind, depths=3, steps=4, seed=0)
    drafts = Drafts(case.model, TABLE, case.weights, training)
    loss, stats = drafts.loss(kind, case.texts, 1)
    assert not stats.alpha.requires_grad
    loss.backward()
    for name, weight in drafts.weights.items():
        assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0, name
