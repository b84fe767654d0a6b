"""The name of a released model stands for the directory that `rlpipe fetch` makes; folders stay paths."""

import pytest

from rlpipe.config.paths import resolve_model, shipped
from rlpipe.config.run import Config, ModelConfig
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.settings import check

pytestmark = pytest.mark.unit


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlpipe" / "models"


def test_a_name_is_refused_at_launch_until_it_is_fetched(cache):
    with pytest.raises(ValueError, match="rlpipe fetch smollm2"):
        check(Config(model=ModelConfig(path="smollm2")))
    with pytest.raises(ValueError, match=r"decoupled\.path=smollm2"):
        resolve_model("smollm2", "decoupled.path")


def test_a_name_resolves_to_the_cache_and_a_folder_of_that_name_to_itself(cache, tmp_path, monkeypatch):
    (cache / "smollm2").mkdir(parents=True)
    (cache / "smollm2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == cache / "smollm2"
    assert resolve_model("./smollm2") == tmp_path / "smollm2"
    assert resolve_model("shipped:models/tiny") == shipped("models/tiny")


@pytest.mark.parametrize("named", ["", "model.gguf"])
def test_a_gguf_file_or_its_folder_is_recognised_and_the_conversion_named(named, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"rlpipe fetch .*model\.gguf --out DIR"):
        read_config(tmp_path / named)
