"""The live page: served, renewed when the files change, and only then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from rlpipe.cli.report import main
from rlpipe.metrics.bus import STEP
from rlpipe.report.live import Live, make_server
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_long_run(tmp_path / "run", steps=4, per_step=1, tokens=8)


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    server = make_server([run], "127.0.0.1", 0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def get(address: str | Request) -> str:
    with urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def test_the_page_is_served_and_may_ask_its_own_server_alone(address: str) -> None:
    page = get(f"{address}/")
    assert "connect-src 'self';" in page and "fetch('stamp')" in page
    with pytest.raises(HTTPError, match="404"):
        get(f"{address}/etc/passwd")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8008", "localhost.evil.example", ""])
def test_a_foreign_name_that_points_here_gets_nothing(address: str, host: str) -> None:
    for path in ("/", "/stamp", "/news"):
        with pytest.raises(HTTPError, match="421"):
            get(Request(address + path, headers={"Host": host}))
    assert get(Request(f"{address}/stamp", headers={"Host": "localhost:1"}))


def test_news_come_when_the_run_has_gone_on(run: Path, address: str) -> None:
    before, news = get(f"{address}/stamp"), json.loads(get(f"{address}/news"))
    assert get(f"{address}/stamp") == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({STEP: 5, "time": 1_700_000_100.0, "critic/rewards/mean": 0.123}) + "\n")
    assert get(f"{address}/stamp") != before
    later = json.loads(get(f"{address}/news"))
    assert max(later["data"]["figures"][0]["traces"][0]["x"]) == 5
    assert max(news["data"]["figures"][0]["traces"][0]["x"]) == 4
    assert news["trajectories"] and 'id="viewer"' in news["body"]


def test_content_is_made_once_for_all_readers(run: Path) -> None:
    live = Live([run])
    assert live.content() is live.content()


def test_a_wrong_directory_is_refused_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--watch", "--port", "0"]) == 2
    assert "not a run directory" in capsys.readouterr().err
