"""The table of `spec.draft_vocab`: what is read, what is refused at launch, and how one is chosen."""

import json

import numpy as np
import pytest

from rlpipe.config.draft_vocab import choose_draft_vocab, coverage, read_draft_vocab, write_table
from rlpipe.config.spec import SpecConfig
from rlpipe.models.released import cache_directory

pytestmark = pytest.mark.unit


def test_the_table_is_that_of_a_file_or_of_the_checkpoint(tmp_path):
    write_table(tmp_path / "draft_vocab.json", [1, 4])
    write_table(tmp_path / "other.json", [0, 2, 3])
    assert read_draft_vocab(SpecConfig(), tmp_path, 5) is None
    assert read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), tmp_path, 5) == [1, 4]
    spec = SpecConfig(draft_vocab=str(tmp_path / "other.json"))
    assert read_draft_vocab(spec, tmp_path / "elsewhere", 5) == [0, 2, 3]


def test_the_table_of_a_fetched_model_is_that_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_directory("smollm2")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_table(folder / "draft_vocab.json", [1, 4])
    assert read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), "smollm2", 5) == [1, 4]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"tokens": []}, "at least one id"),
        ({"ids": [1]}, "at least one id"),
        ({"tokens": [1, "2"]}, "at least one id"),
        ({"tokens": [True, 2]}, "at least one id"),
        ({"tokens": [1, 5]}, "1 to 5, and the model has tokens 0 to 4"),
        ({"tokens": [-1, 2]}, "-1 to 2"),
        ({"tokens": [1, 3, 2]}, "2 after 3"),
        ({"tokens": [1, 1]}, "1 after 1"),
        ([1, 2], "not an object"),
    ],
)
def test_a_table_that_fits_no_model_is_refused(tmp_path, content, reason):
    (tmp_path / "draft_vocab.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), tmp_path, 5)


def test_a_table_that_does_not_exist_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ValueError, match="rlpipe draft-vocab"):
        read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), tmp_path, 5)


@pytest.mark.parametrize("drafter", ["suffix", "eagle3"])
def test_a_table_belongs_to_an_mtp_layer(drafter):
    path = "draft" if drafter == "eagle3" else ""
    with pytest.raises(ValueError, match=f"got spec.drafter={drafter}"):
        SpecConfig(drafter=drafter, draft_path=path, draft_vocab="checkpoint")


def test_the_chosen_tokens_cover_the_most():
    counts = np.random.default_rng(0).integers(0, 50, 200)
    tokens = choose_draft_vocab(counts, 20)
    assert tokens == sorted(set(tokens))
    assert coverage(counts, tokens) == np.sort(counts)[-20:].sum() / counts.sum()


def test_special_tokens_are_chosen_however_rare():
    counts = np.arange(10, 0, -1)
    assert choose_draft_vocab(counts, 4, always=[9, 8]) == [0, 1, 8, 9]
    with pytest.raises(ValueError, match="between 2 and 10"):
        choose_draft_vocab(counts, 1, always=[9, 8])
    with pytest.raises(ValueError, match="not all in a vocabulary of 10"):
        choose_draft_vocab(counts, 4, always=[12])
