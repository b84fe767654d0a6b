"""Looked-up drafts: what is guessed, and an engine that drafts so from a checkpoint without an MTP layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_config, read_weights
from rlpipe.spec.suffix import continue_suffix
from tests.helpers.driven_engine import driven_engine
from tests.helpers.engines import request
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


def _by_hand(tokens: list[int], longest: int, count: int) -> list[int]:
    """The same, one token at a time and by search from the end."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return [tokens[-1]] * count


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_the_guess_follows_the_last_occurrence_of_the_longest_suffix(tokens, longest, count):
    assert continue_suffix(np.array(tokens), longest, count).tolist() == _by_hand(tokens, longest, count)


def test_an_engine_without_an_mtp_layer_drafts_and_emits_what_it_would_without(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "qwen2", seed=3)
    assert not any(map(is_mtp_weight, read_weights(path)))
    assert not read_config(path).get("num_nextn_predict_layers")
    prompts = [[5, 6, 7, 5, 6, 7, 5], [1, 2, 3, 4], [8, 8, 8]]
    outputs = {}
    for mode in ("none", "greedy"):
        with driven_engine(path, mode, drafter="suffix") as engine:
            requests = [
                request(str(i), prompt, max_new_tokens=20, temperature=0.0)
                for i, prompt in enumerate(prompts)
            ]
            outputs[mode] = engine.generate(*requests)
    for plain, drafted in zip(outputs["none"], outputs["greedy"], strict=True):
        assert plain.output_ids.tolist() == drafted.output_ids.tolist()
    # greedy decoding of a random model soon runs in a circle, which is what lookup finds
    spec = [result.spec for result in outputs["greedy"]]
    assert sum(sum(s.accepted) for s in spec) > 10


def test_recorded_drafts_are_certain(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", seed=3)
    with driven_engine(path, "rejection", drafter="suffix") as engine:
        one = request("a", [5, 6, 7, 5, 6], max_new_tokens=8, record_drafts=True)
        (result,) = engine.generate(one)
    assert result.drafts
    assert all(q == 1 for step in result.drafts for q in step.draft_probs)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "tree", "drafter": "suffix"}, "drafts one path"),
        ({"drafter": "suffix", "suffix": 0}, "spec.suffix=0"),
    ],
)
def test_impossible_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        SpecConfig(**settings)
