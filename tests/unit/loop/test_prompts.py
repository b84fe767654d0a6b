import pytest

from rlpipe.loop.prompts import PromptStream

pytestmark = pytest.mark.unit


def test_every_epoch_plays_each_instance_once_in_another_order():
    ids = [f"i{n}" for n in range(20)]
    stream = PromptStream(ids, seed=0)
    epochs = [[stream[e * 20 + n].instance_id for n in range(20)] for e in range(3)]
    assert all(sorted(epoch) == sorted(ids) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_prompt_is_a_function_of_seed_and_index_alone():
    ids = [f"i{n}" for n in range(20)]
    forward, backward = PromptStream(ids, seed=3), PromptStream(ids, seed=3)
    expected = [forward[n] for n in range(60)]
    assert [backward[n] for n in reversed(range(60))] == expected[::-1]
    assert [PromptStream(ids, seed=4)[n] for n in range(20)] != expected[:20]
    assert len({p.seed for p in expected}) == 60 and len({p.group_id for p in expected}) == 60


def test_an_empty_training_set_is_refused():
    with pytest.raises(ValueError, match=r"training set is empty.*env\.train_file"):
        PromptStream([], seed=0)
