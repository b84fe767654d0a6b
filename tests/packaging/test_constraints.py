"""constraints.txt pins everything that pyproject.toml asks for, at versions it accepts."""

import tomllib
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    return dict(line.split("==") for line in lines)


def test_every_requirement_has_a_pin_it_accepts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        requirement = Requirement(line)
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin, f"{requirement.name} has no pin: run scripts/lock"
        assert requirement.specifier.contains(pin), f"{line} does not accept {pin}"


def test_pins_name_no_build_of_a_package():
    assert not [pin for pin in pins().values() if "+" in pin]


def test_pins_install_on_the_oldest_python_that_is_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=").split(",")[0] + ".0"
    asked = {name: distribution(name).metadata.get("Requires-Python", "") for name in pins()}
    refusing = {name: python for name, python in asked.items() if not SpecifierSet(python).contains(oldest)}
    assert not refusing, f"Python {oldest} has none of these versions: pin older ones"
