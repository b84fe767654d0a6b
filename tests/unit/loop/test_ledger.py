import multiprocessing
import sqlite3
import threading
from dataclasses import replace

import pytest

from rlpipe.loop import ledger_file
from rlpipe.loop.ledger import Ledger, main
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def group(index: int, *, masked: bool = False) -> Group:
    name = f"g{index}"
    status = TrajectoryStatus.MASKED if masked else TrajectoryStatus.COMPLETE
    members = [
        Trajectory(trajectory_id=f"{name}/{k}", group_id=name, instance_id=f"i{index}", status=status)
        for k in range(2)
    ]
    return Group(prompt=Prompt(instance_id=f"i{index}", group_id=name), trajectories=members)


def play(ledger: Ledger, index: int, g: Group, *, complete: bool = True) -> None:
    ledger.admitted(index, g.prompt, version=0)
    ledger.generating(g.prompt, g.prompt.trajectory_ids(2))
    if complete:
        ledger.completed(g)


def sound(tmp_path) -> Ledger:
    """A finished run of three prompts: one trained, one masked, one dropped."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for index in range(3):
        play(ledger, index, group(index, masked=index == 1))
    ledger.trained([group(0), group(1, masked=True)], step=1)
    ledger.dropped("g2", "stale")
    return ledger


def test_each_prompt_ends_once_and_is_counted_by_state(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    groups = [group(0), group(1, masked=True), group(2), group(3)]
    for index, g in enumerate(groups):
        play(ledger, index, g, complete=index < 3)
    ledger.trained(groups[:2], step=1)
    assert ledger.counts() == {"trained": 1, "dropped": 1, "complete": 1, "generating": 1}
    assert ledger.violations() == [] and ledger.violations(ended=True) == ["a prompt did not end: g2, g3"]
    assert ledger.drop_unfinished("run ended") == 2
    assert ledger.counts() == {"trained": 1, "dropped": 3}
    assert ledger.violations(ended=True) == []


def test_training_a_prompt_twice_is_refused_and_changes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ready, done = group(0), group(1)
    for index, g in enumerate((ready, done)):
        play(ledger, index, g)
    ledger.trained([done], step=1)
    with pytest.raises(AssertionError, match="g1 is not 'complete'"):
        ledger.trained([ready, done], step=2)
    assert ledger.counts() == {"trained": 1, "complete": 1}


def test_a_dropped_trajectory_cannot_be_trained_and_its_siblings_can(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    whole = group(0)
    play(ledger, 0, whole)
    ledger.trajectories_dropped(whole.trajectories[:1], "stale")
    with pytest.raises(AssertionError, match="g0/0 is not 'complete'"):
        ledger.trained([whole], step=1)
    ledger.trained([replace(whole, trajectories=whole.trajectories[1:])], step=1)
    assert ledger.violations(ended=True) == []


def test_a_group_that_comes_back_without_one_of_its_attempts_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    whole = group(0)
    play(ledger, 0, whole, complete=False)
    with pytest.raises(AssertionError, match="came without 1"):
        ledger.completed(replace(whole, trajectories=whole.trajectories[1:]))
    assert ledger.counts() == {"generating": 1}


def test_a_restored_copy_is_the_moment_of_the_copy_and_goes_on_from_there(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    play(ledger, 0, group(0))
    play(ledger, 1, group(1), complete=False)
    ledger.save(tmp_path / "copy.sqlite")
    ledger.trained([group(0)], step=1)
    play(ledger, 2, group(2))
    ledger.restore(tmp_path / "copy.sqlite")
    assert ledger.counts() == {"complete": 1, "generating": 1} and ledger.admitted_count() == 2
    assert ledger.unfinished() == [(0, "g0", "i0", "complete"), (1, "g1", "i1", "generating")]
    ledger.reopen("g1")
    ledger.generating(group(1).prompt, ["g1/0", "g1/1"])
    ledger.completed(group(1))
    ledger.trained([group(0), group(1)], step=1)
    ledger.close()
    assert Ledger(tmp_path / "ledger.sqlite").counts() == {"trained": 2}


PLANTED = {
    "never admitted": "DELETE FROM prompts WHERE idx = 1",
    "no trained trajectory": "UPDATE trajectories SET state = 'masked', step = NULL WHERE state = 'trained'",
    "another step": "UPDATE trajectories SET step = 2 WHERE trajectory_id = 'g0/0'",
    "outlived": "UPDATE trajectories SET state = 'complete', step = NULL WHERE trajectory_id = 'g0/1'",
    "finished before": "UPDATE prompts SET state = 'generating', step = NULL WHERE idx = 0",
    "newer than the trainer": "UPDATE trajectories SET oldest_version = 7 WHERE trajectory_id = 'g0/0'",
    "belongs to no prompt": "UPDATE trajectories SET group_id = 'g9' WHERE trajectory_id = 'g2/0'",
    "did not end": "UPDATE prompts SET state = 'complete', step = NULL WHERE idx = 0",
    "twice in one epoch": "UPDATE prompts SET instance_id = 'i0'",
}


@pytest.mark.parametrize("what", PLANTED)
def test_each_broken_invariant_is_found(tmp_path, what):
    ledger = sound(tmp_path)
    assert ledger.violations(ended=True, epoch=3) == []
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(PLANTED[what])
    assert any(what in sentence for sentence in ledger.violations(ended=True, epoch=3))


def test_the_command_line_shows_a_run_and_fails_on_a_broken_one(tmp_path, capsys):
    sound(tmp_path).close()
    assert main([str(tmp_path)]) == 0
    assert "every invariant holds" in (shown := capsys.readouterr().out) and "stale: 1 prompts" in shown
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(PLANTED["another step"])
    assert main([str(tmp_path)]) == 1
    assert "VIOLATED: a trajectory was trained in another step" in capsys.readouterr().out


def test_a_full_disk_moves_the_ledger_into_memory_and_nothing_is_lost(tmp_path):
    events = []
    ledger = Ledger(tmp_path / "ledger.sqlite", lambda kind, **fields: events.append(kind))
    play(ledger, 0, group(0))
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then answers as on a full disk
    for index in range(1, 200):
        play(ledger, index, group(index))
    assert events == ["ledger_in_memory"] and ledger.counts() == {"complete": 200}
    ledger.save(tmp_path / "copy.sqlite")
    ledger.close()
    for file in ("copy.sqlite", "ledger.sqlite"):
        assert Ledger(tmp_path / file).counts() == {"complete": 200}


def test_a_ledger_of_another_format_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("CREATE TABLE prompts (idx INTEGER)")
    with pytest.raises(ValueError, match="format 0"):
        Ledger(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("damage", ["garbage", "cut", "a page"])
def test_a_damaged_ledger_is_set_aside_and_the_copy_of_a_checkpoint_restores_it(tmp_path, damage):
    path, copy, events = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite", []
    ledger = Ledger(path)
    for index in range(300):
        play(ledger, index, group(index))
    ledger.save(copy)
    ledger.close()
    whole = path.read_bytes()
    broken = {
        "garbage": b"no database" * 1000,
        "cut": whole[: len(whole) // 2 + 100],
        "a page": whole[:8192] + b"\xff" * 4096 + whole[12288:],
    }
    path.write_bytes(broken[damage])
    ledger = Ledger(path, lambda kind, **fields: events.append((kind, fields)))
    [(kind, fields)] = events
    assert kind == "ledger_damaged" and (tmp_path / fields["aside"]).read_bytes() == broken[damage]
    assert ledger.counts() == {}
    ledger.restore(copy)
    assert ledger.counts() == {"complete": 300} and ledger.violations() == []


def hold(path, locked, release):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    locked.set()
    release.wait()


@pytest.fixture
def holder(tmp_path):
    """Has another process lock the ledger; calling what it gives ends that."""
    context = multiprocessing.get_context("spawn")
    locked, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "ledger.sqlite", locked, release))

    def start():
        process.start()
        assert locked.wait(60)

    yield start, release
    release.set()
    process.join()


def test_a_lock_of_another_process_is_waited_for(tmp_path, holder):
    start, release = holder
    events = []
    ledger = Ledger(tmp_path / "ledger.sqlite", lambda kind, **fields: events.append(kind))
    waited = ledger._db.execute("PRAGMA busy_timeout").fetchone()[0]
    start()
    threading.Timer(0.5, release.set).start()
    play(ledger, 0, group(0))
    assert waited > 12_000 and events == [] and ledger.counts() == {"complete": 1}


def test_a_lock_that_is_never_given_back_moves_the_ledger_into_memory(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(ledger_file, "_LOCK_S", 0.1)
    start, _ = holder
    events = []
    ledger = Ledger(tmp_path / "ledger.sqlite", lambda kind, **fields: events.append(kind))
    play(ledger, 0, group(0))
    start()
    play(ledger, 1, group(1))
    assert events == ["ledger_in_memory"] and ledger.counts() == {"complete": 2}


def test_a_ledger_that_cannot_be_opened_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"the ledger .* cannot be opened .*make room on its disk"):
        Ledger(tmp_path / "no such folder" / "ledger.sqlite")
