"""Reads an event file of TensorBoard."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any


def read_events(directory: Path) -> list[Any]:
    """The protocol buffers of an event file: records of length, checksum, data, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = directory.iterdir()
    data, events = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events
