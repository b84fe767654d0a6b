"""The benches of weight updates on servers and checkpoints whose pauses and changed elements are planted."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

import delta_bytes
import weight_pause

from rlpipe.models.checkpoint import read_weights, write_checkpoint

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
CONTINUES = weight_pause.Updates._continue


class PlantedEngine:
    """Takes 3 s before the pause, 1 s to load (0.5 s a delta), 2 s to check; as the ways say when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._http = SimpleNamespace(post=self.post)
        self._updates = SimpleNamespace(_deltas=True)

    async def post(self, path: str) -> None:
        """Answer at once."""

    def update_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        asyncio.run(self.update())

    async def update(self) -> None:
        self.now += 3
        is_delta = self._updates._deltas and weight_pause.WeightSession.delta() is not None
        await self._http.post("/pause_generation")
        self.now += 0.5 if is_delta else 1
        if weight_pause.Updates._continue is CONTINUES:
            await self._http.post("/continue_generation")
        self.now += 2
        await self._http.post("/continue_generation")

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(sync={"weights/canary_failures": 0})


def test_planted_pauses_and_bytes_come_out_as_planted(monkeypatch):
    engine, weights = PlantedEngine(), {"a": torch.zeros(1000, dtype=torch.bfloat16)}
    monkeypatch.setattr(weight_pause.time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(weight_pause.WeightSession, "delta", lambda: SimpleNamespace(num_bytes=60))
    monkeypatch.setattr(weight_pause, "resident", lambda _: 5)

    report = weight_pause.measure(engine, weights, repeats=2, share=0.01)

    got = {
        way: (row["pause_median"], row["seconds_median"], row["bytes_median"])
        for way, row in report["results"].items()
    }
    assert got == {"check in the pause": (3, 6, 2000), "full": (1, 6, 2000), "delta": (0.5, 5.5, 60)}
    assert report["results"]["full"]["share"] == pytest.approx(1 / 6)
    assert weight_pause.Updates._continue is CONTINUES


def test_changed_weights_differ_in_the_share_that_was_asked_for():
    before = {"a": torch.randn(100, 100).to(torch.bfloat16)}
    after = weight_pause.changed(before, 0.01, seed=3)
    differing = (before["a"].view(torch.int16) != after["a"].view(torch.int16)).sum()
    assert 90 <= differing <= 100  # an element that was chosen twice counts once


def test_planted_elements_are_counted_with_six_bytes_each(tmp_path):
    start, step = ROOT / "models" / "tiny", tmp_path / "checkpoints" / "step_1" / "hf"
    shutil.copytree(start, step)
    weights = {name: tensor.clone() for name, tensor in read_weights(start).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name].view(-1)[::100] *= 2
    planted = len(weights[name].view(-1)[::100])
    write_checkpoint(tmp_path / "new", weights, like=start)
    shutil.copy(tmp_path / "new" / "model.safetensors", step)

    (row,) = delta_bytes.deltas(tmp_path, 1, start)
    assert (row["elements"], row["delta_bytes"]) == (planted, 6 * planted)
    assert row["whole_bytes"] == sum(2 * tensor.numel() for tensor in weights.values())
