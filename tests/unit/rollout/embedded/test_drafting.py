"""What is drafted, against the reference MTP module; which uniforms judge it; and in which order a step asks.

The engine is driven round by round, and what passes between drafting and judging is recorded.
"""

from __future__ import annotations

import pytest
import torch

import rlpipe.rollout.embedded.drafting as drafting
from rlpipe.config.draft_vocab import write_table
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights
from rlpipe.rollout.embedded.drafters import drafting_streams
from rlpipe.spec.tree import Tree
from tests.helpers.driven_engine import GammaScript, Recorded, driven_engine
from tests.helpers.engines import request, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
TOLERANCE = 1e-4
TABLE = list(range(0, 64, 3))
PROMPTS = [[5, 9, 33, 2, 17], [60, 3, 3, 41, 8, 11, 29, 7], [12, 50]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("drafting"))


@pytest.fixture(scope="module")
def draft_law(checkpoint):
    """A function of token ids and drafts behind them to q after the last draft, [V].

    Depth 1 comes from the MTP module over true hidden states; a deeper state is fed back with the draft.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.tiny_model.layer import MtpLayer

    weights = read_weights(checkpoint)
    layer = MtpLayer(AutoConfig.from_pretrained(checkpoint))
    layer.load_state_dict({k.removeprefix(MTP_PREFIX): v for k, v in weights.items() if MTP_PREFIX in k})
    backbone = AutoModelForCausalLM.from_pretrained(checkpoint).model

    @torch.no_grad()
    def law(ids: list[int], drafts: list[int]) -> torch.Tensor:
        states = backbone(torch.tensor([ids[:-1]])).last_hidden_state
        for depth in range(len(drafts) + 1):
            following = torch.tensor([[*ids[1:], *drafts[:depth]]])
            count = following.shape[1]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            embedded = weights["model.embed_tokens.weight"][following]
            state = layer(states, embedded, torch.arange(count)[None], mask)[:, -1:]
            states = torch.cat((states, state), 1)
        return (state[0, -1] @ weights["lm_head.weight"].T).softmax(-1)

    return law


@pytest.fixture(scope="module")
def table(checkpoint):
    """A table of every third token."""
    write_table(file := checkpoint / "table.json", TABLE)
    return file


def _in_table(q: torch.Tensor) -> torch.Tensor:
    """q among the tokens of the table, 0 elsewhere."""
    inside = torch.zeros_like(q)
    inside[TABLE] = q[TABLE]
    return inside / inside.sum()


def _recorded(checkpoint, mode: str, rounds: int = 6, **spec) -> list:
    with driven_engine(checkpoint, mode, **spec) as driven:
        recorded = Recorded(driven)
        driven.submit(*(request(i, prompt, max_new_tokens=40) for i, prompt in enumerate(PROMPTS)))
        for _ in range(rounds):
            driven.round()
    return recorded.steps


@pytest.mark.parametrize(("mode", "tree"), [("rejection", [1, 1, 1]), ("tree", [2, 2, 1]), ("tree", [3, 1])])
def test_p_and_q_of_every_node_are_those_of_its_path(checkpoint, draft_law, mode, tree):
    """All nodes of all steps: the target against transformers, the draft against the reference module."""
    target, shape = transformers_logits(checkpoint), Tree.from_branching(tree)
    paths = [[node for node in path if node >= 0] for path in shape.paths().tolist()]
    steps = _recorded(checkpoint, mode, tree=tree, gamma=len(tree))
    assert len(steps) == 5
    for ids, tokens, drafted, choices, _ in steps:
        for row, prefix in enumerate(ids):
            for node, path in enumerate(paths):
                drafts = [int(tokens[row, n - 1]) for n in path]
                p = target([*prefix, *drafts])[-1].softmax(-1)
                assert (choices[row, node] - p).abs().max() < TOLERANCE
                if shape.children(node):
                    q = draft_law(prefix, drafts)
                    assert (drafted.probs[row, node] - q).abs().max() < TOLERANCE


@pytest.mark.parametrize("mode", ["rejection", "tree"])
def test_a_table_restricts_q_to_its_tokens(checkpoint, draft_law, table, mode):
    shape = Tree.from_branching([2, 1] if mode == "tree" else [1, 1])
    paths = [[node for node in path if node >= 0] for path in shape.paths().tolist()]
    for ids, tokens, drafted, _, _ in _recorded(
        checkpoint, mode, rounds=4, tree=[2, 1], gamma=2, draft_vocab=table
    ):
        assert torch.isin(tokens, torch.tensor(TABLE)).all()
        for row, prefix in enumerate(ids):
            for node in range(len(paths)):
                if shape.children(node):
                    q = draft_law(prefix, [int(tokens[row, n - 1]) for n in paths[node]])
                    assert (drafted.probs[row, node] - _in_table(q)[TABLE]).abs().max() < TOLERANCE
        assert torch.equal(torch.tensor(TABLE)[drafted.columns], tokens)


def test_an_update_replaces_the_rows_of_the_head_that_a_table_chose(checkpoint, table):
    """After an update with other weights q is that of an engine that began with them."""
    other = read_weights(checkpoint)
    other["lm_head.weight"] = other["lm_head.weight"].flip(0)
    weights, q = [read_weights(checkpoint), other], []
    for updates in ([1], [0, 1], []):
        with driven_engine(checkpoint, "rejection", draft_vocab=table) as driven:
            for version, index in enumerate(updates, 1):
                driven.update(weights[index], version)
            recorded = Recorded(driven)
            driven.submit(request(0, PROMPTS[0], max_new_tokens=8))
            for _ in range(2):
                driven.round()
        q.append(recorded.steps[0][2].probs)
    assert (q[0] == q[1]).all()
    assert not torch.allclose(q[0], q[2])


@pytest.mark.parametrize("mode", ["target_only", "greedy"])
def test_drafts_that_are_not_sampled_are_the_argmax_within_a_table(checkpoint, draft_law, table, mode):
    with driven_engine(checkpoint, mode, draft_vocab=table) as driven:
        recorded = Recorded(driven)
        driven.submit(*(request(i, p, max_new_tokens=40, temperature=0.0) for i, p in enumerate(PROMPTS)))
        for _ in range(3):
            driven.round()
    for ids, tokens, *_ in recorded.steps:
        for row, prefix in enumerate(ids):
            drafts = tokens[row].tolist()
            expected = [int(_in_table(draft_law(prefix, drafts[:d])).argmax()) for d in range(3)]
            assert drafts == expected


@pytest.mark.parametrize("mode", ["target_only", "greedy"])
def test_drafts_that_are_not_sampled_are_the_argmax_of_q(checkpoint, draft_law, mode):
    steps = []
    with driven_engine(checkpoint, mode) as driven:
        recorded = Recorded(driven)
        driven.submit(*(request(i, p, max_new_tokens=40, temperature=0.0) for i, p in enumerate(PROMPTS)))
        for _ in range(4):
            driven.round()
        steps = recorded.steps
    for ids, tokens, drafted, _, _ in steps:
        assert drafted.probs is None
        for row, prefix in enumerate(ids):
            drafts = tokens[row].tolist()
            expected = [int(draft_law(prefix, drafts[:depth]).argmax()) for depth in range(3)]
            assert drafts == expected


@pytest.mark.parametrize("shared", [False, True], ids=["greedy only", "beside a row that samples"])
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "within a table"])
def test_children_of_a_greedy_row_are_the_likeliest_tokens_of_q(
    checkpoint, draft_law, table, shared, reduced
):
    """All children of a node differ: a second copy of the argmax would never be accepted."""
    shape, temperatures = Tree.from_branching([3, 2]), [0.0, 0.0, 0.8 if shared else 0.0]
    with driven_engine(checkpoint, "tree", tree=[3, 2], draft_vocab=table if reduced else "") as driven:
        recorded = Recorded(driven)
        for i, (prompt, temperature) in enumerate(zip(PROMPTS, temperatures, strict=True)):
            driven.submit(request(i, prompt, max_new_tokens=40, temperature=temperature))
        for _ in range(4):
            driven.round()

    for ids, tokens, drafted, _, judged in recorded.steps:
        sampling = PROMPTS[2] if shared else None
        greedy = [row for row, prefix in enumerate(ids) if prefix[: len(PROMPTS[2])] != sampling]
        assert len(greedy) == (2 if shared else 3)
        assert (drafted.probs is None) is not shared
        assert set(judged.accept_prob[greedy].flatten().tolist()) <= {0.0, 1.0}
        for row in greedy:
            for node, path in enumerate(shape.paths().tolist()):
                children = shape.children(node)
                q = draft_law(ids[row], [int(tokens[row, n - 1]) for n in path if n >= 0])
                likeliest = (_in_table(q) if reduced else q).topk(3).indices[: len(children)]
                assert [int(tokens[row, child - 1]) for child in children] == likeliest.tolist()


def test_rows_that_sample_do_not_notice_greedy_rows_beside_them(checkpoint):
    """Neither emits other tokens than alone."""
    asked = [(i, p, 0.0 if i == 1 else 0.9) for i, p in enumerate(PROMPTS)]
    requests = [request(i, p, max_new_tokens=40, temperature=t, record_drafts=True) for i, p, t in asked]
    with driven_engine(checkpoint, "tree") as driven:
        together = driven.generate(*requests)
    for one, expected in zip(requests, together, strict=True):
        with driven_engine(checkpoint, "tree") as driven:
            (alone,) = driven.generate(one)
        assert alone.output_ids.tolist() == expected.output_ids.tolist()
        assert alone.spec == expected.spec
        if one.sampling.temperature == 0:
            assert all(step.draft_probs == [1.0] * 10 for step in [*alone.drafts, *expected.drafts])


def test_more_children_than_tokens_repeat_the_least_likely():
    logits = torch.tensor([[[0.0, 2.0]]])
    assert drafting._likeliest(logits, 4).tolist() == [[[1, 0, 0, 0]]]


def test_siblings_are_drawn_without_replacement():
    """Over a fine lattice of uniforms the second sibling follows q without the first, normalised."""
    q = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)
    lattice = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for first, uniform in ((0, 0.25), (1, 0.6), (2, 0.9)):
        noise = torch.stack((torch.full_like(lattice, uniform), lattice), 1).unsqueeze(1)
        drawn = drafting._siblings(q.expand(1000, 1, 4), noise)[:, 0]
        assert (drawn[:, 0] == first).all()
        counts = torch.bincount(drawn[:, 1], minlength=4) / 1000
        rest = q.index_fill(0, torch.tensor(first), 0.0)
        assert (counts - rest / rest.sum()).abs().max() <= 1e-3


def test_more_siblings_than_tokens_repeat_the_last():
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    drawn = drafting._siblings(q, torch.tensor([[[0.3, 0.9, 0.1]]], dtype=torch.float64))
    assert drawn.tolist() == [[[1, 1, 1]]]


@pytest.mark.parametrize("tree", [[2, 2, 1], [3, 1], [1, 1, 1], [4]])
def test_every_node_of_a_tree_has_a_draft_and_a_coin_of_its_own(tree):
    """No two nodes at one depth share a uniform, and none is the residual's."""
    spec = SpecConfig(mode="tree", tree=tree)
    made = drafting.TreeDrafting.__new__(drafting.TreeDrafting)
    model = type("Model", (), {"device": torch.device("cpu")})
    made.__init__(model, None, Tree.from_branching(tree))
    widest = max(map(len, made._levels))
    used = made._draft_streams[:widest] + made._coin_streams[:widest] + [int(drafting.Stream.RESIDUAL)]
    assert len(set(used)) == len(used) == 2 * widest + 1
    assert max(used) < drafting_streams(spec)


