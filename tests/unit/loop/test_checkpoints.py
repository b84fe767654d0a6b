import asyncio
import errno
import json
import random
import shutil
import zlib
from collections import namedtuple

import pytest

from rlpipe.loop.checkpoints import SCORE, CheckpointStore

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
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"] and store.broken == []


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        asyncio.run(store.save(step, {}, write_file))
    assert store.steps() == [2, 10]


def test_the_best_are_kept_besides_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=2)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.8, 0.2, None], 1):
        asyncio.run(store.save(step, {} if score is None else {SCORE: score}, write_file))
    assert store.steps() == [2, 4, 6]


def test_more_may_be_kept_than_there_are(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=4)
    for step, score in enumerate([0.9, 0.1, 0.8], 1):
        asyncio.run(store.save(step, {SCORE: score}, write_file))
    assert store.steps() == [1, 2, 3]


def test_what_others_put_beside_the_checkpoints_is_left_alone(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    foreign = ["step_best", "step_", "step_1_copy", "step_x.tmp", "notes.old"]
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "step_7").write_text("a file")
    for step in (1, 2):
        asyncio.run(store.save(step, {}, write_file))
    assert store.steps() == [2] and store.newest()[1] == {"step": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*foreign, "step_2", "step_7"])


DAMAGE = {
    "weights is missing": lambda path: (path / "weights").unlink(),
    "weights has 0 bytes instead of 1": lambda path: (path / "weights").write_text(""),
    "weights has other bytes": lambda path: (path / "weights").write_text("x"),
    "state.json cannot be read": lambda path: (path / "state.json").write_text('{"step": 2, "files"'),
    "state.json cannot be read (File": lambda path: (path / "state.json").unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, what):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        asyncio.run(store.save(step, {}, write_file))
    DAMAGE[what](store.path(2))
    assert store.newest()[1] == {"step": 1}
    assert [fault.step for fault in store.broken] == [2] and store.broken[0].reason.startswith(what)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1", "step_2.corrupt"]
    asyncio.run(store.save(2, {}, write_file))
    assert store.newest()[1] == {"step": 2}


def test_every_byte_of_a_large_file_is_checked(tmp_path):
    size = 20 << 20

    async def write_large(directory):
        (directory / "weights").write_bytes(bytes(size))

    for place in (0, size // 2, size - 1):
        store = CheckpointStore(tmp_path, keep=2)
        for step in (1, 2):
            asyncio.run(store.save(step, {}, write_large))
        with (store.path(2) / "weights").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert store.newest()[1] == {"step": 1}
        assert "weights has other bytes than were written" in [fault.reason for fault in store.broken]


def test_a_checkpoint_of_an_early_run_with_sums_of_its_edges_is_whole(tmp_path):
    async def write_large(directory):
        (directory / "weights").write_bytes(random.Random(0).randbytes(9 << 20))

    store = CheckpointStore(tmp_path, keep=2)
    asyncio.run(store.save(1, {}, write_large))
    weights, state = store.path(1) / "weights", store.path(1) / "state.json"
    content = weights.read_bytes()
    early = zlib.crc32(content[-(4 << 20) :], zlib.crc32(content[: 4 << 20]))
    state.write_text(json.dumps({"step": 1, "files": {"weights": [len(content), early]}}))
    assert store.newest()[1] == {"step": 1}
    with weights.open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="weights has other bytes than were written"):
        store.newest()


def test_damage_to_all_is_an_error_instead_of_a_silent_start_from_zero(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        asyncio.run(store.save(step, {}, write_file))
        DAMAGE["weights is missing"](store.path(step))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"none of the checkpoints .* is complete \(step 2: weights is missing"
        ):
            CheckpointStore(tmp_path, keep=2).newest()
    assert store.steps() == [1, 2]


def test_a_disk_with_less_room_than_the_last_checkpoint_takes_is_not_written_to(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    asyncio.run(store.save(1, {}, write_file))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=10))
    with pytest.raises(OSError, match="MiB are free") as caught:
        asyncio.run(store.save(2, {}, write_file))
    assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_leftovers_of_a_crash_are_swept_away(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    asyncio.run(store.save(3, {}, write_file))
    for name in ("step_4.tmp", "step_1.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    assert store.newest()[1] == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["step_3"]
    assert "weights" in json.loads((tmp_path / "step_3" / "state.json").read_text())["files"]
