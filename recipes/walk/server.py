"""Serves the walk by OpenEnv, in a separate Python environment that has `openenv` installed.

python -m recipes.walk.server [--port 8000]
"""

from __future__ import annotations

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from recipes.walk.walk import Walk

SESSIONS = 256  # concurrent walks; an attempt that finds no free session is repeated


class Move(Action):
    """An answer of the model."""

    move: str


class Row(Observation):
    """What the model reads."""

    text: str


class WalkEnvironment(Environment):
    """One session with one walk."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._walk = Walk(0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Row:
        """Start a walk."""
        self._walk = Walk(seed or 0)
        return Row(text=self._walk.show())

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Row:
        """Take a step."""
        reward, done = self._walk.step(action.move)
        metadata = {"steps": self._walk.steps}
        return Row(text=self._walk.show(), reward=reward, done=done, metadata=metadata)

    @property
    def state(self) -> State:
        """Return how many steps were taken."""
        return State(step_count=self._walk.steps)


def main() -> None:
    """Serve on loopback until interrupted."""
    parser = argparse.ArgumentParser(description="Serve walks by OpenEnv's protocol.")
    parser.add_argument("--port", type=int, default=8000)
    app = create_fastapi_app(WalkEnvironment, Move, Row, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
