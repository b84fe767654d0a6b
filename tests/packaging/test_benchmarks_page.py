"""docs/benchmarks.md and the figures in other documents are what the committed results say."""

import importlib.util
import json
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("bench_page", ROOT / "scripts" / "bench" / "page.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_every_figure_in_the_documents_is_that_of_its_result(page):
    wrong = [path.relative_to(ROOT) for path, text in page.documents().items() if path.read_text() != text]
    assert wrong == [], "run python scripts/bench/page.py"


def test_every_committed_result_answers_a_question(page):
    assert set(page.results()) - {figure.file for figure in page.FIGURES} == set()


def test_another_result_gives_another_page(page, monkeypatch, tmp_path):
    """A figure of the page comes from its file: a changed file changes exactly that section."""
    before = page.page()
    (figure,) = [f for f in page.FIGURES if f.file.endswith("overhead.json")]
    changed = {**figure.result, "cpu_share_percent": 9.87, "wall_share_percent": 12.3}
    for file in page.results():
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / file).read_text())
    (tmp_path / figure.file).write_text(json.dumps(changed))
    monkeypatch.setattr(page, "ROOT", tmp_path)
    after = page.page()
    assert "9.87% of the processor time" in after and "**missed**" in figure.section
    differing = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(differing) == 1


def test_blocks_of_other_documents_are_filled_by_name(page):
    (name, figure), *_ = [(f.name, f) for f in page.FIGURES if f.name]
    text = f"before\n<!-- figure {name} -->\nstale\n<!-- end -->\nafter\n"
    assert page.filled(text) == f"before\n<!-- figure {name} -->\n{figure.excerpt}\n<!-- end -->\nafter\n"
    assert "**met**" in figure.markdown and "Goal" not in figure.excerpt
    with pytest.raises(KeyError, match="nothing"):
        page.filled("<!-- figure nothing -->\n<!-- end -->")


def test_cells_of_tables_are_filled_with_brief_answers(page):
    (name, figure), *_ = [(f.name, f) for f in page.FIGURES if f.brief]
    row = "| <!-- brief {0} -->{1}<!-- end --> | <!-- brief {0} -->{1}<!-- end --> |"
    assert page.filled(row.format(name, "stale")) == row.format(name, figure.brief_answer)
    with pytest.raises(KeyError, match="nothing"):
        page.filled("| <!-- brief nothing --><!-- end --> |")


@pytest.mark.parametrize(
    "answer, left",
    [
        (
            "| 1 |\n\nGoal: a, **met**. Goal: b, **met**. Goal: c, **missed**.",
            "| 1 |\n\nGoal: c, **missed**.",
        ),
        ("| 1 |\n\nGoal: a, **missed**. Goal: b, **met**.", "| 1 |\n\nGoal: a, **missed**."),
        ("A sentence. Goal: a, **met**. Goal: b, **met**.", "A sentence."),
    ],
)
def test_other_documents_omit_goals_that_were_met_and_keep_the_table_apart(page, answer, left):
    assert page.MET_GOAL.sub("", answer) == left
