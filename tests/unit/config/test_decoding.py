"""What cannot be decoded, or not be trained on, is refused with the remedy."""

import pytest

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.draft import DraftConfig
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models.checkpoint import require_mtp
from rlpipe.preflight.settings import check

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("mode", ["none", "tree"])
def test_adaptive_gamma_needs_a_chain(mode):
    with pytest.raises(ValueError, match=f"got spec.mode={mode}: use spec.mode=rejection"):
        SpecConfig(mode=mode, adaptive=True)


@pytest.mark.parametrize("tree", [[], [2, 0]])
def test_a_tree_without_children_is_refused(tree):
    with pytest.raises(ValueError, match=r"spec\.tree="):
        SpecConfig(mode="tree", tree=tree)


@pytest.mark.parametrize(
    ("config", "depth", "drafts"),
    [
        (SpecConfig(mode="none", gamma=3), 0, 0),
        (SpecConfig(mode="block", gamma=3), 3, 3),
        (SpecConfig(mode="tree", gamma=5, tree=[3, 2]), 2, 9),
    ],
)
def test_depth_and_drafts_follow_from_the_mode(config, depth, drafts):
    assert (config.depth, config.drafts) == (depth, drafts)


def test_greedy_verification_refuses_to_sample(tmp_path):
    config = Config(spec=SpecConfig(mode=SpecMode.GREEDY))
    config.run.dir = str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"rollout.temperature=1.0 and val.temperature=1.0: set both to 0"):
        check(config)
    config.rollout.temperature = config.val.temperature = 0.0
    check(config)


def test_a_tree_is_not_drafted_with_one_mtp_layer_per_depth():
    require_mtp({"num_nextn_predict_layers": 3}, "m", "rejection")
    with pytest.raises(ValueError, match=r"unrolls one MTP layer, but 'm' has 3, .* spec\.mode=rejection"):
        require_mtp({"num_nextn_predict_layers": 3}, "m", "tree")


def test_training_a_draft_that_is_not_there_is_refused_at_launch(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    config = Config(spec=SpecConfig(mode="none"), draft=DraftConfig(train="online"))
    config.model.path, config.run.dir = str(model), str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no MTP layer .* set draft\.train=off"):
        check(config)


def test_obrs_is_refused_where_rollouts_are_not_sampled(tmp_path):
    config = Config(algo=AlgoConfig(correction=Correction.OBRS))
    config.run.dir = str(tmp_path / "run")
    check(config)
    config.rollout.temperature = 0.0
    with pytest.raises(ValueError, match=r"obrs compares .* set rollout\.temperature=1\.0"):
        check(config)
