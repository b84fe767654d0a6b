"""What a run says when nothing happens, on a bus of its own."""

import json
import time

import pytest

from rlpipe.loop.progress import progress_watched
from rlpipe.metrics.bus import MetricsBus

pytestmark = pytest.mark.unit


def waiting(file):
    events = (json.loads(line) for line in file.read_text().splitlines())
    return [event for event in events if event["kind"] == "waiting"]


def test_a_quiet_run_says_what_it_waits_for_ever_more_rarely_and_progress_begins_anew(tmp_path):
    file = tmp_path / "events.jsonl"
    with MetricsBus([], events=file) as bus, progress_watched(bus, lambda: "the engine", 0.06):
        time.sleep(0.4)  # at 0.06, 0.12 and 0.24 s
        bus.progressed()
        time.sleep(0.1)  # at 0.06 s again
    told = waiting(file)
    assert {event["what"] for event in told} == {"the engine"}
    assert [event["level"] for event in told] == ["info"] * len(told)
    assert 3 <= len(told) <= 5, "0.46 s without doubling would be seven lines"


def test_a_run_that_goes_on_says_nothing(tmp_path):
    file = tmp_path / "events.jsonl"
    with MetricsBus([], events=file) as bus, progress_watched(bus, lambda: "the engine", 0.5):
        for number in range(4):
            time.sleep(0.02)
            (bus.event("phase", message="a") if number % 2 else bus.commit(number))
    assert waiting(file) == []


def test_the_line_is_off_at_zero(tmp_path):
    file = tmp_path / "events.jsonl"
    with MetricsBus([], events=file) as bus, progress_watched(bus, lambda: "the engine", 0.0):
        time.sleep(0.05)
    assert not file.exists() or waiting(file) == []
