"""The report is right about a run, complete in itself, and made for crashed runs too."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlpipe.cli.report import main
from rlpipe.metrics.bus import STEP
from rlpipe.metrics.runs import load_run
from rlpipe.metrics.statistics import wilson
from rlpipe.report import viewer
from rlpipe.report.drawing import SECTIONS, smooth
from rlpipe.report.figures import figures, window
from rlpipe.report.png import _ends
from rlpipe.report.write import write_report

pytestmark = pytest.mark.unit
T0 = 1_700_000_000.0


def make_run(path: Path, steps: int = 20, **changes: Any) -> Path:
    """A run directory as a run leaves it; `changes` adds metrics to every training step."""
    path.mkdir(parents=True)
    records = [{STEP: 0, "time": T0 + 5, "val/reward": 0.3, "val/reward_se": 0.03}]
    for step in range(1, steps + 1):
        records.append(
            {
                STEP: step,
                "time": T0 + 5 + 10 * step,
                "critic/rewards/mean": 0.3 + step / 100,
                "rollout/entropy": 1.0 - step / 100,
                "spec/acceptance_length": 2.5,
                "spec/acceptance_rate": 0.5,
                "spec/acceptance_rate/depth_1": 0.8,
                "spec/acceptance_rate/depth_2": 0.6,
                "timing_s/step": 10.0,
                "timing_s/wait_rollout": 4.0,
                "timing_s/update_actor": 5.0,
                "timing_s/gen": 6.0,
                "perf/tokens_per_s/rollout": 1000.0,
                "env/masked": 1.0,
                **changes,
            }
        )
    records[-1] |= {"val/reward": 0.5, "val/reward_se": 0.04, "val/known/reward": 0.5, "val/new/reward": 0.2}
    records[0] |= {"val/known/reward": 0.3, "val/new/reward": 0.1}
    events = [
        {"time": T0, "kind": "start", "level": "info", "recipe": "swe_rl"},
        {"time": T0 + 60, "kind": "rollout_worker_died", "level": "fault", "error": "<b>boom</b>"},
        {"time": T0 + 5 + 10 * steps, "kind": "end", "level": "info", "outcome": "done"},
    ]
    trajectory = {"step": 1, "instance_id": "clamp", "reward": 1.0}
    trajectory["turns"] = [{"role": "user", "text": "</script><script>alert(1)</script>"}]
    write(path / "metrics.jsonl", records)
    write(path / "events.jsonl", events)
    write(path / "trajectories.jsonl", [trajectory])
    (path / "config.yaml").write_text(f"recipe: swe_rl\nrun:\n  steps: {steps}\nspec:\n  mode: none\n")
    return path


def write(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def unpacked(script: str) -> str:
    """What the page's `unpack` makes of a script element."""
    return gzip.decompress(base64.b64decode(script)).decode() if script else ""


