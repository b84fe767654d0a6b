"""The step loop: an interrupted stage ends as an uninterrupted one."""

import json

import pytest
import torch

from recipes.tiny_model.settings import StageConfig
from recipes.tiny_model.stage import learning_rate, load_finished, run_stage

pytestmark = pytest.mark.unit


class Interrupted(Exception):
    pass


def _train(run_dir, stop_at: int | None) -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)

    def loss_of(step: int):
        if step == stop_at:
            raise Interrupted
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return (module(x) - x[:, :2]).square().mean(), {"figure": float(step)}

    run_stage("stage", module, StageConfig(steps=100, lr=1e-2, warmup=5), loss_of, run_dir, save_every=20)
    return module


def test_a_resumed_stage_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    broken.mkdir()
    expected = _train(straight, stop_at=None)
    with pytest.raises(Interrupted):
        _train(broken, stop_at=47)
    assert torch.load(broken / "stage.partial.pt")["step"] == 40
    resumed = _train(broken, stop_at=None)
    assert torch.equal(expected.weight, resumed.weight)
    assert not (broken / "stage.partial.pt").exists()
    fresh = torch.nn.Linear(4, 2)
    assert load_finished("stage", fresh, broken) and torch.equal(fresh.weight, expected.weight)
    assert not load_finished("other", fresh, broken)
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [50, 100] and rows[0]["figure"] == 49.0


def test_learning_rate_warms_up_stays_and_decays_to_a_tenth():
    stage = StageConfig(steps=1000, lr=2.0, warmup=10)
    values = [learning_rate(stage, s) for s in (0, 9, 499, 750, 999)]
    assert values == pytest.approx([0.2, 2.0, 2.0, 1.0, 0.2])
