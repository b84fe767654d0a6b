"""The row table keeps running rows first, whatever joins, ends, comes back or is evicted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture
def table(tmp_path) -> RowTable:
    return _table(tmp_path, rows=4)


def _table(tmp_path, rows: int) -> RowTable:
    path = write_random_checkpoint(tmp_path, layers=1)
    model = Model(
        read_architecture(read_config(path)),
        read_weights(path),
        mtp=True,
        rows=rows,
        slots=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return RowTable(model, depth=2, streams=3, history=True)


def _join(table: RowTable, mark: int, session: str | None = None) -> bool:
    """Seat a job and write its mark everywhere; returns whether the conversation's keys were there."""
    row, known = table.take(session)
    if known:
        assert table.cache[:, :, row, :, :4].unique().tolist() == [float(session[1:])]
    table.seat(
        row,
        mark,
        prompt=[mark] * 4,
        end=9,
        temperature=1.0,
        stops=(),
        uniforms=np.full((2, 3), float(mark)),
    )
    table.cache[:, :, row, :, :4] = mark if session is None else float(session[1:])
    table.history[row, :4] = mark if session is None else float(session[1:])
    table.hidden[row] = mark
    return known


def _consistent(table: RowTable, running: dict[int, str | None]) -> None:
    assert table.active == len(running)
    assert set(table.jobs[: table.active]) == set(running)
    for row in range(table.active):
        mark = table.jobs[row]
        key = mark if running[mark] is None else int(running[mark][1:])
        assert table.tokens[row, 0] == mark
        assert table.hidden[row].unique().tolist() == [mark]
        assert table.uniforms[row, 1, 2] == mark
        assert table.cache[:, :, row, :, :4].unique().tolist() == [key]
        assert table.history[row, :4].unique().tolist() == [key]


def test_rows_survive_a_thousand_random_joins_and_ends(table):
    rng, running, idle = random.Random(0), {}, set()
    gone, most = set(), 0  # conversations that ended while they ran; the most that were parked
    for mark in range(1, 1000):
        if table.active < 4 and (not running or rng.random() < 0.5):
            session = f"s{rng.randrange(1, 7)}" if rng.random() < 0.7 else None
            if session in running.values():
                session = None
            assert _join(table, mark, session) == (session in idle)
            running[mark] = session
            idle.discard(session)
        else:
            row = rng.randrange(table.active)
            ended = running.pop(table.jobs[row])
            table.release(row)
            idle |= {ended} - {None, *gone}
            gone.discard(ended)
        if rng.random() < 0.05:
            session = f"s{rng.randrange(1, 7)}"
            table.end_session(session)
            idle.discard(session)
            gone |= {session} & set(running.values())
        _consistent(table, running)
        most = max(most, len(table._parked))
    assert most > 2
    for session in list(idle):
        table.end_session(session)
    assert table.parked_tokens == 0


def test_the_least_recently_used_conversation_is_parked_and_comes_back(table):
    for number in (1, 2, 3, 4):
        _join(table, number, f"s{number}")
        table.release(0)
    assert _join(table, 5, "s1")  # used again: s2 is now the oldest
    table.release(0)
    assert not _join(table, 6, "s9")
    assert table.idle_row("s2") is None
    assert all(table.idle_row(f"s{n}") is not None for n in (1, 3, 4))
    assert table.cached("s2").tokens.tolist() == [2] * 4
    assert _join(table, 7, "s2")
    assert table.idle_row("s3") is None and table.cached("s3").tokens.tolist() == [3] * 4


def test_a_conversation_that_does_not_fit_beside_the_parked_ones_loses_its_keys(table):
    table.max_parked_tokens = 8
    for number in range(1, 8):
        _join(table, number, f"s{number}")
        table.release(0)
    assert (table.parked_tokens, table.cached("s3")) == (8, None)
    assert not _join(table, 8, "s3") and _join(table, 9, "s1")


def test_dropping_idle_conversations_drops_the_parked_ones(table):
    for number in range(1, 6):
        _join(table, number, f"s{number}")
        table.release(0)
    table.drop_idle()
    assert (table.used, table.parked_tokens, table.cached("s1")) == (0, 0, None)


def test_ending_a_running_conversation_frees_its_row_when_the_request_ends(table):
    _join(table, 1, "s1")
    table.end_session("s1")
    table.release(0)
    assert (table.active, table.used, table.idle_row("s1")) == (0, 0, None)


def test_long_rows_come_before_the_others_one_at_a_time(tmp_path):
    table = _table(tmp_path, rows=20)
    for mark in range(1, 19):
        _join(table, mark, f"s{mark}" if mark % 3 else None)
    running = {mark: f"s{mark}" if mark % 3 else None for mark in range(1, 19)}
    long = {3, 7, 16, 18}
    for row, mark in enumerate(table.jobs[:18]):
        table.total[row] = 14 if mark in long else 4 + mark % 2
    moved = []
    for _ in range(6):
        before = list(table.jobs)
        table.tidy()
        moved.append(sum(a != b for a, b in zip(before, table.jobs, strict=True)))
        _consistent(table, running)
    assert set(table.jobs[:4]) == long
    assert moved == [2, 2, 2, 0, 0, 0]  # one of them was there already