class Page(HTMLParser):
    """What a browser would make of a page: visible text, scripts, and everything it would fetch."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.scripts, self.fetched, self.open = "", [], [], []
        self.source = path.read_text()
        self.feed(self.source)
        plotly, data, trajectories, self.script = self.scripts
        self.data = json.loads(data)
        self.plotly = unpacked(plotly)
        self.data["trajectories"] = json.loads(unpacked(trajectories) or "[]")

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attributes if name in ("src", "href") and value[0] != "#"]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def page_of(runs: list[Path], out: Path) -> Page:
    write_report(runs, out)
    return Page(out)


def test_the_summary_says_what_happened(run: Path) -> None:
    text = page_of([run], run / "report.html").text
    for fact in (
        "first finished",
        "Validation: known0.300 → 0.500",
        "+0.200 [",
        "Validation: new0.100 → 0.200",
        "Training steps20 of 20",
        "Duration3m25s",
        "Faults1",
        "masked 20",
        "10.0 s a step",
    ):
        assert fact in text, fact
    assert text.count("Validation: known") == 1  # it is the primary one: one card for both


def test_the_page_is_complete_in_itself_and_small_enough_to_mail(run: Path) -> None:
    page = page_of([run], run / "report.html")
    assert page.fetched == []
    assert "default-src 'none'" in page.source
    assert (run / "report.html").stat().st_size < 3_000_000
    assert page.plotly.lstrip().startswith("/**") and "plotly.js v" in page.plotly[:200]
    assert not re.search(r"@import|url\(", page.source.split("<style>")[1].split("</style>")[0])
    assert page.open == []  # every element is closed


def test_text_from_a_run_cannot_become_markup(run: Path) -> None:
    page = page_of([run], run / "report.html")
    assert len(page.scripts) == 4
    assert "<b>boom</b>" in page.text  # shown, not interpreted
    turns = page.data["trajectories"][0]["turns"]
    assert turns == [{"role": "user", "text": "</script><script>alert(1)</script>"}]


def test_plotly_accepts_every_figure(run: Path, tmp_path: Path) -> None:
    import plotly.graph_objects as go

    second = make_run(
        tmp_path / "second", **{"actor/grad_norm": 0.5, "env/submit_rate": 0.9, "num_turns/mean": 4}
    )
    for runs in ([run], [second], [run, second]):
        drawn = figures([load_run(path) for path in runs])
        assert len(drawn) >= 5
        for figure in drawn:
            text = json.dumps({"data": figure.traces, "layout": figure.layout})
            assert set(re.findall(r'"\$(\w+)"', text)) <= {
                *map(str, range(7)),
                *(f"{n}a" for n in range(7)),
                "text",
            }
            go.Figure(json.loads(re.sub(r'"\$\w+"', '"#123456"', text)))  # raises on an unknown property


def test_the_phases_of_a_step_add_up_to_it(run: Path) -> None:
    timing = next(f for f in figures([load_run(run)]) if f.title.startswith("Where"))
    stacked = [trace for trace in timing.traces if trace.get("stackgroup")]
    assert [trace["name"] for trace in stacked] == ["wait for rollouts", "update", "other"]
    for values in zip(*(trace["y"] for trace in stacked), strict=True):
        assert sum(values) == pytest.approx(10.0)


def test_error_bars_are_95_percent_intervals(run: Path) -> None:
    reward = figures([load_run(run)])[0]
    held_out = next(trace for trace in reward.traces if trace["name"] == "held-out: known")
    bars, readings = held_out["error_y"], [(0.3, 0.03), (0.5, 0.04)]
    truth = [wilson(rate, rate * (1 - rate) / error**2) for rate, error in readings]
    assert bars["array"] == pytest.approx([i.high - i.value for i in truth])
    assert bars["arrayminus"] == pytest.approx([i.value - i.low for i in truth])


def test_entropy_and_acceptance_share_their_x_axis(run: Path) -> None:
    figure = next(f for f in figures([load_run(run)]) if f.title == "Entropy and acceptance")
    assert [trace["name"] for trace in figure.traces] == ["entropy", "depth 1", "depth 2"]
    assert len({tuple(trace["x"]) for trace in figure.traces}) == 1
    assert all("xaxis" not in trace for trace in figure.traces)


def test_a_long_run_is_drawn_in_windows_that_keep_means_extremes_and_validation(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "long", steps=1000, **{"num_turns/max": 8}))
    run.records[500]["num_turns/max"] = 99
    assert window([run]) == 4 and window([load_run(make_run(tmp_path / "short"))]) == 1
    coarse = run.coarse(4)
    steps, rewards = coarse.series("critic/rewards/mean")
    assert steps == list(range(4, 1001, 4))
    assert rewards[0] == pytest.approx(0.3 + (1 + 2 + 3 + 4) / 4 / 100)
    assert max(coarse.series("num_turns/max")[1]) == 99
    assert coarse.series("val/reward") == ([0, 1000], [0.3, 0.5])
    assert all(len(trace["x"]) <= 251 for figure in figures([run]) for trace in figure.traces)


def test_smoothing_starts_without_bias() -> None:
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert 0 < smooth([0.0, 1.0])[1] < 1


def test_several_runs_are_compared_with_a_colour_each(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "elsewhere" / "first", **{"spec/acceptance_length": 3.5})
    page = page_of([run, other], tmp_path / "compare.html")
    assert "2 runs compared" in page.text and "elsewhere/first" in page.text
    length = next(f for f in figures([load_run(run), load_run(other)]) if f.title == "Acceptance length")
    assert [trace["line"]["color"] for trace in length.traces] == ["$0", "$1"]
    assert [trace["y"][0] for trace in length.traces] == [2.5, 3.5]


def test_a_run_without_a_step_gets_a_page_that_says_so(tmp_path: Path) -> None:
    run = tmp_path / "dead"
    run.mkdir()
    write(run / "events.jsonl", [{"time": T0, "kind": "start", "level": "info"}])
    page = page_of([run], run / "report.html")
    assert "No training step of dead was recorded" in page.text and "start" in page.text
    assert page.data["figures"] == []


def test_a_crashed_run_is_shown_as_far_as_it_came(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:30])
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().splitlines(keepends=True)[0])
    text = page_of([run], run / "report.html").text
    assert "the last recorded step is 7 of 20" in text and "1 unreadable line" in text
    assert "killed, or still running" in text


@pytest.mark.parametrize(
    ("drafter", "title"),
    [("", "MTP draft"), ("eagle3", "EAGLE-3 draft"), ("suffix", "suffix lookup")],
)
def test_the_header_names_the_drafter(run: Path, drafter: str, title: str) -> None:
    settings = {"mode": "rejection", "gamma": 2} | ({"drafter": drafter} if drafter else {})
    (run / "config.yaml").write_text(json.dumps({"spec": settings, "mtp": {"train": "ppow"}}))
    assert load_run(run).settings["draft"] == {"train": "ppow"}  # a name of before version 0.2
    write_report([run], run / "report.html")
    assert f"{title}: rejection, gamma 2" in (run / "report.html").read_text()


def test_a_broken_config_does_not_cost_the_report(run: Path) -> None:
    (run / "config.yaml").write_text("run: [unclosed")
    assert "run: [unclosed" in page_of([run], run / "report.html").text


def test_a_step_that_was_done_again_after_a_resume_counts_once_and_pauses_do_not_count(run: Path) -> None:
    again = [{STEP: 20, "time": T0 + 9000, "critic/rewards/mean": 0.9}]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again[0]) + "\n")
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": T0 + 8990, "kind": "start", "level": "info"}) + "\n")
    data = load_run(run)
    steps, rewards = data.series("critic/rewards/mean")
    assert steps == list(range(1, 21)) and rewards[-1] == 0.9
    assert data.series("val/reward")[1] == [0.3, 0.5]  # kept: only what is new is replaced
    assert data.seconds == pytest.approx(205 + 10)


def test_trajectories_are_thinned_evenly_to_their_budget(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 3000
    rows = [
        {"step": s, "instance_id": f"i{s}", "reward": 0.0, "turns": [{"action": text, "observation": text}]}
        for s in range(1, 401)
    ]
    write(run / "trajectories.jsonl", rows)
    monkeypatch.setattr(viewer, "MAX_TRAJECTORY_BYTES", 600_000)
    kept = page_of([run], run / "report.html").data["trajectories"]
    assert 0.9 * 600_000 < len(json.dumps(kept)) < 1.1 * 600_000
    gaps = {b["step"] - a["step"] for a, b in pairwise(kept)}
    assert gaps <= {4, 5} and kept[-1]["step"] > 390
    assert [turn["role"] for turn in kept[0]["turns"]] == ["assistant", "tool"]


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_the_command_writes_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert (run / "report.html").is_file() and "report.html" in capsys.readouterr().out
    assert not list(run.glob("*.part"))


def drafting(path: Path, name: str = "drafting", slope: float = -2.0, drift: float = 0.0) -> Path:
    """A run whose acceptance follows its entropy by a known law; drift: a mismatch that grows."""
    run = make_run(path / name, steps=60)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records[1:]:
        step = record[STEP]
        entropy = 0.5 + 0.1 * ((step * 7) % 5) / 5 + (0.1 if step > 30 else 0.0)
        rate = 0.9 + slope * (entropy - 0.5) / 10 - drift * max(0, step - 30) / 30
        record |= {"rollout/entropy": entropy, "spec/acceptance_rate": rate}
        record |= {
            "spec/acceptance_length": 1 + 3 * rate,
            "spec/num_accepted": {"edges": [-0.5, 0.5, 1.5], "counts": [1, 3]},
        }
    write(run / "metrics.jsonl", records)
    return run


def figure_of(runs: list[Path], title: str):
    return next(f for f in figures([load_run(path) for path in runs]) if f.title == title)


def test_the_line_against_entropy_has_the_slope_of_the_run(tmp_path: Path) -> None:
    figure = figure_of([drafting(tmp_path)], "Acceptance length against entropy")
    dots, fit = figure.traces
    assert len(dots["x"]) == 60 and dots["mode"] == "markers"
    assert (fit["y"][1] - fit["y"][0]) / (fit["x"][1] - fit["x"][0]) == pytest.approx(-0.6, abs=0.02)
    assert "slope -0.60" in fit["name"]


def test_the_change_of_acceptance_is_split_into_parts_that_add_up(tmp_path: Path) -> None:
    runs = [drafting(tmp_path, "steady"), drafting(tmp_path, "drifting", drift=0.2)]
    change, by_entropy, by_mismatch = figure_of(runs, "Change of the acceptance rate, by run").traces
    assert change["y"] == ["steady", "drifting"]
    for n in range(2):
        assert change["x"][n] == pytest.approx(by_entropy["x"][n] + by_mismatch["x"][n], abs=1e-4)
        assert by_entropy["x"][n] == pytest.approx(-0.02, abs=0.01)
    assert by_mismatch["x"][0] == pytest.approx(0, abs=0.01) and by_mismatch["x"][1] < -0.1
    over_time = figure_of(runs[:1], "Change of the acceptance rate since the early phase")
    assert over_time.section == "Why acceptance moved" and len(over_time.traces) == 3


def test_depths_of_several_runs_differ_in_dash_and_runs_in_colour(tmp_path: Path) -> None:
    runs = [drafting(tmp_path, "a"), drafting(tmp_path, "b")]
    lines = [trace["line"] for trace in figure_of(runs, "Acceptance by depth").traces]
    assert [line["color"] for line in lines] == ["$0", "$0", "$1", "$1"]
    assert [line["dash"] for line in lines] == ["solid", "dash"] * 2


def test_drafts_kept_are_shares_of_the_whole_run(tmp_path: Path) -> None:
    (bars,) = figure_of([drafting(tmp_path)], "Drafts accepted by a verify step").traces
    assert bars["x"] == [0, 1] and bars["y"] == [0.25, 0.75]


def adapting(path: Path) -> Path:
    """An adaptation of two steps, measured before and after it on two held-out sets."""
    records: list[dict[str, Any]] = [
        {STEP: 0, "time": T0},
        {STEP: 1, "time": T0 + 1},
        {STEP: 2, "time": T0 + 2},
    ]
    for record, length in ((records[0], 2.0), (records[2], 3.5)):
        for domain, less in (("swe.held_families", 0.0), ("reasoning.held_out", 0.9)):
            for mode in ("rejection", "target_only"):
                name = f"adapt/{domain}/{mode}/"
                record |= {f"{name}acceptance_length": length - less, f"{name}acceptance_length_se": 0.1}
                record |= {f"{name}tokens_per_step": length - less - 0.1}
            record[f"adapt/{domain}/predicted_tokens_per_step"] = length - less - 0.11
    records[1]["timing_s/step"] = records[2]["timing_s/step"] = 1.0
    path.mkdir()
    write(path / "metrics.jsonl", records)
    write(path / "events.jsonl", [{"time": T0, "kind": "start", "level": "info", "recipe": "mtp_adapt"}])
    (path / "config.yaml").write_text("recipe: mtp_adapt\nrun:\n  steps: 2\n")
    return path


def test_an_adaptation_shows_acceptance_on_each_held_out_set_with_intervals(tmp_path: Path) -> None:
    run = adapting(tmp_path / "run")
    traces = {t["name"]: t for t in figure_of([run], "Acceptance on held-out sets").traces}
    assert len(traces) == 4
    known = traces["swe.held_families, rejection"]
    assert (known["x"], known["y"]) == ([0, 2], [2.0, 3.5])
    assert known["error_y"]["array"] == pytest.approx([0.196, 0.196])
    assert known["line"]["color"] != traces["reasoning.held_out, rejection"]["line"]["color"]
    assert known["line"]["dash"] != traces["swe.held_families, target_only"]["line"]["dash"]
    both = {t["name"]: t["y"] for t in figure_of([run], "Predicted and seen").traces}
    assert both["reasoning.held_out, predicted"] == [0.99, 2.49]
    assert both["reasoning.held_out, seen"] == [1.0, 2.5]
    text = page_of([run], tmp_path / "page.html").text
    assert "Acceptance length: swe.held families, rejection" in text and "2.000 → 3.500" in text


def test_a_name_in_the_records_is_text_wherever_it_stands(run: Path, tmp_path: Path) -> None:
    odd = make_run(tmp_path / "odd", **{"val/<i>odd/reward": 0.4})
    for runs in ([odd], [run, odd]):
        page = page_of(runs, tmp_path / "odd.html")
        assert "<i>odd" in page.text and "<i>" not in page.source


def test_adaptations_are_compared_with_a_colour_each(tmp_path: Path) -> None:
    runs = [adapting(tmp_path / "first"), adapting(tmp_path / "second")]
    traces = figure_of(runs, "Acceptance on held-out sets").traces
    assert len({t["line"]["color"] for t in traces}) == 2 and len(traces) == 4
    page_of(runs, tmp_path / "page.html")


def test_sections_come_in_order_behind_the_summary_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    run = drafting(tmp_path)
    page = page_of([run], run / "report.html")
    places = [page.source.index(f">{section}</h2>") for section in SECTIONS]
    assert page.source.index("<dt>What to change</dt>") < places[0] and places == sorted(places)
    links = re.findall(r'href="#([\w-]+)"', page.source)
    assert len(links) > 5 and all(f'id="{link}"' in page.source for link in links)


def test_a_comparison_lists_the_settings_that_differ_and_no_others(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text + "trainer:\n  lr: 0.5\n")
    page = page_of([run, other], tmp_path / "compare.html")
    table = page.source.split("Settings that differ</h2>")[1].split("</table>")[0]
    assert "trainer.lr" in table and "0.5" in table and "run.steps" not in table


def test_alarms_stand_at_the_top_with_their_steps(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        for step in range(3, 9):
            alarm = {"time": T0 + step, "kind": "alarm", "level": "warning", "alarm": "stall", "step": step}
            file.write(json.dumps(alarm) + "\n")
    page = page_of([run], run / "report.html")
    assert "Alarms of first: stall at step 3, 4, 5, 6 and 2 more." in page.text
    assert page.source.index("Alarms of") < page.source.index(">Training</h2>")


def test_answers_of_the_first_and_the_last_validation_stand_side_by_side(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    sample = {"time": T0 + 6, "kind": "sample", "level": "info", "split": "known", "prompt": "What is <b>?"}
    answers = [sample | {"step": step, "answer": f"answer {step}", "reward": 0.0} for step in (0, 10, 20)]
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in answers)
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    table = page.split('id="samples"')[1].split("</table>")[0]
    assert "answer 0" in table and "answer 20" in table and "answer 10" not in table
    assert "What is &lt;b&gt;?" in table


def test_the_primary_held_out_set_has_its_name_where_there_are_others(tmp_path) -> None:
    run = load_run(make_run(tmp_path / "run"))
    [reward] = [figure for figure in figures([run]) if figure.title == "Reward"]
    names = {trace.get("name") for trace in reward.traces}
    assert {"held-out: known", "new"} <= names


def test_numbers_of_the_environment_have_curves_of_training_and_held_out_sets(tmp_path: Path) -> None:
    numbers = {"env/info/format": 0.5, "val/held_out/info/format": 0.25}
    run = make_run(tmp_path / "informed", steps=3, **numbers)
    figure = figure_of([run], "format")
    assert [trace["name"] for trace in figure.traces] == ["training", "held out"]
    assert figure.traces[0]["y"] == [0.5] * 3 and figure.traces[1]["y"][-1] == 0.25


def test_pictures_have_both_ends_of_an_interval_that_is_not_symmetric() -> None:
    assert _ends({"array": [0.1], "arrayminus": [0.3]}) == [[0.3], [0.1]]
    assert _ends({"array": [0.1]}) == [0.1] and _ends({}) is None
