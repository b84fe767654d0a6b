"""What an offline W&B run holds: its .wandb file, read without W&B's service.

The file is a LevelDB log behind a header of 7 bytes: blocks of 32 KiB hold pieces (checksum 4, length 2, type
1: whole, first, middle, last), and the pieces of a record make a protocol buffer.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER, PIECE = 32768, 7, 7
WHOLE, FIRST, _MIDDLE, LAST = 1, 2, 3, 4


def history(path: Path) -> list[dict[str, Any]]:
    """Every step that was logged, as {name: value}."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            step: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = list(item.nested_key) or [item.key]
                inside = step
                for key in outer:
                    inside = inside.setdefault(key, {})
                inside[last] = json.loads(item.value_json)
            steps.append(step)
    return steps


def _records(data: bytes) -> list[bytes]:
    found, parts, at = [], b"", HEADER
    while at + PIECE <= len(data):
        if BLOCK - at % BLOCK < PIECE:  # too short for a piece: the block ends in zeros
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + PIECE])
        piece = data[at + PIECE : at + PIECE + length]
        at += PIECE + length
        parts = piece if kind in (WHOLE, FIRST) else parts + piece
        if kind in (WHOLE, LAST):
            found.append(parts)
    return found
