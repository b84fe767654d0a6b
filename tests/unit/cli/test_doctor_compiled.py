"""The doctor says when every process has to compile the modules that it imports."""

import importlib.util
import py_compile
import sys

import pytest

from rlpipe.cli import doctor


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `torch` whose modules nothing has compiled."""
    (tmp_path / "torch").mkdir()
    origin = tmp_path / "torch" / "__init__.py"
    origin.write_text("")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.util.spec_from_file_location(name, origin)
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return origin


def test_packages_that_stay_uncompiled_are_named_with_the_remedy(package):
    (finding,) = doctor.check_compiled()
    assert finding.level is doctor.Level.WARN
    assert "PYTHONDONTWRITEBYTECODE" in finding.remedy
    assert finding.remedy.endswith(f"-m compileall -q {package.parents[1]}")


def test_a_folder_that_cannot_be_written_is_named_too(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert len(list(doctor.check_compiled())) == 1


def test_packages_that_the_next_process_finds_compiled_are_not_named(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert list(doctor.check_compiled()) == []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(package))
    assert list(doctor.check_compiled()) == []


def test_without_torch_nothing_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(doctor.check_compiled()) == []
