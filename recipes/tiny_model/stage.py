"""One resumable training stage: the step loop that all stages share.

This module has the optimizer, schedule, checkpoints, progress bar and metrics file. Invariant: the state
after step i depends only on the configuration, because batches are functions of the step. So a run that was
killed and resumed from `stage.pt` ends with the same weights as an uninterrupted run (on the same machine and
threads).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recipes.tiny_model.settings import StageConfig

Loss = Callable[[int], tuple[Tensor, dict[str, float]]]
LOG_EVERY = 50


def learning_rate(stage: StageConfig, step: int) -> float:
    """Return the learning rate: linear warm-up, constant until half of the steps, then linear to a tenth.

    >>> learning_rate(StageConfig(steps=100, lr=1.0, warmup=10), 4)
    0.5
    """
    done = step / stage.steps
    return stage.lr * min(1.0, (step + 1) / stage.warmup) * (1.0 if done < 0.5 else max(0.1, 2 * (1 - done)))


def make_optimizer(module: nn.Module, lr: float) -> torch.optim.AdamW:
    """Make AdamW with weight decay 0.05 on matrices only."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)


def load_finished(name: str, module: nn.Module, run_dir: Path) -> bool:
    """Load the weights of a finished stage; return False if the stage is not finished."""
    file = run_dir / f"{name}.pt"
    if file.is_file():
        module.load_state_dict(torch.load(file, weights_only=True))
    return file.is_file()


def run_stage(
    name: str, module: nn.Module, stage: StageConfig, loss_of: Loss, run_dir: Path, save_every: int
) -> None:
    """Train `module` in place; `loss_of(step)` returns a scalar loss and values to log.

    Leaves RUN_DIR/NAME.pt with the final weights; an interrupted stage continues from its last checkpoint.
    """
    final, partial = run_dir / f"{name}.pt", run_dir / f"{name}.partial.pt"
    optimizer = make_optimizer(module, stage.lr)
    start = 0
    if partial.is_file():
        saved = torch.load(partial, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    module.train()
    began, since = time.monotonic(), start
    for step in _progress(name, start, stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step)
        loss, figures = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0:
            seconds = (time.monotonic() - began) / (step + 1 - since)
            began, since = time.monotonic(), step + 1
            row = {"stage": name, "step": step + 1, "loss": loss.item(), "grad_norm": float(norm)}
            _log(run_dir, row | figures | {"seconds_per_step": seconds})
        if (step + 1) % save_every == 0 and step + 1 < stage.steps:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            _save(state, partial)
    _save(module.state_dict(), final)
    partial.unlink(missing_ok=True)


def _progress(name: str, start: int, stop: int) -> Iterator[int]:
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=stop, completed=start)
        for step in range(start, stop):
            yield step
            progress.advance(task)


def _save(state: object, path: Path) -> None:
    staging = path.with_suffix(".tmp")
    torch.save(state, staging)
    staging.replace(path)


def _log(run_dir: Path, row: dict[str, object]) -> None:
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rounded) + "\n")
