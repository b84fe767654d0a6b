"""The console shows a run on a terminal and stays plain everywhere else."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.console import ConsoleSink, Header, duration, sparkline

pytestmark = pytest.mark.unit


def sink_on(console: Console, steps: int = 40) -> ConsoleSink:
    details = [("model", "tiny"), ("loop", "asynchronous, staleness ≤ 1")]
    return ConsoleSink(Header(title="swe_rl", details=details, total_steps=steps), console)


def record(step: int, **metrics: Any) -> dict[str, Any]:
    return {STEP: step, "time": 1000.0 + 10 * step, **metrics}


def shown(console: Console) -> str:
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def test_off_a_terminal_there_is_one_ascii_line_per_step_without_control_codes() -> None:
    console = plain()
    sink = sink_on(console)
    sink.open()
    sink.record(record(0, **{"val/reward": 0.4, "val/reward_se": 0.03}))
    sink.record(record(1, **{"critic/rewards/mean": 0.5, "spec/acceptance_length": 2.5}))
    sink.record(record(2, **{"critic/rewards/mean": None}))
    sink.close()
    lines = shown(console).splitlines()
    assert len(lines) == 6
    assert shown(console).isascii() and "\x1b" not in shown(console)
    assert lines[1] == "step  0/40  val 0.400 +-0.030"
    assert lines[2] == "step  1/40  reward 0.500  acc.len 2.50  eta 6m30s"  # 39 steps of 10 s
    assert "reward nan" in lines[3]
    assert lines[4].startswith("stopped after step 2/40") and "0.400" in lines[4]
    assert lines[5] == "Run the same command to continue."


def test_a_number_of_thirty_digits_has_an_exponent() -> None:
    console = plain()
    sink = sink_on(console)
    sink.open()
    sink.record(record(0, **{"val/reward": -1e30, "val/reward_se": 1e29}))
    sink.record(record(1, **{"critic/rewards/mean": -1e30}))
    sink.close()
    assert "val -1e+30 +-1e+29" in shown(console) and "reward -1e+30" in shown(console)


SETS = {"val/start/reward": 0.1, "val/start/reward_se": 0.02, "val/short/reward": 0.2}


def test_every_held_out_set_is_shown_below_its_step_and_in_the_outcome() -> None:
    console = plain()
    sink = sink_on(console, steps=2)
    sink.open()
    sink.record(record(0, **{"val/reward": 0.1, **SETS}))
    sink.record(record(2, **{"val/reward": 0.7, "val/start/reward": 0.7, "val/short/reward": 0.9}))
    sink.close()
    lines = shown(console).splitlines()
    assert lines[2] == "  held-out: start 0.100 +-0.020  short 0.200"
    assert lines[4] == "  held-out: start 0.700  short 0.900"
    outcome = "val reward 0.100 -> 0.700   start 0.100 -> 0.700   short 0.200 -> 0.900"
    assert lines[5].endswith(outcome)


def test_the_split_of_acceptance_is_a_line_every_ten_steps_and_at_the_end() -> None:
    console = plain()
    sink = sink_on(console, steps=21)
    split = {"total": -0.031, "total/low": -0.05, "total/high": -0.012, "entropy": 0.004, "mismatch": -0.035}
    values = {f"acceptance_split/{name}": value for name, value in (split | {"early_steps": 7.0}).items()}
    sink.open()
    for step in (5, 10, 11, 20, 21):
        sink.record(record(step, **(values if step > 9 else {})))
    sink.close()
    lines = [line for line in shown(console).splitlines() if "since steps" in line]
    told = (
        "acceptance since steps 1-7: -3.1 [-5.0, -1.2] points, entropy +0.4, draft + staleness + contexts "
        "-3.5 (not yet split by a probe)"
    )
    assert lines == [f"  {told}"] * 3  # after steps 10, 20 and 21


def test_a_late_probe_splits_the_draft_from_other_contexts() -> None:
    console = plain()
    sink = sink_on(console, steps=10)
    split = {"total": -0.064, "entropy": 0.0, "mismatch": -0.007, "contexts": -0.055, "early_steps": 6.0}
    sink.open()
    sink.record(record(10, **{f"acceptance_split/{name}": value for name, value in split.items()}))
    sink.close()
    assert "points, entropy +0.0, draft -0.7, contexts -5.5\n" in shown(console)


def test_the_only_held_out_set_is_not_repeated() -> None:
    console = plain()
    sink = sink_on(console, steps=0)
    sink.open()
    sink.record(record(0, **{"val/reward": 0.1, "val/start/reward": 0.1}))
    sink.close()
    assert "held-out" not in shown(console) and "start" not in shown(console)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_sample_is_one_line_of_prompt_answer_and_reward(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=300, _environ={})
    sink = sink_on(console)
    sink.open()
    sample = {"split": "short", "prompt": "What is\nbread?", "answer": "Bread " * 50, "reward": 1.0}
    sink.event({"time": 0, "kind": "sample", "level": "info", "step": 0, **sample})
    sink.close()
    [line] = [line for line in shown(console).splitlines() if "What is" in line]
    assert 'short: "What is bread?"' in line and "reward 1" in line and len(line) < 300


@pytest.mark.parametrize("terminal", [False, True])
def test_a_record_that_says_nothing_is_no_line(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    sink = sink_on(console)
    sink.open()
    sink.record(record(0, **{"timing_s/validate": 0.0}))
    empty = shown(console)
    sink.record(record(0, **{"val/reward": 0.4}))
    sink.close()
    assert "step  0/40" not in empty and "0.400" not in empty and "0.400" in shown(console)


def test_a_run_with_nothing_left_to_do_says_that_it_is_finished() -> None:
    console = plain()
    sink = sink_on(console)
    sink.open()
    sink.event({"time": 0, "kind": "resumed", "level": "info", "step": 40, "path": "step_40"})
    sink.close()
    assert "finished after step 40/40" in shown(console)


def test_a_continued_run_is_held_against_the_reward_it_began_with() -> None:
    console = plain()
    baseline = {"val/reward": 0.125, "val/start/reward": 0.125, "val/short/reward": 0.25}
    sink = ConsoleSink(Header(title="swe_rl", total_steps=4, baseline=baseline), console)
    sink.open()
    sink.record(record(4, **{"val/reward": 0.625, "val/start/reward": 0.625, "val/short/reward": 0.75}))
    sink.close()
    outcome = "val reward 0.125 -> 0.625   start 0.125 -> 0.625   short 0.250 -> 0.750"
    assert f"finished after step 4/4   {outcome}" in shown(console)
    assert "same command" not in shown(console)


def test_a_run_that_is_past_what_was_asked_for_says_so() -> None:
    console = plain()
    sink = sink_on(console, steps=1)
    sink.open()
    sink.event({"time": 0, "kind": "resumed", "level": "info", "step": 2, "path": "step_2"})
    sink.close()
    assert "finished after step 2, 1 were requested" in shown(console)


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_of_an_advice_is_cut_and_a_validation_says_how_far_it_is(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=50, _environ={})
    sink = sink_on(console)
    sink.open()
    advice = (
        "the draft no longer fits its target: "
        + "acceptance on fixed contexts moved, " * 4
        + "raise draft.lr"
    )
    sink.event({"time": 0, "kind": "advice", "level": "warning", "rule": "stale_draft", "text": advice})
    sink.record(record(1, **{"val/reward": 0.5, "timing_s/validate": 34.0}))
    sink.event(
        {"time": 0, "kind": "phase", "level": "info", "message": "validating version 2 by 64 attempts"}
    )
    panel = Console(file=io.StringIO(), width=width)
    panel.print(sink._panel())
    sink.close()
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(console))
    assert "".join(advice.split()) in "".join(written.split()) and "rule=" not in written
    lines = [line for line in re.split(r"[\r\n]+", written) if "moved," in line]
    assert len(lines) > 1 and all(line.startswith("  ") for line in lines)
    assert "validating version 2 by 64 attempts" in shown(panel) and "of about 34s" in shown(panel)
    assert max(map(len, shown(panel).splitlines())) <= width


def test_warnings_and_faults_are_shown_and_chatter_is_not() -> None:
    console = plain()
    sink = sink_on(console)
    sink.open()
    sink.event({"time": 0, "kind": "rollout_worker_died", "level": "fault", "worker": 1})
    sink.event({"time": 0, "kind": "start", "level": "info", "pid": 4711})
    sink.event({"time": 0, "kind": "phase", "level": "info", "message": "loading the model"})
    assert "[fault] rollout_worker_died  worker=1" in shown(console)
    assert "4711" not in shown(console)
    assert "[phase] loading the model" in shown(console)


def test_a_terminal_gets_rows_that_stay_and_a_panel_with_trend_and_time_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90, height=50, _environ={})
    sink = sink_on(console)
    sink.open()
    for step in range(1, 6):
        sink.record(record(step, **{"critic/rewards/mean": step / 10, "perf/tokens_per_s/rollout": 1234.0}))
    panel = Console(file=io.StringIO(), width=90)
    panel.print(sink._panel())
    sink.close()
    for step in range(1, 6):
        assert f"{step / 10:.3f}" in shown(console)
    text = shown(panel)
    assert "▁▃▄▆█" in text.replace(" ", "") and "5/40" in text and "5m50s left" in text and "1,234" in text
    assert shown(console).rstrip().endswith("stopped\x1b[0m") or "stopped" in shown(console)


def test_the_cursor_is_visible_during_a_run_so_that_a_kill_leaves_a_usable_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90, _environ={})
    sink = sink_on(console)
    sink.open()
    written = shown(console)
    sink.close()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_the_pace_starts_anew_after_a_resume() -> None:
    console = plain()
    sink = sink_on(console)
    sink.open()
    sink.record(record(20))  # the first record says nothing about the pace
    sink.record(record(21))
    lines = shown(console).splitlines()
    assert "eta" not in lines[1] and lines[2].endswith("eta 3m10s")


def test_trends_and_durations_read_well() -> None:
    assert sparkline([]) == "" and sparkline([2.0]) == "▄"
    assert [duration(s) for s in (0.4, 59.6, 61, 3600)] == ["0s", "1m00s", "1m01s", "1h00m"]
