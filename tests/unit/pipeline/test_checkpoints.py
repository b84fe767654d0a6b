import asyncio

import pytest

from rlpipe.pipeline.checkpoints import CheckpointStore

pytestmark = pytest.mark.unit


async def write_file(directory):
    (directory / "weights").write_text("w")


async def fail_half_way(directory):
    (directory / "weights").write_text("half")
    raise OSError("disk full")


def test_a_failed_write_leaves_the_previous_checkpoint_as_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    asyncio.run(store.save(1, {"seed": 7}, write_file))
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(store.save(2, {"seed": 7}, fail_half_way))
    assert store.steps() == [1]
    path, state = store.newest()
    assert (path / "weights").read_text() == "w" and state == {"step": 1, "seed": 7}
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        asyncio.run(store.save(step, {}, write_file))
    assert store.steps() == [2, 10]
