"""The model card."""

import pytest

from recipes.tiny_model.card import SetScores, write_card

pytestmark = pytest.mark.unit


def test_the_card_states_both_sets_and_refuses_one_of_them(tmp_path):
    known = SetScores(instances=256, greedy=0.5, sampled=0.375, pass_at_8=0.875)
    new = SetScores(instances=256, greedy=0.25, sampled=0.125, pass_at_8=0.5)
    write_card(tmp_path, {"held_instances": known, "held_families": new}, {"acceptance length": 3.5})
    text = (tmp_path / "README.md").read_text()
    assert "| 0.500 | 0.375 ± 0.030 | 0.875 |" in text and "| 0.250 | 0.125 ± 0.021 | 0.500 |" in text
    assert "| acceptance length | 3.500 |" in text
    with pytest.raises(ValueError, match="lacks scores of \\['held_families'\\]"):
        write_card(tmp_path, {"held_instances": known})
