"""Finds the current position of user code: file and line of a thread or coroutine that does not return."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from rlpipe.config.user_code import users_line


def line_of_thread(thread: threading.Thread) -> str:
    """Return "file:line" of the user's code in a thread, and the text of the line in backquotes if known.

    If the thread runs C code, this is the line that called it. If it runs an event loop, this is the line at
    which a coroutine waits.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    return users_line([*_frames(frame), *_in_loop(frame)])


def line_of_coroutine(coroutine: Coroutine[Any, Any, Any], thread: threading.Thread | None) -> str:
    """Return the "file:line" at which a coroutine waits, or at which user code blocks its event loop.

    thread: the thread of the event loop.
    """
    stack = _frames(sys._current_frames().get(thread.ident or 0)) if thread else []
    is_blocked = bool(stack) and stack[-1][0].f_code.co_name != "select"
    return users_line([*_awaited(coroutine), *(stack if is_blocked else ())])


def _frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return a frame and its callers with their lines, the outermost first."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _in_loop(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of all tasks of the event loop that a thread runs: they are on no thread's stack."""
    loops = (f.f_locals.get("self") for f, _ in _frames(frame) if f.f_code.co_name == "run_forever")
    loop = next((loop for loop in loops if isinstance(loop, asyncio.AbstractEventLoop)), None)
    tasks = asyncio.all_tasks(loop) if loop else ()
    return [line for task in tasks for line in _awaited(task.get_coro())]


def _awaited(waiting: Any) -> list[tuple[FrameType, int]]:
    """Return the frames of a coroutine and of the coroutines that it awaits, the outermost first."""
    frames = []
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        waiting = waiting.cr_await
    return frames
