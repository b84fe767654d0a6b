"""A real SGLang server for tests: started once, given its first weights back after each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import is_mtp_weight
from rlpipe.rollout.sglang import SglangEngine

GAMMA = 3
SKIP = "RLPIPE_WITHOUT_SGLANG=1: these tests need SGLang's environment (scripts/install_sglang cpu)"


def needs_sglang() -> None:
    """Skip only where one asked for it; without the environment tests fail, and say how to make it."""
    if os.environ.get("RLPIPE_WITHOUT_SGLANG") == "1":
        pytest.skip(SKIP)


@contextmanager
def running_server(
    path: Path,
    logs: Path,
    mode: str = "rejection",
    draft: Path | None = None,
    adaptive: bool = False,
    routes: bool = False,
    **sglang: Any,
) -> Iterator[SglangEngine]:
    """A server on the CPU, closed at the end, and `engine.events`, the faults it told of.

    draft: directory of an EAGLE-3 draft; None for the model's MTP layer.
    """
    needs_sglang()
    config = RolloutConfig(
        engine="sglang", max_running=32, max_context=256, device="cpu", kv_on_update="recompute"
    )
    config.replay_routes = routes
    for name, value in sglang.items():
        setattr(config.sglang, name, value)
    config.sglang.__post_init__()
    eagle3 = {} if draft is None else {"drafter": "eagle3", "draft_path": str(draft)}
    events: list[tuple[str, dict[str, Any]]] = []
    engine = SglangEngine(
        config,
        SpecConfig(mode=mode, gamma=GAMMA, adaptive=adaptive, **eagle3),
        path,
        log_dir=logs,
        on_event=lambda kind, **fields: events.append((kind, fields)),
    )
    engine.events = events
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def configured(engine: SglangEngine, **settings: Any) -> Iterator[None]:
    """Other settings of `rollout.sglang` for a while; only those that are read at each update."""
    config = engine._config.sglang
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    config.__post_init__()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def perturbed(weights: Mapping[str, torch.Tensor], scale: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Each weight times 1 + scale * noise: as if trained on a little."""
    generator = torch.Generator().manual_seed(seed)
    return {k: w * (1 + scale * torch.randn(w.shape, generator=generator)) for k, w in weights.items()}


def lossy(engine: SglangEngine, change: Callable[[str, dict], dict | None], times: int = 10**9) -> None:
    """Plant a bug in the transport: `change(path, body)` gives what is sent instead, None for nothing."""
    post, left = engine._http.post, [times]

    async def sent(path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        if left[0] and path.startswith("/update_weights"):
            left[0] -= 1
            body = change(path, dict(body))
            if body is None:
                return None
        return await post(path, body, timeout)

    engine._http.post = sent


def repaired(engine: SglangEngine) -> None:
    """Take the planted bug out."""
    engine._http.__dict__.pop("post", None)


def target_only(path: str, body: dict) -> dict:
    """The bug five public projects had: the draft is never told."""
    return body | {"selector": "target"}


def only_mtp(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The draft's own weights."""
    return {name: weight for name, weight in weights.items() if is_mtp_weight(name)}
