import pytest

from rlpipe.config.algo import AlgoConfig, Correction, Proximal
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.config.run import Config, RunSettings
from rlpipe.preflight.settings import check_staleness

pytestmark = pytest.mark.unit


def test_tokens_of_any_age_need_a_correction():
    keep = PipelineConfig(stale=Stale.KEEP)
    with pytest.raises(ValueError, match="stale=keep trains on tokens of any age"):
        check_staleness(Config(pipeline=keep, algo=AlgoConfig(correction=Correction.NONE)))
    check_staleness(Config(pipeline=keep))
    ratio = AlgoConfig(correction=Correction.NONE, proximal=Proximal.ROLLOUT)
    check_staleness(Config(pipeline=keep, algo=ratio))


def test_injected_staleness_beyond_the_bound_would_drop_everything():
    injected = InjectionConfig(stale_steps=2)
    drop = PipelineConfig(stale=Stale.DROP, max_staleness=1)
    with pytest.raises(ValueError, match="nothing would ever be trained"):
        check_staleness(Config(pipeline=drop, injection=injected))
    check_staleness(Config(pipeline=PipelineConfig(max_staleness=1), injection=injected))


@pytest.mark.parametrize("stale", [Stale.WAIT, Stale.KEEP])
def test_only_a_policy_that_drops_may_oversample(stale):
    with pytest.raises(ValueError, match=r"oversample=1\.5"):
        PipelineConfig(stale=stale, oversample=1.5)
    assert PipelineConfig(prompts_per_step=3, stale=Stale.DROP, oversample=1.5).groups_ahead == 5


def test_a_run_keeps_at_least_its_last_checkpoint():
    with pytest.raises(ValueError, match=r"run\.keep_last=0"):
        RunSettings(keep_last=0)
