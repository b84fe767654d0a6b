"""What the driver answers, and that nothing which is asked of it can end the run."""

import asyncio
import json

import pytest

from rlpipe.actors import pool
from rlpipe.loop.worker_scaling import Growth

pytestmark = pytest.mark.unit


class Cluster:
    """Answers as it is told; a drain of worker 9 meets a full disk."""

    def __init__(self):
        self.numbers = [0]

    def workers(self):
        return [{"worker": number, "in_flight": 0, "leaving": False} for number in self.numbers]

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
        serving = asyncio.ensure_future(pool.serve(Cluster(), tmp_path, Growth(1, 0), lambda *_, **__: None))
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
    assert found["a"]["message"] == "rollout workers 1, 2 serve the newest weights"
    assert found["b"]["message"] == "no room" and "No space left" in found["c"]["message"]
    assert "3 of its groups are rerun" in found["d"]["message"]
    assert workers and not place.exists()


class Wanting(Growth):
    """Wants what it is told; remembers what it was told."""

    def __init__(self):
        super().__init__(1, 9)
        self.stood, self.refusals = [], 0

    def set_current(self, workers):
        super().set_current(workers)
        self.stood.append((workers, self.wanted))

    def refused(self):
        super().refused()
        self.refusals += 1


class Joining(Cluster):
    """A worker takes its time to join; there is room for three."""

    def __init__(self):
        super().__init__()
        self.let = asyncio.Event()

    async def add_workers(self, count):
        await self.let.wait()
        if len(self.numbers) + count > 3:
            raise ValueError("no room")
        new = list(range(max(self.numbers) + 1, max(self.numbers) + 1 + count))
        self.numbers += new
        return new


def test_what_a_run_wants_is_done_one_by_one_after_what_users_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    place, events = pool.folder(tmp_path), []

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.01)

    async def run():
        cluster, growth = Joining(), Wanting()
        event = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
        serving = asyncio.ensure_future(pool.serve(cluster, tmp_path, growth, event))
        await until(lambda: growth.stood)
        growth.wanted = 2
        await until(lambda: events)
        pool.write(place / "a.json", {"do": "add", "count": 1})  # while the other one joins
        await until((place / f"a{pool.ANSWER}").exists)
        growth.stood.clear()
        await asyncio.sleep(0.05)
        assert not growth.stood  # something moves
        cluster.let.set()
        await until(lambda: growth.stood)
        assert growth.stood[0] == (3, 3) and cluster.numbers == [0, 1, 2]
        growth.wanted = 4
        await until(lambda: growth.refusals)
        assert growth.wanted == 3 and cluster.numbers == [0, 1, 2]
        growth.wanted = 2
        await until(lambda: len(cluster.numbers) == 2)
        assert cluster.numbers == [0, 1]  # the last that came goes first
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))
    kinds = [kind for kind, _ in events]
    assert kinds == ["pool_wanted", "pool_wanted", "pool_unchanged", "pool_wanted"]
    assert events[2][1]["error"] == "no room" and events[0][1]["wanted"] == 2
