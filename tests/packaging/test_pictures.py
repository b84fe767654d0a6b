"""The pictures of README: drawn by one command from a run's records, small, and complete in themselves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.cli import ROOT
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.packaging


def shown(svg: Path) -> str:
    """The text of a drawn terminal."""
    return re.sub(r"<style>.*?</style>|<[^>]+>", " ", svg.read_text(), flags=re.S).replace("&#160;", " ")


def test_one_command_draws_console_and_report_of_a_run(tmp_path):
    run = make_long_run(tmp_path / "run", steps=26, per_step=1, tokens=8)
    command = [sys.executable, ROOT / "scripts" / "draw_pictures", run, "--out", tmp_path / "pictures"]
    subprocess.run(command, check=True, timeout=120)
    text = shown(tmp_path / "pictures" / "console.svg")
    assert "26/26" in text and "val 0.300" not in text
    steps = [int(step) for step in re.findall(r"^ +(\d+) +0\.\d{3} ", text, flags=re.M)]
    assert steps == [24, 25, 26]  # the rows below the last titles
    with Image.open(tmp_path / "pictures" / "report.png") as picture:
        assert picture.size == (1280, 1300)
        assert len(picture.getcolors()) > 20  # text and plots, not an empty page


def test_a_section_of_the_report_is_drawn_by_its_name(tmp_path):
    run = make_long_run(tmp_path / "run", steps=26, per_step=1, tokens=8)
    command = [sys.executable, ROOT / "scripts" / "draw_pictures", run, "--section", "training"]
    subprocess.run([*command, "--out", tmp_path / "pictures"], check=True, timeout=120)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["training.png"]


@pytest.mark.parametrize("name", ["console.svg", "report.png", "acceptance.png", "why-acceptance-moved.png"])
def test_the_committed_pictures_are_small_and_load_nothing(name):
    content = (ROOT / "docs" / "pictures" / name).read_bytes()
    assert len(content) < 200_000
    assert not re.search(rb"url\((?!#)|@import|href=|<script", content) or name.endswith(".png")
    for page in ("README.md", "docs/reading_the_report.md"):
        assert "pictures/" in (ROOT / page).read_text()
