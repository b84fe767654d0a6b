"""A run gets the sinks its settings ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.config.metrics import MetricsConfig, WandbMode
from rlpipe.config.run import Task
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.console import Header
from rlpipe.metrics.console_log import ConsoleLog
from rlpipe.metrics.sinks import WandbSink, logged_in, make_sinks, run_header
from rlpipe.metrics.values import Mean

pytestmark = pytest.mark.unit


@pytest.fixture
def config():
    from rlpipe.config.run import Config

    return Config(recipe="swe_rl")


def test_metrics_jsonl_is_always_written_and_the_rest_is_by_choice(config, tmp_path: Path) -> None:
    def names() -> list[str]:
        return [sink.name for sink in make_sinks(config, tmp_path)]

    config.metrics = MetricsConfig(console=False, wandb=WandbMode.OFF, trace=False)
    assert names() == ["metrics.jsonl", "console.log"]
    config.metrics = MetricsConfig()
    assert names() == ["metrics.jsonl", "console.log", "console", "trace.json.gz", "wandb"]
    config.metrics = MetricsConfig(console=False, wandb=WandbMode.OFF, tensorboard=True, prometheus_port=9400)
    assert names() == ["metrics.jsonl", "console.log", "trace.json.gz", "tensorboard", "prometheus"]


def test_the_console_is_a_file_too_with_the_time_of_each_line_and_starts_follow_one_another(tmp_path) -> None:
    path = tmp_path / "console.log"
    for step in (1, 2):
        with MetricsBus([ConsoleLog(Header(title="run", total_steps=2), path)]) as bus:
            bus.event("phase", message="starting\nengines")
            bus.emit(step, {"critic/rewards/mean": Mean(0.5, 1)})
            bus.commit(step)
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S", line) for line in lines)
    texts = [line[20:] for line in lines]
    assert [text for text in texts if text.startswith("step")] == [
        "step 1/2  reward 0.500",
        "step 2/2  reward 0.500",
    ]
    assert texts.count("[phase] starting") == texts.count("rlpipe run | steps: 2") == 2


def test_the_header_says_what_the_settings_say(config, tmp_path: Path) -> None:
    config.pipeline.max_staleness = 0
    config.run.steps = 17
    header = run_header(config, tmp_path)
    details = dict(header.details)
    assert header.title == "swe_rl" and header.total_steps == 17
    assert details["loop"].startswith("synchronous") and details["model"] == config.model.path
    config.pipeline.max_staleness = 3
    assert "staleness ≤ 3" in dict(run_header(config, tmp_path).details)["loop"]
    config.task, config.draft.objective = Task.MTP_ADAPT, "kl"
    details = dict(run_header(config, tmp_path).details)
    assert "loop" not in details and details["draft"].startswith("trained by kl, uniform anchors")


def test_a_continued_run_has_the_first_reward_of_every_held_out_set(config, tmp_path: Path) -> None:
    assert run_header(config, tmp_path).baseline == {}
    records = [
        {"training/global_step": 0, "val/reward": 0.5, "val/short/reward": None},
        {"training/global_step": 2, "val/reward": 0.75, "val/short/reward": 0.25, "val/short/reward_se": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run_header(config, tmp_path).baseline == {"val/reward": 0.5, "val/short/reward": 0.25}


def test_being_logged_in_is_seen_in_the_environment_and_in_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine example.org login user password x\n")
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    assert logged_in()
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert logged_in()


def test_online_without_a_login_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpipe.metrics.sinks.logged_in", lambda: False)
    sink = WandbSink(run_dir=tmp_path, mode=WandbMode.ONLINE, project="p", group="", config={})
    with pytest.raises(ValueError, match=r"wandb login.*offline"):
        sink.open()


@pytest.mark.parametrize(
    ("mode", "logged_in", "expected"),
    [
        (WandbMode.AUTO, True, "online"),
        (WandbMode.AUTO, False, "offline"),
        (WandbMode.OFFLINE, True, "offline"),
        (WandbMode.ONLINE, True, "online"),
    ],
)
def test_records_go_online_only_when_wanted_and_possible(
    mode: WandbMode, logged_in: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict] = []

    def init(**arguments: object) -> SimpleNamespace:
        seen.append(arguments)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    fake = SimpleNamespace(init=init, Settings=lambda **settings: settings)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    monkeypatch.setattr("rlpipe.metrics.sinks.logged_in", lambda: logged_in)
    for _ in range(2):  # the second is a resumed run
        WandbSink(run_dir=tmp_path, mode=mode, project="p", group="g", config={}).open()
    assert [arguments["mode"] for arguments in seen] == [expected] * 2
    assert seen[0]["id"] == seen[1]["id"] and seen[0]["dir"] == tmp_path


def test_an_agent_that_uses_openai_brings_no_advertisement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import wandb
    from wandb.integration.weave import init_weave_if_imported

    def init(**_: object) -> SimpleNamespace:
        init_weave_if_imported("entity", "project")  # as the real one does
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "")  # restored afterwards
    monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    monkeypatch.setitem(__import__("sys").modules, "openai", SimpleNamespace())
    monkeypatch.setattr(wandb, "init", init)
    WandbSink(run_dir=tmp_path, mode=WandbMode.OFFLINE, project="p", group="", config={}).open()
    assert "Weave" not in capsys.readouterr().err


@pytest.mark.parametrize("mode", [WandbMode.AUTO, WandbMode.ONLINE])
def test_a_key_that_the_server_refuses_costs_one_line_and_the_run_is_recorded_offline(
    mode: WandbMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[str] = []

    def init(**arguments: str) -> SimpleNamespace:
        modes.append(arguments["mode"])
        if arguments["mode"] == "online":
            raise RuntimeError("user is not logged in\nmany more lines")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    fake = SimpleNamespace(init=init, Settings=lambda **settings: settings, teardown=lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    monkeypatch.setattr("rlpipe.metrics.sinks.logged_in", lambda: True)
    sink = WandbSink(run_dir=tmp_path, mode=mode, project="p", group="g", config={})
    if mode is WandbMode.ONLINE:
        with pytest.raises(ValueError, match=r"W&B did not start \(RuntimeError: user is not logged in\)$"):
            sink.open()
        return

    sink.open()
    assert modes == ["online", "offline"]
    (line,) = caplog.messages
    assert "WANDB_API_KEY" in line and f"wandb sync {tmp_path}" in line and "many more" not in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"report_every": -1}, "report_every=-1"),
        ({"wandb_project": ""}, "wandb=off"),
        ({"prometheus_port": 70000}, "prometheus_port=70000"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetricsConfig(**settings)
