"""Acceptance theory against enumeration of drafts and of target sequences."""

from __future__ import annotations

import pytest
import torch

from recipes import theory
from rlpipe.drafts.loss import mtp_loss
from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import verify_chain, verify_tree_greedy
from tests.helpers.verification_law import Process, all_drafts

pytestmark = pytest.mark.unit
VOCAB, GAMMA = 3, 3
EXACT = 1e-12


def _random_pair(rows: int, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, (p.log() + torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


class _Enumerated:
    """All sequences of GAMMA tokens, with the laws of target and draft along them."""

    def __init__(self, seed: int = 0, zeros: float = 0.0):
        self.target = Process.random(VOCAB, GAMMA, seed=seed, zeros=zeros)
        self.draft = Process.random(VOCAB, GAMMA, seed=seed + 100, zeros=zeros)
        self.tokens = all_drafts(VOCAB, GAMMA)
        pick = self.tokens.unsqueeze(-1)
        self.p_rows, self.q_rows = (law.rows(self.tokens, GAMMA) for law in (self.target, self.draft))
        self.p = self.p_rows.gather(-1, pick).squeeze(-1)
        self.q = self.q_rows.gather(-1, pick).squeeze(-1)
        self.p_chance, self.q_chance = self.p.prod(1), self.q.prod(1)

    def drafted(self, reach: torch.Tensor) -> torch.Tensor:
        """Expectation over drafts: [GAMMA]."""
        return self.q_chance @ reach

    def sampled(self, reach: torch.Tensor) -> torch.Tensor:
        """Expectation over the target's sequences: [GAMMA]."""
        live = self.p_chance > 0
        return self.p_chance[live] @ reach[live]


def test_alpha_of_rejection_is_the_chance_that_a_sampled_draft_is_accepted():
    p, q = _random_pair(50)
    enumerated = (q * (p / q).clamp(max=1)).sum(-1)
    assert torch.allclose(theory.rejection_alpha(p, q), enumerated, atol=EXACT)
    assert torch.allclose(theory.rejection_alpha(p, q), 1 - theory.total_variation(p, q), atol=EXACT)


def test_alpha_of_target_only_is_the_targets_probability_of_the_drafted_token():
    p, q = _random_pair(50)
    greedy = theory.target_only_alpha(p, q)
    assert greedy.tolist() == [p[i, int(q[i].argmax())].item() for i in range(50)]
    assert (greedy <= p.amax(-1)).all()
    sampled = theory.target_only_alpha_sampled(p, q)
    assert torch.allclose(sampled, sum(q[:, v] * p[:, v] for v in range(7)), atol=EXACT)
    assert (sampled <= theory.rejection_alpha(p, q)).all()


def test_rejection_wins_exactly_where_the_distance_is_below_the_mass_outside_the_greedy_token():
    p, q = _random_pair(500)
    wins = theory.rejection_margin(p, q) > 0
    boundary = 1 - p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(wins, theory.total_variation(p, q) < boundary)
    assert 0 < wins.sum() < 500


def test_acceptance_length_of_constant_alphas_is_the_product_form():
    alphas = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    length = theory.acceptance_length(theory.expected_reach(alphas)).item()
    assert length == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    target = [Process.random(VOCAB, 1, seed=s).probs[0] for s in range(GAMMA)]
    draft = [Process.random(VOCAB, 1, seed=s + 9).probs[0] for s in range(GAMMA)]
    alphas = theory.rejection_alpha(torch.stack(target), torch.stack(draft))
    enumerated = _Enumerated()  # tokens alone are used: the laws here do not depend on the context
    p, q = (
        torch.stack([law[i][enumerated.tokens[:, i]] for i in range(GAMMA)], 1) for law in (target, draft)
    )
    reach = q.prod(1) @ theory.chain_reach_drafted(p, q)
    assert torch.allclose(reach, theory.expected_reach(alphas), atol=EXACT)


def test_geometric_length_is_leviathans_closed_form():
    alpha = torch.tensor([0.0, 0.3, 0.8, 1.0], dtype=torch.float64)
    lengths = theory.geometric_length(alpha, 4)
    assert torch.allclose(lengths[:3], (1 - alpha[:3] ** 5) / (1 - alpha[:3]))
    assert lengths[3] == 5


def _of_all_entropies() -> torch.Tensor:
    """Distributions over 40 tokens from nearly certain to uniform, [400, 40]."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.linspace(0, 8, 400, dtype=torch.float64)[:, None]
    return (scale * torch.randn(400, 40, generator=generator, dtype=torch.float64)).softmax(-1)


def test_the_largest_probability_lies_between_its_bounds_by_entropy():
    """exp(-H) <= max p (Bebop Eq. 20); uniform, and one token beside a uniform rest, attain the bounds."""
    p = _of_all_entropies()
    low, high = theory.target_only_bounds(p)
    largest = p.amax(-1)
    assert (low <= largest + EXACT).all() and (largest <= high + EXACT).all()
    assert theory.entropy(p).min() < 0.1 and theory.entropy(p).max() > 3.6

    uniform = torch.full((40,), 1 / 40, dtype=torch.float64)
    peaked = torch.cat((torch.tensor([0.6], dtype=torch.float64), torch.full((39,), 0.4 / 39).double()))
    assert theory.target_only_bounds(uniform)[0].item() == pytest.approx(1 / 40)
    assert theory.target_only_bounds(peaked)[1].item() == pytest.approx(0.6)
    assert theory.entropy(uniform).exp().item() == pytest.approx(40)  # effective support


def test_target_only_falls_with_entropy_and_no_draft_does_better_than_the_bound():
    p = _of_all_entropies()
    _, high = theory.target_only_bounds(p)
    for seed in range(5):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert (theory.target_only_alpha(p, (p.log() + noise).softmax(-1)) <= high + EXACT).all()
    order = torch.stack((theory.entropy(p), p.amax(-1))).argsort(-1).argsort(-1).double()
    assert torch.corrcoef(order)[0, 1] < -0.95  # Proposition 1: by ranks


def test_pinskers_bound_holds_with_the_root_and_not_as_it_is_printed():
    p, q = _random_pair(500)
    near = 0.97 * p + 0.03 * q
    for a, b in ((p, q), (q, p), (p, near), (near, p)):
        kl = (a * (a / b).log()).sum(-1)
        assert (theory.rejection_alpha(p, b if a is p else a) >= theory.pinsker(kl) - EXACT).all()
    kl = (p * (p / near).log()).sum(-1)
    assert (theory.total_variation(p, near) > kl / 2).all()


def test_a_swap_of_ranks_costs_target_only_and_hardly_costs_rejection():
    """Bebop section 7.3: .31 and .29 trade places. Target-only drafts the old first token."""
    draft = torch.tensor([0.31, 0.29, 0.4 / 4, 0.4 / 4, 0.4 / 4, 0.4 / 4], dtype=torch.float64)
    moved = draft[[1, 0, 2, 3, 4, 5]]
    assert theory.rejection_alpha(draft, draft).item() == pytest.approx(1)
    assert theory.rejection_alpha(moved, draft).item() == pytest.approx(0.98)

    # By the paper's own Eq. 1 target-only loses as little: .31 to .29. Its jump from accepted to rejected is
    # that of greedy decoding, where the only token accepted is the target's first.
    assert theory.target_only_alpha(draft, draft).item() == pytest.approx(0.31)
    assert theory.target_only_alpha(moved, draft).item() == pytest.approx(0.29)
    greedy = torch.nn.functional.one_hot(moved.argmax(), 6).double()
    assert theory.target_only_alpha(greedy, draft).item() == 0


def test_typical_acceptance_of_a_greedy_branch_is_as_far_from_the_target_as_the_notes_say():
    """P1 = (.6, .4), P2(. | a) = (.51, .49): the branch (a, u) is emitted always. TV .4 and .694."""
    first, second = torch.tensor([0.6, 0.4]).double(), torch.tensor([0.51, 0.49]).double()
    rows = torch.stack((first, second))
    accepted = theory.lossy_typical_accepts(rows, rows.argmax(-1), epsilon=0.3, delta=0.9)
    assert accepted.tolist() == [True, True]

    emitted = torch.tensor([1.0, 0.0]).double()
    assert theory.total_variation(emitted, first).item() == pytest.approx(0.4)
    joint = torch.cat((first[0] * second, first[1] * torch.tensor([0.5, 0.5])))
    branch = torch.tensor([1.0, 0, 0, 0]).double()
    assert theory.total_variation(branch, joint).item() == pytest.approx(1 - 0.6 * 0.51) == 0.694
    assert 1 - first.max() < 0.694  # the notes' lower bound


def test_typical_acceptance_stops_at_the_first_draft_below_its_threshold():
    flat = torch.full((4,), 0.25).double()
    sharp = torch.tensor([0.97, 0.01, 0.01, 0.01]).double()
    rows = torch.stack((sharp, flat, sharp, sharp))
    accepted = theory.lossy_typical_accepts(rows, torch.tensor([1, 2, 3, 0]), epsilon=0.3, delta=0.9)
    assert accepted.tolist() == [True, True, False, False]  # flat: .25 >= .9 / 4; sharp: .01 < .3


def test_ranks_are_mistaken_only_where_the_gap_is_below_twice_the_mismatch():
    """Bebop Eq. 22, for a mismatch of at most sigma at every token; more often at high entropy."""
    p = _of_all_entropies()
    sigma = 0.01
    noise = torch.rand(20, *p.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q = p + sigma * (2 * noise - 1)
    top = p.topk(2, -1).values
    wrong = q.argmax(-1) != p.argmax(-1)
    assert wrong.any() and (top[:, 0] - top[:, 1]).expand(20, -1)[wrong].max() < 2 * sigma
    order = theory.entropy(p).argsort()
    assert wrong[:, order[-100:]].double().mean() > 5 * wrong[:, order[:100]].double().mean()


@pytest.mark.parametrize(("exponent", "doubles"), [(0, True), (1, False)])
def test_uniform_mismatch_adds_up_over_the_support_and_proportional_mismatch_does_not(exponent, doubles):
    """Bebop Eq. 26 and 33-43: TV = sigma n / 2 over n equal tokens against delta / 2, whatever n is."""
    distances = []
    for count in (10, 20):
        p = torch.full((1, count), 1 / count, dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0]).repeat(count // 2)
        q = p + 0.02 * signs * (p * 10) ** exponent
        distances.append(theory.total_variation(p, q).item())
    assert distances[0] == pytest.approx(0.02 * 10 / 2)
    assert distances[1] == pytest.approx(distances[0] * (2 if doubles else 1))

    # The fit finds the exponent where tokens differ.
    p = torch.tensor([[0.4, 0.2, 0.1, 0.1, 0.15, 0.05]], dtype=torch.float64)
    q = p + 0.01 * p**exponent * torch.tensor([1.0, -1, 1, -1, 1, -1])
    assert theory.mismatch_exponent(p, q).item() == pytest.approx(exponent, abs=1e-9)


def _trained(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and trained draft, [96, 300] each; the draft sees half of what the target's logits depend on."""
    generator = torch.Generator().manual_seed(seed)
    states, head = (torch.randn(n, 12, generator=generator) for n in (96, 300))
    target = torch.linspace(0.3, 1.5, 96)[:, None] * (states @ head.T) - torch.arange(1, 301).log()
    weight = (0.01 * torch.randn(300, 6, generator=generator)).requires_grad_()
    bias = torch.zeros(300, requires_grad=True)
    optimizer, mask = torch.optim.Adam([weight, bias], lr=2e-2), torch.ones(96, 1).bool()
    for _ in range(150):
        loss, _ = mtp_loss(kind, (states[:, :6] @ weight.T + bias)[:, None], target[:, None], mask=mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return target.softmax(-1), (states[:, :6] @ weight.T + bias).softmax(-1).detach()


@pytest.mark.parametrize("seed", range(3))
def test_neither_kl_nor_tv_leaves_the_mismatch_that_the_propositions_assume(seed):
    """What is found where drafts lack capacity: nothing uniform after KL, and less proportional after TV."""
    by_kl, by_tv = (theory.mismatch_exponent(*_trained(kind, seed)).item() for kind in ("kl", "tv"))
    assert 0.5 < by_tv < by_kl < 0.95


def _trained_on(scales: tuple[float, float], logits: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """A draft of one distribution per context, trained by TV while the target's temperature varies."""
    draft = start.clone().requires_grad_()
    optimizer, mask = torch.optim.Adam([draft], lr=0.1), torch.ones(len(logits), 1).bool()
    for step in range(80):
        scale = scales[step % 2]
        loss, _ = mtp_loss("tv", draft[:, None], (scale * logits)[:, None], mask=mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.detach()


def test_entropy_matters_outside_the_range_that_a_draft_learned_until_it_is_trained_there():
    """Bebop, Limitations: the invariance under TV holds in the range of entropies of the training data."""
    logits = 2 * torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
    inside, outside = (0.9, 1.1), 0.3  # factors of the logits: RL that explores raises entropy

    def overlap(draft: torch.Tensor, scale: float) -> tuple[float, float]:
        """Mean acceptance and mean entropy over contexts."""
        p = (scale * logits).softmax(-1)
        return theory.rejection_alpha(p, draft.softmax(-1)).mean().item(), theory.entropy(p).mean().item()

    learned = _trained_on(inside, logits, logits)
    (near, low), (edge, nats), (far, high) = (overlap(learned, scale) for scale in (1.1, 0.9, outside))
    assert abs(near - edge) / (nats - low) < 0.15 and min(near, edge) > 0.9
    assert (far - edge) / (high - nats) < -0.3  # per nat

    again = _trained_on((outside, outside), logits, learned)
    assert overlap(again, outside)[0] > 0.9 > far + 0.2


def test_more_features_never_raise_the_least_cross_entropy_and_lower_it_if_they_inform():
    """Notes, lemma 3.4: the top layer, and two more, of which Y is or is not independent."""
    generator = torch.Generator().manual_seed(0)
    top, other, tokens = 5, 4, 6
    joint = torch.rand(top, other, tokens, generator=generator, dtype=torch.float64)
    joint = joint / joint.sum()
    fused, alone = (
        theory.bayes_cross_entropy(joint.view(-1, tokens)),
        theory.bayes_cross_entropy(joint.sum(1)),
    )
    assert fused < alone - 0.01

    # Given the top layer the others say nothing: the same cross-entropy.
    given = joint.sum(1, keepdim=True) * joint.sum(2, keepdim=True) / joint.sum((1, 2), keepdim=True)
    assert theory.bayes_cross_entropy(given.view(-1, tokens)).item() == pytest.approx(alone.item(), abs=EXACT)

    # It is attained by p(y | z), and any other prediction costs its divergence on top.
    rows, (p_z, p_y) = joint.view(-1, tokens), (joint.sum(2).flatten(), joint.view(-1, tokens))
    posterior = p_y / p_z[:, None]
    guess = torch.rand(rows.shape, generator=generator, dtype=torch.float64)
    guess = guess / guess.sum(-1, keepdim=True)
    excess = p_z @ (posterior * (posterior / guess).log()).sum(-1)
    assert -(rows * posterior.log()).sum().item() == pytest.approx(fused.item(), abs=EXACT)
    assert -(rows * guess.log()).sum().item() == pytest.approx((fused + excess).item(), abs=EXACT)


def _regression(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs [n, 12], features [n, 24] with noise, their exact map, and a head of 6 orthonormal rows."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(12, 24, generator=generator, dtype=torch.float64)
    head = torch.linalg.qr(torch.randn(24, 6, generator=generator, dtype=torch.float64)).Q.T
    inputs = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    return inputs, inputs @ exact + torch.randn(n, 24, generator=generator, dtype=torch.float64), exact, head


def test_the_risk_of_features_is_that_of_all_their_directions_and_of_logits_that_of_the_heads():
    """Notes, lemma 3.3: d p / n against r p / n, here d = 24, r = 6, p = 12; 40 samples each."""
    risks = []
    for n in (200, 400):
        both = []
        for seed in range(40):
            inputs, features, exact, head = _regression(n, seed)
            error = theory.reduced_rank(inputs, features, 12) - exact
            both.append((error.square().sum().item(), (error @ head.T).square().sum().item()))
        risks.append(torch.tensor(both).mean(0))
    for n, (by_features, by_logits) in zip((200, 400), risks, strict=True):
        assert by_features.item() == pytest.approx(24 * 12 / (n - 13), rel=0.1)
        assert by_logits.item() == pytest.approx(6 * 12 / (n - 13), rel=0.1)


def test_the_null_space_costs_tokens_nothing_unless_capacity_is_limited():
    """What the lemma leaves out: with enough rank the fit to features is as good for tokens."""
    for seed in range(5):
        inputs, features, exact, head = _regression(300, seed)
        errors = {}
        for rank in (4, 12):
            by_features = theory.reduced_rank(inputs, features, rank) @ head.T
            by_logits = theory.reduced_rank(inputs, features @ head.T, rank)
            fits = (by_features, by_logits)
            errors[rank] = [(fitted - exact @ head.T).square().sum().item() for fitted in fits]
        assert errors[12][0] == pytest.approx(errors[12][1], rel=1e-9)
        assert errors[4][0] > 1.5 * errors[4][1] > 1.5 * errors[12][0]


def _path(tree: Tree, tokens: list[int], node: int) -> tuple[int, ...]:
    """The draft tokens from the root to a node."""
    found: list[int] = []
    while node:
        found.insert(0, tokens[node - 1])
        node = tree.parents[node]
    return tuple(found)


def _static_tokens(tree: Tree, draft: Process) -> list[int]:
    """The likeliest children of every node."""
    tokens: list[int] = []
    for node in range(tree.num_drafts + 1):
        count = len(tree.children(node))
        path = _path(tree, tokens, node)
        tokens += draft.probs[len(path)][path].topk(count).indices.tolist() if count else []
    return tokens


def test_a_dynamic_tree_emits_argmax_decoding_and_accepts_more_than_a_static_one_of_its_size():
    """EAGLE-2 at temperature 0, over 60 contexts; both trees have ten nodes on three levels."""
    vocab, depth, accepted = 5, 3, {"dynamic": 0, "static": 0}
    static = Tree.from_branching((2, 2, 1))
    for seed in range(60):
        target = Process.random(vocab, depth + 1, seed=seed, sharpness=2.0)
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in target.probs]
        pairs = zip(target.probs, noise, strict=True)
        draft = Process([(p.log() + x).softmax(-1) for p, x in pairs])

        def confidence(prefix: tuple[int, ...], probs: list[torch.Tensor] = draft.probs) -> torch.Tensor:
            return probs[len(prefix)][prefix]

        best: list[int] = []
        for step in range(depth + 1):
            best.append(int(target.probs[step][tuple(best)].argmax()))
        trees = {
            "dynamic": theory.dynamic_tree(confidence, width=4, depth=depth, nodes=10),
            "static": (static, _static_tokens(static, draft)),
        }
        for name, (tree, tokens) in trees.items():
            assert tree.num_drafts == 10
            paths = [_path(tree, tokens, node) for node in range(11)]
            rows = torch.stack([target.probs[len(path)][path] for path in paths])
            verdict = verify_tree_greedy(tree, torch.tensor([tokens]), rows[None])
            count = int(verdict.num_accepted)
            assert [*(tokens[n - 1] for n in verdict.path[0, :count].tolist())] == best[:count]
            assert int(verdict.next_token) == best[count]
            accepted[name] += count
    assert accepted["dynamic"] > 1.05 * accepted["static"]


@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_reach_of_drafts_is_what_the_verifiers_state(zeros):
    case = _Enumerated(zeros=zeros)
    live = case.q_chance > 0
    bonus = torch.full((len(case.tokens), 1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    coins = torch.full(case.tokens.shape, 0.5, dtype=torch.float64)
    verdict = verify_chain(case.tokens, case.q_rows, torch.cat([case.p_rows, bonus], 1), coins, coins[:, 0])
    chain = theory.chain_reach_drafted(case.p, case.q)
    assert torch.allclose(chain[live], verdict.accept_prob.cumprod(1)[live], atol=EXACT)
    assert (theory.block_reach_drafted(case.p, case.q) >= chain - EXACT).all()


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_estimators_from_target_tokens_equal_those_from_drafts_in_expectation(seed, zeros):
    case = _Enumerated(seed, zeros)
    alphas = theory.rejection_alpha(case.p_rows, case.q_rows)
    chain = case.sampled(theory.chain_reach_target(case.p.log(), case.q.log(), alphas))
    assert torch.allclose(chain, case.drafted(theory.chain_reach_drafted(case.p, case.q)), atol=EXACT)
    block = case.sampled(theory.block_reach_target(case.p.log(), case.q.log()))
    assert torch.allclose(block, case.drafted(theory.block_reach_drafted(case.p, case.q)), atol=EXACT)
    assert (block >= chain - EXACT).all()


def test_the_target_token_estimator_covers_target_only_by_a_one_hot_draft():
    case = _Enumerated()
    greedy = case.q_rows.argmax(-1)
    one_hot = (case.tokens == greedy).double()
    alphas = theory.target_only_alpha(case.p_rows, case.q_rows)
    reach = case.sampled(theory.chain_reach_target(case.p.log(), one_hot.log(), alphas))
    on_path = one_hot.cumprod(1)
    assert torch.allclose(reach, case.p_chance @ on_path, atol=EXACT)


def test_the_product_of_mean_alphas_is_biased_where_laws_depend_on_context():
    """Why the exact estimators exist: the mistake they avoid is visible here."""
    case = _Enumerated()
    alphas = theory.rejection_alpha(case.p_rows, case.q_rows)
    exact = case.drafted(theory.chain_reach_drafted(case.p, case.q))
    product = case.sampled(theory.expected_reach(alphas))
    assert (product - exact).abs().max() > 1e-3
    assert product[0] == pytest.approx(exact[0].item(), abs=EXACT)


def test_speedup_breaks_even_where_the_length_is_the_cost_of_a_step():
    alpha, gamma, cost = torch.tensor(0.8, dtype=torch.float64), 5, 0.1
    length = theory.geometric_length(alpha, gamma)
    closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))
    assert torch.allclose(theory.speedup(length, gamma, cost), closed)
    assert theory.step_cost(3, 0.2, verify_cost=1.4) == pytest.approx(2.0)
    assert theory.speedup(torch.tensor(2.0), 3, 0.2, verify_cost=1.4).item() == pytest.approx(1.0)
