"""`rlpipe draft-vocab` chooses a table from rollouts or text, and reports what it covers of unseen text."""

import json

import pytest

from rlpipe.cli.draft_vocab import choose, main
from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.spec import SpecConfig

pytestmark = pytest.mark.unit


@pytest.fixture
def model(tmp_path):
    """A checkpoint of ten tokens, of which 9 ends a text and 8 is special."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 10}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    added = [{"id": 8, "special": True, "content": "<s>"}, {"id": 7, "special": False, "content": "x"}]
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return path


def _rollouts(file, *texts):
    lines = [{"rollouts_of": "x"}, *({"token_ids": [0, *t], "loss_mask": [0] + [1] * len(t)} for t in texts)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_most_frequent_sampled_tokens_and_the_special_ones_are_chosen(model, tmp_path, capsys):
    data = _rollouts(tmp_path / "rollouts.jsonl", [3, 3, 3, 5], [3, 3, 5, 1])
    assert main([str(model), str(data), "--size", "4"]) == 0
    assert read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), model, 10) == [3, 5, 8, 9]
    assert "cover 75.00%" in capsys.readouterr().out  # three of four tokens of either text


def test_coverage_is_that_of_unseen_text(model, tmp_path):
    data = _rollouts(tmp_path / "rollouts.jsonl", [1, 1], [2, 2])
    assert choose(model, [data], 3)[1] == 0


@pytest.mark.parametrize(
    ("texts", "size", "reason"),
    [([[1]], 3, "fewer than two"), ([[1], [12]], 3, "token 12"), ([[1], [2]], 1, "between 2 and 10")],
)
def test_data_that_choose_no_table_are_refused(model, tmp_path, capsys, texts, size, reason):
    data = _rollouts(tmp_path / "rollouts.jsonl", *texts)
    assert main([str(model), str(data), "--size", str(size)]) == 2
    assert reason in capsys.readouterr().err
    assert not (model / "draft_vocab.json").exists()
