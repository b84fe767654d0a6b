"""The report of a long run: quickly made, small, right in a real browser, light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import Browser, Page

from rlpipe.cli.report import main
from rlpipe.metrics.bus import STEP
from rlpipe.metrics.runs import load_run
from rlpipe.report.figures import figures
from rlpipe.report.live import make_server
from tests.helpers.browser import chromium, opened
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.integration
STEPS, PER_STEP = 1000, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_long_run(tmp_path_factory.mktemp("runs") / "long", steps=STEPS, per_step=PER_STEP)


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    assert main([str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def background(page: Page, selector: str) -> str:
    return page.eval_on_selector(selector, "e => getComputedStyle(e).backgroundColor")


def test_the_report_is_small_and_names_nothing_to_fetch(report: Path) -> None:
    assert report.stat().st_size < 10_000_000
    markup = re.sub(r"<script.*?</script>", "", report.read_text(), flags=re.DOTALL)
    assert not re.search(r"src=|href=\"(?!#)|url\(|@import", markup)


CROSSED = """[...document.querySelectorAll('.js-plotly-plot')].filter(plot => {
    const box = element => element.getBoundingClientRect();
    const labels = [...plot.querySelectorAll('.ytick text')].map(box);
    return [...plot.querySelectorAll('.ytitle')].map(box).some(title => labels.some(label =>
        label.left < title.right && title.left < label.right &&
        label.top < title.bottom && title.top < label.bottom));
}).map(plot => plot.id)"""  # plots whose title of the vertical axis lies across its labels


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_it_opens_without_a_complaint_or_a_request(
    report: Path, browser: Browser, width: int, dark: bool
) -> None:
    with opened(browser, report.as_uri(), width=width, dark=dark) as seen:
        assert seen.complaints == []
        assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert not seen.overflows()
        page = seen.page
        assert page.locator(".js-plotly-plot").count() == len(figures([load_run(report.parent)]))
        assert page.locator(".js-plotly-plot .trace").count() > 10  # lines, not empty axes
        assert background(page, "body") == ("rgb(18, 20, 23)" if dark else "rgb(247, 247, 245)")
        assert page.evaluate(CROSSED) == []


def test_the_viewer_walks_through_every_trajectory_and_tells_of_each_token(
    report: Path, browser: Browser
) -> None:
    with opened(browser, report.as_uri()) as seen:
        page = seen.page
        where = page.locator("#v-where")
        assert where.inner_text().startswith(f"1 of {STEPS * PER_STEP} · step 1 · task-0")
        assert " · siblings 0, 0.5 · advantage " in where.inner_text()
        page.click("#v-next")
        assert where.inner_text().startswith("2 of")
        assert where.inner_text().partition("siblings ")[2].count(", ") == PER_STEP - 2  # rows of its group
        page.select_option("#v-step", "500")
        assert where.inner_text().startswith(f"1 of {PER_STEP} · step 500")
        recorded = json.loads((report.parent / "rollouts" / "step_000500.jsonl").read_text().splitlines()[0])
        tokens = page.locator(".turn.assistant .tok")
        sampled = [i for i, depth in enumerate(recorded["accepted"]) if depth >= 0]
        assert tokens.count() == len(sampled)
        visible = [n for n, i in enumerate(sampled) if recorded["token_texts"][i].strip()]
        kept = next(n for n in visible if recorded["accepted"][sampled[n]] > 0)
        drawn = next(n for n in visible if recorded["accepted"][sampled[n]] == 0)
        colours = [tokens.nth(n).evaluate("e => e.style.background") for n in (kept, drawn)]
        assert colours[0] != colours[1] and all(colours)
        tokens.nth(kept).click()
        about = page.locator("#v-token").inner_text()
        index = sampled[kept]
        assert f"accepted as draft {recorded['accepted'][index]}" in about and "version 499" in about
        assert f"entropy {round(100 * recorded['entropies'][index]) / 100:.2f} nat" in about
        page.select_option("#v-colour", "version")
        assert "policy version 499" in page.locator("#v-legend").inner_text()
        page.select_option("#v-outcome", "solved")
        assert seen.complaints == []


def test_a_theme_that_changes_while_the_page_is_open_is_followed(report: Path, browser: Browser) -> None:
    with opened(browser, report.as_uri()) as seen:
        line = "#plot-0 .scatterlayer .js-line"
        before = seen.page.eval_on_selector(line, "e => getComputedStyle(e).stroke")
        seen.page.emulate_media(color_scheme="dark")
        deadline = time.monotonic() + 60
        while seen.page.eval_on_selector(line, "e => getComputedStyle(e).stroke") == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seen.complaints == []


def test_the_live_page_shows_a_new_step_without_a_reload(tmp_path: Path, browser: Browser) -> None:
    run = make_long_run(tmp_path / "live", steps=4, per_step=1, tokens=8)
    server = make_server([run], "127.0.0.1", 0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with opened(browser, f"http://127.0.0.1:{server.server_port}/") as seen:
            assert "4 of 4" in seen.page.locator(".cards").inner_text()
            seen.page.evaluate("window.same = true")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({STEP: 5, "time": 1_700_000_100.0, "timing_s/step": 9.0}) + "\n")
            seen.page.locator(".cards", has_text="5 of 4").wait_for(timeout=15_000)
            assert seen.page.evaluate("window.same")
            assert seen.page.locator(".js-plotly-plot").count() > 3
            assert seen.complaints == [] and "1 of 4" in seen.page.locator("#v-where").inner_text()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_every_plot_is_written_as_a_picture_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_long_run(tmp_path / name, steps=60, per_step=1, tokens=8, seed=n) for n, name in enumerate("ab")
    ]
    out = tmp_path / "out" / "compare.html"
    assert main([*map(str, runs), "--png", "--out", str(out)]) == 0
    pictures = sorted((tmp_path / "out" / "compare_png").glob("*.png"))
    drawn = figures([load_run(path) for path in runs])
    assert len(pictures) == len(drawn) and f"pictures: {len(drawn)}" in capsys.readouterr().out
    assert all(picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for picture in pictures)
