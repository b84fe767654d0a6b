"""Weights that would train on garbage: quantised without scales, or not finite; named by tensor and file."""

from __future__ import annotations

import resource

import pytest
import torch
from safetensors.torch import save_file

from rlpipe.config.paths import shipped
from rlpipe.models.checkpoint import check_dtypes, check_finite, read_weights, weight_shapes
from rlpipe.preflight.checkpoint_and_machine import check_open_files

pytestmark = pytest.mark.unit
NAME = "model.layers.1.mlp.up_proj.weight"


def save(folder, **tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((shipped("models/tiny") / "config.json").read_bytes())
    save_file({NAME: torch.ones(4, 4), **tensors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_named(tmp_path, value, dtype):
    weight = torch.ones(4, 4, dtype=dtype)
    weight[2, 3] = value
    with pytest.raises(ValueError, match=rf"model\.safetensors: 1 of the 16 numbers of {NAME} are NaN"):
        read_weights(save(tmp_path / "m", **{NAME: weight}))
    with pytest.raises(ValueError, match=rf"model\.safetensors: 1 of the 16 numbers of {NAME} are NaN"):
        check_finite(tmp_path / "m")


def test_large_weights_with_a_sum_that_overflows_are_read(tmp_path):
    weight = torch.full((4, 4), 3e38)
    assert read_weights(save(tmp_path / "m", **{NAME: weight}))[NAME].equal(weight)
    check_finite(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantised_weights_are_refused_and_other_tensors_may_be_integers(tmp_path, dtype):
    folder = save(tmp_path / "m", **{NAME: torch.ones(4, 4).to(dtype)}, positions=torch.arange(3))
    with pytest.raises(ValueError, match=rf"{NAME} is stored as \w+: it is quantised"):
        check_dtypes(folder, weight_shapes(folder).keys() - {"positions"})
    check_dtypes(folder, {"another"})


def test_a_small_limit_of_open_files_is_raised_where_it_may_be_and_refused_where_not(monkeypatch):
    limits = [(40, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    check_open_files()
    assert limits == [(40, 4096), (512, 4096)]
    limits.append((40, 40))
    with pytest.raises(ValueError, match=r"may open 40 files here \(ulimit -n\)"):
        check_open_files()
