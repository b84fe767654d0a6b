"""What the driver answers, and that nothing which is asked of it can end the run."""

import asyncio
import json

import pytest

from rlpipe.actors import pool

pytestmark = pytest.mark.unit


class Cluster:
    """Answers as it is told; a drain of worker 9 meets a full disk."""

    def __init__(self):
        self.numbers = [0]

    def workers(self):
        return [{"worker": number, "playing": 0, "leaving": False} for number in self.numbers]

    async def add_workers(self, count):
        if count > 2:
            raise ValueError("no room")
        self.numbers += range(1, 1 + count)
        return self.numbers[1:]

    async def drain_worker(self, number, grace):
        if number == 9:
            raise OSError(28, "No space left on device")
        self.numbers.remove(number)
        return 3


def test_every_request_is_answered_and_the_folder_goes_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    requests = {
        "a": {"do": "add", "count": 2},
        "b": {"do": "add", "count": 3},
        "c": {"do": "drain", "worker": 9, "grace": 1},
        "d": {"do": "drain", "worker": 1, "grace": 0},
        "e": ["nothing"],
    }
    place = pool.folder(tmp_path)

    async def run():
        serving = asyncio.ensure_future(pool.serve(Cluster(), tmp_path))
        found = {}
        for name, asked in requests.items():
            while not (place / "workers.json").exists():
                await asyncio.sleep(0.01)
            pool.write(place / f"{name}.json", asked)
            answer = place / f"{name}{pool.ANSWER}"
            while not (answer.exists() and json.loads(answer.read_text())["state"] != "accepted"):
                assert not serving.done()
                await asyncio.sleep(0.01)
            found[name] = json.loads(answer.read_text())
        workers = json.loads((place / "workers.json").read_text())
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return found, workers

    found, workers = asyncio.run(asyncio.wait_for(run(), 60))
    assert {name: answer["state"] for name, answer in found.items()} == {
        "a": "done",
        "b": "refused",
        "c": "refused",
        "d": "done",
        "e": "refused",
    }
    assert found["a"]["said"] == "rollout workers 1, 2 serve the newest weights"
    assert found["b"]["said"] == "no room" and "No space left" in found["c"]["said"]
    assert "3 of its groups are played again" in found["d"]["said"]
    assert workers and not place.exists()
