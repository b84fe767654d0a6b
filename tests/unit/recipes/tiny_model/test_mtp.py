"""Teacher-forced acceptance: a perfect draft is always accepted; alignment is what an engine does."""

import pytest
import torch

from recipes.tiny_model.model import build_backbone
from recipes.tiny_model.mtp import build_mtp, draft, mtp_loss
from recipes.tiny_model.settings import TinyShape

pytestmark = pytest.mark.unit
GAMMA = 3


class PerfectLayer(torch.nn.Module):
    """Depth k at anchor t returns the backbone's own hidden state at t + k (minus `late`)."""

    def __init__(self, hidden: torch.Tensor, late: int = 0) -> None:
        super().__init__()
        self.hidden, self.depth, self.late = hidden, 0, late

    def forward(self, hidden, embeddings, position_ids, attention_mask=None):
        self.depth = self.depth % GAMMA + 1
        start = self.depth - self.late
        return self.hidden[:, start : start + hidden.shape[1]]


@pytest.fixture
def backbone():
    shape = TinyShape(hidden_size=32, num_layers=2, head_dim=8, intermediate_size=48)
    model = build_backbone(shape, 40, eos=1, pad=0, seed=0).eval()
    model.model.norm.weight.data *= 20  # distributions far from uniform
    return model


def _text():
    ids = torch.randint(2, 40, (3, 16), generator=torch.Generator().manual_seed(0))
    written = torch.zeros(3, 16, dtype=torch.bool)
    written[:, 5:] = True
    return ids, written


@torch.no_grad()
def test_a_draft_equal_to_the_target_is_always_accepted_and_one_position_late_is_not(backbone):
    ids, written = _text()
    hidden = backbone.model(input_ids=ids).last_hidden_state
    loss, perfect = mtp_loss(backbone, PerfectLayer(hidden).eval(), ids, written.float(), GAMMA)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert list(perfect.values()) == pytest.approx([1.0] * GAMMA)
    _, late = mtp_loss(backbone, PerfectLayer(hidden, late=1).eval(), ids, written.float(), GAMMA)
    assert max(late.values()) < 0.9


def test_only_anchors_whose_tokens_the_model_wrote_are_drafted(backbone):
    ids, written = _text()
    written[:, 9] = False  # two turns: 5..8 and 10..15
    drafts = draft(backbone, build_mtp(backbone), ids, written, GAMMA)
    # depth 1 drafts token t + 2 after the written token t + 1
    assert drafts.anchors[0][0].nonzero().flatten().tolist() == [4, 5, 6, 9, 10, 11, 12, 13]
    assert drafts.anchors[2][0].nonzero().flatten().tolist() == [4, 9, 10, 11]


def test_training_lowers_the_divergence_from_the_frozen_backbone(backbone):
    ids, written = _text()
    layer = build_mtp(backbone)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    first = mtp_loss(backbone, layer, ids, written.float(), GAMMA)[0].item()
    for _ in range(40):
        loss, _ = mtp_loss(backbone, layer, ids, written.float(), GAMMA)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.8 * first
    assert backbone.lm_head.weight.grad is None


def test_an_anchor_counts_with_the_weight_of_the_token_it_predicts(backbone):
    ids, written = _text()
    layer = build_mtp(backbone).eval()
    drafts = draft(backbone, layer, ids, written, 1)
    divergence = (
        drafts.target_logprobs[0].exp() * (drafts.target_logprobs[0] - drafts.draft_logprobs[0])
    ).sum(-1)
    weights = written.float()
    weights[:, 7] = 0.25
    expected = torch.ones(ids[:, 2:].shape)
    expected[:, 5] = 0.25  # anchor 5 predicts token 7
    expected = expected[drafts.anchors[0]]
    loss, _ = mtp_loss(backbone, layer, ids, weights, 1)
    torch.testing.assert_close(loss, (divergence * expected).sum() / expected.sum())