@pytest.mark.parametrize("mode", ["rejection", "block", "tree"])
def test_no_uniform_that_decided_anything_is_used_by_a_later_step(checkpoint, mode):
    """Block: none at all, as all drafts of a step decide together. Else: none up to the first rejection.

    A coin drawn again after it failed is a coin known to be high: that biases what follows.
    """
    seen: list[set[float]] = [set() for _ in PROMPTS]
    for _, _, drafted, _, judged in _recorded(checkpoint, mode, rounds=10):
        for row, kept in enumerate(judged.accepted.tolist()):
            uniforms = drafted.uniforms[row]
            deciding = uniforms if mode == "block" else uniforms[: kept + 1]
            now = set(deciding.flatten().tolist())
            assert len(now) == deciding.numel()
            assert not seen[row] & set(uniforms.flatten().tolist())
            seen[row] |= now


@pytest.mark.parametrize("mode", ["rejection", "block", "target_only"])
def test_gamma_is_chosen_before_anything_is_drafted(checkpoint, mode, monkeypatch):
    """In each round: choose, draft that many, verify, and then tell the policy sums alone."""
    events = []

    class Policy(GammaScript):
        def choose(self, batch):
            events.append(("choose", super().choose(batch)))
            return events[-1][1]

        def observe(self, drafted, accepted):
            assert all(type(n) is int for n in (*drafted, *accepted))
            events.append(("observe", len(drafted)))

    draft, verify = drafting.ChainDrafting.draft, drafting.ChainDrafting.verify

    def drafted(self, decoding, gamma):
        events.append(("draft", gamma))
        return draft(self, decoding, gamma)

    def verified(self, one, choices):
        events.append(("verify", one.part.span.width - 1))
        return verify(self, one, choices)

    monkeypatch.setattr(drafting.ChainDrafting, "draft", drafted)
    monkeypatch.setattr(drafting.ChainDrafting, "verify", verified)
    gammas = [2, 3, 0, 1, 0, 0, 2]
    with driven_engine(checkpoint, mode, policy=Policy(*gammas)) as driven:
        events.clear()  # those of the cost measurement
        driven.submit(request(0, PROMPTS[0], max_new_tokens=60))
        for _ in gammas:
            driven.round()
    expected = [("choose", gammas[0])]  # the first round fills the prompt and drafts nothing
    for gamma in gammas[1:]:
        expected += [("choose", gamma), ("draft", gamma), ("verify", gamma)]
        expected += [("observe", gamma)] if gamma else []
    assert events == expected
