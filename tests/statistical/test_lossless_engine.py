"""The engine's samples against the exact joint law of the first tokens, and planted samplers against it.

G-test of the first 6 tokens over a vocabulary of 3 (729 sequences): a score for each depth and one for all
together, the largest judged. n = 6,000 requests with seeds 0..n-1 for each engine, alpha = 1e-4 each (2.9e-3
for the 29 right engines here), split evenly over the 7 scores. Seeds, joins, batch sizes and swaps are
fixed, so a right engine passes always or never. Power: a wrong law at a divergence of 0.033 nats per sequence
from the right one is caught with probability above 0.999 (tested). Every planted bug must be beyond the limit
of 4.2. The models were chosen for power: two of the bugs in block verification score 6.7 and 17.9 here, and
pass unseen on other random models.

An engine is driven round by round: requests join while others run, as many as a schedule says (1 to 192
rows). A third end later than the tokens judged; a third are the second turn of a conversation whose keys
stay cached up to where its prompt was changed.

Swaps: the weights are replaced between rounds, keys recomputed, so that a token follows the law of the
weights its recorded version names, given all tokens before it. Whether token i was sampled before the swap
depends on tokens before i and on coins independent of it, whatever the rule: given that i - 1 drafts of a
step were kept, what follows them has the target's law (for block see `rlpipe.spec.verify.block`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import rlpipe.rollout.embedded.drafting as drafting
from rlpipe.certify.statistics import normal_quantile
from rlpipe.config.draft_vocab import write_table
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.embedded.decoder import Decoder
from rlpipe.rollout.embedded.sampler import Sampler
from rlpipe.spec.gamma import AdaptiveGamma
from rlpipe.spec.sampling import sample_cdf
from tests.helpers.driven_engine import RandomGamma, driven_engine
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.engines import request, transformers_logits
from tests.helpers.goodness_of_fit import Law
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.wrong_tree_verifiers import TREE_MUTANTS
from tests.helpers.wrong_verifiers import BLOCK_MUTANTS, bonus_from_draft, resample_from_target

pytestmark = pytest.mark.statistical
VOCAB, DEPTH, SAMPLES, GAMMA = 3, 6, 6_000, 3
PROMPT = [2, 0, 1, 2]
ROWS = 192
ALPHA = 1e-4
LIMIT = normal_quantile(ALPHA / (DEPTH + 1))
DETECTABLE = 0.033  # nats per sequence
REPEATS = 40


@dataclass(slots=True, kw_only=True)
class Case:
    """Two checkpoints of one shape, the laws of their first tokens after PROMPT, and EAGLE-3 drafts.

    drafts: directories by what they know: all tokens, or two of the three. two_layers: the first checkpoint
    with a second MTP layer. table: of the two tokens that an MTP layer may draft.
    """

    path: object
    two_layers: object
    other: dict[str, torch.Tensor]
    law: Law
    drafts: dict[str, object]
    table: object = None


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    """Models far from uniform whose drafts are sometimes right, and whose rows depend on all tokens."""
    root = tmp_path_factory.mktemp("law")
    shape = {"vocab": VOCAB, "hidden": 16, "heads": 2, "kv_heads": 1, "scale": 0.3, "head_scale": 0.3}
    paths = [write_random_checkpoint(root / str(seed), seed=seed, **shape) for seed in (6, 2)]
    law = Law.of([transformers_logits(path) for path in paths], PROMPT, VOCAB, DEPTH)
    vocabularies = {"whole": None, "reduced": [0, 2]}
    drafts = {name: write_random_draft(root / name, paths[0], ids=ids) for name, ids in vocabularies.items()}
    two_layers = write_random_checkpoint(root / "two layers", seed=6, mtp_layers=2, **shape)
    write_table(table := root / "table.json", vocabularies["reduced"])
    return Case(
        path=paths[0],
        two_layers=two_layers,
        other=read_weights(paths[1]),
        law=law,
        drafts=drafts,
        table=table,
    )


def _conversations(samples: int, temperature: float) -> list[list]:
    """One request each whose first DEPTH tokens follow PROMPT; its id is its number."""

    def turn(name: object, prompt: list[int], length: int, **kwargs) -> object:
        return request(name, prompt, max_new_tokens=length, temperature=temperature, **kwargs)

    def conversation(i: int) -> list:
        if i % 3 == 0:
            return [turn(i, PROMPT, DEPTH)]
        if i % 3 == 1:
            return [turn(i, PROMPT, DEPTH + 1 + i % 4)]
        before = turn(f"before {i}", PROMPT[:3], 1 + i % 4, session=str(i), seed=samples + i)
        return [before, turn(i, PROMPT, DEPTH, session=str(i))]

    return [conversation(i) for i in range(samples)]


def _sample(
    case: Case, mode: str, samples: int = SAMPLES, temperature: float = 1.0, swap_every: int = 0, **engine
) -> tuple[np.ndarray, np.ndarray]:
    """The first DEPTH tokens of all requests, and which model sampled each; swaps go to and fro."""
    rollout = {"max_running": ROWS, "max_context": 20, "kv_on_update": "recompute"}
    weights = [read_weights(case.path), case.other]
    with driven_engine(case.path, mode, gamma=GAMMA, **rollout, **engine) as driven:

        def swap(number: int) -> None:
            if swap_every and number % swap_every == swap_every - 1:
                version = (number + 1) // swap_every
                driven.update(weights[version % 2], version)

        driven.play(_conversations(samples, temperature), between=swap)
        results = [driven.results[str(i)] for i in range(samples)]
    tokens = np.array([result.output_ids.tolist()[:DEPTH] for result in results])
    return tokens, np.array([result.versions.tolist()[:DEPTH] for result in results]) % 2


def _score(case: Case, mode: str, **settings) -> float:
    return max(case.law.scores(*_sample(case, mode, **settings)))


@pytest.mark.parametrize("mode", ["none", "target_only", "rejection", "block", "tree"])
def test_the_engine_samples_the_exact_joint_law(case, mode):
    assert _score(case, mode) < LIMIT


def test_drafts_over_cached_latent_vectors_keep_the_law(tmp_path):
    """DeepSeek-V3: attention and the draft's layer have latent vectors, tokens choose experts in groups.

    Half the samples: its experts take their time.
    """
    shape = {"vocab": VOCAB, "hidden": 16, "heads": 2, "query_rank": 8, "scale": 0.3, "head_scale": 0.3}
    path = write_random_checkpoint(tmp_path, "deepseek_v3", seed=6, **shape)
    law = Law.of([transformers_logits(path)], PROMPT, VOCAB, DEPTH)
    latent = Case(path=path, two_layers=None, other=read_weights(path), law=law, drafts={})
    assert _score(latent, "rejection", samples=SAMPLES // 2) < LIMIT


@pytest.mark.parametrize("mode", ["target_only", "rejection", "block"])
def test_a_gamma_that_varies_from_step_to_step_keeps_the_law(case, mode):
    """gamma = 0 in a quarter of the steps: the draft falls behind and its gaps are closed again."""
    assert _score(case, mode, policy=RandomGamma(GAMMA)) < LIMIT


@pytest.mark.parametrize(("mode", "adaptive"), [("rejection", True), ("block", False)])
def test_drafts_of_one_layer_per_depth_keep_the_law(case, mode, adaptive):
    """The second layer drafts the second token and, again, the third."""
    policy = RandomGamma(GAMMA) if adaptive else None
    assert _score(replace(case, path=case.two_layers), mode, policy=policy) < LIMIT


@pytest.mark.parametrize(("mode", "adaptive"), [("rejection", False), ("target_only", True)])
def test_looked_up_drafts_keep_the_law(case, mode, adaptive):
    """Half of the rows repeat a token soon, so drafts are accepted and rejected at every depth."""
    policy = RandomGamma(GAMMA) if adaptive else None
    assert _score(case, mode, policy=policy, drafter="suffix") < LIMIT


EAGLE3 = [("rejection", "reduced", True), ("block", "reduced", False)]
EAGLE3 += [("target_only", "whole", True), ("tree", "whole", False)]


@pytest.mark.parametrize(("mode", "vocabulary", "adaptive"), EAGLE3)
def test_eagle3_drafts_keep_the_law(case, mode, vocabulary, adaptive):
    """A token that a reduced vocabulary lacks is never drafted, and comes from the residual."""
    policy = RandomGamma(GAMMA) if adaptive else None
    eagle3 = {"drafter": "eagle3", "draft_path": case.drafts[vocabulary]}
    assert _score(case, mode, policy=policy, **eagle3) < LIMIT


REDUCED = [("rejection", True), ("block", False), ("target_only", False), ("tree", False)]


@pytest.mark.parametrize(("mode", "adaptive"), REDUCED)
def test_an_mtp_draft_over_a_part_of_the_vocabulary_keeps_the_law(case, mode, adaptive):
    """As above; the tree has more children than the table has tokens."""
    policy = RandomGamma(GAMMA) if adaptive else None
    assert _score(case, mode, policy=policy, draft_vocab=case.table, tree=[3, 2, 1]) < LIMIT


def test_a_reduced_mtp_draft_follows_its_own_model_across_a_weight_swap(case):
    tokens, models = _sample(case, "rejection", swap_every=2, draft_vocab=case.table)
    assert max(case.law.scores(tokens, models)) < LIMIT


def test_an_eagle3_draft_that_stays_across_weight_swaps_keeps_the_law_of_each_model(case):
    eagle3 = {"drafter": "eagle3", "draft_path": case.drafts["whole"]}
    tokens, models = _sample(case, "rejection", swap_every=2, **eagle3)
    assert max(case.law.scores(tokens, models)) < LIMIT


def _residual_among_draft_tokens(patch: pytest.MonkeyPatch) -> None:
    """After a rejection, too, only tokens of the reduced vocabulary are drawn."""
    verify = drafting.verify_chain

    def wrong(drafts, q, p, coins, residual, **options):
        known = torch.cat((q > 0, torch.ones_like(q[:, :1], dtype=torch.bool)), 1)
        return verify(drafts, q, p * known / (p * known).sum(-1, keepdim=True), coins, residual, **options)

    patch.setattr(drafting, "verify_chain", wrong)


def test_tokens_outside_a_reduced_vocabulary_that_never_come_are_missed(case, monkeypatch):
    _residual_among_draft_tokens(monkeypatch)
    eagle3 = {"drafter": "eagle3", "draft_path": case.drafts["reduced"]}
    for draft in (eagle3, {"draft_vocab": case.table}):
        assert _score(case, "rejection", samples=SAMPLES // 2, **draft) > LIMIT


def test_looked_up_drafts_follow_their_own_model_across_a_weight_swap(case):
    tokens, models = _sample(case, "target_only", swap_every=2, drafter="suffix")
    assert max(case.law.scores(tokens, models)) < LIMIT


def test_a_gamma_chosen_from_batch_and_acceptance_keeps_the_law(case):
    """Drafts are dear in large batches and cheap in small ones, so all gammas are chosen."""
    price = {1: 0.1, 48: 0.2, 120: 0.8, 192: 2.0}
    costs = {(batch, gamma): 1 + each * gamma for batch, each in price.items() for gamma in range(GAMMA + 1)}
    assert _score(case, "rejection", policy=AdaptiveGamma(costs)) < LIMIT


@pytest.mark.parametrize(
    ("mode", "adaptive"), [("rejection", False), ("block", False), ("tree", False), ("rejection", True)]
)
def test_tokens_before_and_after_a_weight_swap_follow_their_own_model(case, mode, adaptive):
    policy = RandomGamma(GAMMA) if adaptive else None
    tokens, models = _sample(case, mode, swap_every=2, policy=policy)
    assert (models[:, 0] != models[:, -1]).mean() > 0.25  # requests that a swap cut in two
    assert max(case.law.scores(tokens, models)) < LIMIT
    assert max(case.law.scores(tokens)) > LIMIT  # and the swap matters: one model does not explain them


@pytest.mark.parametrize(("adaptive", "reduced"), [(False, False), (True, False), (False, True)])
def test_greedy_decoding_emits_the_argmax_of_the_model_in_use(case, adaptive, reduced):
    """Mode greedy has no coins: given the tokens before it and the model, each token is known."""
    policy = RandomGamma(GAMMA) if adaptive else None
    settings = {"samples": 300, "temperature": 0.0, "swap_every": 2, "policy": policy}
    settings["draft_vocab"] = case.table if reduced else ""
    tokens, models = _sample(case, "greedy", **settings)
    number = np.zeros(len(tokens), np.int64)
    for i, row in enumerate(case.law.rows):
        assert (tokens[:, i] == row[models[:, i], number].argmax(1)).all()
        number = number * VOCAB + tokens[:, i]
    assert len(np.unique(number)) > 2  # both models and a mixture


def test_the_scores_of_right_samplers_are_standard_normal(case):
    rng = np.random.default_rng(1)
    scores = np.array([case.law.scores(case.law.sample(SAMPLES, rng)) for _ in range(REPEATS)])
    assert abs(scores.mean()) < 4 / np.sqrt(scores.size)
    assert abs(scores.std() - 1) < 4 / np.sqrt(2 * scores.size)


def test_a_wrong_law_is_caught_from_the_stated_divergence_on(case):
    """The wrong law is the right one, sharpened a little; power 0.999 is 3.1 deviations beyond the limit."""
    wrong = Law([row**1.22 for row in case.law.rows])
    assert case.law.divergence(wrong) < DETECTABLE
    rng = np.random.default_rng(2)
    scores = np.array([max(case.law.scores(wrong.sample(SAMPLES, rng))) for _ in range(REPEATS)])
    assert scores.mean() - 3.1 * scores.std() > LIMIT


def _shared_noise(patch: pytest.MonkeyPatch) -> None:
    """The coin of a draft is the very number that drew it."""
    sample, verify, drawn = Sampler.sample, drafting.verify_chain, []

    def remember(self, weights, uniforms):
        drawn.append(uniforms)
        return sample(self, weights, uniforms)

    def wrong(drafts, q, p, coins, residual, **options):
        return verify(drafts, q, p, torch.stack(drawn[-drafts.shape[1] :], 1), residual, **options)

    patch.setattr(Sampler, "sample", remember)
    patch.setattr(drafting, "verify_chain", wrong)


def _misstated_draft(patch: pytest.MonkeyPatch) -> None:
    """Drafts are sampled at temperature 1 and judged as if at 1/2."""
    verify = drafting.verify_chain

    def wrong(drafts, q, p, coins, residual, **options):
        return verify(drafts, q**2 / (q**2).sum(-1, keepdim=True), p, coins, residual, **options)

    patch.setattr(drafting, "verify_chain", wrong)


def _peeking_gamma(patch: pytest.MonkeyPatch) -> None:
    """Gamma is chosen after drafting: a row keeps the drafts before the first that q finds unlikely."""
    verify = drafting.verify_chain

    def wrong(drafts, q, p, coins, residual, **options):
        verdict = verify(drafts, q, p, coins, residual, **options)
        likely = q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) > 0.4
        gamma = likely.long().cumprod(1).sum(1)
        cut = (verdict.num_accepted >= gamma) & (gamma < drafts.shape[1])
        bonus = sample_cdf(p[torch.arange(len(p)), gamma], residual)
        verdict.num_accepted = verdict.num_accepted.minimum(gamma)
        verdict.next_token = torch.where(cut, bonus, verdict.next_token)
        return verdict

    patch.setattr(drafting, "verify_chain", wrong)


def _uniforms_used_twice(patch: pytest.MonkeyPatch) -> None:
    """Block's coins and drafts behind the accepted ones are drawn again for the positions they stood at."""
    patch.setattr(drafting.ChainDrafting, "_start", drafting._RowDrafting._start)


