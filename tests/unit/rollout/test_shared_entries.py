"""What a server keeps in /dev/shm goes with it, however it ended, and nobody else's does."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlpipe.rollout import shared_entries
from rlpipe.rollout.sglang.server import ServerProcess

pytestmark = pytest.mark.unit
SERVER = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
open(sys.argv[2], "w").close()
time.sleep(1000)
"""


@pytest.fixture
def entry():
    path = Path(f"/dev/shm/rlpipe-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("starting", [False, True])
def test_what_a_killed_server_kept_is_removed_with_it(tmp_path, entry, starting):
    ready = tmp_path / "ready"
    server = ServerProcess(
        [sys.executable, "-c", SERVER, str(entry), str(ready)], os.environ, tmp_path / "log"
    )

    async def serves():
        return ready.exists()

    asyncio.run(server.wait_until(serves, 60))
    (note,) = Path(tempfile.gettempdir()).glob(f"rlpipe-shared-entries-{os.getpid()}-{server.pid}")
    assert json.loads(note.read_text()) == [str(entry)]
    if starting:
        note.unlink()
        server._entries = None
    for _ in range(2):
        server.stop()
        assert not entry.exists() and not note.exists()


def test_a_sweep_removes_what_dead_processes_noted_and_nothing_outside(tmp_path, entry, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    outside = tmp_path / "outside"
    for path in (entry, outside):
        path.touch()
    living, gone = (tmp_path / f"rlpipe-shared-entries-{pid}-7" for pid in (os.getpid(), dead.pid))
    living.write_text(json.dumps([str(entry)]))
    shared_entries.remove_leftovers()
    assert entry.exists() and living.exists()
    gone.write_text(json.dumps([str(entry), str(outside)]))
    shared_entries.remove_leftovers()
    assert not entry.exists() and not gone.exists() and outside.exists()
