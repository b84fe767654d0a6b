"""The W&B workspace shows declared metrics, fits the library's schema, and needs no login to be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.metrics.names import declared
from rlpipe.metrics.runs import load_run
from rlpipe.report.workspace import NAME, build, main, make_spec, write_spec
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_long_run(tmp_path_factory.mktemp("runs") / "tv", steps=80, per_step=1, tokens=8)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for part in ("total", "entropy", "mismatch"):
        lines[-1] |= {f"acceptance_split/{part}{depth}": 0.1 for depth in ("", "/depth_1")}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "wandb").mkdir()
    (path / "wandb" / "run_id").write_text("abc123\n")
    return path


def panels(spec: dict) -> list[dict]:
    return [panel for section in spec["sections"] for panel in section["panels"]]


def test_there_are_panels_like_the_five_figures_and_all_show_declared_metrics(run: Path) -> None:
    spec = make_spec([load_run(run)])
    shown = panels(spec)
    assert {panel["figure"] for panel in shown} == {"", "Fig. 2", "Fig. 3", "Fig. 6", "Fig. 7", "Fig. 8"}
    assert sum(panel["figure"] == "Fig. 2" for panel in shown) == 3  # a panel per depth
    for panel in shown:
        for name in (*panel["y"], panel["x"]):
            declared(name)
    wanted = {"critic/rewards/mean", "val/reward", "rollout/entropy", "timing_s/step", "probe/staleness"}
    wanted |= {"training/off_policy/trajectory_staleness/mean", "spec/acceptance_rate/depth_1"}
    assert wanted <= {name for panel in shown for name in panel["y"]}
    (against,) = [panel for panel in shown if panel["figure"] == "Fig. 8"]
    assert (against["x"], against["y"]) == ("rollout/entropy", ["spec/acceptance_length"])


def test_the_split_has_a_panel_for_all_depths_and_for_each_of_what_the_run_logged(run: Path) -> None:
    (section,) = [s for s in make_spec([load_run(run)])["sections"] if s["name"] == "Why acceptance moved"]
    assert [panel["title"].rpartition(", ")[2] for panel in section["panels"]] == ["all depths", "depth 1"]
    overall, first = (panel["y"] for panel in section["panels"])
    assert overall == ["acceptance_split/total", "acceptance_split/entropy", "acceptance_split/mismatch"]
    assert first == [f"{name}/depth_1" for name in overall] and section["runs"] == []


def test_the_spec_fits_the_schema_of_the_library(run: Path) -> None:
    workspace, report = build(make_spec([load_run(run)], entity="", project="p"))
    view = workspace._to_model().model_dump_json(by_alias=True)
    document = report._to_model().model_dump_json(by_alias=True)
    for text in (view, document):
        assert "Fig. 8: Acceptance length against entropy" in text
    assert "Fig. 3: Change of acceptance since the early phase, all depths" in document


def test_what_does_not_fit_the_schema_is_refused(run: Path, tmp_path: Path) -> None:
    spec = make_spec([load_run(run)])
    spec["sections"][0]["panels"][0]["y"] = {"not": "a list"}
    with pytest.raises(ValueError, match="y"):
        write_spec(spec, tmp_path / NAME)
    assert not (tmp_path / NAME).exists()


def test_the_command_writes_the_spec_without_a_login(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlpipe.report.workspace.logged_in", lambda: False)
    assert main([str(run)]) == 0
    written = json.loads((run / NAME).read_text())
    assert written["runs"] == [{"name": "tv", "id": "abc123"}] and written["project"] == "rlpipe"
    assert "not sent" in capsys.readouterr().out


def test_with_a_login_both_are_created(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    saved = []
    monkeypatch.setattr("rlpipe.report.workspace.logged_in", lambda: True)
    monkeypatch.setattr("rlpipe.report.workspace.default_entity", lambda: "team")
    for kind in (workspaces.Workspace, reports.Report):
        monkeypatch.setattr(kind, "save", lambda self: saved.append((type(self).__name__, self.entity)))
        monkeypatch.setattr(kind, "url", property(lambda self: f"https://host/{type(self).__name__}"))
    assert main([str(run)]) == 0
    assert saved == [("Workspace", "team"), ("Report", "team")]
    assert "created: https://host/Report" in capsys.readouterr().out


def test_a_server_that_cannot_be_reached_leaves_a_spec_that_can_be_sent_later(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable() -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("rlpipe.report.workspace.logged_in", lambda: True)
    monkeypatch.setattr("rlpipe.report.workspace.default_entity", unreachable)
    spec = tmp_path / "spec.json"
    assert main([str(run), "--out", str(spec)]) == 1
    assert f"no route to host). Try again: rlpipe workspace --spec {spec}" in (capsys.readouterr().err)
    sent = []
    monkeypatch.setattr("rlpipe.report.workspace.apply", lambda spec: sent.append(spec) or ["https://host/w"])
    assert main(["--spec", str(spec), "--entity", "team"]) == 0
    assert sent == [json.loads(spec.read_text()) | {"entity": "team"}]
    assert "created: https://host/w" in capsys.readouterr().out
    assert main([]) == main([str(run), "--spec", str(spec)]) == 2


def test_runs_of_two_projects_need_a_choice(run: Path) -> None:
    one, other = load_run(run), load_run(run)
    other.settings = {"metrics": {"wandb_project": "elsewhere"}}
    with pytest.raises(ValueError, match=r"elsewhere.*rlpipe.*--project"):
        make_spec([one, other])
    assert make_spec([one, other], project="p")["project"] == "p"
