"""The generated reference pages are what the code says, and leave no setting without a meaning."""

import dataclasses
import importlib.util
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(reference):
    assert reference.SETTINGS.read_text() == reference.settings_page(), "run python scripts/reference.py"
    assert reference.COMMANDS_PAGE.read_text() == reference.commands_page(), "run python scripts/reference.py"


def test_every_setting_has_a_meaning(reference):
    rows = [row for _, _, rows in reference.sections(reference.Config()) for row in rows]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


def test_a_field_without_a_text_is_an_empty_row(reference):
    cls = type(reference.Config().run)
    assert set(reference.field_texts(cls)) == {field.name for field in dataclasses.fields(cls)}
    assert [reference.shown(value) for value in (0, False, "")] == ["`0`", "false", "empty"]