def _siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """A node of the tree attends to all nodes before it."""
    everything = lambda tree: torch.ones(tree.num_drafts + 1, tree.num_drafts + 1, dtype=torch.bool).tril()  # noqa: E731
    patch.setattr(drafting.Tree, "ancestor_mask", everything)


def _keys_left_where_they_were(patch: pytest.MonkeyPatch) -> None:
    """The accepted path's keys are not moved behind the root's."""
    patch.setattr(drafting, "rearrange_kv", lambda cache, base, source: cache)


def _replaced(name: str, value) -> object:
    return lambda patch: patch.setattr(drafting, name, value)


BUGS = {
    "resample_from_target": ("rejection", _replaced("verify_chain", resample_from_target)),
    "bonus_from_draft": ("rejection", _replaced("verify_chain", bonus_from_draft)),
    "shared_noise": ("rejection", _shared_noise),
    "misstated_draft": ("rejection", _misstated_draft),
    "peeking_gamma": ("rejection", _peeking_gamma),
    "block_residual_not_scaled": ("block", _replaced("verify_block", BLOCK_MUTANTS["residual_not_scaled"])),
    "block_uniforms_used_twice": ("block", _uniforms_used_twice),
    "tree_residual_not_updated": (
        "tree",
        _replaced("verify_tree", TREE_MUTANTS["residual_not_updated"][1]),
    ),
    "tree_siblings_judged_as_independent": (
        "tree",
        _replaced("verify_tree", TREE_MUTANTS["siblings_judged_as_independent"][1]),
    ),
    "tree_siblings_see_each_other": ("tree", _siblings_see_each_other),
    "tree_keys_left_where_they_were": ("tree", _keys_left_where_they_were),
}


FAINT = {
    "block_residual_not_scaled",
    "block_uniforms_used_twice",
    "tree_siblings_see_each_other",
    "tree_keys_left_where_they_were",
}  # the others need half the requests


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_sampler_is_caught(case, monkeypatch, bug):
    mode, plant = BUGS[bug]
    plant(monkeypatch)
    assert _score(case, mode, samples=SAMPLES if bug in FAINT else SAMPLES // 2) > LIMIT


def test_keys_of_the_old_weights_are_caught(case, monkeypatch):
    monkeypatch.setattr(Decoder, "rebuild", lambda self: None)
    assert _score(case, "rejection", swap_every=2) > LIMIT
